"""Reading at places that a tensor names: embedding, gather, index_select, index.

An index outside its axis makes eager raise. A kernel masks it, so that no foreign memory is touched and the element reads as
NaN (0 for integers), and on the CPU checks it (`Op` "check"): the call raises as eager does. Elements that nobody reads are not
computed, and so not checked.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import BOOL, I64
from fuseline.ir.graph import Size
from fuseline.ir.kernels import Bounds
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import Context, lowering, scalar
from fuseline.lower.views import View, expand, normalize_axis


def outside(view: View) -> float:
    """What an element outside the tensor reads as."""
    return math.nan if view.dtype.is_float else 0


def bounds(context: Context, view: View, axis: int, error: str = "IndexError") -> Bounds:
    """What an index along an axis of the view is checked for."""
    node = context.node
    return Bounds(node.op if node else "", axis, view.shape[axis], node.origin if node else "", error)


@lowering("aten.embedding.default")
def embedding(context: Context, weight: View, indices: View, padding_idx: int = -1, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> View:
    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        row, mask = k.indirect(k.load(indices, index[:-1]), weight.shape[0], bounds(context, weight, 0))
        return k.load(weight, (row, index[-1]), mask, outside(weight))
    return context.fill(context.result(), value)


@lowering("aten.index_select.default")
def index_select(context: Context, x: View, dim: int, index: View) -> View:
    axis = normalize_axis(dim, x.rank)
    if x.rank == 0:
        return context.copy(x, context.result())

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        number = k.load(index, place[axis:axis + 1] if index.rank else ())
        row, mask = k.indirect(number, x.shape[axis], bounds(context, x, axis, "either" if axis else "IndexError"))
        return k.load(x, (*place[:axis], row, *place[axis + 1:]), mask, outside(x))
    return context.fill(context.result(), value)


@lowering("aten.gather.default")
def gather(context: Context, x: View, dim: int, index: View, *, sparse_grad: bool = False) -> View:
    """Also what losses are decomposed to, where PyTorch raises IndexError for a target; for gather it is RuntimeError."""
    axis = normalize_axis(dim, x.rank)
    if x.rank != index.rank or x.rank == 0:
        raise LoweringError("gather of scalars")

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        row, mask = k.indirect(k.load(index, place), x.shape[axis], bounds(context, x, axis, "either"))
        return k.load(x, (*place[:axis], row, *place[axis + 1:]), mask, outside(x))
    return context.fill(context.result(), value)


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(context: Context, x: View, indices: Sequence[View | None]) -> View:
    """NumPy's advanced indexing by integer tensors: neighbouring indices keep their place, others go first."""
    named = [axis for axis, i in enumerate(indices) if i is not None]
    used = [i for i in indices if i is not None]
    if any(not i.dtype.is_integer or i.dtype.name == "u8" for i in used):
        raise LoweringError("indexing by a mask: the result's size depends on data")
    out = context.result()
    width = max((i.rank for i in used), default=0)
    first = named[0] if named and named == list(range(named[0], named[0] + len(named))) else 0
    shape = out.shape[first:first + width]
    spread = [expand(i, shape) for i in used]

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        chosen = place[first:first + width]
        rest = iter((*place[:first], *place[first + width:]))
        mask: Val | None = None
        source: list[Size] = []
        at = dict(zip(named, spread))
        for axis in range(x.rank):
            if axis not in at:
                source.append(next(rest))
                continue
            extent = x.shape[axis]
            number = k.load(at[axis], chosen)
            number = k.where(number < 0, number + k.index(extent, number.dtype), number)
            row, inside = k.indirect(number, extent, bounds(context, x, axis))
            mask = k.both(mask, inside)
            source.append(row)
        return k.load(x, source, mask, outside(x))
    return context.fill(out, value)


# ---------------------------------------------------------------- writing at places that a tensor names

MAX_SCATTERED = 4                      # entries along the axis that are worth comparing with at every element


def _scatter(context: Context, x: View, dim: int, index: View, source: object, add: bool) -> View:
    """As selects: each element compares its place with the few indices that could name it. No order of writes is left open."""
    out, axis = context.result(), normalize_axis(dim, x.rank)
    entries = index.shape[axis] if index.rank == x.rank and x.rank else None
    if not isinstance(entries, int) or entries > MAX_SCATTERED:
        raise LoweringError("a scatter of many entries")
    if any(a != axis and x.shape[a] != index.shape[a] for a in range(x.rank)) or (add and out.dtype == BOOL):
        raise LoweringError("a scatter into a part of the tensor, or a sum of booleans")

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        here, found = k.index(place[axis]), k.load(x, place)
        for entry in range(entries):
            at = (*place[:axis], entry, *place[axis + 1:])
            number = k.load(index, at)
            named = k.cast(number, I64).equals(here)
            if x.device == "cpu":                            # an index outside matches no place: checked only to raise
                named = k.both(named, k.indirect(number, x.shape[axis], bounds(context, x, axis, "RuntimeError"))[1])  # type: ignore[assignment]
            new = scalar(k, source, at, out.dtype)
            found = k.where(named, found + new if add else new, found)
        return found
    return context.fill(out, value)


@lowering("aten.scatter.value")
def scatter_value(context: Context, x: View, dim: int, index: View, value: object) -> View:
    return _scatter(context, x, dim, index, value, False)


@lowering("aten.scatter.src")
def scatter_src(context: Context, x: View, dim: int, index: View, src: View) -> View:
    return _scatter(context, x, dim, index, src, False)


@lowering("aten.scatter_add.default")
def scatter_add(context: Context, x: View, dim: int, index: View, src: View) -> View:
    return _scatter(context, x, dim, index, src, True)
