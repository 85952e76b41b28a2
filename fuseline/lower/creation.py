"""Tensors made from numbers: constants, ranges, triangles, the identity."""
from __future__ import annotations

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import F64
from fuseline.ir.expr import Expr
from fuseline.ir.graph import Size
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import POINTWISE, Context, lowering, scalar
from fuseline.lower.views import View


def _filled(context: Context, value: object) -> View:
    out = context.result()
    return context.fill(out, lambda k, i: scalar(k, value, (), out.dtype))


@lowering("aten.full.default")
def full(context: Context, size: object, fill_value: object, **_: object) -> View:
    return _filled(context, fill_value)


@lowering("aten.full_like.default", "aten.fill.Scalar")
def full_like(context: Context, x: View, fill_value: object, **_: object) -> View:
    return _filled(context, fill_value)


@lowering("aten.fill.Tensor")
def fill_tensor(context: Context, x: View, value: View) -> View:
    return context.copy(value, context.result())


@lowering("aten.new_full.default")
def new_full(context: Context, x: View, size: object, fill_value: object, **_: object) -> View:
    return _filled(context, fill_value)


# What nothing has written yet reads as zero: any value is right, and this one is the same each time.
@lowering("aten.zeros.default", "aten.empty.memory_format", "aten.empty_strided.default", "aten.new_zeros.default",
          "aten.new_empty.default", "aten.zeros_like.default", "aten.empty_like.default", "aten.new_empty_strided.default",
          "aten.zero.default", "aten.empty_permuted.default")
def zeros(context: Context, *_: object, **__: object) -> View:
    return _filled(context, 0)


@lowering("aten.ones.default", "aten.new_ones.default", "aten.ones_like.default")
def ones(context: Context, *_: object, **__: object) -> View:
    return _filled(context, 1)


POINTWISE.update(("aten.full_like.default", "aten.zeros_like.default", "aten.ones_like.default", "aten.empty_like.default"))


@lowering("aten.scalar_tensor.default")
def scalar_tensor(context: Context, value: object, **_: object) -> View:
    return _filled(context, value)


@lowering("aten.arange.default")
def arange(context: Context, end: object, **_: object) -> View:
    return _arange(context, 0, 1)


@lowering("aten.arange.start")
def arange_start(context: Context, start: object, end: object, **_: object) -> View:
    return _arange(context, start, 1)


@lowering("aten.arange.start_step")
def arange_step(context: Context, start: object, end: object, step: object = 1, **_: object) -> View:
    return _arange(context, start, step)


@lowering("prims.iota.default")
def iota(context: Context, length: object, *, start: object = 0, step: object = 1, **_: object) -> View:
    return _arange(context, start, step)


def _arange(context: Context, start: object, step: object) -> View:
    out = context.result()

    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        if isinstance(start, (int, Expr)) and isinstance(step, (int, Expr)):
            return k.cast(k.index(start + index[0] * step), out.dtype)
        if not isinstance(start, (int, float)) or not isinstance(step, (int, float)):
            raise LoweringError("a range of sizes and fractions")
        return k.cast(k.index(index[0], F64) * step + start, out.dtype)
    return context.fill(out, value)


@lowering("aten.eye.default", "aten.eye.m")
def eye(context: Context, *_: object, **__: object) -> View:
    out = context.result()
    return context.fill(out, lambda k, i: k.cast(k.index(i[0]).equals(k.index(i[1])), out.dtype))


@lowering("aten.triu.default")
def triu(context: Context, x: View, diagonal: int = 0) -> View:
    return _triangle(context, x, diagonal, "ge")


@lowering("aten.tril.default")
def tril(context: Context, x: View, diagonal: int = 0) -> View:
    return _triangle(context, x, diagonal, "le")


def _triangle(context: Context, x: View, diagonal: int, side: str) -> View:
    out = context.result()

    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        kept = k.op(side, k.index(index[-1]), k.index(index[-2] + diagonal))
        return k.where(kept, k.load(x, index), 0)
    return context.fill(out, value)
