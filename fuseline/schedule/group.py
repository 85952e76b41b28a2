"""Groups: kernels while they are being fused. A group addresses buffers by their program names and owns its symbols.

While a program is scheduled, every axis symbol and every value name is unique in the whole program, so that index
expressions can be compared and substituted across groups. Groups only grow at their end: phase indices stay valid.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from fuseline.errors import InternalError
from fuseline.ir.expr import Int, Sym, evaluate, product, substitute, symbols
from fuseline.ir.kernels import Axis, Index, Launch, Load, Op, Reduce, Stmt, Store, Value

SIZE_HINT = 128           # stands for a size that only run time knows, where a decision needs a number


def hint(e: Int) -> int:
    """A plausible value of an expression over sizes."""
    if isinstance(e, int):
        return e
    return evaluate(e, {s.name: SIZE_HINT for s in symbols(e)})


def points(axes: Iterable[Axis]) -> int:
    """How many points axes have, sizes guessed."""
    total = 1
    for axis in axes:
        total *= hint(axis.extent)
    return total


def names_of(stmt: Stmt) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(stmt, Reduce):
        return stmt.names
    return () if isinstance(stmt, Store) else (stmt.name,)


def operands(stmt: Stmt) -> list[str]:
    """The values that a statement reads; indirect index symbols are among them, and so may be axes and sizes."""
    if isinstance(stmt, (Op, Reduce)):
        return [a for a in stmt.args if isinstance(a, str)]
    if isinstance(stmt, Index):
        return [s.name for s in symbols(stmt.expr)]
    found = [s.name for s in symbols(stmt.index)]
    if stmt.mask is not None:
        found.append(stmt.mask)
    value = stmt.value if isinstance(stmt, Store) else stmt.other
    if isinstance(value, str):
        found.append(value)
    return found


@dataclass(slots=True)
class Draft:
    """A phase under construction."""
    axes: tuple[Axis, ...]
    body: list[Stmt] = field(default_factory=list)


class Names:
    """Fresh symbols and value names, unique in one program."""

    def __init__(self) -> None:
        self._next = count()

    def axis(self, extent: Int) -> Axis:
        sym = Sym(f"a{next(self._next)}", extent)
        return Axis(sym, extent)

    def value(self) -> str:
        return f"%v{next(self._next)}"


class Group:
    """A kernel under construction, and what fused into it. `id` is its bit in sets of groups."""

    def __init__(self, id_: int, outer: tuple[Axis, ...], sizes: tuple[Sym, ...]) -> None:
        self.id, self.outer, self.sizes = id_, outer, sizes
        self.phases: list[Draft] = []
        self.ops: list[str] = []
        self.origins: list[str] = []
        self.label = ""
        self.position = id_
        self.defs: dict[str, tuple[int, Stmt]] = {}                     # value -> (phase, statement)
        self.stores: dict[str, list[tuple[int, Store]]] = {}           # buffer -> its stores
        self.loads: dict[str, list[tuple[int, Load]]] = {}
        self.numbering: dict[tuple, Stmt] = {}
        self.reduces = False                                            # some statement is a Reduce
        self.passes: int | None = None                                  # see `merge`

    # -- facts ------------------------------------------------------------------------------------------------
    @property
    def pure(self) -> bool:
        """True for a pointwise group: every phase runs once for each outer point, and nothing is reduced."""
        return not self.reduces and all(not p.axes for p in self.phases)

    @property
    def buffers(self) -> set[str]:
        return set(self.loads) | set(self.stores)

    def work(self) -> int:
        """Points over all phases, sizes guessed."""
        return points(self.outer) * max((points(p.axes) for p in self.phases), default=1)

    # -- growing ----------------------------------------------------------------------------------------------
    def key(self, stmt: Stmt, axes: tuple[Axis, ...]) -> tuple | None:
        """What two statements have in common if they have the same value; None for a store."""
        where = tuple(a.sym.name for a in axes)
        if isinstance(stmt, Load):
            return "load", stmt.buffer, stmt.index, stmt.mask, _number_key(stmt.other), where
        if isinstance(stmt, Op):
            return stmt.op, tuple(_number_key(a) for a in stmt.args), stmt.dtype.name, where
        if isinstance(stmt, Index):
            return "index", stmt.expr, stmt.dtype.name, where
        if isinstance(stmt, Reduce):
            return "reduce", stmt.op, tuple(_number_key(a) for a in stmt.args), stmt.dtype.name, where
        return None

    def append(self, phase: int, stmt: Stmt) -> None:
        """Put a statement at the end of a phase."""
        self.phases[phase].body.append(stmt)
        for name in names_of(stmt):
            if name in self.defs:
                raise InternalError(f"value {name} is defined twice in a group")
            self.defs[name] = (phase, stmt)
        if isinstance(stmt, Store):
            self.stores.setdefault(stmt.buffer, []).append((phase, stmt))
            return
        if isinstance(stmt, Load):
            self.loads.setdefault(stmt.buffer, []).append((phase, stmt))
        elif isinstance(stmt, Reduce):
            self.reduces = True
        key = self.key(stmt, self.phases[phase].axes)
        if key is not None:
            self.numbering.setdefault(key, stmt)

    def reindex(self) -> None:
        """Rebuild the tables from the phases, after these were changed in place."""
        phases, self.phases = self.phases, []
        self.defs, self.stores, self.loads, self.numbering = {}, {}, {}, {}
        self.reduces, self.passes = False, None
        for draft in phases:
            self.phases.append(Draft(draft.axes))
            for stmt in draft.body:
                self.append(len(self.phases) - 1, stmt)

    def substitute(self, mapping: Mapping[Sym, Int]) -> None:
        """Replace axis symbols in every index; the caller changes the axes."""
        memo: dict[Int, Int] = {}

        def on(e: Int) -> Int:
            if e not in memo:
                memo[e] = substitute(e, mapping)
            return memo[e]
        for draft in self.phases:
            draft.body = [with_index(s, on) for s in draft.body]

    def remove_stores(self, buffer: str) -> None:
        """Remove the stores to a buffer; what computed the values stays until `drop`."""
        for phase, store in self.stores.pop(buffer):
            body = self.phases[phase].body
            body[:] = [s for s in body if s is not store]

    def drop(self, keep_store: Callable[[str], bool]) -> None:
        """Remove stores to buffers that nobody reads any more, and every statement that then serves nothing."""
        needed: set[str] = set()
        changed = False
        for draft in reversed(self.phases):
            body = []
            for stmt in reversed(draft.body):
                if keep_store(stmt.buffer) if isinstance(stmt, Store) else any(n in needed for n in names_of(stmt)):
                    body.append(stmt)
                    needed.update(operands(stmt))
                else:
                    changed = True
            draft.body = body[::-1]
        if changed or not all(p.body for p in self.phases):
            self.phases = [p for p in self.phases if p.body]
            self.reindex()


def _number_key(value: Value) -> object:
    return value if isinstance(value, str) else (type(value).__name__, repr(value))


def with_index(stmt: Stmt, on: Callable[[Int], Int]) -> Stmt:
    """The statement with its index expression changed."""
    if isinstance(stmt, Load):
        index = on(stmt.index)
        return stmt if index is stmt.index else Load(stmt.name, stmt.buffer, index, stmt.dtype, stmt.mask, stmt.other)
    if isinstance(stmt, Store):
        index = on(stmt.index)
        return stmt if index is stmt.index else Store(stmt.buffer, index, stmt.value, stmt.mask, stmt.mode)
    if isinstance(stmt, Index):
        return replace(stmt, expr=on(stmt.expr))
    return stmt


def renamed(stmt: Stmt, names: Mapping[str, Value], on: Callable[[Int], Int], fresh: Callable[[], str]) -> Stmt:
    """A copy whose operands and index are replaced and whose results have fresh names."""
    def value(v: Value) -> Value:
        return names.get(v, v) if isinstance(v, str) else v
    if isinstance(stmt, Load):
        mask = None if stmt.mask is None else value(stmt.mask)
        return Load(fresh(), stmt.buffer, on(stmt.index), stmt.dtype.compute, mask, value(stmt.other))  # type: ignore[arg-type]
    if isinstance(stmt, Op):
        return Op(fresh(), stmt.op, tuple(value(a) for a in stmt.args), stmt.dtype, stmt.bounds)
    if isinstance(stmt, Index):
        return Index(fresh(), on(stmt.expr), stmt.dtype)
    if isinstance(stmt, Store):
        mask = None if stmt.mask is None else value(stmt.mask)
        return Store(stmt.buffer, on(stmt.index), value(stmt.value), mask, stmt.mode)                   # type: ignore[arg-type]
    return Reduce(tuple(fresh() for _ in stmt.names), stmt.op, tuple(value(a) for a in stmt.args), stmt.dtype)


def from_launch(launch: Launch, id_: int, names: Names) -> Group:
    """The group of one launch: symbols made unique, axes of extent 1 dropped, loads typed by what they compute with."""
    kernel = launch.kernel
    bound = {p.name: b for p, b in zip(kernel.params, launch.buffers)}
    mapping: dict[Sym, Int] = {}

    def fresh_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
        made = []
        for axis in axes:
            if axis.extent == 1:
                mapping[axis.sym] = 0
            else:
                made.append(names.axis(axis.extent))
                mapping[axis.sym] = made[-1].sym
        return tuple(made)
    group = Group(id_, fresh_axes(kernel.axes), kernel.sizes)
    group.ops, group.origins, group.label = list(launch.ops), list(launch.origins), kernel.label
    values: dict[str, Value] = {}
    inner_axes: dict[tuple, tuple[Axis, ...]] = {}
    for phase in kernel.phases:
        if phase.axes not in inner_axes:
            inner_axes[phase.axes] = fresh_axes(phase.axes)
        for axis in phase.axes:                              # the symbols of equal axes stay shared between phases
            if axis.extent != 1 and axis.sym not in mapping:
                raise InternalError(f"axis {axis.sym} has no symbol")
        group.phases.append(Draft(inner_axes[phase.axes]))
        local = dict(mapping)
        for axis, new in zip((a for a in phase.axes if a.extent != 1), inner_axes[phase.axes]):
            local[axis.sym] = new.sym

        def on(e: Int, local: dict[Sym, Int] = local) -> Int:
            if isinstance(e, int):
                return e
            used = symbols(e)
            here: dict[Sym, Int] = {s: local[s] for s in used if s in local}
            for s in used:
                if s.name in values:
                    here[s] = Sym(str(values[s.name]), s.extent, s.lo)
            return substitute(e, here) if here else e
        for stmt in phase.body:
            if isinstance(stmt, (Load, Store)):
                stmt = replace(stmt, buffer=bound[stmt.buffer])
            copy = renamed(stmt, values, on, names.value)
            for old_name, new_name in zip(names_of(stmt), names_of(copy)):
                values[old_name] = new_name
            group.append(len(group.phases) - 1, copy)
    return group


def split_axis(axis: Axis, parts: Sequence[Axis]) -> Int:
    """The old axis as an expression over the axes that replace it, outermost first."""
    total: Int = 0
    for position, part in enumerate(parts):
        total = total + part.sym * product(tuple(p.extent for p in parts[position + 1:]))
    return total

