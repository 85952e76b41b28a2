"""The memory plan: which temp buffers share which bytes of one arena."""
from __future__ import annotations

from collections.abc import Sequence

from fuseline.ir.expr import Int
from fuseline.ir.kernels import Buffer, Extern, Launch
from fuseline.ir.steps import reads, writes
from fuseline.ir.verify import storage_extent

ALIGNMENT = 64             # bytes: a cache line, and the width of the widest vector register


def plan(steps: Sequence[Launch | Extern], buffers: dict[str, Buffer], excluded: set[str]) -> tuple[dict[str, Int], int]:
    """(buffer -> offset in bytes, bytes of the arena) for temps whose size is a number and that a step of ours writes into.

    Largest first, each at the lowest-waste gap between those already placed that are alive at the same time. Results that an
    operator allocates itself, opaque buffers and buffers of symbolic size get memory of their own.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    own: set[str] = set(excluded)
    for position, step in enumerate(steps):
        for name in (*reads(step), *writes(step)):
            first.setdefault(name, position)
            last[name] = position
        if isinstance(step, Extern) and step.out_variant is None:
            own.update(writes(step))
    wanted: list[tuple[int, int, int, str]] = []
    for name, begin in first.items():
        buffer = buffers[name]
        if buffer.kind != "temp" or buffer.opaque or name in own:
            continue
        extent = storage_extent(buffer)
        if isinstance(extent, int):
            size = max(1, -(-extent * buffer.dtype.size // ALIGNMENT)) * ALIGNMENT
            wanted.append((size, begin, last[name], name))
    wanted.sort(key=lambda w: (-w[0], w[1]))
    placed: list[tuple[int, int, int, int]] = []           # offset, end, first, last; sorted by offset
    offsets: dict[str, Int] = {}
    top = 0
    for size, begin, end, name in wanted:
        best, waste, cursor = None, None, 0
        for offset, until, b, e in placed:
            if e < begin or end < b:
                continue
            gap = offset - cursor
            if gap >= size and (waste is None or gap - size < waste):
                best, waste = cursor, gap - size
            cursor = max(cursor, until)
        at = cursor if best is None else best
        offsets[name] = at
        top = max(top, at + size)
        placed.append((at, at + size, begin, end))
        placed.sort()
    return offsets, top
