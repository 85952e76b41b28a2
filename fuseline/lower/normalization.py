"""Softmax, log-sum-exp, layer norm and group norm with their derivatives, each as a few small kernels that fuse by rows.

Intermediate results are kept in the compute type (f32 for half types), so the parts lose nothing to rounding.
"""
from __future__ import annotations

from collections.abc import Sequence

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import DType
from fuseline.ir.graph import Size, TensorType
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import Context, as_number, lowering
from fuseline.lower.reduction import Index, as_value, count, reduce_over
from fuseline.lower.views import View, expand, normalize_axes

# ---------------------------------------------------------------- softmax


def kept_shape(shape: Sequence[Size], axes: Sequence[int]) -> tuple[Size, ...]:
    return tuple(1 if a in axes else s for a, s in enumerate(shape))


def _row(context: Context, x: View, axes: Sequence[int], op: str, dtype: DType, term: object = None) -> View:
    """The reduction of term(kernel, index) (default: x itself) over axes, with extents of 1 in their place."""
    out = context.buffer(dtype, kept_shape(x.shape, axes))

    def inside(k: KernelBuilder, index: Index) -> Sequence[Val]:
        value = term(k, index) if callable(term) else k.cast(k.load(x, index), dtype)
        return [k.reduce(op, value, dtype=dtype)]
    reduce_over(context, x.shape, axes, [out], inside)
    return expand(out, x.shape)


def _exponentials(context: Context, x: View, axes: Sequence[int], dtype: DType) -> tuple[View, View]:
    """(row maxima, exp(x - maximum)), of x's shape."""
    largest = _row(context, x, axes, "max", dtype)
    powers = context.buffer(dtype, x.shape)
    context.fill(powers, lambda k, i: k.op("exp", k.cast(k.load(x, i), dtype) - k.load(largest, i)))
    return largest, powers


@lowering("aten._softmax.default")
def softmax(context: Context, x: View, dim: int, half_to_float: bool) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    dtype = out.dtype.compute
    if x.empty:
        return context.nothing(out)
    _, powers = _exponentials(context, x, axes, dtype)
    total = _row(context, powers, axes, "sum", dtype)
    return context.fill(out, lambda k, i: k.load(powers, i) / k.load(total, i))


@lowering("aten._log_softmax.default")
def log_softmax(context: Context, x: View, dim: int, half_to_float: bool) -> View:
    out, axes = context.result(), normalize_axes(dim, x.rank)
    dtype = out.dtype.compute
    if x.empty:
        return context.nothing(out)
    largest, powers = _exponentials(context, x, axes, dtype)
    total = _row(context, powers, axes, "sum", dtype)
    return context.fill(out, lambda k, i: k.cast(k.load(x, i), dtype) - k.load(largest, i) - k.op("log", k.load(total, i)))


@lowering("aten._softmax_backward_data.default")
def softmax_backward(context: Context, grad: View, y: View, dim: int, input_dtype: DType) -> View:
    out, axes = context.result(), normalize_axes(dim, y.rank)
    dtype = y.dtype.compute
    if y.empty:
        return context.nothing(out)
    dot = _row(context, y, axes, "sum", dtype, lambda k, i: k.cast(k.load(grad, i), dtype) * k.load(y, i))
    return context.fill(out, lambda k, i: k.load(y, i) * (k.cast(k.load(grad, i), dtype) - k.load(dot, i)))


@lowering("aten._log_softmax_backward_data.default")
def log_softmax_backward(context: Context, grad: View, y: View, dim: int, input_dtype: DType) -> View:
    out, axes = context.result(), normalize_axes(dim, y.rank)
    dtype = y.dtype.compute
    if y.empty:
        return context.nothing(out)
    total = _row(context, grad, axes, "sum", dtype)
    return context.fill(out, lambda k, i: k.cast(k.load(grad, i), dtype) - k.op("exp", k.load(y, i)) * k.load(total, i))


