"""Reductions with few rows and long ones, in two kernels: partial results of pieces of each row, then their combination.

The row of a reduction over inner axes is cut along one axis, which becomes an outer axis (the piece) and a shorter inner one.
Where no divisor of its extent is near the wanted number of pieces, the last piece is shorter and masked.
"""
from __future__ import annotations

from dataclasses import replace

from fuseline.ir.dtypes import BOOL, I64
from fuseline.ir.expr import Int, ceil_div, product, substitute
from fuseline.ir.graph import contiguous
from fuseline.ir.kernels import Buffer, Index, Load, Op, Reduce, Store, Value
from fuseline.ir.target import Target
from fuseline.ir.verdict import Verdict
from fuseline.schedule.group import Draft, Group, hint, names_of, operands, points
from fuseline.schedule.merge import Context, outer_is_contiguous

COMBINE = {"sum": "sum", "prod": "prod", "max": "max", "min": "min", "any": "any", "all": "all"}
IDENTITY = {"sum": 0, "prod": 1, "any": False, "all": True}
ROW_CPU, ROW_CUDA = 32768, 4096      # a shorter row is not worth a second kernel
PIECE_CPU, PIECE_CUDA = 8192, 2048   # elements that one piece has at least


def split_reductions(group: Group, context: Context, buffers: dict[str, Buffer]) -> list[Group]:
    """The group itself, or the two groups that do its work with enough parallelism; new temps are added to `buffers`."""
    target = context.target
    outer = points(group.outer)
    rows = [d for d in group.phases if d.axes and any(isinstance(s, Reduce) for s in d.body)]
    if rows and outer_is_contiguous(group):                  # neighbouring rows are worked on together, as lanes
        outer = -(-outer // (16 if target.is_cuda else target.vector_bits // 32))
    if not rows or outer >= (2 * target.cores if target.is_cuda else target.cores):
        return [group]
    inner = max(points(d.axes) for d in rows)
    if inner <= (ROW_CUDA if target.is_cuda else ROW_CPU):
        return [group]
    refusal = _refusal(group, rows)
    if refusal is not None:
        context.verdicts.append(Verdict.no(refusal, group.label))
        return [group]
    wanted = max(2, min(_wanted(outer, target), inner // (PIECE_CUDA if target.is_cuda else PIECE_CPU)))
    return _split(group, rows[0], wanted, context, buffers)


def _wanted(outer: int, target: Target) -> int:
    """Pieces of a row that occupy the target: twice the multiprocessors' worth of blocks, four pieces a core."""
    return -(-4 * target.cores // max(outer, 1))


def _refusal(group: Group, rows: list[Draft]) -> str | None:
    if len(rows) != 1 or any(d.axes for d in group.phases if d is not rows[0]):
        return "a row that is gone over several times is not split"
    for stmt in rows[0].body:
        if isinstance(stmt, Reduce) and stmt.op not in COMBINE and stmt.op != "welford":
            return f"{stmt.op} is not split"
        if isinstance(stmt, Store) and stmt.mode != "set":
            return "a scatter is not split"
    before = group.phases[:group.phases.index(rows[0])]
    stores = [s for d in before for s in d.body if isinstance(s, Store)]
    if any(s.mode != "set" or s.buffer in group.loads for s in stores):
        return "a store before the reduction that is read again is not split"
    return None


def _split(group: Group, row: Draft, wanted: int, context: Context, buffers: dict[str, Buffer]) -> list[Group]:
    names = context.names
    cut = max(row.axes, key=lambda a: hint(a.extent)) if hint(row.axes[0].extent) < wanted else row.axes[0]
    extent = cut.extent
    pieces, masked = _pieces(extent, wanted)
    length = ceil_div(extent, pieces)
    piece, rest = names.axis(pieces), names.axis(length)
    has_welford = any(isinstance(s, Reduce) and s.op == "welford" for s in row.body)
    if masked and has_welford:
        context.verdicts.append(Verdict.no(f"no divisor of {extent} makes equal pieces for welford", group.label))
        return [group]
    position: Int = piece.sym * length + rest.sym
    partial = Group(group.id, (*group.outer, piece), group.sizes)
    final = Group(group.id, group.outer, group.sizes)
    index = group.phases.index(row)
    # What the row's values before the reduction are stored to is left to the second kernel.
    partial.phases = [Draft(d.axes, [s for s in d.body if d is row or not isinstance(s, Store)]) for d in group.phases[:index + 1]]
    partial.phases[-1].axes = tuple(rest if a is cut else a for a in row.axes)
    partial.reindex()
    partial.substitute({cut.sym: position})
    partial.reindex()
    if masked:
        _mask_tail(partial, index, position, extent, context)
    # Partial results: one element for each outer point and piece.
    shape = tuple(a.extent for a in (*group.outer, piece))
    at: Int = 0
    for axis, step in zip((*group.outer, piece), contiguous(shape)):
        at = at + axis.sym * step
    stores = Draft(())
    loads = Draft((names.axis(pieces),))
    combined = Draft(())
    own = loads.axes[0]
    read_at = substitute(at, {piece.sym: own.sym})
    count = product(tuple(a.extent for a in partial.phases[index].axes))
    device = buffers[next(iter(group.buffers))].device

    def partial_buffer(dtype) -> str:
        name = f"part{len(buffers)}"
        buffers[name] = Buffer(name, dtype, shape, contiguous(shape), device)
        context.dtypes[name] = dtype
        context.writers[name] = 1
        return name

    def through_memory(value: str, dtype) -> str:
        buffer = partial_buffer(dtype)
        stores.body.append(Store(buffer, at, value))
        loaded = names.value()
        loads.body.append(Load(loaded, buffer, read_at, dtype))
        return loaded
    for stmt in row.body:
        if not isinstance(stmt, Reduce):
            continue
        if stmt.op == "welford":
            mean, m2 = (through_memory(n, stmt.dtype) for n in stmt.names)
            number: object = float(count) if isinstance(count, int) else None
            if number is None:
                size, number = names.value(), names.value()
                loads.body += [Index(size, count, I64), Op(number, "cast", (size,), stmt.dtype)]
            loads.body.append(Reduce(stmt.names, "welford_combine", (mean, m2, number), stmt.dtype))   # type: ignore[arg-type]
        else:
            loads.body.append(Reduce(stmt.names, COMBINE[stmt.op], (through_memory(stmt.names[0], stmt.dtype),), stmt.dtype))
    partial.phases.append(stores)
    # Row values that came before the reduction and are needed after it, or stored, are computed again.
    tail = [s for d in group.phases[index + 1:] for s in d.body]
    needed = {n for s in tail for n in operands(s)}
    for draft in reversed(group.phases[:index]):
        for stmt in reversed(draft.body):
            if isinstance(stmt, Store) or any(n in needed for n in names_of(stmt)):
                needed.update(operands(stmt))
                combined.body.insert(0, stmt)
    final.phases = [p for p in (combined, loads) if p.body] + [Draft(d.axes, list(d.body)) for d in group.phases[index + 1:]]
    for made in (partial, final):
        made.reindex()
        made.ops, made.origins, made.position = list(group.ops), list(group.origins), group.position
        made.label = group.label
    partial.drop(lambda name: True)
    final.ops = [*group.ops, "fuseline.combine"]
    return [partial, final]


def _pieces(extent: Int, wanted: int) -> tuple[Int, bool]:
    """(number of pieces, whether the last one is shorter): a divisor of the extent near `wanted` if there is one."""
    if not isinstance(extent, int):
        return wanted, True
    if extent <= wanted:
        return extent, False
    for distance in range(wanted):
        for candidate in (wanted + distance, wanted - distance):
            if candidate > 1 and extent % candidate == 0:
                return candidate, False
    return wanted, True


def _mask_tail(group: Group, index: int, position: Int, extent: Int, context: Context) -> None:
    """Let the phase's accesses and reductions leave out positions that are past the end of the row."""
    names = context.names
    draft = group.phases[index]
    at, end, inside = names.value(), names.value(), names.value()
    body: list = [Index(at, position, I64)]
    if isinstance(extent, int):
        body.append(Op(inside, "lt", (at, extent), BOOL))
    else:
        body += [Index(end, extent, I64), Op(inside, "lt", (at, end), BOOL)]

    def both(mask: Value | None) -> str:
        if mask is None or mask is True:
            return inside
        name = names.value()
        body.append(Op(name, "and", (mask, inside), BOOL))
        return name
    for stmt in draft.body:
        if isinstance(stmt, (Load, Store)):
            body.append(replace(stmt, mask=both(stmt.mask)))
        elif isinstance(stmt, Reduce):
            value, dtype = stmt.args[0], stmt.dtype
            if isinstance(value, str):
                dtype = next((s.dtype.compute for s in reversed(body) if value in names_of(s)), None) or \
                    group.defs[value][1].dtype.compute                          # type: ignore[union-attr]
            chosen = names.value()
            body.append(Op(chosen, "where", (inside, value, _identity(stmt.op, dtype)), dtype))
            body.append(replace(stmt, args=(chosen,)))
        elif isinstance(stmt, Op) and stmt.op == "check":
            body.append(replace(stmt, args=(stmt.args[0], both(stmt.args[1]))))
        else:
            body.append(stmt)
    draft.body = body
    group.reindex()


def _identity(op: str, dtype) -> int | float | bool:
    """What changes nothing under a reduction."""
    if op in IDENTITY:
        plain = IDENTITY[op]
        return bool(plain) if dtype == BOOL else float(plain) if dtype.is_float else plain
    if dtype == BOOL:
        return op == "min"
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    bits = dtype.size * 8
    if dtype.kind == "uint":
        return 0 if op == "max" else (1 << bits) - 1
    return -(1 << (bits - 1)) if op == "max" else (1 << (bits - 1)) - 1

