"""Merging two groups into one kernel: one iteration space, phases appended, values forwarded instead of stored and loaded.

`merge(first, second, ...)` either returns the merged group and leaves both arguments alone, or a Verdict that says why not.
Cases by whether a group is pointwise ("pure") or has inner axes and reductions ("rows"):

  pure + pure   the spaces are equal up to factorisation and order
  pure + rows   the pure group's axes divide into the rows' outer and inner axes: it becomes a phase before them
  rows + pure   the pure group's axes that match the outer ones are outer, all others inner: it becomes a phase after them
  rows + rows   the outer axes match exactly; inner axes that match are shared, and so are phases then
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from fuseline.ir.dtypes import BOOL, DType
from fuseline.ir.expr import Int, Sym, substitute, symbols
from fuseline.ir.kernels import Axis, Index, Load, Op, Reduce, Stmt, Store, Value
from fuseline.ir.target import Target
from fuseline.ir.verdict import Verdict
from fuseline.schedule.align import Alignment, address, common_rows, solve
from fuseline.schedule.group import Draft, Group, Names, names_of, operands, points, renamed, split_axis, with_index

MAX_PARAMS = 24              # buffers of one kernel: beyond, registers for base addresses spill and compile time grows
MAX_STATEMENTS = 400
ROW_ELEMENTS_CUDA = 16384    # a longer row does not fit the registers of one block
MAX_CLONED = 24              # operations to compute again rather than keep
SMALL_WORK = 16384           # elements that are not worth a second worker


@dataclass
class Context:
    """What merging needs to know of the program.

    writers   buffer -> number of steps that change it
    given     buffers that have a value before the first step: inputs and constants
    """
    target: Target
    names: Names
    dtypes: dict[str, DType]
    writers: dict[str, int]
    given: frozenset[str] = frozenset()
    verdicts: list[Verdict] = field(default_factory=list)

    def stable(self, buffer: str) -> bool:
        """True if the buffer holds the same values whenever it may be read."""
        return self.writers.get(buffer, 0) <= (0 if buffer in self.given else 1)


def merge(first: Group, second: Group, context: Context) -> Group | Verdict:
    """One group that does the work of both, `first` before `second`."""
    shared = [b for b in second.loads if b in first.stores]
    for buffer in second.stores:
        if buffer in first.buffers:
            return Verdict.no("both use memory that the second writes", buffer)
    for buffer in shared:
        if len(first.stores[buffer]) != 1 or context.writers.get(buffer, 0) != 1 or first.stores[buffer][0][1].mode != "set" \
                or first.stores[buffer][0][1].mask is not None:
            return Verdict.no("the buffer is written in several parts", buffer)
    if len(first.buffers | second.buffers) > MAX_PARAMS + len(shared):
        return Verdict.no(f"more than {MAX_PARAMS} buffers in one kernel")
    if len(first.defs) + len(second.defs) > MAX_STATEMENTS:
        return Verdict.no(f"more than {MAX_STATEMENTS} operations in one kernel")
    alignment = _align(first, second, shared, context.names)
    if alignment is None and not shared:
        alignment = _equal_spaces(first, second)
    if alignment is None:
        return Verdict.no("the iteration spaces do not match", shared[0] if shared else second.label)
    roles = _roles(first, second, alignment, context.target)
    if isinstance(roles, Verdict):
        return roles
    merged = _copy(first, roles)
    verdict = _absorb(merged, second, roles, context)
    if not verdict:
        return verdict
    if not (first.pure and second.pure):
        passes = _passes(merged)
        if passes > max(_passes(first), _passes(second)) or (second.pure and passes > 1):
            verdict = can_row(merged, context.target)
            if not verdict:
                return verdict
    merged.ops = first.ops + second.ops
    merged.origins = list(dict.fromkeys(first.origins + second.origins))
    merged.position = max(first.position, second.position)
    sizes = {s.name: s for s in (*first.sizes, *second.sizes)}
    merged.sizes = tuple(sizes[n] for n in sorted(sizes))
    return merged


def _passes(group: Group) -> int:
    """How many times one after the other a row is gone over: phases with inner axes that wait for a reduction before them."""
    if group.passes is not None:
        return group.passes
    level: dict[str, int] = {}
    deepest = 0
    for draft in group.phases:
        here = max((level.get(n, 0) for s in draft.body for n in operands(s)), default=0)
        if draft.axes:
            deepest = max(deepest, here + 1)
        for stmt in draft.body:
            for name in names_of(stmt):
                level[name] = here + 1 if isinstance(stmt, Reduce) and draft.axes else here
    group.passes = deepest
    return deepest


def can_row(group: Group, target: Target) -> Verdict:
    """May rows be gone over several times, one worker a row, on this target?"""
    outer = points(group.outer)
    inner = max((points(p.axes) for p in group.phases), default=1)
    if outer * inner <= SMALL_WORK:
        return Verdict.yes()
    if target.is_cuda:
        lanes = 8 if outer_is_contiguous(group) else 1       # neighbouring rows that a block needs to use whole sectors
        if inner * lanes > ROW_ELEMENTS_CUDA:
            return Verdict.no(f"a row of {inner} elements does not fit one block", group.label)
        if outer < lanes * target.cores // 4:
            return Verdict.no(f"{outer} rows do not occupy {target.cores} multiprocessors", group.label)
        return Verdict.yes()
    lanes = target.vector_bits // 32 if outer_is_contiguous(group) else 1
    if outer < target.cores * lanes:
        return Verdict.no(f"{outer} rows do not occupy {target.cores} cores", group.label)
    if lanes > 1:                # the rows are columns in memory: (3136, 512) f32, batch norm backward, 3.2 ms in one kernel, 2.3 in two
        return Verdict.no(f"{outer} columns of {inner} elements are gone over faster by one kernel for each pass", group.label)
    return Verdict.yes()


def outer_is_contiguous(group: Group) -> bool:
    """True if the accesses inside rows are next to each other along an outer axis rather than along an inner one."""
    outer = {a.sym for a in group.outer}
    votes, inner = 0, 0
    for draft in group.phases:
        if not draft.axes:
            continue
        syms = {a.sym for a in draft.axes}
        for stmt in draft.body:
            if isinstance(stmt, (Load, Store)) and symbols(stmt.index) & syms:
                for monomial, coefficient in stmt.index.terms:              # type: ignore[union-attr]
                    if coefficient == 1 and len(monomial) == 1:
                        votes += monomial[0] in outer
                        inner += monomial[0] in syms
    return votes > inner


# ---------------------------------------------------------------- iteration spaces

def _align(first: Group, second: Group, shared: list[str], names: Names) -> Alignment | None:
    """Match axes through buffers that the first stores and the second loads, or that both load."""
    pairs: list[tuple[int, tuple, tuple]] = []
    for buffer in shared:
        (phase, store), *_ = first.stores[buffer]
        for at, load in second.loads[buffer]:
            pairs.append((0, (first, phase, store.index), (second, at, load.index)))
    for buffer in second.loads:
        if buffer in first.loads and buffer not in first.stores:
            seen = {(phase, load.index) for phase, load in first.loads[buffer]}
            for phase, index in seen:
                for at, load in second.loads[buffer]:
                    pairs.append((1, (first, phase, index), (second, at, load.index)))
    anchors = []
    for kind, (_, phase, index), (_, at, other) in pairs[:64]:
        left = address(index, (*first.outer, *first.phases[phase].axes))
        axes = (*second.outer, *second.phases[at].axes)
        right = address(other, axes)
        if left is not None and right is not None:
            anchors.append((-len(right.digits), kind, left, right))
        elif left is not None and kind == 0:                # elements picked from rows
            both = common_rows(left, other, axes)
            if both is not None:
                anchors.append((0, 2, *both))
    anchors.sort(key=lambda a: a[:2])
    alignment = Alignment()
    found = False
    for _, _, left, right in anchors:
        found = alignment.add(left, right, names) or found
    if not anchors and not first.outer and not second.outer:
        return alignment
    return alignment if found or (not first.outer and not second.outer) else None


def _equal_spaces(first: Group, second: Group) -> Alignment | None:
    """Pair the axes of two pointwise groups that have nothing to do with each other, in order of their stores' strides."""
    if not (first.pure and second.pure) or len(first.outer) != len(second.outer):
        return None
    left, right = space(first), space(second)
    if left is None or right is None or [a.extent for a in left] != [a.extent for a in right]:
        return None
    return Alignment({a.sym: (a,) for a in left}, {b.sym: (a,) for a, b in zip(left, right)})


