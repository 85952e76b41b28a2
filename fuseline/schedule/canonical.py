"""From a group to the Kernel that is compiled: loop order, collapsed axes, canonical names.

Equal structures give equal kernels: params p0, p1, ... in order of first use, values %0, %1, ... in order of definition,
outer axes i0, i1, ..., inner axes j0, j1, ...
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseline.errors import InternalError
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Int, Sym, substitute, symbols
from fuseline.ir.kernels import Axis, Index, Kernel, Launch, Load, Op, Param, Phase, Reduce, Stmt, Store, Value
from fuseline.schedule.group import Draft, Group, hint, names_of, operands, points

MAX_LABEL = 4            # operators that a label names


def to_launch(group: Group, dtypes: Mapping[str, DType]) -> Launch:
    """The launch of a group, which is changed on the way; `dtypes` has those of all buffers."""
    hoist(group)
    order_axes(group)
    collapse(group)
    kernel, buffers = _named(group, dtypes)
    return Launch(kernel, buffers, tuple(group.ops), tuple(group.origins))


def hoist(group: Group) -> None:
    """Move what does not depend on a phase's inner axes out of it, to a phase without axes right before it."""
    row: set[str] = {n for d in group.phases if not d.axes for s in d.body for n in names_of(s)}
    row |= {n for d in group.phases for s in d.body if isinstance(s, Reduce) for n in s.names}
    phases: list[Draft] = []
    for draft in group.phases:
        if not draft.axes or any(a.extent == 0 for a in draft.axes):
            phases.append(draft)
            continue
        inner = {a.sym.name for a in draft.axes}
        out: list[Stmt] = []
        stay: list[Stmt] = []
        for stmt in draft.body:
            local = {n for n in operands(stmt) if n in inner or (n in group.defs and n not in row)}
            if local or isinstance(stmt, (Store, Reduce)) or (isinstance(stmt, Load) and stmt.buffer in group.stores):
                stay.append(stmt)
            else:
                out.append(stmt)
                row.update(names_of(stmt))
        if out and stay and phases and not phases[-1].axes:
            phases[-1].body.extend(out)
        elif out and stay:
            phases.append(Draft((), out))
        phases.append(Draft(draft.axes, stay) if out and stay else draft)
        if not stay:
            row -= {n for s in out for n in names_of(s)}
    group.phases = phases
    group.reindex()


# ---------------------------------------------------------------- loop order

def _strides(group: Group) -> list[tuple[int, dict[Sym, Int]]]:
    """(weight, symbol -> stride) of every access; weight: how many elements it touches, stores twice."""
    found = []
    for draft in group.phases:
        axes = (*group.outer, *draft.axes)
        for stmt in draft.body:
            if isinstance(stmt, (Load, Store)) and not isinstance(stmt.index, int):
                strides = linear_strides(stmt.index, {a.sym for a in axes})
                touched = points(a for a in axes if a.sym in strides)
                found.append((touched * (2 if isinstance(stmt, Store) else 1), strides))
    return found


def linear_strides(index: Int, syms: set[Sym]) -> dict[Sym, Int]:
    """symbol -> stride for the symbols in which the index is linear, by itself or times sizes."""
    strides: dict[Sym, Int] = {}
    if isinstance(index, int):
        return strides
    for monomial, coefficient in index.terms:
        stride: Int = coefficient
        found = None
        for atom in monomial:
            if isinstance(atom, Sym) and atom in syms and found is None:
                found = atom
            elif isinstance(atom, Sym) and atom.extent is None:
                stride = stride * atom
            else:
                found = None
                break
        if found is not None:
            strides[found] = strides[found] + stride if found in strides else stride
    return strides


def order_axes(group: Group) -> None:
    """Sort outer axes, and the inner axes of each phase, so that the last one is contiguous for most accesses.

    The accesses that touch most elements decide; axes that they tie on stay as they were. Inner axes of phases that
    look for a position (argmax) stay.
    """
    accesses = sorted(_strides(group), key=lambda a: -a[0])
    if not accesses:
        return
    group.outer = _sorted_axes(group.outer, accesses)
    fixed = {d.axes for d in group.phases if any(isinstance(s, Reduce) and s.op in ("argmax", "argmin") for s in d.body)}
    orders: dict[tuple[Axis, ...], tuple[Axis, ...]] = {}
    for draft in group.phases:
        if len(draft.axes) < 2 or draft.axes in fixed:
            continue
        if draft.axes not in orders:
            orders[draft.axes] = _sorted_axes(draft.axes, accesses)
        draft.axes = orders[draft.axes]


def _sorted_axes(axes: tuple[Axis, ...], accesses: Sequence[tuple[int, dict[Sym, Int]]]) -> tuple[Axis, ...]:
    if len(axes) < 2:
        return axes
    votes: dict[Sym, int] = {a.sym: 0 for a in axes}
    for weight, strides in accesses:
        for sym, stride in strides.items():
            if sym in votes and stride == 1:
                votes[sym] += weight
    main: dict[Sym, float] = {}
    for _, strides in accesses:                            # the largest access that has an axis tells its place
        for sym, stride in strides.items():
            if sym in votes and sym not in main:
                main[sym] = hint(stride)
    fastest = max(votes, key=lambda s: votes[s])
    if votes[fastest] > 0:
        main[fastest] = 0.5
    position = {a.sym: i for i, a in enumerate(axes)}
    return tuple(sorted(axes, key=lambda a: (-main.get(a.sym, float("inf")), position[a.sym])))


# ---------------------------------------------------------------- collapsing

