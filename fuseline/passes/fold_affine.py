"""Absorb what scales and shifts the channels of a convolution into its weight and bias (inference only).

Batch norm in inference is, after decomposition, a chain of subtractions, products and sums with values that depend on
parameters only. Each link is absorbed in turn: (conv(x, w) + b) * s = conv(x, w*s) + b*s. What the chain computes from
parameters is hoisted by lower, so folding costs nothing per call and is redone when a parameter changes.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuseline.ir.dtypes import F32, F64
from fuseline.ir.graph import Graph, Node, TensorType, contiguous
from fuseline.passes.convolution import Convolution
from fuseline.passes.edit import Editor
from fuseline.passes.facts import static_nodes

_LINKS = {"aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor"}


def fold_affine(graph: Graph) -> Graph:
    """Fold every convolution whose single reader scales or shifts it per channel by a static value."""
    static, users = static_nodes(graph), graph.users()
    outputs = {o for o in graph.outputs if isinstance(o, Node)}
    chains: dict[Node, list[Node]] = {}                 # last link -> [convolution, link, link, ...]
    for node in graph.nodes:
        conv = Convolution.of(node)
        if conv is None or conv.transposed or conv.weight not in static or node.tensor.dtype not in (F32, F64):
            continue
        if conv.bias is not None and conv.bias not in static:
            continue
        chain = [node]
        while len(users[chain[-1]]) == 1 and chain[-1] not in outputs and _is_link(users[chain[-1]][0], chain[-1], static):
            chain.append(users[chain[-1]][0])
        if len(chain) > 1:
            chains[chain[-1]] = chain
    if not chains:
        return graph
    absorbed = {link for chain in chains.values() for link in chain[:-1]}
    editor = Editor(graph)
    for node in graph.nodes:
        if node in chains:
            editor.mapping[node] = _folded(editor, chains[node])
        elif node not in absorbed:
            editor.keep(node)
    return editor.done()


def _is_link(user: Node, value: Node, static: frozenset[Node]) -> bool:
    if user.op not in _LINKS or user.type != value.type or user.kwargs:
        return False
    a, b = user.args[:2]
    if len(user.args) > 2 and user.args[2] != 1:
        return False
    if a is value:
        return _per_channel(b, value, static)
    return b is value and user.op in ("aten.add.Tensor", "aten.mul.Tensor") and _per_channel(a, value, static)


def _per_channel(other: object, value: Node, static: frozenset[Node]) -> bool:
    """True for a number, or a static tensor that broadcasts as one value a channel."""
    if isinstance(other, (int, float)) and not isinstance(other, bool):
        return True
    if not isinstance(other, Node) or other not in static or not isinstance(other.type, TensorType):
        return False
    if other.type.dtype != value.tensor.dtype:
        return False
    shape = (1,) * (value.tensor.rank - other.type.rank) + other.type.shape
    return all(size == (value.tensor.shape[1] if axis == 1 else 1) for axis, size in enumerate(shape))


def _folded(editor: Editor, chain: list[Node]) -> Node:
    node = chain[0]
    conv = Convolution.of(node)
    assert conv is not None
    channels, dtype, device = node.tensor.shape[1], node.tensor.dtype, node.tensor.device
    vector = TensorType(dtype, (channels,), (1,), device)
    origin = chain[-1].origin

    def flat(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        new = editor.new(value)
        return new if value.type == vector else editor.emit("aten.reshape.default", (new, (channels,)), vector, origin=origin)

    def binary(op: str, a: Any, b: Any) -> Any:
        if not isinstance(a, Node) and not isinstance(b, Node):
            return {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "div": lambda: a / b}[op]()
        if not isinstance(a, Node):                       # a number on the left: aten's overloads want the tensor first
            if op == "sub":
                return binary("add", binary("mul", b, -1), a)
            if op == "div":
                return binary("mul", editor.emit("aten.reciprocal.default", (b,), vector, origin=origin), a)
            a, b = b, a
        return editor.emit(f"aten.{op}.Tensor", (a, b), vector, origin=origin)

    scale: object = 1.0
    shift: object = flat(conv.bias) if conv.bias is not None else 0.0
    value = node
    for link in chain[1:]:
        other = flat(link.args[1] if link.args[0] is value else link.args[0])
        op = link.op.split(".")[1]
        if op in ("add", "sub"):
            shift = binary(op, shift, other)
        else:
            shift = binary(op, shift, other)
            scale = binary(op, scale, other)
        value = link
    weight = editor.new(conv.weight)
    if isinstance(scale, Node):
        shape = (channels,) + (1,) * (conv.weight.tensor.rank - 1)
        type_ = TensorType(dtype, shape, contiguous(shape), device)
        column = editor.emit("aten.reshape.default", (scale, shape), type_, origin=origin)
        weight = editor.emit("aten.mul.Tensor", (weight, column), conv.weight.type, origin=origin, hint="folded_weight")
    elif scale != 1:
        weight = editor.emit("aten.mul.Tensor", (weight, scale), conv.weight.type, origin=origin, hint="folded_weight")
    if not isinstance(shift, Node):
        shift = editor.emit("aten.full.default", ((channels,), shift), vector, origin=origin,
                            kwargs=(("dtype", dtype), ("device", device)))
    made = replace(conv, x=editor.new(conv.x), weight=weight, bias=shift)
    return editor.emit(node.op, made.args(), node.type, origin=origin, hint=node.name)
