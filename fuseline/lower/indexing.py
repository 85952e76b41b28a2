"""Reading at places that a tensor names: embedding, gather, index_select, index.

An index outside its axis makes eager raise; a kernel cannot, so the element reads as NaN (0 for integers) and no foreign
memory is touched.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from fuseline.errors import LoweringError
from fuseline.ir.graph import Size
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import Context, lowering
from fuseline.lower.views import View, expand, normalize_axis


def outside(view: View) -> float:
    """What an element outside the tensor reads as."""
    return math.nan if view.dtype.is_float else 0


@lowering("aten.embedding.default")
def embedding(context: Context, weight: View, indices: View, padding_idx: int = -1, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> View:
    def value(k: KernelBuilder, index: tuple[Size, ...]) -> Val:
        row, mask = k.indirect(k.load(indices, index[:-1]), weight.shape[0])
        return k.load(weight, (row, index[-1]), mask, outside(weight))
    return context.fill(context.result(), value)


@lowering("aten.index_select.default")
def index_select(context: Context, x: View, dim: int, index: View) -> View:
    axis = normalize_axis(dim, x.rank)
    if x.rank == 0:
        return context.copy(x, context.result())

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        row, mask = k.indirect(k.load(index, place[axis:axis + 1] if index.rank else ()), x.shape[axis])
        return k.load(x, (*place[:axis], row, *place[axis + 1:]), mask, outside(x))
    return context.fill(context.result(), value)


@lowering("aten.gather.default")
def gather(context: Context, x: View, dim: int, index: View, *, sparse_grad: bool = False) -> View:
    axis = normalize_axis(dim, x.rank)
    if x.rank != index.rank or x.rank == 0:
        raise LoweringError("gather of scalars")

    def value(k: KernelBuilder, place: tuple[Size, ...]) -> Val:
        row, mask = k.indirect(k.load(index, place), x.shape[axis])
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
            row, inside = k.indirect(number, extent)
            mask = k.both(mask, inside)
            source.append(row)
        return k.load(x, source, mask, outside(x))
    return context.fill(out, value)
