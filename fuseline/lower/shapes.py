"""Operators that move no data (views), and those that only move it: concatenation, padding, flips, slices written into a copy."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fuseline.errors import LoweringError
from fuseline.ir.expr import maximum, minimum, product
from fuseline.ir.graph import Node, Size, TensorType, nested_strides
from fuseline.lower import views
from fuseline.lower.builder import KernelBuilder, Number, Val
from fuseline.lower.context import Context, as_number, lowering
from fuseline.lower.views import View, expand, normalize_axis, same_layout

MAX_KERNEL_CAT = 4                     # more operands than this are concatenated by PyTorch, which copies block by block
_FIRST: Size = 0


# ---------------------------------------------------------------- views

@lowering("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")
def alias(context: Context, x: View) -> View:
    return x


@lowering("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten._reshape_alias.default",
          "aten.view_as.default", "aten.flatten.using_ints", "aten.unflatten.int")
def reshape(context: Context, x: View, *_: object, **__: object) -> View:
    return context.contiguous(x, context.type.shape)


@lowering("aten.expand.default", "aten.expand_as.default")
def expand_(context: Context, x: View, *_: object, **__: object) -> View:
    return expand(x, context.type.shape)


@lowering("aten.permute.default")
def permute(context: Context, x: View, dims: Sequence[int]) -> View:
    return views.permute(x, dims)


@lowering("aten.transpose.int")
def transpose(context: Context, x: View, dim0: int, dim1: int) -> View:
    return views.transpose(x, dim0, dim1)


@lowering("aten.t.default")
def t(context: Context, x: View) -> View:
    return views.transpose(x, 0, 1) if x.rank == 2 else x


@lowering("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(context: Context, x: View, dim: object = None) -> View:
    return views.squeeze(x, dim)


@lowering("aten.unsqueeze.default")
def unsqueeze(context: Context, x: View, dim: int) -> View:
    return views.unsqueeze(x, dim)


@lowering("aten.select.int")
def select(context: Context, x: View, dim: int, index: Size) -> View:
    return views.select(x, dim, index)


@lowering("aten.slice.Tensor")
def slice_(context: Context, x: View, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1) -> View:
    return views.slice_(x, dim, start, end, step, context.type.shape[normalize_axis(dim, x.rank)])


@lowering("aten.narrow.default")
def narrow(context: Context, x: View, dim: int, start: Size, length: Size) -> View:
    return views.slice_(x, dim, start, None, 1, length)


@lowering("aten.diagonal.default")
def diagonal(context: Context, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    return views.diagonal(x, offset, dim1, dim2, context.type.shape[-1])


@lowering("aten.unfold.default")
def unfold(context: Context, x: View, dimension: int, size: int, step: int) -> View:
    return views.unfold(x, dimension, size, step, context.type.shape[normalize_axis(dimension, x.rank)] if x.rank else size)


@lowering("aten.as_strided.default")
def as_strided(context: Context, x: View, size: Sequence[Size], stride: Sequence[Size],
               storage_offset: Size | None = None) -> View:
    """Only where the storage is known to be laid out as in eager: not with an offset into an input's storage."""
    source = context.node.args[0] if context.node else None
    type_ = source.type if isinstance(source, Node) else None
    if not isinstance(type_, TensorType) or not same_layout(x.shape, x.stride, type_.stride):
        raise LoweringError("as_strided of a value that is laid out in another way")
    if storage_offset is not None and context.buffers[x.buffer].kind == "input":
        raise LoweringError("as_strided at an offset into the storage of an input")
    offset = x.offset if storage_offset is None else storage_offset
    return replace(x, shape=tuple(size), stride=tuple(stride), offset=offset)


@lowering("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default")
def split(context: Context, x: View, sizes: object, dim: int = 0) -> tuple:
    """The results' extents are in their types."""
    axis, start, parts = normalize_axis(dim, x.rank), _FIRST, []
    for type_ in context.types:
        if not isinstance(type_, TensorType):
            raise LoweringError("a split into an unknown number of parts")
        extent = type_.shape[axis]
        shape = (*x.shape[:axis], extent, *x.shape[axis + 1:])
        parts.append(replace(x, shape=shape, offset=x.offset + start * x.stride[axis]))
        start = start + extent
    return tuple(parts)


@lowering("aten.unbind.int")
def unbind(context: Context, x: View, dim: int = 0) -> tuple:
    return tuple(views.select(x, dim, i) for i in range(len(context.types)))


