"""Tensor values while lowering: a buffer seen through shape, strides and offset. View operators compose here and cost nothing."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Expr, nonnegative
from fuseline.ir.graph import Size, contiguous


@dataclass(frozen=True, slots=True)
class View:
    """Elements of `buffer` as a tensor: element (i, j, ...) is at offset + i*stride[0] + j*stride[1] + ... (elements)."""

    buffer: str
    dtype: DType
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    device: str
    offset: Size = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    def at(self, index: Sequence[Size]) -> Size:
        """The buffer's element that the index names."""
        place: Size = self.offset
        for i, step, size in zip(index, self.stride, self.shape):
            if size != 1:
                place = place + i * step
        return place

    @property
    def empty(self) -> bool:
        return any(isinstance(s, int) and s == 0 for s in self.shape)


@dataclass(frozen=True, slots=True)
class RuntimeNumber:
    """A Python float that is known when the program runs. `view` is 0-d f64 memory that holds it, for kernels, which convert it
    as they convert a number in the program; operators of PyTorch take the float itself."""

    view: View

    @staticmethod
    def passed(name: str) -> str:
        """The buffer that stands for the float itself, of the input called `name`."""
        return f"{name}_number"


def normalize_axis(axis: int, rank: int) -> int:
    return axis + max(rank, 1) if axis < 0 else axis


def normalize_axes(axes: object, rank: int) -> tuple[int, ...]:
    """A reduction's dim argument as sorted axes: None and () mean all."""
    if axes is None:
        return tuple(range(rank))
    listed = (axes,) if isinstance(axes, int) else tuple(axes)          # type: ignore[arg-type]
    if not listed:
        return tuple(range(rank))
    return tuple(sorted(normalize_axis(a, rank) for a in listed)) if rank else ()


def is_dense(shape: tuple[Size, ...], stride: tuple[Size, ...]) -> bool:
    """True if the strides are those of some permutation of the axes, laid out without gaps."""
    left = [(size, step) for size, step in zip(shape, stride) if size != 1]
    reach: Size = 1
    while left:
        # Equal strides cannot both be next: the one of larger extent would overlap, so any match is the only one.
        found = next((i for i, (_, step) in enumerate(left) if step == reach), None)
        if found is None:
            return False
        reach = reach * left.pop(found)[0]
    return True


