"""The algebra of mutation: functional forms of in-place operators, and how a write through a view reaches its base.

A tensor object of the traced program is an `Alias` on a `Store` (one storage). The first tensor seen on a storage is its
root; every other one is a view step away from its parent. A write gives the alias a new value, puts that back into
each ancestor by the inverse of the view step, and raises the store's generation: aliases of an older generation are
regenerated from their parents when they are next read.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fuseline.errors import NotSupported
from fuseline.ir.graph import Node, nested_strides
from fuseline.ir.traced import ViewStep


@dataclass(eq=False, slots=True)
class Store:
    """One storage. `root` is the alias that owns its value; `inputs` the program's inputs that lie on it."""

    root: Alias | None = None
    generation: int = 0
    inputs: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Alias:
    """One tensor object. `node` is its value as of `generation`; `func`, `args`... the view that made it of `parent`."""

    tensor: Any
    store: Store
    node: Any
    generation: int
    parent: Alias | None = None
    func: Any = None
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    step: ViewStep | None = None
    input: int | None = None

    def path(self) -> tuple[Alias, tuple[ViewStep, ...]]:
        """(root, the view steps from it to here)."""
        steps: list[ViewStep] = []
        alias = self
        while alias.parent is not None:
            steps.append(alias.step)                      # type: ignore[arg-type]
            alias = alias.parent
        return alias, tuple(reversed(steps))


# ---------------------------------------------------------------- operators

@dataclass(frozen=True, slots=True)
class Writes:
    """An operator that writes: which arguments, by position or name, and its functional form (None: there is none).

    `drop` are the names of out= arguments, which the functional form does not take.
    """

    arguments: tuple[tuple[int, str], ...]
    functional: Any
    drop: frozenset[str]


def writes_of(func: Any) -> Writes | None:
    """None for an operator that writes nothing."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    arguments = tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    out = frozenset(a.name for a in schema.arguments if a.is_out)
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    namespace, name = schema.name.split("::")
    if out:
        names = [name]
    elif name.endswith("_"):
        names = [name[:-1], f"{name[:-1]}_functional"]
    else:
        names = [f"{name}_functional"]
    for candidate in names:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            other = getattr(packet, overload)
            if not other._schema.is_mutable and [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
                return Writes(arguments, other, out)
    return Writes(arguments, None, out)


# In-place operators that change only a tensor's geometry: their functional forms are views.
GEOMETRY = frozenset({"aten::t_", "aten::transpose_", "aten::squeeze_", "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_",
                      "aten::as_strided_", "aten::detach_"})
# Operators that give a tensor another storage or another size of storage.
STORAGE = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_data",
                     "inductor::resize_storage_bytes_"})

IDENTITY = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift", "aten::view_as"})
_SAME_ELEMENTS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_alias", "aten::unsqueeze",
                            "aten::squeeze"})


def put_back(emit: Any, alias: Alias, base: Node, value: Node) -> Node:
    """The parent's value after `alias`, a view of it, got `value`; `base` is the parent's value before.

    emit(func, *arguments, like=tensor) records a call and returns its node. Raises NotSupported for a view without inverse.
    """
    aten = torch.ops.aten
    parent, name, args = alias.parent.tensor, alias.func._schema.name, alias.args          # type: ignore[union-attr]
    bound = bind(alias.func, args, alias.kwargs)
    if name in IDENTITY:
        return value
    if name == "aten::view" and "dtype" in bound:
        return emit(aten.view.dtype, value, parent.dtype, like=parent)
    if name in _SAME_ELEMENTS:
        return emit(aten.reshape.default, value, list(parent.shape), like=parent)
    if name == "aten::t":
        return emit(aten.t.default, value, like=parent)
    if name == "aten::transpose":
        return emit(aten.transpose.int, value, bound["dim0"], bound["dim1"], like=parent)
    if name == "aten::permute":
        dims = [d % parent.dim() for d in bound["dims"]]
        return emit(aten.permute.default, value, [dims.index(i) for i in range(len(dims))], like=parent)
    if name == "aten::slice":
        return emit(aten.slice_scatter.default, base, value, bound["dim"], bound["start"], bound["end"], bound["step"], like=parent)
    if name == "aten::select":
        return emit(aten.select_scatter.default, base, value, bound["dim"], bound["index"], like=parent)
    if name == "aten::diagonal":
        return emit(aten.diagonal_scatter.default, base, value, bound["offset"], bound["dim1"], bound["dim2"], like=parent)
    if name == "aten::as_strided":
        if nested_strides(bound["size"], bound["stride"]) is None:       # PyTorch's operator needs a storage of its own
            raise NotSupported("a write through as_strided of elements that may overlap", hint="clone the tensor before writing to it")
        return emit(aten.as_strided_scatter.default, base, value, list(bound["size"]), list(bound["stride"]),
                    bound["storage_offset"], like=parent)
    if name == "aten::unbind":
        return emit(aten.select_scatter.default, base, value, bound["dim"], alias.step.index, like=parent)      # type: ignore[union-attr]
    if name in ("aten::split", "aten::split_with_sizes"):
        dim, index = bound["dim"], alias.step.index                                                      # type: ignore[union-attr]
        start = part_start(bound, index)
        return emit(aten.slice_scatter.default, base, value, dim, start, start + alias.tensor.shape[dim], 1, like=parent)
    if name == "aten::expand" and tuple(alias.tensor.shape) == tuple(parent.shape):
        return value
    if name == "aten::view_as_real":
        return emit(aten.view_as_complex.default, value, like=parent)
    if name == "aten::view_as_complex":
        return emit(aten.view_as_real.default, value, like=parent)
    raise NotSupported(f"a write through {name.replace('::', '.')}", hint="clone the tensor before writing to it")


def part_start(bound: dict[str, Any], index: Any) -> Any:
    """Where the index-th result of split or split_with_sizes begins."""
    sizes = bound.get("split_sizes", bound.get("split_size"))
    return sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else sizes * index


def bind(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments after the first by name, defaults filled in."""
    bound = {}
    for position, a in enumerate(func._schema.arguments):
        if position < len(args):
            bound[a.name] = args[position]
        elif a.name in kwargs:
            bound[a.name] = kwargs[a.name]
        elif a.has_default_value():
            bound[a.name] = a.default_value
    return bound