# ---------------------------------------------------------------- concatenation

@lowering("aten.cat.default", "aten.concatenate.default")
def cat(context: Context, tensors: Sequence[View], dim: int = 0) -> View:
    """One kernel of masked loads; PyTorch's own for many operands."""
    out = context.result()
    parts = [t for t in tensors if not (t.rank == 1 and out.rank != 1 and t.empty)]
    axis = normalize_axis(dim, out.rank)
    parts = [t for t in parts if not t.empty]
    if len(parts) > MAX_KERNEL_CAT:
        raise LoweringError(f"concatenation of {len(parts)} tensors")

    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        place, start = index[axis], _FIRST
        found: Val | None = None
        for number, part in enumerate(parts):
            extent = part.shape[axis]
            inside = (*index[:axis], place - start, *index[axis + 1:])
            below = k.index(place) < k.index(start + extent) if number < len(parts) - 1 else None
            above = k.index(place) >= k.index(start) if number else None
            item = k.cast(k.load(part, inside, k.both(above, below)), out.dtype, round_half=False)
            # From the last part backwards would nest the same; here each part overrides what came before it.
            found = item if found is None or above is None else k.where(above, item, found)
            start = start + extent
        if found is None:
            raise LoweringError("concatenation of nothing")
        return found
    return context.fill(out, value)


@lowering("aten.stack.default")
def stack(context: Context, tensors: Sequence[View], dim: int = 0) -> View:
    axis = dim + tensors[0].rank + 1 if dim < 0 else dim
    return cat(context, [views.unsqueeze(t, axis) for t in tensors], axis)      # type: ignore[return-value]


# ---------------------------------------------------------------- the same elements elsewhere

@lowering("aten.repeat.default")
def repeat(context: Context, x: View, repeats: Sequence[Size]) -> View:
    out = context.result()
    missing = out.rank - x.rank
    return context.fill(out, lambda k, i: k.load(x, [i[missing + a] % x.shape[a] for a in range(x.rank)]))


@lowering("aten.flip.default")
def flip(context: Context, x: View, dims: Sequence[int]) -> View:
    axes = {normalize_axis(d, x.rank) for d in dims}
    return context.fill(context.result(), lambda k, index: k.load(
        x, [x.shape[a] - 1 - i if a in axes else i for a, i in enumerate(index)]))


@lowering("aten.roll.default")
def roll(context: Context, x: View, shifts: object, dims: object = ()) -> View:
    moves = (shifts,) if not isinstance(shifts, tuple) else shifts
    axes = (dims,) if isinstance(dims, int) else tuple(dims)                 # type: ignore[arg-type]
    if not axes:
        flat = context.contiguous(x, (product(x.shape),))
        rolled = context.fill(context.buffer(x.dtype, flat.shape), lambda k, i: k.load(flat, [(i[0] - moves[0]) % flat.shape[0]]))
        return context.contiguous(rolled, x.shape)
    amount = {normalize_axis(d, x.rank): s for d, s in zip(axes, moves)}
    if len(amount) < len(axes):
        raise LoweringError("roll of one axis twice")
    return context.fill(context.result(), lambda k, index: k.load(
        x, [(i - amount[a]) % x.shape[a] if a in amount else i for a, i in enumerate(index)]))


# ---------------------------------------------------------------- padding

