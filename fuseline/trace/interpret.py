"""Run a Graph with PyTorch's own operators: the reference that tests compare with, and an executor of last resort."""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Expr, Sym, evaluate
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType

_FORMATS = {name: getattr(torch, name) for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format")}
_LAYOUTS = {"strided": torch.strided}
# In the pure graph a view is a value: where strides differ from those of the trace, it is a copy.
_RELAXED = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}


def run_graph(graph: Graph, inputs: Sequence[Any]) -> tuple:
    """The graph's outputs for these inputs. Raises InternalError if a result has another shape or dtype than its type."""
    values: dict[Node, Any] = {}
    sizes: dict[str, int] = {}
    for node, value in zip(graph.inputs, inputs, strict=True):
        values[node] = value
        _bind_sizes(node, value, sizes)

    def arg(a: Any) -> Any:
        if isinstance(a, Node):
            return values[a]
        if isinstance(a, Expr):
            return evaluate(a, sizes)
        if isinstance(a, (tuple, list)):
            return [arg(b) for b in a]
        if isinstance(a, DType):
            return torch_internals.to_torch_dtype(a)
        if isinstance(a, str):
            return _FORMATS.get(a, _LAYOUTS.get(a, a))
        return a

    with torch.no_grad(), torch_internals.disable_autocast():
        for node in graph.nodes:
            if node.op == "getitem":
                value = values[node.args[0]][node.args[1]]
            else:
                value = _operator(_RELAXED.get(node.op, node.op))(*map(arg, node.args), **{k: arg(v) for k, v in node.kwargs})
            if isinstance(node.type, TensorType):
                _check(node, node.type, value, sizes)
            values[node] = value
        return tuple(arg(o) for o in graph.outputs)


def _bind_sizes(node: Node, value: Any, sizes: dict[str, int]) -> None:
    if isinstance(node.type, TensorType):
        for size, actual in zip(node.type.shape, value.shape):
            if isinstance(size, Sym):
                sizes[size.name] = actual
    elif isinstance(node.type, ScalarType) and isinstance(node.type.expr, Sym):
        sizes[node.type.expr.name] = value


def _check(node: Node, type_: TensorType, value: Any, sizes: dict[str, int]) -> None:
    shape = tuple(evaluate(s, sizes) for s in type_.shape)
    if tuple(value.shape) != shape or torch_internals.from_torch_dtype(value.dtype) != type_.dtype:
        raise InternalError(f"result of type {value.dtype}{list(value.shape)}", node=node, at=node.origin)


@cache
def _operator(name: str) -> Any:
    found = torch_internals.operator(name)
    if found is None:
        raise InternalError(f"no operator {name}")
    return found
