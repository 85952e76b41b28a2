"""Calls of PyTorch's operators: what has no loops of ours, and what its libraries do best."""
from __future__ import annotations

from dataclasses import replace

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.dtypes import OTHER
from fuseline.ir.expr import symbols
from fuseline.ir.graph import Node, ScalarType, TensorType
from fuseline.ir.kernels import Buffer, Extern, Ref, ViewOf
from fuseline.lower.context import Context
from fuseline.lower.views import RuntimeNumber, View, is_dense, same_layout

# Operators with an overload that writes into memory that we place. Their result's dtype, shape and strides are as given.
OUT_VARIANTS = {
    "aten.mm.default": "aten.mm.out", "aten.bmm.default": "aten.bmm.out", "aten.addmm.default": "aten.addmm.out",
    "aten.baddbmm.default": "aten.baddbmm.out", "aten.mv.default": "aten.mv.out", "aten.cat.default": "aten.cat.out",
}


def call(context: Context, node: Node, values: dict[Node, object]) -> object:
    """Emit the node as an Extern; the result as `values` holds results."""
    args = argument(context, node.args, values)
    kwargs = tuple((k, argument(context, v, values)) for k, v in node.kwargs)
    if torch_internals.returns_alias(node.op):
        _keep_alive(context, node, values)
    several = isinstance(node.type, tuple)
    types = node.type if isinstance(node.type, tuple) else (node.type,)
    results = tuple(_result(context, node, t) for t in types)
    outs = tuple(r.buffer if isinstance(r, View) else r.buffer if isinstance(r, Ref) else None for r in results)
    out_variant = OUT_VARIANTS.get(node.op)
    first = results[0]
    if not (isinstance(first, View) and is_dense(first.shape, first.stride) and not first.empty):
        out_variant = None
    context.steps.append(Extern(node.op, args, kwargs, outs, out_variant, node.origin))     # type: ignore[arg-type]
    return results if several else results[0]


def argument(context: Context, arg: object, values: dict[Node, object]) -> object:
    """An argument as an Extern has it: tensors as Ref or ViewOf."""
    if isinstance(arg, Node):
        return argument(context, values[arg], values)
    if isinstance(arg, RuntimeNumber):
        name = arg.passed(arg.view.buffer)
        context.buffers[name] = Buffer(name, OTHER, (), (), "cpu", "input", opaque=True)
        return Ref(name)
    if isinstance(arg, View):
        buffer = context.buffers[arg.buffer]
        whole = arg.offset == 0 and arg.shape == buffer.shape and same_layout(arg.shape, arg.stride, buffer.stride)
        if whole or buffer.opaque:
            return Ref(arg.buffer)
        return ViewOf(arg.buffer, arg.shape, arg.stride, arg.offset)
    if isinstance(arg, (tuple, list)):
        return tuple(argument(context, a, values) for a in arg)
    return arg


def _result(context: Context, node: Node, type_: object) -> object:
    if type_ is None:
        return None
    if isinstance(type_, ScalarType):                       # a number that only the operator knows: passed on as it is
        name = f"n{context.count}"
        context.count += 1
        context.buffers[name] = Buffer(name, OTHER, (), (), "cpu", opaque=True)
        return Ref(name)
    if not isinstance(type_, TensorType):
        raise InternalError(f"result of type {type_}", node=node)
    opaque = type_.dtype == OTHER or "._reorder" in node.op or _unbound(type_)
    return context.buffer(type_.dtype, type_.shape, type_.stride, type_.device, opaque=opaque)


def _unbound(type_: TensorType) -> bool:
    """True if a size is known only once the operator has run (an unbacked symbol of the tracer)."""
    return any(symbol.name.startswith("u") for size in type_.shape for symbol in symbols(size))


def _keep_alive(context: Context, node: Node, values: dict[Node, object]) -> None:
    """The result shows its operands' memory: that memory must not be shared with other buffers after their last use."""
    for operand in node.operands:
        value = values.get(operand)
        if isinstance(value, View) and context.buffers[value.buffer].kind == "temp":
            context.buffers[value.buffer] = replace(context.buffers[value.buffer], kind="output")