@lowering("aten.constant_pad_nd.default")
def constant_pad_nd(context: Context, x: View, pad: Sequence[Size], value: Number = 0) -> View:
    out = context.result()
    before = _pads_before(x, pad)
    number = as_number(value)

    def padded(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        inside = tuple(i - p for i, p in zip(index, before))
        mask = None
        for axis, i in enumerate(inside):
            if 2 * (x.rank - axis) <= len(pad):
                mask = k.both(mask, k.within(i, x.shape[axis]))
        fill = k.const(number, x.dtype).ref
        return k.load(x, inside, mask, fill)                                # type: ignore[arg-type]
    return context.fill(out, padded)


@lowering("aten.reflection_pad1d.default", "aten.reflection_pad2d.default", "aten.reflection_pad3d.default")
def reflection_pad(context: Context, x: View, padding: Sequence[Size]) -> View:
    before = _pads_before(x, padding)

    def inside(i: Size, axis: int) -> Size:
        if 2 * (x.rank - axis) > len(padding):
            return i
        last, place = x.shape[axis] - 1, i - before[axis]
        mirrored = maximum(place, -place)                     # at the front; then at the back: last - |last - i|
        return last - maximum(last - mirrored, mirrored - last)
    return context.fill(context.result(), lambda k, index: k.load(x, [inside(i, a) for a, i in enumerate(index)]))


@lowering("aten.replication_pad1d.default", "aten.replication_pad2d.default", "aten.replication_pad3d.default")
def replication_pad(context: Context, x: View, padding: Sequence[Size]) -> View:
    before = _pads_before(x, padding)

    def inside(i: Size, axis: int) -> Size:
        if 2 * (x.rank - axis) > len(padding):
            return i
        return maximum(minimum(i - before[axis], x.shape[axis] - 1), 0)
    return context.fill(context.result(), lambda k, index: k.load(x, [inside(i, a) for a, i in enumerate(index)]))


def _pads_before(x: View, pad: Sequence[Size]) -> list[Size]:
    """For each axis, how many elements come before the first; `pad` lists (before, after) from the last axis on."""
    before: list[Size] = [0] * x.rank
    for i in range(0, len(pad), 2):
        before[x.rank - 1 - i // 2] = pad[i]
    return before


# ---------------------------------------------------------------- a part replaced

@lowering("aten.slice_scatter.default")
def slice_scatter(context: Context, x: View, source: View, dim: int = 0, start: Size | None = None, end: Size | None = None,
                  step: int = 1) -> View:
    axis = normalize_axis(dim, x.rank)
    first, last = views.slice_bounds(x.shape[axis], start, end)
    out = context.result()

    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        place = index[axis] - first
        mask = k.within(place, last - first)
        if step != 1:
            mask = k.both(mask, k.index(place % step).equals(0))
        inside = (*index[:axis], place // step, *index[axis + 1:])
        return _replaced(k, x, source, index, inside, mask, out)
    return context.fill(out, value)


@lowering("aten.select_scatter.default")
def select_scatter(context: Context, x: View, source: View, dim: int, index: Size) -> View:
    axis = normalize_axis(dim, x.rank)
    chosen = index + x.shape[axis] if isinstance(index, int) and index < 0 else index
    out = context.result()

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        mask = k.index(place[axis]).equals(k.index(chosen))
        return _replaced(k, x, source, place, (*place[:axis], *place[axis + 1:]), mask, out)
    return context.fill(out, value)


@lowering("aten.as_strided_scatter.default")
def as_strided_scatter(context: Context, x: View, source: View, size: Sequence[Size], stride: Sequence[Size],
                       storage_offset: Size | None = None) -> View:
    """The storage is x's own, which begins at its first element. The view's elements must not overlap (`nested_strides`)."""
    order = nested_strides(size, stride)
    if order is None:
        raise LoweringError("a write through as_strided whose elements may overlap")
    out = context.result()
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride))

    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        rest: Size = sum(i * s for i, s in zip(index, context.type.stride)) - (storage_offset or 0)
        mask = k.within(rest, extent)
        inside: list[Size] = [_FIRST] * len(size)
        for axis in order:
            inside[axis] = rest // stride[axis]
            mask = k.both(mask, k.within(inside[axis], size[axis]))
            rest = rest % stride[axis]
        if not order or stride[order[-1]] != 1:
            mask = k.both(mask, k.index(rest).equals(0))
        return _replaced(k, x, source, index, tuple(inside), mask, out)
    return context.fill(out, value)


@lowering("aten.diagonal_scatter.default")
def diagonal_scatter(context: Context, x: View, source: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    a, b = normalize_axis(dim1, x.rank), normalize_axis(dim2, x.rank)
    out = context.result()

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        mask = k.index(place[b] - place[a]).equals(offset)
        along = place[a] if offset >= 0 else place[b]
        rest = tuple(i for axis, i in enumerate(place) if axis not in (a, b))
        return _replaced(k, x, source, place, (*rest, along), mask, out)
    return context.fill(out, value)


def _replaced(k: KernelBuilder, x: View, source: View, index: tuple[Size, ...], inside: tuple[Size, ...], mask: Val | None,
              out: View) -> Val:
    """source[inside] where the mask holds, x[index] elsewhere."""
    new = k.cast(k.load(source, inside, mask), out.dtype, round_half=False)
    return new if mask is None else k.where(mask, new, k.cast(k.load(x, index), out.dtype, round_half=False))