def same_layout(shape: tuple[Size, ...], a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    """Equal strides wherever they matter: axes of extent 1 aside."""
    return all(size == 1 or x == y for size, x, y in zip(shape, a, b))


def storage_stride(shape: tuple[Size, ...], stride: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides to allocate for a result: those given if dense, else row-major."""
    if any(isinstance(s, int) and s == 0 for s in shape):
        return contiguous(shape)
    return stride if is_dense(shape, stride) else contiguous(shape)


# ---------------------------------------------------------------- view operators

def expand(view: View, shape: Sequence[Size]) -> View:
    """torch's expand; -1 keeps an extent."""
    missing = len(shape) - view.rank
    if missing < 0:
        raise LoweringError(f"expand of rank {view.rank} to fewer axes")
    sizes, strides = [], []
    for axis, size in enumerate(shape):
        old = view.shape[axis - missing] if axis >= missing else 1
        step = view.stride[axis - missing] if axis >= missing else 0
        if isinstance(size, int) and size == -1:
            size = old
        sizes.append(size)
        strides.append(0 if axis < missing or (old == 1 and size != 1) else step)
    return replace(view, shape=tuple(sizes), stride=tuple(strides))


def permute(view: View, axes: Sequence[int]) -> View:
    order = [normalize_axis(a, view.rank) for a in axes]
    return replace(view, shape=tuple(view.shape[a] for a in order), stride=tuple(view.stride[a] for a in order))


def transpose(view: View, a: int, b: int) -> View:
    if view.rank == 0:
        return view
    order = list(range(view.rank))
    a, b = normalize_axis(a, view.rank), normalize_axis(b, view.rank)
    order[a], order[b] = order[b], order[a]
    return permute(view, order)


def unsqueeze(view: View, axis: int) -> View:
    axis = axis + view.rank + 1 if axis < 0 else axis
    step = view.shape[axis] * view.stride[axis] if axis < view.rank else 1
    return replace(view, shape=(*view.shape[:axis], 1, *view.shape[axis:]),
                   stride=(*view.stride[:axis], step, *view.stride[axis:]))


def squeeze(view: View, axes: object = None) -> View:
    """Drop axes of extent 1: all, or those named (ignored if their extent is another)."""
    named = set(range(view.rank)) if axes is None else {normalize_axis(a, view.rank) for a in (
        (axes,) if isinstance(axes, int) else axes)}                    # type: ignore[attr-defined]
    kept = [a for a in range(view.rank) if not (a in named and view.shape[a] == 1)]
    return replace(view, shape=tuple(view.shape[a] for a in kept), stride=tuple(view.stride[a] for a in kept))


def select(view: View, axis: int, index: Size) -> View:
    axis = normalize_axis(axis, view.rank)
    if not nonnegative(index):
        index = index + view.shape[axis] if nonnegative(-1 - index) else _refuse(f"select at {index}, of unknown sign")
    rest = [a for a in range(view.rank) if a != axis]
    return replace(view, shape=tuple(view.shape[a] for a in rest), stride=tuple(view.stride[a] for a in rest),
                   offset=view.offset + index * view.stride[axis])


def slice_bounds(size: Size, start: Size | None, end: Size | None) -> tuple[Size, Size]:
    """(start, end) of a slice within 0..size, as torch clamps them. LoweringError where a symbolic bound cannot be decided."""
    return _clamped(0 if start is None else start, size), _clamped(size if end is None else end, size)


def _clamped(bound: Size, size: Size) -> Size:
    if isinstance(bound, int) and bound >= 2**62:
        return size
    if not nonnegative(bound):
        if not nonnegative(-1 - bound):
            return _refuse(f"slice bound {bound}, of unknown sign")
        bound = bound + size
        if not nonnegative(bound):
            return 0 if nonnegative(-bound) else _refuse(f"slice bound {bound}, of unknown sign")
    if nonnegative(size - bound):
        return bound
    if nonnegative(bound - size):
        return size
    return _refuse(f"slice bound {bound} of {size}")


def slice_(view: View, axis: int, start: Size | None, end: Size | None, step: int, extent: Size) -> View:
    """`extent` is the result's, which the tracer knows."""
    axis = normalize_axis(axis, view.rank)
    if isinstance(extent, int) and extent == 0:
        first: Size = 0
    elif isinstance(start, int) and start >= 0:
        first = start
    else:
        first, _ = slice_bounds(view.shape[axis], start, end)
    shape, stride = list(view.shape), list(view.stride)
    shape[axis], stride[axis] = extent, view.stride[axis] * step
    return replace(view, shape=tuple(shape), stride=tuple(stride), offset=view.offset + first * view.stride[axis])


def diagonal(view: View, offset: int, axis1: int, axis2: int, extent: Size) -> View:
    a, b = normalize_axis(axis1, view.rank), normalize_axis(axis2, view.rank)
    start = offset * view.stride[b] if offset >= 0 else -offset * view.stride[a]
    rest = [x for x in range(view.rank) if x not in (a, b)]
    if isinstance(extent, int) and extent == 0:
        start = 0
    return replace(view, shape=(*(view.shape[x] for x in rest), extent), offset=view.offset + start,
                   stride=(*(view.stride[x] for x in rest), view.stride[a] + view.stride[b]))


def unfold(view: View, axis: int, size: int, step: int, extent: Size) -> View:
    if view.rank == 0:
        return replace(view, shape=(size,), stride=(1,))
    axis = normalize_axis(axis, view.rank)
    shape = [*view.shape, size]
    stride = [*view.stride, view.stride[axis]]
    shape[axis], stride[axis] = extent, view.stride[axis] * step
    return replace(view, shape=tuple(shape), stride=tuple(stride))


def reshape(view: View, shape: tuple[Size, ...]) -> View | None:
    """The same elements in row-major order under another shape, or None where strides cannot express it."""
    if view.empty or any(isinstance(s, int) and s == 0 for s in shape):
        return replace(view, shape=shape, stride=contiguous(shape))
    old = [(size, step) for size, step in zip(view.shape, view.stride) if size != 1]
    wanted = [s for s in shape if s != 1]
    if wanted == [s for s, _ in old]:                     # only axes of extent 1 come or go, whatever the sizes are
        steps = iter(step for _, step in old)
        return replace(view, shape=shape, stride=tuple(1 if s == 1 else next(steps) for s in shape))
    # Chunks of old axes that lie in memory as one axis: (extent, innermost stride), from the innermost outwards.
    chunks: list[tuple[Size, Size]] = []
    for size, step in reversed(old):
        if chunks and step == chunks[-1][0] * chunks[-1][1]:
            chunks[-1] = (chunks[-1][0] * size, chunks[-1][1])
        else:
            chunks.append((size, step))
    strides: list[Size] = [0] * len(shape)
    chunk = 0
    done: Size = 1                                        # elements of the current chunk that new axes have covered
    for axis in reversed(range(len(shape))):
        size = shape[axis]
        if size == 1:
            strides[axis] = done * chunks[chunk][1] if chunk < len(chunks) else 1
            continue
        if chunk == len(chunks):
            return None
        extent, step = chunks[chunk]
        strides[axis] = done * step
        done = done * size
        if done == extent:
            chunk, done = chunk + 1, 1
        elif not _divides(done, extent):
            return None
    return replace(view, shape=shape, stride=tuple(strides)) if chunk == len(chunks) and done == 1 else None


def _divides(part: Size, whole: Size) -> bool:
    from_whole = whole % part if not isinstance(whole, int) or not isinstance(part, Expr) else 1
    return from_whole == 0


def _refuse(what: str) -> Size:
    raise LoweringError(what)