def space(group: Group) -> tuple[Axis, ...] | None:
    """The outer axes, slowest first by the address of some store; None if no store has all of them in a regular order."""
    for stores in group.stores.values():
        at = address(stores[0][1].index, group.outer)
        if at is not None and len(at.digits) == len(group.outer):
            return tuple(d.axis for d in at.digits)
    return None


@dataclass
class Roles:
    """The merged kernel's axes. `first`, `second`: old symbol -> expression; `inner`: the inner axes of second's phases."""
    outer: tuple[Axis, ...]
    first: dict[Sym, Int]
    first_inner: list[tuple[Axis, ...]]
    second: dict[Sym, Int]
    second_inner: list[tuple[Axis, ...]]


def _roles(first: Group, second: Group, alignment: Alignment, target: Target) -> Roles | Verdict:
    left, right = alignment.left, alignment.right

    def parts(axes: tuple[Axis, ...], side: dict[Sym, tuple[Axis, ...]]) -> tuple[Axis, ...]:
        return tuple(p for a in axes for p in side.get(a.sym, (a,)))

    def mapping(axes: set[Axis], side: dict[Sym, tuple[Axis, ...]]) -> dict[Sym, Int]:
        return {a.sym: split_axis(a, side[a.sym]) for a in axes if a.sym in side and side[a.sym] != (a,)}
    all_first = {*first.outer, *(a for p in first.phases for a in p.axes)}
    all_second = {*second.outer, *(a for p in second.phases for a in p.axes)}
    first_map, second_map = mapping(all_first, left), mapping(all_second, right)
    first_outer, second_outer = parts(first.outer, left), parts(second.outer, right)
    first_inner = [parts(p.axes, left) for p in first.phases]
    second_inner = [parts(p.axes, right) for p in second.phases]
    if first.pure and second.pure:
        if set(first_outer) != set(second_outer):
            return Verdict.no("one repeats the other's elements", second.label)
        return Roles(first_outer, first_map, first_inner, second_map, second_inner)
    if first.pure:
        if not set(second_outer) <= set(first_outer):
            return Verdict.no("the consumer repeats the producer's elements", second.label)
        inner = set(first_outer) - set(second_outer)
        if inner:
            order = next((axes for axes in second_inner if set(axes) == inner), None)
            if order is None:
                return Verdict.no("the producer's axes are not those that the consumer reduces", second.label)
            first_inner = [order for _ in first.phases]
        return Roles(second_outer, first_map, first_inner, second_map, second_inner)
    if second.pure:
        if not set(first_outer) <= set(second_outer):
            return Verdict.no("the consumer needs elements of several rows", second.label)
        inner_axes = tuple(a for a in second_outer if a not in set(first_outer))
        inner_axes = _shared_order(inner_axes, first_inner)
        return Roles(first_outer, first_map, first_inner, second_map, [inner_axes for _ in second.phases])
    if set(first_outer) != set(second_outer):
        return Verdict.no("the rows are different ones", second.label)
    _share_equal(second, second_inner, first_inner, second_map)
    positions = {"argmax", "argmin"}
    for i, axes in enumerate(second_inner):
        order = _shared_order(axes, first_inner)
        if order != axes and any(isinstance(s, Reduce) and s.op in positions for s in second.phases[i].body):
            return Verdict.no("a position in the row depends on the order of its axes", second.label)
        second_inner[i] = order
    return Roles(first_outer, first_map, first_inner, second_map, second_inner)


