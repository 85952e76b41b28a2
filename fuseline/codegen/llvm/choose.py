"""Decisions of code generation for one kernel: which axis the vector lanes run along, how far loops are unrolled, what is kept.

Two arrangements. "inner": one outer point at a time, lanes along an inner axis of each phase, reductions end across lanes.
"outer": lanes along an outer axis, each lane an outer point of its own; what kernels without reductions always do, and
reductions whose contiguous axis is an outer one (column sums, batch-norm statistics in channels-last).
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseline.codegen.llvm import mathlib
from fuseline.codegen.llvm.nests import expressions, extent_guess
from fuseline.ir.expr import Int, Sym, linear_in, symbols
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Op, Phase, Reduce, Stmt, Store

# Costs of a vector of lanes, in instructions: a contiguous access, one with a stride, one whose index must be computed by lane.
CONTIGUOUS, STRIDED, COMPUTED, UNIFORM = 1.0, 14.0, 30.0, 0.2
SCATTER = 1.6                                                # a store with a stride costs so much more than a load
ACROSS_LANES = 12.0                                          # the end of a reduction over lanes
HEAVY = frozenset(mathlib.FUNCTIONS) | {"div", "sqrt", "reciprocal", "rem", "fmod", "floordiv", "truncdiv"}
# Rows of values kept between phases: beyond this they fall out of the core's second-level cache, and computing again is cheaper.
KEEP_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Plan:
    """outer: the outer axis of the lanes, or None for the "inner" arrangement, where `inner` maps a phase's axes to theirs.

    lanes   elements of a vector        unroll   vectors computed side by side
    kept    names of values that are stored in a row buffer for later phases
    sweep   in the "outer" arrangement, an outer axis that each block of lanes runs along before the next block: accesses with a
            stride along the lanes are contiguous along it, so the cache lines that one step gathers serve the next steps too
    """

    outer: Axis | None
    inner: dict[tuple[Axis, ...], Axis]
    lanes: int
    unroll: int
    kept: frozenset[str]
    sweep: Axis | None = None


def choose(kernel: Kernel, vector_bytes: int) -> Plan:
    lanes = _lanes(kernel, vector_bytes)
    plan_outer = min(((_cost_outer(kernel, a, lanes), k) for k, a in enumerate(kernel.axes)), default=None)
    has_inner = any(p.axes for p in kernel.phases)
    inner: dict[tuple[Axis, ...], Axis] = {}
    cost_inner = float("inf")
    if has_inner or not kernel.axes:
        cost_inner, inner = _choose_inner(kernel, lanes)
    if plan_outer is not None and plan_outer[0] <= cost_inner:
        axis = kernel.axes[plan_outer[1]]
        extents = [axis.extent]
        outer: Axis | None = axis
    else:
        outer, extents = None, [a.extent for a in inner.values()]
    longest = max((extent_guess(e) for e in extents), default=1)
    while lanes > 1 and lanes // 2 >= longest and all(isinstance(e, int) for e in extents):
        lanes //= 2
    unroll = _unroll(kernel, outer is not None)
    while unroll > 1 and unroll * lanes > longest:
        unroll //= 2
    sweep = _sweep(kernel, outer) if outer is not None else None
    unroll = 1 if sweep is not None else unroll
    return Plan(outer, inner, lanes, unroll, _kept(kernel, outer is not None, lanes * unroll), sweep)


def _sweep(kernel: Kernel, lanes_axis: Axis) -> Axis | None:
    if extent_guess(lanes_axis.extent) < 16:
        return None
    for axis in kernel.axes:
        if axis is lanes_axis or extent_guess(axis.extent) < 16:
            continue
        for phase in kernel.phases:
            for stmt in phase.body:
                if not isinstance(stmt, (Load, Store)):
                    continue
                across, along = linear_in(stmt.index, lanes_axis.sym), linear_in(stmt.index, axis.sym)
                if across is not None and along is not None and along[0] == 1 and isinstance(across[0], int) and abs(across[0]) >= 16:
                    return axis
    return None


def statements(kernel: Kernel) -> Iterator[Stmt]:
    for phase in kernel.phases:
        yield from phase.body


def _lanes(kernel: Kernel, vector_bytes: int) -> int:
    """As many as f32 has in a vector; half of it in kernels that compute in 64 bits throughout."""
    sizes = [s.dtype.compute.size for s in statements(kernel) if isinstance(s, (Load, Op)) and s.dtype.is_float]
    sizes = sizes or [s.dtype.size for s in statements(kernel) if isinstance(s, (Load, Op)) and s.dtype.is_integer]
    smallest = max(4, min(sizes, default=4))
    return max(2, vector_bytes // smallest)


def _unroll(kernel: Kernel, outer: bool) -> int:
    """Independent chains hide latency; heavy bodies have enough instructions in flight by themselves."""
    work = sum(8 if isinstance(s, Op) and s.op in HEAVY else 1 for s in statements(kernel))
    if any(isinstance(s, Reduce) for s in statements(kernel)):
        return 4 if work <= 12 else 2 if work <= 40 else 1
    return 2 if work <= 16 else 1


# ---------------------------------------------------------------- cost of an arrangement

def varying(kernel: Kernel, sym: Sym) -> frozenset[str]:
    """Names of the values that depend on sym (results of reductions excepted: one value an outer point, see `_cost`)."""
    found: set[str] = set()
    for stmt in statements(kernel):
        if isinstance(stmt, Load):
            if _depends(stmt.index, sym, found) or stmt.mask in found or stmt.other in found:
                found.add(stmt.name)
        elif isinstance(stmt, Index):
            if _depends(stmt.expr, sym, found):
                found.add(stmt.name)
        elif isinstance(stmt, Op) and any(isinstance(a, str) and a in found for a in stmt.args):
            found.add(stmt.name)
    return frozenset(found)


def _depends(e: Int, sym: Sym, names: set[str] | frozenset[str]) -> bool:
    return any(s == sym or s.name in names for s in symbols(e))


def _access(e: Int, sym: Sym, names: frozenset[str]) -> float:
    if not _depends(e, sym, names):
        return UNIFORM
    if any(s.name in names for s in symbols(e)):
        return COMPUTED
    along = linear_in(e, sym)
    if along is None:
        return COMPUTED
    return CONTIGUOUS if along[0] == 1 else STRIDED


def _body_cost(phase: Phase, sym: Sym | None, names: frozenset[str], lanes: int) -> float:
    """Instructions for `lanes` points of the phase's body."""
    total = 0.0
    for stmt in phase.body:
        if sym is None:
            total += lanes                                       # scalar code
        elif isinstance(stmt, (Load, Store)):
            cost = _access(stmt.index, sym, names)
            total += cost * SCATTER if isinstance(stmt, Store) and cost > CONTIGUOUS else cost
        elif isinstance(stmt, Op) and stmt.name not in names and stmt.op != "where":
            total += UNIFORM
        else:
            total += 1
    return total