@lowering("aten.logsumexp.default")
def logsumexp(context: Context, x: View, dim: object, keepdim: bool = False) -> View:
    """Shifted by the largest element where that is finite."""
    out, axes = context.result(), normalize_axes(dim, x.rank)
    if not x.dtype.is_float or x.empty:
        raise LoweringError("log-sum-exp of integers or of nothing")
    dtype = x.dtype.compute
    largest = _row(context, x, axes, "max", dtype)

    def shift(k: KernelBuilder, index: Index) -> Val:
        m = k.load(largest, index)
        return k.where(k.op("isinf", m), 0.0, m)

    def after(k: KernelBuilder, total: Val) -> Sequence[Val]:
        return [k.op("log", total)]
    log_total = context.buffer(dtype, out.shape)
    reduce_over(context, x.shape, axes, [log_total],
                lambda k, i: [k.reduce("sum", k.op("exp", k.load(x, i) - shift(k, i)), dtype=dtype)], after)
    keeps = out.rank == x.rank
    compact = View(largest.buffer, dtype, kept_shape(x.shape, axes), context.buffers[largest.buffer].stride, x.device)
    kept = [a for a in range(x.rank) if a not in axes]

    def value(k: KernelBuilder, index: Index) -> Val:
        at = index if keeps else tuple(index[kept.index(a)] if a in kept else 0 for a in range(x.rank))
        m = k.load(compact, at)
        return k.load(log_total, index) + k.where(k.op("isinf", m), 0.0, m)
    return context.fill(out, value)


# ---------------------------------------------------------------- layer norm and group norm

def _statistics(context: Context, x: View, axes: Sequence[int], eps: float) -> tuple[View, View]:
    """(mean, 1 / sqrt(variance + eps)) over axes, in the compute type, with extents of 1 in their place."""
    dtype, size = x.dtype.compute, count(x.shape, axes)
    mean, rstd = (context.buffer(dtype, kept_shape(x.shape, axes)) for _ in range(2))

    def after(k: KernelBuilder, average: Val, m2: Val) -> Sequence[Val]:
        return [average, k.op("rsqrt", m2 / as_value(k, size, dtype) + eps)]
    reduce_over(context, x.shape, axes, [mean, rstd], lambda k, i: k.welford(k.load(x, i)), after)
    return mean, rstd


def _kept(context: Context, view: View, type_: object) -> View:
    """Statistics as the operator's result has them: reshaped and, for half types, converted."""
    if not isinstance(type_, TensorType):
        raise LoweringError("statistics without a type")
    shaped = context.contiguous(view, type_.shape)
    return shaped if shaped.dtype == type_.dtype else context.copy(shaped, context.result(type_))


@lowering("aten.native_layer_norm.default")
def layer_norm(context: Context, x: View, normalized_shape: Sequence[Size], weight: View | None, bias: View | None,
               eps: float) -> tuple:
    out_type, mean_type, rstd_type = context.types
    axes = tuple(range(x.rank - len(normalized_shape), x.rank))
    out = context.result(out_type)                                    # type: ignore[arg-type]
    if x.empty:
        raise LoweringError("layer norm of nothing")
    mean, rstd = _statistics(context, x, axes, float(as_number(eps)))
    _normalized(context, x, mean, rstd, weight, bias, out)
    return out, _kept(context, mean, mean_type), _kept(context, rstd, rstd_type)


def _normalized(context: Context, x: View, mean: View, rstd: View, weight: View | None, bias: View | None, out: View) -> None:
    """out = (x - mean) * rstd * weight + bias; all broadcast to x's shape."""
    dtype = x.dtype.compute
    parts = [None if p is None else expand(p, x.shape) for p in (mean, rstd, weight, bias)]

    def value(k: KernelBuilder, index: Index) -> Val:
        m, r, w, b = (None if p is None else k.cast(k.load(p, index), dtype, round_half=False) for p in parts)
        normal = (k.load(x, index) - m) * r                           # type: ignore[operator]
        normal = normal if w is None else normal * w
        return normal if b is None else normal + b
    context.fill(out, value)


@lowering("aten.native_layer_norm_backward.default")
def layer_norm_backward(context: Context, grad: View, x: View, normalized_shape: Sequence[Size], mean: View, rstd: View,
                        weight: View | None, bias: View | None, output_mask: Sequence[bool]) -> tuple:
    inner = tuple(range(x.rank - len(normalized_shape), x.rank))
    outer = tuple(range(x.rank - len(normalized_shape)))
    if x.empty:
        raise LoweringError("layer norm of nothing")
    return _norm_backward(context, grad, x, mean, rstd, weight, inner, outer, output_mask)