def _share_equal(second: Group, inner: list[tuple[Axis, ...]], known: list[tuple[Axis, ...]], mapping: dict[Sym, Int]) -> None:
    """Let inner axes of the second group that match nothing by what they read be those of the first that have their extents."""
    taken = {a for axes in inner for a in axes}
    for i, axes in enumerate(inner):
        if not axes or any(a in k for k in known for a in axes) or inner[i] != second.phases[i].axes:
            continue
        extents = [a.extent for a in axes]
        same = next((k for k in known if [a.extent for a in k] == extents and not taken & set(k)), None)
        if same is not None:
            mapping.update((old.sym, new.sym) for old, new in zip(axes, same))
            for j in range(i, len(inner)):
                if inner[j] == axes:
                    inner[j] = same
            taken |= set(same)


def _shared_order(axes: tuple[Axis, ...], known: list[tuple[Axis, ...]]) -> tuple[Axis, ...]:
    return next((k for k in known if set(k) == set(axes)), axes)


def _copy(group: Group, roles: Roles) -> Group:
    merged = Group(group.id, roles.outer, group.sizes)
    merged.label = group.label
    if not roles.first and all(d.axes == axes for d, axes in zip(group.phases, roles.first_inner)):
        merged.phases = [Draft(d.axes, list(d.body)) for d in group.phases]
        merged.defs, merged.numbering = dict(group.defs), dict(group.numbering)
        merged.stores = {b: list(found) for b, found in group.stores.items()}
        merged.loads = {b: list(found) for b, found in group.loads.items()}
        merged.reduces = group.reduces
        return merged
    memo: dict[Int, Int] = {}

    def on(e: Int) -> Int:
        if isinstance(e, int) or not roles.first:
            return e
        if e not in memo:
            memo[e] = substitute(e, roles.first)
        return memo[e]
    for draft, axes in zip(group.phases, roles.first_inner):
        merged.phases.append(Draft(axes))
        for stmt in draft.body:
            merged.append(len(merged.phases) - 1, with_index(stmt, on) if roles.first else stmt)
    return merged


