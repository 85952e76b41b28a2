"""The ATen-level graph that trace, passes, autodiff and lower hand each other.

A Graph is purely functional: no node changes a tensor that another node can see. Sizes are ints or index
expressions over size symbols (`s0`). It prints as text that `fuseline.ir.parse.parse_graph` reads back.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from fuseline.errors import InternalError
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Expr

Size = Union[int, Expr]


@dataclass(frozen=True, slots=True)
class TensorType:
    """dtype, shape, strides (in elements) and device ("cpu", "cuda:0"). Strides are those that eager would give."""

    dtype: DType
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    device: str = "cpu"

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.shape))
        strides = "" if self.stride == contiguous(self.shape) else "; " + ", ".join(map(str, self.stride))
        return f"{self.dtype}[{sizes}{strides}]" + ("" if self.device == "cpu" else f"@{self.device}")

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A Python number computed in the graph: kind is "int", "float" or "bool"; `expr` is its value where it is a size."""

    kind: str
    expr: Size | None = None

    def __str__(self) -> str:
        return self.kind if self.expr is None else f"{self.kind}={self.expr}"


Type = Union[TensorType, ScalarType, tuple, None]        # a tuple of types for an operator with several results


def nested_strides(shape: Sequence[Size], stride: Sequence[Size]) -> tuple[int, ...] | None:
    """The axes with more than one element, outermost first, if each stride spans all that is inside of it: then no two elements
    overlap, and an element's place tells its index. None if that is not so, or not known."""
    if not all(isinstance(n, int) for n in (*shape, *stride)):
        return None
    order = sorted((a for a, n in enumerate(shape) if n != 1), key=lambda a: -int(stride[a]))          # type: ignore[arg-type]
    inner = [*order[1:], None]
    if any(stride[a] < (1 if b is None else stride[b] * shape[b]) for a, b in zip(order, inner)):            # type: ignore[operator]
        return None
    return tuple(order)


def contiguous(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides of a shape, with torch's convention for sizes of 0 (counted as 1)."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (1 if isinstance(size, int) and size == 0 else size)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation. An edge is a reference to another Node; two nodes are equal only if they are the same node.

    op      "input" | "aten.add.Tensor" (namespace, name, overload) | "getitem" (a result of a node with several)
    args    positional arguments as the operator's schema has them; an Arg is a Node, a number, an Expr, a string,
            None, a DType, or a tuple of these. Memory formats, layouts and devices are strings ("channels_last", "cuda:0").
    kwargs  keyword arguments, sorted by name.
    origin  the user's line that caused it: "model.py:12".
    """

    name: str
    op: str
    args: tuple = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    type: Type = None
    origin: str = ""
    static: bool = False          # an input that is a parameter or buffer: its address and, in inference, value persist

    def __str__(self) -> str:
        if self.op == "input":
            return f"%{self.name}: {show_type(self.type)}" + (" static" if self.static else "")
        args = ", ".join([show_arg(a) for a in self.args] + [f"{k}={show_arg(v)}" for k, v in self.kwargs])
        return f"%{self.name}: {show_type(self.type)} = {self.op}({args})"

    __repr__ = __str__

    @property
    def tensor(self) -> TensorType:
        """The type of a node that is known to give one tensor. Raises InternalError for any other."""
        if not isinstance(self.type, TensorType):
            raise InternalError(f"%{self.name} of {self.op} is no tensor but {show_type(self.type)}")
        return self.type

    @property
    def operands(self) -> tuple[Node, ...]:
        """All nodes that this one reads, in order, with repetitions."""
        return tuple(nodes_in(self.args)) + tuple(nodes_in(tuple(v for _, v in self.kwargs)))

    def with_operands(self, mapping: Mapping[Node, object]) -> Node:
        """A copy that reads mapping[n] in place of every operand n that the mapping has; itself if nothing changes."""
        if not any(n in mapping for n in self.operands):
            return self
        return replace(self, args=substitute(self.args, mapping),
                       kwargs=tuple((k, substitute(v, mapping)) for k, v in self.kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """inputs in calling order, nodes in execution order (inputs not among them), outputs (Node, number, Expr or None).

    Every size symbol that occurs is the size of some input's axis or the `expr` of a scalar input.
    """

    inputs: tuple[Node, ...]
    nodes: tuple[Node, ...]
    outputs: tuple = ()
    name: str = "graph"
    notes: dict = field(default_factory=dict)      # facts for the report, never for decisions

    def __str__(self) -> str:
        head = f"{self.name}(" + ", ".join(str(i) for i in self.inputs) + "):"
        body = [f"  {n}" for n in self.nodes]
        return "\n".join([head, *body, "  return " + ", ".join(show_arg(o) for o in self.outputs)])

    def users(self) -> dict[Node, list[Node]]:
        """node -> the nodes that read it, each once per node, in order."""
        found: dict[Node, list[Node]] = {n: [] for n in (*self.inputs, *self.nodes)}
        for node in self.nodes:
            for operand in dict.fromkeys(node.operands):
                found[operand].append(node)
        return found


def nodes_in(arg: object) -> Iterator[Node]:
    if isinstance(arg, Node):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for a in arg:
            yield from nodes_in(a)


def substitute(arg: Any, mapping: Mapping[Node, object]) -> Any:
    if isinstance(arg, Node):
        return mapping.get(arg, arg)
    if isinstance(arg, (tuple, list)):
        return tuple(substitute(a, mapping) for a in arg)
    return arg


def show_arg(arg: object) -> str:
    if isinstance(arg, Node):
        return f"%{arg.name}"
    if isinstance(arg, (tuple, list)):
        return "[" + ", ".join(show_arg(a) for a in arg) + "]"
    if isinstance(arg, (DType, Expr)):
        return str(arg)
    return repr(arg)


def show_type(type_: Type) -> str:
    if isinstance(type_, tuple):
        return "(" + ", ".join(show_type(t) for t in type_) + ")"
    return "none" if type_ is None else str(type_)
