"""Rewrites of a kernel's axes before code is generated: equal kernels in, equal values out, simpler loops.

  share_inner_axes   phases with the same inner extents use the same loop variables, so that values can be read across phases
  split_axes         an axis that occurs in `v // 7` or `v % 7` becomes two axes, where that makes the division vanish
  merge_axes         two axes that every index walks through like one become one: longer vectors, fewer loops
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fuseline.ir.expr import Div, Expr, Int, Max, Mod, Sym, floor_div, linear_in, substitute, symbols
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Phase, Reduce, Stmt, Store

Rewrite = Callable[[Int], Int]


def simplify_axes(kernel: Kernel) -> Kernel:
    """The kernel with the rewrites of this module applied; the meaning is the same for every buffer contents."""
    kernel = share_inner_axes(kernel)
    kernel = drop_unit_axes(kernel)
    kernel = split_axes(kernel)
    return merge_axes(kernel)


def expressions(phase: Phase) -> list[Int]:
    """Every index expression of the phase's body."""
    found: list[Int] = []
    for stmt in phase.body:
        if isinstance(stmt, (Load, Store)):
            found.append(stmt.index)
        elif isinstance(stmt, Index):
            found.append(stmt.expr)
    return found


def rewrite_stmt(stmt: Stmt, rewrite: Rewrite) -> Stmt:
    if isinstance(stmt, (Load, Store)):
        return replace(stmt, index=rewrite(stmt.index))
    if isinstance(stmt, Index):
        return replace(stmt, expr=rewrite(stmt.expr))
    return stmt


def _rewrite_phase(phase: Phase, axes: tuple[Axis, ...], rewrite: Rewrite) -> Phase:
    return Phase(axes, tuple(rewrite_stmt(s, rewrite) for s in phase.body))


def _substituting(mapping: dict[Sym, Int]) -> Rewrite:
    return lambda e: substitute(e, mapping)


def share_inner_axes(kernel: Kernel) -> Kernel:
    """Rename every phase's loop variables: those of the first phase with the same extents."""
    first: dict[tuple[Int, ...], tuple[Axis, ...]] = {}
    phases = []
    for phase in kernel.phases:
        extents = tuple(a.extent for a in phase.axes)
        if extents not in first:
            taken = sum(len(axes) for axes in first.values())
            first[extents] = tuple(Axis(Sym(f"r{taken + k}", a.extent), a.extent) for k, a in enumerate(phase.axes))
        axes = first[extents]
        mapping: dict[Sym, Int] = {old.sym: new.sym for old, new in zip(phase.axes, axes, strict=True)}
        phases.append(_rewrite_phase(phase, axes, _substituting(mapping)))
    return replace(kernel, phases=tuple(phases))


def drop_unit_axes(kernel: Kernel) -> Kernel:
    """Axes of extent 1 go: their variable is 0. (A reduction over a phase without axes left is over one element.)"""
    outer: dict[Sym, Int] = {a.sym: 0 for a in kernel.axes if a.extent == 1}
    phases = []
    for phase in kernel.phases:
        inner: dict[Sym, Int] = {a.sym: 0 for a in phase.axes if a.extent == 1}
        if len(inner) == len(phase.axes) and inner:            # keep one: whether a phase has axes is part of its meaning
            inner.pop(phase.axes[-1].sym)
        mapping = {**outer, **inner}
        axes = tuple(a for a in phase.axes if a.sym not in inner)
        phases.append(_rewrite_phase(phase, axes, _substituting(mapping)) if mapping else phase)
    return replace(kernel, axes=tuple(a for a in kernel.axes if a.sym not in outer), phases=tuple(phases))


# ---------------------------------------------------------------- splitting

def _divisions(e: Int, sym: Sym, found: set[int]) -> int:
    """The number of Div, Mod and Max atoms in e that depend on sym; their constant denominators go to `found`."""
    if isinstance(e, int):
        return 0
    count = 0
    for monomial, _ in e.terms:
        for atom in monomial:
            if isinstance(atom, (Div, Mod)) and sym in symbols(atom):
                count += 1 + _divisions(atom.numerator, sym, found)
                if isinstance(atom.denominator, int):
                    found.add(atom.denominator)
            elif isinstance(atom, Max) and sym in symbols(atom):
                count += 1 + _divisions(atom.a, sym, found) + _divisions(atom.b, sym, found)
    return count