def collapse(group: Group) -> None:
    """Join neighbouring axes that every index only uses as one number: i*512 + j over i, j becomes k."""
    while _collapse_pair(group, group.outer, True):
        pass
    for axes in dict.fromkeys(d.axes for d in group.phases):
        while len(axes) > 1:
            joined = _collapse_pair(group, axes, False)
            if joined is None:
                break
            axes = joined


def _indices(group: Group) -> list[Int]:
    found = []
    for draft in group.phases:
        for stmt in draft.body:
            if isinstance(stmt, (Load, Store)):
                found.append(stmt.index)
            elif isinstance(stmt, Index):
                found.append(stmt.expr)
    return found


def _collapse_pair(group: Group, axes: tuple[Axis, ...], outer: bool) -> tuple[Axis, ...] | None:
    indices = list(dict.fromkeys(e for e in _indices(group) if not isinstance(e, int)))
    syms = {a.sym for a in axes}
    strides = [(linear_strides(e, syms), e) for e in indices]
    for position in range(len(axes) - 1):
        major, minor = axes[position], axes[position + 1]
        fits = True
        for known, e in strides:
            a, b = known.get(major.sym, 0), known.get(minor.sym, 0)
            if a != b * minor.extent or _hidden(e, (major.sym, minor.sym)):
                fits = False
                break
        if not fits:
            continue
        # Named after neither: expressions with the old symbols must not be taken for ones with the new.
        joined = Axis(Sym(f"{major.sym.name}_{minor.sym.name}", major.extent * minor.extent), major.extent * minor.extent)
        group.substitute({major.sym: 0, minor.sym: joined.sym})
        new = (*axes[:position], joined, *axes[position + 2:])
        if outer:
            group.outer = new
        else:
            for draft in group.phases:
                if draft.axes == axes:
                    draft.axes = new
        return new
    return None


def _hidden(e: Int, pair: tuple[Sym, Sym]) -> bool:
    """True if a symbol of the pair occurs inside a division, or multiplied with another axis or value."""
    if isinstance(e, int):
        return False
    for monomial, _ in e.terms:
        for atom in monomial:
            if isinstance(atom, Sym):
                if atom in pair and any(not isinstance(o, Sym) or (o.extent is not None and o is not atom) for o in monomial):
                    return True
            elif symbols(atom) & set(pair):
                return True
    return False


# ---------------------------------------------------------------- names

def _named(group: Group, dtypes: Mapping[str, DType]) -> tuple[Kernel, tuple[str, ...]]:
    axis_map: dict[Sym, Sym] = {}
    sizes: dict[str, Sym] = {}

    def extent(e: Int) -> Int:
        for s in symbols(e):
            sizes[s.name] = s
        return e

    def named_axes(axes: tuple[Axis, ...], letter: str) -> tuple[Axis, ...]:
        made = []
        for axis in axes:
            if axis.sym not in axis_map:
                taken = sum(1 for s in axis_map.values() if s.name.startswith(letter))
                axis_map[axis.sym] = Sym(f"{letter}{taken}", extent(axis.extent))
            made.append(Axis(axis_map[axis.sym], axis.extent))
        return tuple(made)
    outer = named_axes(group.outer, "i")
    params: dict[str, str] = {}
    values: dict[str, str] = {}

    def value(v: Value) -> Value:
        return values[v] if isinstance(v, str) else v

    def index(e: Int) -> Int:
        if isinstance(e, int):
            return e
        mapping: dict[Sym, Int] = {}
        for s in symbols(e):
            if s in axis_map:
                mapping[s] = axis_map[s]
            elif s.name in values:
                mapping[s] = Sym(values[s.name], s.extent, s.lo)
            elif s.extent is None:
                sizes[s.name] = s
            else:
                raise InternalError(f"index {e} has the axis {s}, which the kernel does not have")
        return substitute(e, mapping)

    def define(name: str) -> str:
        values[name] = f"%{len(values)}"
        return values[name]
    phases = []
    for draft in group.phases:
        inner = named_axes(draft.axes, "j")
        body: list[Stmt] = []
        for stmt in draft.body:
            if isinstance(stmt, (Load, Store)):
                param = params.setdefault(stmt.buffer, f"p{len(params)}")
                at = index(stmt.index)
                mask = None if stmt.mask is None else values[stmt.mask]
                if isinstance(stmt, Load):
                    other = value(stmt.other)
                    body.append(Load(define(stmt.name), param, at, stmt.dtype, mask, other))
                else:
                    body.append(Store(param, at, value(stmt.value), mask, stmt.mode))
            elif isinstance(stmt, Op):
                args = tuple(value(a) for a in stmt.args)
                body.append(Op(define(stmt.name), stmt.op, args, stmt.dtype, stmt.bounds))
            elif isinstance(stmt, Index):
                at = index(stmt.expr)
                body.append(Index(define(stmt.name), at, stmt.dtype))
            else:
                args = tuple(value(a) for a in stmt.args)
                body.append(Reduce(tuple(define(n) for n in names_of(stmt)), stmt.op, args, stmt.dtype))
        phases.append(Phase(inner, tuple(body)))
    made = tuple(Param(p, dtypes[b], b in group.stores) for b, p in params.items())
    ordered = tuple(sizes[n] for n in sorted(sizes))
    return Kernel(made, ordered, outer, tuple(phases), label(group)), tuple(params)


def label(group: Group) -> str:
    """For people: the kernel's operators in order, "fused_" before them if there are several."""
    short = []
    for op in group.ops:
        name = op.split(".")[1] if op.count(".") >= 1 else op
        name = name.strip("_")
        if name not in short:
            short.append(name)
    if not short:
        return group.label or "kernel"
    text = "_".join(short[:MAX_LABEL]) + (f"_and_{len(short) - MAX_LABEL}" if len(short) > MAX_LABEL else "")
    return f"fused_{text}" if len(group.ops) > 1 else text


