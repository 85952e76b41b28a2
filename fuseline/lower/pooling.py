"""Pooling and nearest-neighbour resampling. Windows are unrolled: each place of a window is one masked load."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product as places

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import BOOL, F32, I64, DType
from fuseline.ir.expr import Expr, ceil_div, maximum, minimum
from fuseline.ir.graph import Size, TensorType
from fuseline.lower.builder import KernelBuilder, Number, Val
from fuseline.lower.context import Context, lowering
from fuseline.lower.indexing import outside
from fuseline.lower.promotion import integer_range
from fuseline.lower.views import View

MAX_WINDOW = 64                        # places in an unrolled window; larger ones are left to PyTorch

Index = tuple[Size, ...]


def _pair(value: object, rank: int = 2) -> tuple[int, ...]:
    """A setting for each spatial axis: one number stands for all."""
    listed = (value,) if isinstance(value, int) else tuple(value)               # type: ignore[arg-type]
    found = listed * rank if len(listed) == 1 else listed
    if any(not isinstance(v, int) for v in found):
        raise LoweringError("a window whose size is known at run time only")
    return found


def _check_window(kernel: Sequence[int]) -> None:
    if math.prod(kernel) > MAX_WINDOW:
        raise LoweringError(f"a window of {'x'.join(map(str, kernel))} is too large to unroll")


def _lowest(dtype: DType) -> Number:
    if dtype == BOOL:
        return False
    return -math.inf if dtype.is_float else integer_range(dtype)[0]


# ---------------------------------------------------------------- maximum

@lowering("aten.max_pool2d_with_indices.default")
def max_pool2d(context: Context, x: View, kernel_size: object, stride: object = (), padding: object = 0, dilation: object = 1,
               ceil_mode: bool = False) -> tuple:
    """(maxima, their places in the plane); the last NaN of a window wins, as in PyTorch."""
    kernel = _pair(kernel_size)
    step, pad, gap = _pair(stride or kernel), _pair(padding), _pair(dilation)
    _check_window(kernel)
    out_type, place_type = context.types
    if not isinstance(out_type, TensorType) or not isinstance(place_type, TensorType):
        raise LoweringError("pooling without result types")
    out, chosen = context.result(out_type), context.result(place_type)
    wanted = context.used is None or 1 in context.used
    if out.empty:
        return context.nothing(out), context.nothing(chosen)
    height, width = x.shape[-2:]
    k = context.kernel()
    index = k.axes(out.shape)
    k.phase()
    corner = [index[-2 + a] * step[a] - pad[a] for a in range(2)]
    lowest = _lowest(x.dtype)

    def item(place: tuple[int, ...]) -> tuple[Val, Size]:
        row, column = (corner[a] + place[a] * gap[a] for a in range(2))
        mask = k.both(k.within(row, height), k.within(column, width))
        return k.load(x, (*index[:-2], row, column), mask, lowest), row * width + column

    window = list(places(*(range(n) for n in kernel)))
    if not wanted:
        best, _ = item(window[0])
        for place in window[1:]:
            best = k.op("maximum", best, item(place)[0])
        k.store(out, index, best)
        context.launch(k)
        return out, chosen
    # Where nothing exceeds the lowest value, the first place inside the plane is the one reported.
    first = [c + ceil_div(maximum(-c, 0), gap[a]) * gap[a] for a, c in enumerate(corner)]
    best, best_place = k.const(lowest, x.dtype), k.index(first[0] * width + first[1])
    for place in window:
        value, where = item(place)
        better = k.op("gt", value, best)
        if value.dtype.is_float:
            better = better | k.op("isnan", value)
        best, best_place = k.where(better, value, best), k.where(better, k.index(where), best_place)
    k.store(out, index, best)
    k.store(chosen, index, best_place)
    context.launch(k)
    return out, chosen


@lowering("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_backward(context: Context, grad: View, x: View, kernel_size: object, stride: object, padding: object,
                        dilation: object, ceil_mode: bool, indices: View) -> View:
    """Each element gathers the gradients of the windows that chose it."""
    kernel = _pair(kernel_size)
    step, pad, gap = _pair(stride or kernel), _pair(padding), _pair(dilation)
    if gap != (1, 1):
        raise LoweringError("backward of dilated pooling")
    out = context.result()
    dtype = out.dtype.compute

    def value(k: KernelBuilder, index: Index) -> Val:
        here = k.index(index[-2] * x.shape[-1] + index[-1])
        total: Val | None = None
        for row, column, mask in _windows(k, index, kernel, step, pad, grad.shape[-2:]):
            at = (*index[:-2], row, column)
            # Where the window is outside the plane, no index matches: -1 is no place.
            same = k.load(indices, at, mask, -1).equals(here)
            part = k.load(grad, at, same if mask is None else k.both(mask, same), 0)
            total = part if total is None else total + part
        return k.const(0, dtype) if total is None else total
    return context.fill(out, value)


def _windows(k: KernelBuilder, index: Index, kernel: Sequence[int], step: Sequence[int], pad: Sequence[int],
             extent: Sequence[Size]) -> Iterator[tuple[Size, Size, Val | None]]:
    """The windows that may contain the element at an index: (row, column, mask that they exist)."""
    counts = [-(-kernel[a] // step[a]) for a in range(2)]
    if math.prod(counts) > MAX_WINDOW:
        raise LoweringError("too many windows overlap")
    last = [(index[-2 + a] + pad[a]) // step[a] for a in range(2)]
    for back in places(*(range(n) for n in counts)):
        row, column = (last[a] - back[a] for a in range(2))
        yield row, column, k.both(k.within(row, extent[0]), k.within(column, extent[1]))


# ---------------------------------------------------------------- average

def _divisor(x: View, window: Sequence[Size], kernel: Sequence[int], step: Sequence[int], pad: Sequence[int], include_pad: bool,
             override: int | None) -> Size:
    """How many elements the average at window (row, column) counts."""
    if override is not None:
        return override
    total: Size = 1
    for a in range(2):
        size = x.shape[-2 + a]
        start = window[a] * step[a] - pad[a]
        end = minimum(start + kernel[a], size + pad[a])
        total = total * (end - start if include_pad else minimum(end, size) - maximum(start, 0))
    return total


def _over(k: KernelBuilder, value: Val, divisor: Size) -> Val:
    return value / (k.index(divisor, value.dtype) if isinstance(divisor, Expr) else divisor)


@lowering("aten.avg_pool2d.default")
def avg_pool2d(context: Context, x: View, kernel_size: object, stride: object = (), padding: object = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> View:
    kernel = _pair(kernel_size)
    step, pad = _pair(stride or kernel), _pair(padding)
    _check_window(kernel)
    if not x.dtype.is_float:
        raise LoweringError("average of integers")

    def value(k: KernelBuilder, index: Index) -> Val:
        total: Val | None = None
        for place in places(*(range(n) for n in kernel)):
            row, column = (index[-2 + a] * step[a] - pad[a] + place[a] for a in range(2))
            mask = k.both(k.within(row, x.shape[-2]), k.within(column, x.shape[-1]))
            item = k.load(x, (*index[:-2], row, column), mask, 0)
            total = item if total is None else total + item
        if total is None:
            raise LoweringError("an empty window")
        return _over(k, total, _divisor(x, index[-2:], kernel, step, pad, count_include_pad, divisor_override))
    return context.fill(context.result(), value)


@lowering("aten.avg_pool2d_backward.default")
def avg_pool2d_backward(context: Context, grad: View, x: View, kernel_size: object, stride: object, padding: object,
                        ceil_mode: bool, count_include_pad: bool, divisor_override: int | None) -> View:
    kernel = _pair(kernel_size)
    step, pad = _pair(stride or kernel), _pair(padding)
    out = context.result()

    def value(k: KernelBuilder, index: Index) -> Val:
        total: Val | None = None
        for row, column, mask in _windows(k, index, kernel, step, pad, grad.shape[-2:]):
            for a, window in enumerate((row, column)):
                if kernel[a] % step[a]:                        # the furthest window may end before this element
                    mask = k.both(mask, k.within(index[-2 + a] + pad[a] - window * step[a], kernel[a]))
            part = k.load(grad, (*index[:-2], row, column), mask, 0)
            divisor = _divisor(x, (row, column), kernel, step, pad, count_include_pad, divisor_override)
            # Outside the plane the count may be 0, and the part is 0.
            part = _over(k, part, divisor if divisor_override is not None else maximum(divisor, 1))
            total = part if total is None else total + part
        return k.const(0, out.dtype) if total is None else total
    return context.fill(out, value)


@lowering("aten._adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(context: Context, x: View, output_size: Sequence[Size]) -> View:
    """Windows from floor(o * in / out) to ceil((o + 1) * in / out)."""
    out = context.result()
    extents = [(size, count) for size, count in zip(x.shape[-2:], out.shape[-2:]) if isinstance(size, int) and isinstance(count, int)]
    if len(extents) < 2 or out.empty or not x.dtype.is_float:
        raise LoweringError("adaptive pooling of sizes that are known at run time only, of nothing, or of integers")
    kernel = [max(-(-(o + 1) * size // count) - o * size // count for o in range(count)) for size, count in extents]
    _check_window(kernel)

    def value(k: KernelBuilder, index: Index) -> Val:
        total: Val | None = None
        start = [index[-2 + a] * extents[a][0] // extents[a][1] for a in range(2)]
        end = [ceil_div((index[-2 + a] + 1) * extents[a][0], extents[a][1]) for a in range(2)]
        for place in places(*(range(n) for n in kernel)):
            at = [start[a] + place[a] for a in range(2)]
            mask = None
            for a in range(2):
                mask = k.both(mask, k.within(end[a] - 1 - at[a], kernel[a]))
            item = k.load(x, (*index[:-2], *at), mask, 0)
            total = item if total is None else total + item
        if total is None:
            raise LoweringError("an empty window")
        return _over(k, total, (end[0] - start[0]) * (end[1] - start[1]))
    return context.fill(out, value)


@lowering("aten._adaptive_avg_pool2d_backward.default")
def adaptive_avg_pool2d_backward(context: Context, grad: View, x: View) -> View:
    ratios = []
    for size, windows in zip(x.shape[-2:], grad.shape[-2:]):
        if not isinstance(windows, int) or windows == 0 or size % windows != 0:
            raise LoweringError("adaptive pooling whose windows overlap")
        ratios.append(size // windows)
    area = ratios[0] * ratios[1]
    return context.fill(context.result(), lambda k, index: _over(
        k, k.load(grad, (*index[:-2], index[-2] // ratios[0], index[-1] // ratios[1])), area))


# ---------------------------------------------------------------- nearest-neighbour resampling

def _nearest(context: Context, x: View, scales: Sequence[object]) -> View:
    """Source index = floor(index * scale), the product rounded to f32, as PyTorch computes it."""
    out = context.result()
    spatial = out.rank - 2

    def value(k: KernelBuilder, index: Index) -> Val:
        source: list[Size] = list(index[:2])
        mask: Val | None = None
        for axis in range(2, out.rank):
            size, wanted = x.shape[axis], out.shape[axis]
            scale = scales[axis - 2]
            ratio = wanted // size if isinstance(size, int) and isinstance(wanted, int) and wanted % size == 0 else None
            # Powers of two are exact in f32 too. For ratios of 1 and 2 the CPU's operator ignores a scale that rounds to them.
            if ratio is not None and ratio & (ratio - 1) == 0 and (
                    scale in (None, float(ratio)) or ratio in (1, 2) and x.device == "cpu"):
                source.append(index[axis] // ratio)
                continue
            if scale is not None and x.device == "cpu" and not (isinstance(size, int) and isinstance(wanted, int)):
                raise LoweringError("whether the ratio is 1 or 2 is known at run time only")
            if scale is not None and not isinstance(scale, float):
                raise LoweringError("a scale that is known at run time only")
            factor = k.const(1.0 / scale, F32) if scale else k.index(size, F32) / k.index(wanted, F32)
            place = k.cast(k.op("floor", k.index(index[axis], F32) * factor), I64)
            place = k.op("minimum", place, k.index(size - 1))
            chosen, inside = k.indirect(place, size)
            source.append(chosen)
            mask = k.both(mask, inside)
        return k.load(x, source, mask, outside(x))
    if spatial < 1:
        raise LoweringError("resampling without spatial axes")
    return context.fill(out, value)


@lowering("aten.upsample_nearest1d.default", "aten.upsample_nearest2d.default", "aten.upsample_nearest3d.default")
def upsample_nearest(context: Context, x: View, output_size: Sequence[Size], *scales: object, **named: object) -> View:
    given = (*scales, *named.values())
    return _nearest(context, x, (*given, *([None] * (x.rank - 2 - len(given)))))


@lowering("aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.vec", "aten.upsample_nearest3d.vec")
def upsample_nearest_vec(context: Context, x: View, output_size: object, scale_factors: Sequence[float] | None = None) -> View:
    return _nearest(context, x, tuple(scale_factors) if scale_factors else (None,) * (x.rank - 2))
