"""How a kernel's points are spread over blocks and tiles of a GPU: the numbers that code generation and launch share.

A kernel's tile has up to two dimensions. `x` flattens (some of) the outer axes, its blocks make up the grid; `y` is a second
dimension of outer axes, used where one tensor is contiguous along one axis and another along the other (a transpose); `r`
flattens a phase's inner axes, held whole in registers (persistent) or walked in a loop.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Expr, Int, Sym, evaluate, linear_in, product, symbols
from fuseline.ir.kernels import Axis, Kernel, Load, Op, Phase, Reduce, Store

# 16,384 f32 values in 16 warps are 32 registers a thread for each live value; beyond, loops with reloads from L2 win.
PERSISTENT_ELEMENTS = 16384
NARROW = 8                    # a plane with a shorter side is walked flat: runs that short stay within a cache line


@dataclass(frozen=True, slots=True)
class Tiling:
    """x_axes: how many of the kernel's last outer axes the x dimension flattens; the others are y's (y == 0: x has all).

    x, y   block extents, powers of two (1: no such tile dimension, the index is a scalar)
    r      loop block of the inner axes; persistent kernels use each phase's own extent, rounded up to a power of two
    """
    x: int
    y: int = 0
    r: int = 0
    x_axes: int = 0
    persistent: bool = False
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class Chip:
    """What tiling needs to know of the device."""
    multiprocessors: int = 132
    capability: int = 90


def next_power_of_2(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


def value(extent: Int, hints: Mapping[str, int]) -> int:
    """The extent with size symbols taken from hints (8192 for one without)."""
    if isinstance(extent, int):
        return extent
    return evaluate(extent, _Default(hints))


class _Default(dict):
    def __missing__(self, key: str) -> int:
        return 8192


def extent(axes: tuple[Axis, ...]) -> Int:
    return product(tuple(a.extent for a in axes))


def accesses(kernel: Kernel) -> list[tuple[Int, int]]:
    """(index, bytes of an element) of each distinct load and store."""
    dtype: dict[str, DType] = {p.name: p.dtype for p in kernel.params}
    found: dict[tuple[str, Int], int] = {}
    for phase in kernel.phases:
        for stmt in phase.body:
            if isinstance(stmt, (Load, Store)):
                found[(stmt.buffer, stmt.index)] = dtype[stmt.buffer].size
    return [(index, size) for (_, index), size in found.items()]


def unit_stride_bytes(kernel: Kernel, sym: Sym) -> int:
    """Bytes of the accesses whose index steps by one element along `sym`: what is lost if it is not the fastest."""
    total = 0
    for index, size in accesses(kernel):
        linear = linear_in(index, sym) if isinstance(index, Expr) else None
        if linear is not None and linear[0] == 1:
            total += size
    return total


def choose(kernel: Kernel, hints: Mapping[str, int] = {}, chip: Chip = Chip()) -> Tiling:
    """The default tiling. hints: the sizes of the call at hand, by name; chosen in steps of powers of two."""
    if any(phase.axes for phase in kernel.phases):
        return _choose_reduction(kernel, hints, chip)
    return _choose_pointwise(kernel, hints, chip)


def _choose_pointwise(kernel: Kernel, hints: Mapping[str, int], chip: Chip) -> Tiling:
    axes = kernel.axes
    points = value(extent(axes), hints)
    if points <= 1:
        return Tiling(1, x_axes=len(axes), num_warps=1)
    transposed = _transposed(kernel, hints)
    if transposed:
        across, down = value(axes[-1].extent, hints), value(axes[-2].extent, hints)
        if across < 16 or down < 16:                          # a filter's places and its channels; H200, 512x9x512: 6 us, flat 13
            narrow = Tiling(64, 16, x_axes=1, num_warps=8)
            return narrow if down < 16 else replace(narrow, x=next_power_of_2(across), y=64)
        blocks = -(-value(extent(axes[:-1]), hints) // 32) * -(-value(axes[-1].extent, hints) // 64)
        if blocks >= 4 * chip.multiprocessors:                # H200, 16384x4096: 0.139 ms, with 64 x 32 0.146
            return Tiling(64, 64, x_axes=1, num_warps=8)
        return Tiling(64 if blocks >= chip.multiprocessors else 32, 32, x_axes=1, num_warps=4)
    smallest = min((size for _, size in accesses(kernel)), default=4)
    block = 1024 if smallest >= 2 else 2048
    if len(kernel.params) > 8 or any(size == 8 for _, size in accesses(kernel)):
        block = 512
    while block > 128 and points // block < 2 * chip.multiprocessors:
        block //= 2
    block = min(block, max(32, next_power_of_2(points)))
    return Tiling(block, x_axes=len(axes), num_warps=4 if block >= 128 else max(1, block // 32))


def _transposed(kernel: Kernel, hints: Mapping[str, int]) -> bool:
    """Some access is contiguous along the last but one axis, some along the last, and the plane is big enough for tiles."""
    if len(kernel.axes) < 2:
        return False
    extents = [value(a.extent, hints) for a in kernel.axes[-2:]]
    if min(extents) < NARROW or max(extents) < 16:
        return False
    return all(unit_stride_bytes(kernel, a.sym) > 0 for a in kernel.axes[-2:])


def reduction_is_inner(kernel: Kernel) -> bool:
    """True if most bytes are contiguous along the last inner axis of the phases rather than along the last outer axis."""
    inner = sum(unit_stride_bytes(kernel, axis.sym) for axis in {p.axes[-1] for p in kernel.phases if p.axes})
    outer = unit_stride_bytes(kernel, kernel.axes[-1].sym) if kernel.axes else 0
    return inner >= outer


def live_values(kernel: Kernel) -> int:
    """How many per-element values of an earlier phase a later one reads: what a persistent kernel keeps in registers."""
    made: dict[str, int] = {}
    kept: set[str] = set()
    for number, phase in enumerate(kernel.phases):
        for stmt in phase.body:
            for arg in names_read(stmt):
                if arg in made and made[arg] != number:
                    kept.add(arg)
            if phase.axes and isinstance(stmt, (Load, Op)):
                made[stmt.name] = number
    return len(kept)


def names_read(stmt: object) -> tuple[str, ...]:
    """The values that a statement reads by name (indirect index symbols not among them)."""
    names: tuple[object, ...] = ()
    if isinstance(stmt, Load):
        names = (stmt.mask, stmt.other)
    elif isinstance(stmt, Store):
        names = (stmt.value, stmt.mask)
    elif isinstance(stmt, (Op, Reduce)):
        names = stmt.args
    return tuple(n for n in names if isinstance(n, str))


def _choose_reduction(kernel: Kernel, hints: Mapping[str, int], chip: Chip) -> Tiling:
    phases: list[Phase] = [p for p in kernel.phases if p.axes]
    points = value(extent(kernel.axes), hints)
    constant = all(isinstance(extent(p.axes), int) for p in phases)
    longest = max(max(1, value(extent(p.axes), hints)) for p in phases)
    x_axes = len(kernel.axes)
    live = max(1, live_values(kernel))
    fits = constant and next_power_of_2(longest) * min(live, 4) <= 2 * PERSISTENT_ELEMENTS and longest <= PERSISTENT_ELEMENTS
    if reduction_is_inner(kernel):
        if fits:
            row = next_power_of_2(longest)
            rows = 1
            while rows * row < 1024 and points // (2 * rows) >= 2 * chip.multiprocessors:
                rows *= 2
            rows = min(rows, next_power_of_2(points))
            # H200, layer norm and softmax of 4,096: 4 warps 0.175 ms, 8 0.182; plain sums of such rows: 8 warps 0.069, 4 0.068.
            each = 32 if row > 8192 or live > 1 and row >= 2048 else 16
            return Tiling(rows, x_axes=x_axes, persistent=True, num_warps=_warps(rows * row, each))
        block = 2048 if longest >= 2048 else next_power_of_2(longest)
        return Tiling(1, r=block, x_axes=x_axes, num_warps=_warps(block, 8))
    # Columns: neighbouring threads take neighbouring outer points. H200, sums over the rows of one tensor, 32 columns, 16 warps:
    # 128 rows 0.038 ms, 64 rows 0.042; of three and more tensors, 64 rows 0.146, 128 rows 0.169.
    # 1792 rows of 64 columns: 32 columns 0.0085 ms, 16 columns 0.011; 1568 rows of 1024: 32 columns 0.0117 ms, 16 columns 0.0099.
    close = bool(kernel.axes) and value(kernel.axes[-1].extent, hints) <= 128
    shares = ((64, 1.5), (32, 0.8 if close else 1.5), (16, 1.5))
    columns = next((c for c, share in shares if -(-points // c) >= share * chip.multiprocessors), 8)
    columns = min(columns, next_power_of_2(points))
    row = next_power_of_2(longest)
    if fits and row * columns <= 4096:
        return Tiling(columns, x_axes=x_axes, persistent=True, num_warps=_warps(row * columns, 8))
    if fits and columns == 8 and row * columns <= PERSISTENT_ELEMENTS and live <= 4:
        # Few blocks: all loads of a block in flight at once. 11 sums over 1568 x 1024: 0.040 ms, in loops of 256 rows 0.051.
        return Tiling(columns, x_axes=x_axes, persistent=True, num_warps=_warps(row * columns, 64))
    elements = 2048 if columns < 32 or loads_in_rows(kernel) > 1 else 4096
    block = max(1, min(row, elements // columns))
    return Tiling(columns, r=block, x_axes=x_axes, num_warps=_warps(block * columns, elements // 512))


def loads_in_rows(kernel: Kernel) -> int:
    """How many elements each point of the inner axes reads."""
    found = set()
    for phase in kernel.phases:
        inner = {a.sym for a in phase.axes}
        found |= {(s.buffer, s.index) for s in phase.body if isinstance(s, Load) and symbols(s.index) & inner}
    return len(found)


def _warps(elements: int, each: int) -> int:
    """Warps of a block with `each` elements a thread, at most 16."""
    return max(1, min(16, elements // (32 * each)))


def alternatives(kernel: Kernel, hints: Mapping[str, int] = {}, chip: Chip = Chip()) -> list[Tiling]:
    """The default tiling and a few that max-autotune measures against it."""
    default = choose(kernel, hints, chip)
    found = [default]
    if default.y:
        found += [replace(default, x=64, y=64, num_warps=8), replace(default, x=32, y=32), replace(default, x=64, y=16)]
    elif not default.persistent and not default.r:
        for factor, warps in ((0.5, 4), (2, 4), (2, 8), (4, 8)):
            block = int(default.x * factor)
            if 64 <= block <= 4096:
                found.append(replace(default, x=block, num_warps=warps))
    else:
        for warps in (default.num_warps * 2, default.num_warps // 2):
            if 1 <= warps <= 32:
                found.append(replace(default, num_warps=warps))
        if default.r:
            for block in (default.r * 2, default.r // 2, default.r * 4):
                if 1 <= block * default.x <= 16384:
                    found.append(replace(default, r=block))
        if default.x > 8:
            found.append(replace(default, x=default.x // 2))
    return list(dict.fromkeys(found))


def blocks(kernel: Kernel, tiling: Tiling) -> tuple[Int, Int]:
    """(points along x, points along y): the grid has ceil(x / tiling.x) * ceil(y / tiling.y) blocks."""
    if tiling.y:
        return extent(kernel.axes[-tiling.x_axes:]), extent(kernel.axes[:-tiling.x_axes])
    return extent(kernel.axes), 1