def _norm_backward(context: Context, grad: View, x: View, mean: View, rstd: View, weight: View | None, inner: Sequence[int],
                   outer: Sequence[int], output_mask: Sequence[bool]) -> tuple:
    """(grad of x, of weight, of bias), where mean and rstd reduce the inner axes and weight and bias broadcast over the outer."""
    dtype, size = x.dtype.compute, count(x.shape, inner)
    means, scales = expand(mean, x.shape), expand(rstd, x.shape)
    weights = None if weight is None else expand(weight, x.shape)

    def terms(k: KernelBuilder, index: Index) -> tuple[Val, Val, Val]:
        """grad, grad * weight, normalised x"""
        g = k.cast(k.load(grad, index), dtype, round_half=False)
        scale = k.cast(k.load(scales, index), dtype, round_half=False)
        normal = (k.load(x, index) - k.cast(k.load(means, index), dtype, round_half=False)) * scale
        weighted = g if weights is None else g * k.cast(k.load(weights, index), dtype, round_half=False)
        return g, weighted, normal

    types = context.types
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        grad_x = context.result(types[0])                             # type: ignore[arg-type]
        sums = [context.buffer(dtype, kept_shape(x.shape, inner)) for _ in range(2)]

        def both(k: KernelBuilder, index: Index) -> Sequence[Val]:
            _, weighted, normal = terms(k, index)
            return [k.reduce("sum", weighted, dtype=dtype), k.reduce("sum", weighted * normal, dtype=dtype)]
        reduce_over(context, x.shape, inner, sums, both)
        first, second = (expand(s, x.shape) for s in sums)

        def value(k: KernelBuilder, index: Index) -> Val:
            _, weighted, normal = terms(k, index)
            mean_part = (k.load(first, index) + normal * k.load(second, index)) / as_value(k, size, dtype)
            return (weighted - mean_part) * k.cast(k.load(scales, index), dtype, round_half=False)
        context.fill(grad_x, value)
    outs = [context.result(t) if wanted and isinstance(t, TensorType) else None           # type: ignore[arg-type]
            for t, wanted in zip(types[1:], output_mask[1:])]
    if any(o is not None for o in outs):
        def over_rows(k: KernelBuilder, index: Index) -> Sequence[Val]:
            g, _, normal = terms(k, index)
            return [k.reduce("sum", g * normal, dtype=dtype) if outs[0] is not None else g,
                    k.reduce("sum", g, dtype=dtype) if outs[1] is not None else g]
        reduce_over(context, x.shape, outer, outs, over_rows)
        grad_weight, grad_bias = outs
    return grad_x, grad_weight, grad_bias


def _grouped(x: View, groups: int) -> View:
    """(N, C, ...) as (N, groups, C/groups, ...): splitting an axis is always a view."""
    channels = x.shape[1] // groups
    return View(x.buffer, x.dtype, (x.shape[0], groups, channels, *x.shape[2:]),
                (x.stride[0], channels * x.stride[1], x.stride[1], *x.stride[2:]), x.device, x.offset)


@lowering("aten.native_group_norm.default")
def group_norm(context: Context, x: View, weight: View | None, bias: View | None, N: Size, C: Size, HxW: Size, group: int,  # noqa: N803
               eps: float) -> tuple:
    out_type, mean_type, rstd_type = context.types
    if x.empty:
        raise LoweringError("group norm of nothing")
    out = context.result(out_type)                                    # type: ignore[arg-type]
    grouped = _grouped(x, group)
    mean, rstd = _statistics(context, grouped, tuple(range(2, grouped.rank)), float(as_number(eps)))
    _normalized(context, grouped, mean, rstd, _by_channel(weight, grouped), _by_channel(bias, grouped), _grouped(out, group))
    return out, _kept(context, mean, mean_type), _kept(context, rstd, rstd_type)


def _by_channel(vector: View | None, grouped: View) -> View | None:
    """A vector over channels as (1, groups, channels a group, 1, ...)."""
    if vector is None:
        return None
    _, groups, channels = grouped.shape[:3]
    step, rest = vector.stride[0], (1,) * (grouped.rank - 3)
    return View(vector.buffer, vector.dtype, (1, groups, channels, *rest), (0, channels * step, step, *rest), vector.device,
                vector.offset)
