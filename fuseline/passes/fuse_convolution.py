"""Give convolutions the epilogues that the library's own kernels offer (inference, static weights).

CPU: oneDNN's convolution with an activation or a residual sum, on weights packed once. CUDA: cuDNN's convolution with
bias, residual sum and relu. Bias that no library epilogue takes becomes an elementwise sum, which fuses with what follows.
"""
from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from fuseline.ir.dtypes import BF16, F16, F32
from fuseline.ir.graph import Graph, Node, TensorType, contiguous
from fuseline.passes.convolution import Convolution
from fuseline.passes.edit import Editor
from fuseline.passes.facts import static_nodes

# ATen operator -> oneDNN's name of the activation (those without parameters).
_ONEDNN_ACTIVATIONS = {
    "aten.relu.default": "relu", "aten.sigmoid.default": "sigmoid", "aten.tanh.default": "tanh",
    "aten.hardswish.default": "hardswish", "aten.hardsigmoid.default": "hardsigmoid", "aten.silu.default": "swish",
}


@dataclass(frozen=True, slots=True)
class _Fusion:
    """A convolution with what follows it: the residual operand and the activation, where there is one."""
    conv: Node
    residual: Node | None
    activation: str | None


def fuse_convolution(graph: Graph, *, libraries: Container[str]) -> Graph:
    """`libraries`: which of "onednn" and "cudnn" can be called."""
    static, users = static_nodes(graph), graph.users()
    outputs = {o for o in graph.outputs if isinstance(o, Node)}
    order = {n: i for i, n in enumerate((*graph.inputs, *graph.nodes))}
    fusions: dict[Node, _Fusion] = {}
    for node in graph.nodes:
        if _library(node, static, libraries) is None:
            continue
        end, residual, activation = node, None, None
        if _single_user(end, users, outputs, "aten.add.Tensor") is not None:
            add = users[end][0]
            other = add.args[1] if add.args[0] is end else add.args[0]
            if (isinstance(other, Node) and other is not end and other.type == end.type == add.type and not add.kwargs
                    and len(add.args) == 2 and not (Convolution.of(other) and _claims(other, add, users, order, node))):
                end, residual = add, other
        for op, name in _ONEDNN_ACTIVATIONS.items():
            if (user := _single_user(end, users, outputs, op)) is not None and user.type == end.type:
                end, activation = user, name
                break
        fusions[end] = _Fusion(node, residual, activation)
    inner = {f.conv for end, f in fusions.items() if end is not f.conv}
    inner |= {end.args[0] for end, f in fusions.items() if f.residual is not None and f.activation is not None}
    editor = Editor(graph)
    for node in graph.nodes:
        if node in fusions:
            fusion = fusions[node]
            if _library(fusion.conv, static, libraries) == "onednn":
                editor.mapping[node] = _onednn(editor, fusion, node)
            else:
                editor.mapping[node] = _cudnn(editor, fusion, node)
        elif node not in inner:
            editor.keep(node)
    return editor.done()


def _single_user(node: Node, users: dict, outputs: set, op: str) -> Node | None:
    found = users[node]
    return found[0] if len(found) == 1 and found[0].op == op and node not in outputs else None


def _claims(other: Node, add: Node, users: dict, order: dict, node: Node) -> bool:
    """Both operands of a sum are convolutions: the later one takes the sum as its epilogue."""
    return order[other] > order[node] and users[other] == [add]


def _library(node: Node, static: frozenset[Node], libraries: Container[str]) -> str | None:
    conv = Convolution.of(node)
    if conv is None or conv.transposed or conv.x.tensor.rank != 4 or conv.weight not in static:
        return None
    if conv.bias is not None and conv.bias not in static:
        return None
    if not all(isinstance(s, int) for s in conv.x.tensor.shape):
        return None
    if node.tensor.device == "cpu":
        return "onednn" if "onednn" in libraries and node.tensor.dtype == F32 else None
    return "cudnn" if "cudnn" in libraries and node.tensor.dtype in (F32, F16, BF16) else None


def _onednn(editor: Editor, fusion: _Fusion, end: Node) -> Node:
    conv = Convolution.of(fusion.conv)
    assert conv is not None
    settings = (conv.padding, conv.stride, conv.dilation, conv.groups)
    packed = editor.emit("mkldnn._reorder_convolution_weight.default",
                         (editor.new(conv.weight), *settings, tuple(conv.x.tensor.shape)), conv.weight.type,
                         origin=end.origin, hint="packed_weight")
    x, bias = editor.new(conv.x), editor.new(conv.bias)
    activation = fusion.activation or "none"
    if fusion.residual is None:
        return editor.emit("mkldnn._convolution_pointwise.default", (x, packed, bias, *settings, activation, (), ""), end.type,
                           origin=end.origin, hint=end.name)
    args = (x, editor.new(fusion.residual), packed, bias, *settings, "add", 1.0, fusion.activation, (), None)
    return editor.emit("mkldnn._convolution_pointwise.binary", args, end.type, origin=end.origin, hint=end.name)


def _cudnn(editor: Editor, fusion: _Fusion, end: Node) -> Node:
    conv = Convolution.of(fusion.conv)
    assert conv is not None
    settings = (conv.stride, conv.padding, conv.dilation, conv.groups)
    x, weight, bias = editor.new(conv.x), editor.new(conv.weight), editor.new(conv.bias)
    if fusion.activation == "relu":
        if fusion.residual is None:
            return editor.emit("aten.cudnn_convolution_relu.default", (x, weight, bias, *settings), end.type, origin=end.origin,
                               hint=end.name)
        residual = editor.new(fusion.residual)
        return editor.emit("aten.cudnn_convolution_add_relu.default", (x, weight, residual, 1.0, bias, *settings), end.type,
                           origin=end.origin, hint=end.name)
    made = editor.emit("aten.convolution.default", replace(conv, x=x, weight=weight, bias=None).args(), fusion.conv.type,
                       origin=end.origin, hint=fusion.conv.name)
    if bias is not None:
        shape = (conv.weight.tensor.shape[0], 1, 1)
        type_ = TensorType(end.tensor.dtype, shape, contiguous(shape), end.tensor.device)
        column = editor.emit("aten.reshape.default", (bias, shape), type_)
        made = editor.emit("aten.add.Tensor", (made, column), fusion.conv.type, origin=end.origin)
    if fusion.residual is not None:
        made = editor.emit("aten.add.Tensor", (made, editor.new(fusion.residual)), fusion.conv.type, origin=end.origin)
    if fusion.activation is not None:
        made = editor.emit(end.op, (made,), end.type, origin=end.origin, hint=end.name)
    return made