def split_axes(kernel: Kernel) -> Kernel:
    for _ in range(8):                                          # each split removes a division; few kernels have more than two
        better = _split_one(kernel)
        if better is None:
            return kernel
        kernel = better
    return kernel


def _split_one(kernel: Kernel) -> Kernel | None:
    axes = dict.fromkeys([*kernel.axes, *(a for p in kernel.phases for a in p.axes)])
    for axis in axes:
        if not isinstance(axis.extent, int):
            continue
        found: set[int] = set()
        before = sum(_divisions(e, axis.sym, found) for p in kernel.phases for e in expressions(p))
        for by in sorted(found):
            # v // 7 and v % 28 give candidates 7 and 28; with a coefficient, as in (2*v) // 14, 14 does not divide but 7 may
            if not 1 < by < axis.extent or axis.extent % by:
                continue
            high, low = Sym(f"{axis.sym.name}h{by}", axis.extent // by), Sym(f"{axis.sym.name}l{by}", by)
            candidate = _replace_axis(kernel, axis, (Axis(high, axis.extent // by), Axis(low, by)), by * high + low)
            after = sum(_divisions(e, s, set()) for p in candidate.phases for e in expressions(p) for s in (high, low))
            if after < before:
                return candidate
    return None


def _replace_axis(kernel: Kernel, axis: Axis, new: tuple[Axis, ...], value: Int) -> Kernel:
    def swap(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(n for a in axes for n in (new if a.sym == axis.sym else (a,)))

    phases = tuple(_rewrite_phase(p, swap(p.axes), lambda e: substitute(e, {axis.sym: value})) for p in kernel.phases)
    return replace(kernel, axes=swap(kernel.axes), phases=phases)


# ---------------------------------------------------------------- merging

def merge_axes(kernel: Kernel) -> Kernel:
    while True:
        better = _merge_one(kernel)
        if better is None:
            return kernel
        kernel = better


def _merge_one(kernel: Kernel) -> Kernel | None:
    for i in kernel.axes:
        for j in kernel.axes:
            if i is not j:
                merged = _merge(kernel, i, j)
                if merged is not None:
                    return merged
    for phase in kernel.phases:
        for i, j in zip(phase.axes, phase.axes[1:]):            # neighbours: the row-major position (argmax) stays the same
            merged = _merge(kernel, i, j)
            if merged is not None:
                return merged
    return None


def _merge(kernel: Kernel, i: Axis, j: Axis) -> Kernel | None:
    """One axis k = i * extent(j) + j in place of the two, or None where some index does not allow it."""
    k = Sym(f"{i.sym.name}.{j.sym.name}", i.extent * j.extent)
    phases = []
    for phase in kernel.phases:
        has = [a.sym for a in phase.axes]
        if (i.sym in has) != (j.sym in has):
            return None
        rewritten: dict[Int, Int] = {}
        for e in expressions(phase):
            merged = _merged_index(e, i.sym, j, k)
            if merged is None:
                return None
            rewritten[e] = merged
        phases.append((phase, rewritten))
    merged_axis = Axis(k, i.extent * j.extent)

    def swap(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple(merged_axis if a.sym == j.sym else a for a in axes if a.sym != i.sym)

    return replace(kernel, axes=swap(kernel.axes),
                   phases=tuple(_rewrite_phase(p, swap(p.axes), r.__getitem__) for p, r in phases))


def _merged_index(e: Int, i: Sym, j: Axis, k: Sym) -> Int | None:
    along_j = linear_in(e, j.sym)
    if along_j is None:
        return None
    step, rest = along_j
    along_i = linear_in(rest, i)
    if along_i is None or along_i[0] != step * j.extent or i in symbols(step):
        return None
    return step * k + along_i[1]


def extent_guess(extent: Int) -> int:
    """An extent for cost estimates: symbolic sizes count as 64."""
    if isinstance(extent, int):
        return extent
    guessed = substitute(extent, {s: max(64, s.lo) for s in symbols(extent)})
    return guessed if isinstance(guessed, int) else 64


def blocks(extent: Int, width: int) -> Int:
    return -floor_div(-extent, width) if isinstance(extent, (int, Expr)) else extent


def reduces(phase: Phase) -> bool:
    return any(isinstance(s, Reduce) for s in phase.body)