def _trips(axes: tuple[Axis, ...]) -> float:
    trips = 1.0
    for a in axes:
        trips *= extent_guess(a.extent)
    return trips


def _waste(extent: Int, lanes: int) -> float:
    n = max(1, extent_guess(extent))
    return -(-n // lanes) * lanes / n


def _cost_outer(kernel: Kernel, axis: Axis, lanes: int) -> float:
    names = varying(kernel, axis.sym)
    total = sum(_trips(p.axes) * _body_cost(p, axis.sym, names, lanes) for p in kernel.phases)
    return total * _trips(kernel.axes) / lanes * _waste(axis.extent, lanes)


def _choose_inner(kernel: Kernel, lanes: int) -> tuple[float, dict[tuple[Axis, ...], Axis]]:
    chosen: dict[tuple[Axis, ...], Axis] = {}
    total = 0.0
    for axes in dict.fromkeys(p.axes for p in kernel.phases):
        phases = [p for p in kernel.phases if p.axes == axes]
        if not axes:
            total += sum(_body_cost(p, None, frozenset(), lanes) for p in phases) / lanes
            continue
        best, best_axis = float("inf"), axes[-1]
        for axis in reversed(axes):
            names = varying(kernel, axis.sym)
            cost = sum(_body_cost(p, axis.sym, names, lanes) for p in phases) / lanes * _waste(axis.extent, lanes)
            if cost < best:
                best, best_axis = cost, axis
        chosen[axes] = best_axis
        ends = sum(isinstance(s, Reduce) for p in phases for s in p.body)
        total += best * _trips(axes) + ends * ACROSS_LANES
    return total * _trips(kernel.axes), chosen


# ---------------------------------------------------------------- what is kept between phases

def _kept(kernel: Kernel, outer: bool, width: int) -> frozenset[str]:
    written = {kernel.params[k].name for k in range(len(kernel.params)) if kernel.params[k].writes}
    home: dict[str, tuple[int, Stmt]] = {}
    for number, phase in enumerate(kernel.phases):
        for stmt in phase.body:
            if isinstance(stmt, (Load, Op, Index)):
                home[stmt.name] = (number, stmt)
    kept: set[str] = set()
    for number, phase in enumerate(kernel.phases):
        for name in _names_read(phase):
            if name not in home or name in kept:
                continue
            at, _ = home[name]
            if at == number or not kernel.phases[at].axes:
                continue
            heavy, unsafe = _slice_facts(name, home, at, written)
            points = _trips(kernel.phases[at].axes)
            fits = points * (width if outer else 1) * 4 <= KEEP_BYTES
            if unsafe or (heavy and fits):
                kept.add(name)
    return frozenset(kept)


def _names_read(phase: Phase) -> list[str]:
    names: list[str] = [s.name for e in expressions(phase) for s in symbols(e)]
    for stmt in phase.body:
        if isinstance(stmt, (Op, Reduce)):
            names += [a for a in stmt.args if isinstance(a, str)]
        elif isinstance(stmt, Load):
            names += [a for a in (stmt.mask, stmt.other) if isinstance(a, str)]
        elif isinstance(stmt, Store):
            names += [a for a in (stmt.mask, stmt.value) if isinstance(a, str)]
    return list(dict.fromkeys(names))


def _slice_facts(name: str, home: dict[str, tuple[int, Stmt]], at: int, written: set[str]) -> tuple[bool, bool]:
    """(costly to compute again, must not be computed again because it reads memory that the kernel writes)."""
    heavy = unsafe = False
    seen: set[str] = set()
    work = [name]
    while work:
        current = work.pop()
        if current in seen or current not in home or home[current][0] != at:
            continue
        seen.add(current)
        stmt = home[current][1]
        if isinstance(stmt, Op):
            heavy |= stmt.op in HEAVY
            work += [a for a in stmt.args if isinstance(a, str)]
        elif isinstance(stmt, Load):
            unsafe |= stmt.buffer in written
            heavy |= any(s.name in home for s in symbols(stmt.index))
            work += [s.name for s in symbols(stmt.index)] + [a for a in (stmt.mask, stmt.other) if isinstance(a, str)]
        elif isinstance(stmt, Index):
            work += [s.name for s in symbols(stmt.expr)]
    return heavy, unsafe