# ---------------------------------------------------------------- statements

class Refused(Exception):
    """Ends an attempt to copy statements; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


def _absorb(merged: Group, second: Group, roles: Roles, context: Context) -> Verdict:
    """Append second's phases, reading forwarded values in place of what the merged group stores."""
    values: dict[str, Value] = {}
    try:
        for draft, axes in zip(second.phases, roles.second_inner):
            writer = Writer(merged, axes, roles.second, values, context)
            for stmt in draft.body:
                writer.add(stmt)
            writer.place()
    except Refused as refusal:
        return refusal.verdict
    return Verdict.yes()


class Writer:
    """Collects one phase's statements for a group, then puts them into the earliest phase that can hold them."""

    def __init__(self, group: Group, axes: tuple[Axis, ...], mapping: dict[Sym, Int], values: dict[str, Value],
                 context: Context) -> None:
        self.group, self.axes, self.mapping, self.values, self.context = group, axes, mapping, values, context
        self.body: list[Stmt] = []
        self.local: dict[tuple, Stmt] = {}
        self.names = {a.sym.name for a in axes}

    def on(self, e: Int) -> Int:
        if isinstance(e, int):
            return e
        here: dict[Sym, Int] = {}
        for s in symbols(e):
            if s in self.mapping:
                here[s] = self.mapping[s]
            elif s.name in self.values:
                value = self.values[s.name]
                here[s] = Sym(value, s.extent, s.lo) if isinstance(value, str) else int(value)
        return substitute(e, here) if here else e

    def add(self, stmt: Stmt) -> None:
        if isinstance(stmt, Load) and stmt.buffer in self.group.stores:
            self.values[stmt.name] = self.forward(stmt)
            return
        new = renamed(stmt, self.values, self.on, self.context.names.value)
        self.emit(new, names_of(stmt))

    def emit(self, new: Stmt, old_names: tuple[str, ...]) -> str:
        """Keep a statement unless one of the same value is there; returns the (first) name of the value."""
        key = self.group.key(new, self.axes)
        if key is not None:
            same = self.local.get(key) or self.group.numbering.get(key)
            if same is not None:
                for old, name in zip(old_names, names_of(same)):
                    self.values[old] = name
                return names_of(same)[0]
            self.local[key] = new
        self.body.append(new)
        for old, name in zip(old_names, names_of(new)):
            self.values[old] = name
        return names_of(new)[0] if names_of(new) else ""

    def forward(self, load: Load) -> Value:
        """The value that the group stores where the load reads; recomputed if it is of another point of the same row."""
        phase, store = self.group.stores[load.buffer][0]
        index = self.on(load.index)
        axes = self.group.phases[phase].axes
        if index == store.index and (axes == self.axes or not axes):
            return self.chosen(self.converted(store.value, load), load)
        at = address(store.index, (*self.group.outer, *axes))
        if at is None:
            raise Refused(Verdict.no("its elements are not stored in a regular order", load.buffer))
        point = solve(at, index)
        moved = {s: e for s, e in point.items() if e != s}
        if any(_has_division(e) for e in moved.values()) and not _has_division(index):
            raise Refused(Verdict.no("reading it at another shape needs divisions", load.buffer))
        row_moves = any(a.sym in moved for a in self.group.outer)
        here = set(self.axes)
        if any(a.sym not in point or (a.sym not in moved and a not in here) for a in axes):
            raise Refused(Verdict.no("it varies over an axis that its reader does not have", load.buffer))
        value = store.value
        if isinstance(value, str):
            defs, phases = self.group.defs, self.group.phases
            rows = set() if row_moves else {n for n in cone_of(self.group, value)
                                            if not phases[defs[n][0]].axes or isinstance(defs[n][1], Reduce)}
            value = self.clone(self.group, value, moved, rows, load)
        return self.chosen(self.converted(value, load), load)

    def chosen(self, value: str, load: Load) -> str:
        """The value where the load's mask is true, its other number where not."""
        if load.mask is None:
            return value
        mask, other = self.values[load.mask], load.other
        if isinstance(other, str):
            other = self.values[other]
        return self.emit(Op(self.context.names.value(), "where", (mask, value, other), load.dtype.compute), ())

    def clone(self, source: Group, value: str, moved: dict[Sym, Int], rows: set[str], load: Load) -> str:
        """Emit the computation of a value of `source` again, with its axes moved, for the place of a load.

        `rows`: values that are kept, not computed again. Loads are masked as `load` is. Raises Refused for a value that comes
        from a reduction, or from memory that the source itself writes.
        """
        cone = [n for n in cone_of(source, value) if n not in rows]
        if len(cone) > MAX_CLONED:
            raise Refused(Verdict.no(f"computing it again takes {len(cone)} operations", load.buffer))
        made: dict[str, Value] = {name: name for name in rows}
        mask = None if load.mask is None else str(self.values[load.mask])

        def on(e: Int) -> Int:
            here: dict[Sym, Int] = {}
            for s in symbols(e):
                if s in moved:
                    here[s] = moved[s]
                elif s.name in made:
                    here[s] = Sym(str(made[s.name]), s.extent, s.lo)
            return substitute(e, here) if here else e
        for name in cone:
            stmt = source.defs[name][1]
            if isinstance(stmt, Reduce):
                raise Refused(Verdict.no("the consumer needs elements of several rows", load.buffer))
            if isinstance(stmt, Load) and (stmt.buffer in source.stores or not self.context.stable(stmt.buffer)):
                raise Refused(Verdict.no("computing it again would read memory that changes", load.buffer))
            if isinstance(stmt, Index) and any(_has_division(m) for s, m in moved.items() if s in symbols(stmt.expr)):
                raise Refused(Verdict.no("reading it at another shape needs divisions", load.buffer))
            if name in made:
                continue
            new = renamed(stmt, made, on, self.context.names.value)
            if isinstance(new, Load) and mask is not None:
                both = mask if new.mask is None else self.emit(
                    Op(self.context.names.value(), "and", (new.mask, mask), BOOL), ())
                new = replace(new, mask=both)
            elif isinstance(new, Op) and new.op == "check" and mask is not None:
                holds, active = new.args
                both = mask if active is True else self.emit(Op(self.context.names.value(), "and", (active, mask), BOOL), ())
                new = replace(new, args=(holds, both))
            made[name] = self.emit(new, ())
        return str(made[value])

    def converted(self, value: Value, load: Load) -> str:
        """A stored value as the load gives it: through the buffer's type where that differs from the value's."""
        dtype = self.context.dtypes[load.buffer].compute
        if isinstance(value, str):
            found = next((s for s in self.body if value in names_of(s)), None) or self.group.defs[value][1]
            if found.dtype.compute == dtype:                 # type: ignore[union-attr]
                return value
        else:
            value = bool(value) if dtype == BOOL else float(value) if dtype.is_float else int(value)
        return self.emit(Op(self.context.names.value(), "cast", (value,), dtype), ())

    def place(self) -> None:
        """Append the statements to the first phase of these axes in which all that they read is there, else to a new one."""
        if not self.body:
            return
        least = 0
        local = {n for s in self.body for n in names_of(s)}
        for stmt in self.body:
            for name in operands(stmt):
                if name in local or name not in self.group.defs:
                    continue
                phase, source = self.group.defs[name]
                axes = self.group.phases[phase].axes
                if axes and axes != self.axes and not isinstance(source, Reduce):
                    raise Refused(Verdict.no("a value of one row is read along other axes", name))
                same = axes == self.axes and (not isinstance(source, Reduce) or not axes)
                least = max(least, phase if same else phase + 1)
        for position in range(least, len(self.group.phases)):
            if self.group.phases[position].axes == self.axes:
                break
        else:
            self.group.phases.append(Draft(self.axes))
            position = len(self.group.phases) - 1
        for stmt in self.body:
            self.group.append(position, stmt)


def cone_of(group: Group, value: str) -> list[str]:
    """All values that a value is computed from, itself last, down to loads and reductions (whose arguments are left out)."""
    order: list[str] = []
    seen: set[str] = set()
    stack: list[tuple[str, bool]] = [(value, False)]
    while stack:
        name, done = stack.pop()
        if done:
            order.append(name)
            continue
        if name in seen or name not in group.defs:
            continue
        seen.add(name)
        stack.append((name, True))
        stmt = group.defs[name][1]
        if not isinstance(stmt, Reduce):
            stack += [(n, False) for n in operands(stmt)]
    return order


def _has_division(e: Int) -> bool:
    return not isinstance(e, int) and any(not isinstance(a, Sym) for m, _ in e.terms for a in m)

