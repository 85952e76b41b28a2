"""Reductions: the kept axes are a kernel's axes, the reduced ones its first phase's, and a phase without axes stores."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import BOOL, I64, DType
from fuseline.ir.expr import Expr, product
from fuseline.ir.graph import Size, TensorType
from fuseline.lower.builder import KernelBuilder, Number, Val
from fuseline.lower.context import Context, as_number, lowering
from fuseline.lower.views import View, normalize_axes

Index = tuple[Size, ...]
Inside = Callable[[KernelBuilder, Index], Sequence[Val]]
After = Callable[..., Sequence[Val]]


def reduce_over(context: Context, shape: Sequence[Size], axes: Sequence[int], outs: Sequence[View | None], inside: Inside,
                after: After | None = None) -> None:
    """One kernel that reduces a tensor of `shape` over `axes` and stores one value in each of outs.

    inside  (kernel, full index) -> the reduced values (made with kernel.reduce)
    after   (kernel, *reduced values) -> the values to store, one for each of outs; those of None are not stored
    The outs have the kept axes, in order, or those and extents of 1 in the place of the reduced ones.
    """
    kept = [a for a in range(len(shape)) if a not in axes]
    stored = [o for o in outs if o is not None]
    if stored[0].empty:
        for empty in stored:
            context.nothing(empty)
        return
    kernel = context.kernel()
    outer = dict(zip(kept, kernel.axes([shape[a] for a in kept])))
    inner = dict(zip(axes, kernel.phase([shape[a] for a in axes])))
    reduced = inside(kernel, tuple({**outer, **inner}[a] for a in range(len(shape))))
    kernel.phase()
    for out, value in zip(outs, after(kernel, *reduced) if after else reduced):
        if out is None:
            continue
        keeps = out.rank == len(shape)
        kernel.store(out, [outer.get(a, 0) for a in range(len(shape)) if keeps or a in outer], value)
    context.launch(kernel)


def count(shape: Sequence[Size], axes: Sequence[int]) -> Size:
    return product(tuple(shape[a] for a in axes))


def as_value(k: KernelBuilder, size: Size, dtype: DType) -> Val | Number:
    """A size as an operand next to values of dtype."""
    return k.index(size, dtype) if isinstance(size, Expr) else size


# ---------------------------------------------------------------- sums

def _sum(context: Context, x: View, dim: object, dtype: DType | None) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    if out.dtype == BOOL:
        raise LoweringError("sum as a bool")
    accumulator = I64 if out.dtype.is_integer else out.dtype.compute

    def inside(k: KernelBuilder, index: Index) -> Sequence[Val]:
        value = k.cast(k.load(x, index), out.dtype, round_half=x.dtype != out.dtype)
        return [k.reduce("sum", k.cast(value, accumulator), dtype=accumulator)]
    reduce_over(context, x.shape, axes, [out], inside)
    return out


@lowering("aten.sum.default")
def sum_all(context: Context, x: View, *, dtype: DType | None = None) -> View:
    return _sum(context, x, None, dtype)


@lowering("aten.sum.dim_IntList")
def sum_dim(context: Context, x: View, dim: object = None, keepdim: bool = False, *, dtype: DType | None = None) -> View:
    return _sum(context, x, dim, dtype)


def _mean(context: Context, x: View, dim: object) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    size, dtype = count(x.shape, axes), out.dtype.compute
    reduce_over(context, x.shape, axes, [out],
                lambda k, i: [k.reduce("sum", k.cast(k.load(x, i), out.dtype, round_half=x.dtype != out.dtype), dtype=dtype)],
                lambda k, total: [total / as_value(k, size, dtype)])
    return out


@lowering("aten.mean.default")
def mean_all(context: Context, x: View, *, dtype: DType | None = None) -> View:
    return _mean(context, x, None)


@lowering("aten.mean.dim")
def mean_dim(context: Context, x: View, dim: object = None, keepdim: bool = False, *, dtype: DType | None = None) -> View:
    return _mean(context, x, dim)


def _prod(context: Context, x: View, dim: object) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    if out.dtype == BOOL:
        raise LoweringError("product as a bool")
    accumulator = I64 if out.dtype.is_integer else out.dtype.compute

    def inside(k: KernelBuilder, index: Index) -> Sequence[Val]:
        value = k.cast(k.load(x, index), out.dtype, round_half=x.dtype != out.dtype)
        return [k.reduce("prod", k.cast(value, accumulator), dtype=accumulator)]
    reduce_over(context, x.shape, axes, [out], inside)
    return out


@lowering("aten.prod.default")
def prod_all(context: Context, x: View, *, dtype: DType | None = None) -> View:
    return _prod(context, x, None)


@lowering("aten.prod.dim_int")
def prod_dim(context: Context, x: View, dim: int, keepdim: bool = False, *, dtype: DType | None = None) -> View:
    return _prod(context, x, dim)


# ---------------------------------------------------------------- extremes

def _extreme(context: Context, op: str, x: View, dim: object) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    reduction = {"max": "any", "min": "all"}[op] if x.dtype == BOOL else op
    reduce_over(context, x.shape, axes, [out], lambda k, i: [k.reduce(reduction, k.load(x, i), dtype=x.dtype.compute)])
    return out


def _extreme_and_place(context: Context, op: str, x: View, dim: int) -> tuple:
    if x.dtype == BOOL:
        raise LoweringError(f"{op} of booleans along an axis")
    types = [t for t in context.types if isinstance(t, TensorType)]
    values, places = (context.result(t) for t in types)
    wanted = [values if context.used is None or 0 in context.used else None,
              places if context.used is None or 1 in context.used else None]
    if any(w is not None for w in wanted):
        reduce_over(context, x.shape, normalize_axes(dim, x.rank), wanted, lambda k, i: [
            k.reduce(op, k.load(x, i), dtype=x.dtype.compute), k.reduce(f"arg{op}", k.load(x, i), dtype=I64)])
    return values, places


def _place(context: Context, op: str, x: View, dim: int | None) -> View:
    if x.dtype == BOOL:
        raise LoweringError(f"{op} of booleans")
    out = context.result()
    reduce_over(context, x.shape, normalize_axes(dim, x.rank), [out], lambda k, i: [k.reduce(op, k.load(x, i), dtype=I64)])
    return out


def _register_extremes(op: str) -> None:
    lowering(f"aten.a{op}.default")(lambda context, x, dim=(), keepdim=False: _extreme(context, op, x, dim))
    lowering(f"aten.{op}.default")(lambda context, x: _extreme(context, op, x, None))
    lowering(f"aten.{op}.dim")(lambda context, x, dim, keepdim=False: _extreme_and_place(context, op, x, dim))
    lowering(f"aten.arg{op}.default")(lambda context, x, dim=None, keepdim=False: _place(context, f"arg{op}", x, dim))


_register_extremes("max")
_register_extremes("min")


def _register_logical(op: str) -> None:
    def lower(context: Context, x: View, dim: object = None, keepdim: bool = False) -> View:
        out = context.result()
        reduce_over(context, x.shape, normalize_axes(dim, x.rank), [out],
                    lambda k, i: [k.reduce(op, k.cast(k.load(x, i), BOOL), dtype=BOOL)])
        return out
    lowering(f"aten.{op}.default", f"aten.{op}.dim", f"aten.{op}.dims")(lower)


_register_logical("any")
_register_logical("all")


# ---------------------------------------------------------------- moments

def _moments(context: Context, x: View, dim: object, correction: object, outs: Sequence[View | None], root: bool) -> None:
    """Stores (variance or its root, mean) in outs."""
    axes = normalize_axes(dim, x.rank)
    size, dtype = count(x.shape, axes), x.dtype.compute
    off = 1 if correction is None else as_number(correction)
    if not x.dtype.is_float:
        raise LoweringError("variance of integers")

    def after(k: KernelBuilder, mean: Val, m2: Val) -> Sequence[Val]:
        if isinstance(size, Expr):
            variance = m2 / k.op("maximum", k.index(size, dtype) - off, 0)
        else:
            variance = m2 / float(max(size - off, 0))
        return [k.op("sqrt", variance) if root else variance, mean]
    reduce_over(context, x.shape, axes, outs, lambda k, i: k.welford(k.load(x, i)), after)


def _one(root: bool) -> Callable[..., View]:
    def lower(context: Context, x: View, dim: object = None, *, correction: object = None, keepdim: bool = False) -> View:
        out = context.result()
        _moments(context, x, dim, correction, [out, None], root)
        return out
    return lower


def _two(root: bool) -> Callable[..., tuple]:
    def lower(context: Context, x: View, dim: object = None, *, correction: object = None, keepdim: bool = False) -> tuple:
        outs = tuple(context.result(t) for t in context.types if isinstance(t, TensorType))
        _moments(context, x, dim, correction, outs, root)
        return outs
    return lower


lowering("aten.var.correction")(_one(False))
lowering("aten.std.correction")(_one(True))
lowering("aten.var_mean.correction")(_two(False))
lowering("aten.std_mean.correction")(_two(True))


# ---------------------------------------------------------------- norms

@lowering("aten.linalg_vector_norm.default")
def vector_norm(context: Context, x: View, ord: float = 2, dim: object = None, keepdim: bool = False, *,     # noqa: A002
                dtype: DType | None = None) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    compute, order = out.dtype.compute, float(as_number(ord))

    def inside(k: KernelBuilder, index: Index) -> Sequence[Val]:
        value = k.cast(k.load(x, index), out.dtype, round_half=x.dtype != out.dtype)
        size = k.op("abs", value)
        if order == math.inf:
            return [k.reduce("max", size, dtype=compute)]
        if order == -math.inf:
            return [k.reduce("min", size, dtype=compute)]
        term = (k.cast(value.differs(0), compute) if order == 0 else size if order == 1 else value * value if order == 2
                else k.op("pow", size, order))
        return [k.reduce("sum", term, dtype=compute)]

    def after(k: KernelBuilder, total: Val) -> Sequence[Val]:
        if order in (0, 1, math.inf, -math.inf):
            return [total]
        return [k.op("sqrt", total) if order == 2 else k.op("pow", total, 1.0 / order)]
    reduce_over(context, x.shape, axes, [out], inside, after)
    return out
