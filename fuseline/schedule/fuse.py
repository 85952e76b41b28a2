"""Which groups to fuse: producers into consumers, cheap values computed again, siblings that read the same data."""
from __future__ import annotations

from collections.abc import Sequence

from fuseline.ir.expr import Int, Sym
from fuseline.ir.kernels import Buffer, Extern, Launch, Load, Op, Reduce, Stmt
from fuseline.ir.steps import reads
from fuseline.ir.target import Target
from fuseline.ir.verdict import Verdict
from fuseline.ir.verify import storage_extent
from fuseline.schedule.align import Address, address, solve
from fuseline.schedule.group import Group, Names, from_launch, hint, points
from fuseline.schedule.merge import MAX_PARAMS, Context, Refused, Writer, cone_of, merge, space
from fuseline.schedule.order import Order, changes

COSTS = {"div": 4, "sqrt": 4, "rsqrt": 6, "reciprocal": 4, "rem": 6, "floordiv": 6, "truncdiv": 6, "fmod": 8, "cast": 1}
TRANSCENDENTAL = frozenset((
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh",
    "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "pow"))
CHEAP = 8                  # cost up to which a value is rather computed again than written and read
CHEAP_REPEATED = 4         # likewise where each element is computed several times (broadcast)
SMALL_CPU, SMALL_CUDA = 1 << 15, 1 << 18       # points below which starting a kernel costs more than its work
MAX_SIBLINGS = 12          # earlier readers of a buffer that a new one is tried with


class Fusion:
    """The groups of one list of steps. `kept`: buffers that must be in memory after it (outputs, or read elsewhere)."""

    def __init__(self, steps: Sequence[Launch | Extern], buffers: dict[str, Buffer], kept: set[str], target: Target) -> None:
        self.steps, self.buffers, self.kept, self.target = steps, buffers, kept, target
        written: dict[str, int] = {}
        for step in steps:
            for name in changes(step):
                written[name] = written.get(name, 0) + 1
        given = frozenset(n for n, b in buffers.items() if b.kind in ("input", "constant"))
        self.context = Context(target, Names(), {n: b.dtype for n, b in buffers.items()}, written, given)
        self.order = Order(steps)
        self.groups: dict[int, Group] = {}
        self.extern_reads: set[str] = set()
        for i, step in enumerate(steps):
            if isinstance(step, Launch):
                self.groups[i] = from_launch(step, i, self.context.names)
            else:
                self.extern_reads |= set(reads(step))
        self.readers: dict[str, set[int]] = {}
        self.writer: dict[str, set[int]] = {}
        for group in self.groups.values():
            self._register(group)
        self.refusals: dict[tuple[str, str], Verdict] = {}
        self.tried: set[tuple[int, int, int, int]] = set()

    def _register(self, group: Group) -> None:
        for name in group.loads:
            self.readers.setdefault(name, set()).add(group.id)
        for name in group.stores:
            self.writer.setdefault(name, set()).add(group.id)

    def _forget(self, group: Group) -> None:
        for name in group.loads:
            self.readers[name].discard(group.id)
        for name in group.stores:
            self.writer[name].discard(group.id)

    def run(self) -> list[Launch | Group | Extern]:
        """Fuse, and return the groups and Externs in their order."""
        self.drop_unread()
        self.merge_down()
        while self.recompute():
            self.drop_unread()
            self.merge_down()
        self.merge_siblings()
        self.merge_small()
        self.merge_down()
        self.drop_unread(final=True)
        position = {i: self.groups[i].position if i in self.groups else i for i in self.order.alive}
        return [self.groups.get(i) or self.steps[i] for i in self.order.sequence(position)]

    # -- producers and consumers --------------------------------------------------------------------------------
    def merge_down(self) -> None:
        """Merge each group into those whose results it reads, in program order."""
        for i in sorted(self.groups):
            while i in self.groups:
                group = self.groups[i]
                producers = {p for name in group.loads for p in self.writer.get(name, ()) if p != i}
                ranked = sorted(producers, key=lambda p: (-self._shared_bytes(p, i), -p))
                for producer in ranked:
                    if self.try_merge(producer, i):
                        i = producer
                        break
                else:
                    break

    def _shared_bytes(self, producer: int, consumer: int) -> int:
        stores = self.groups[producer].stores
        return sum(self.bytes_of(n) for n in self.groups[consumer].loads if n in stores)

    def bytes_of(self, name: str) -> int:
        buffer = self.buffers[name]
        return hint(storage_extent(buffer)) * buffer.dtype.size

    def try_merge(self, first: int, second: int) -> bool:
        """Merge second into first, if order, shapes and target allow; remember why not."""
        a, b = self.groups[first], self.groups[second]
        attempt = (first, second, len(a.defs) + len(a.stores), len(b.defs) + len(b.stores))
        if attempt in self.tried:
            return False
        self.tried.add(attempt)
        if not self.order.can_merge(first, second):
            self._refuse(a, b, Verdict.no("a step between them needs the one and feeds the other"))
            return False
        if self.order.depends(first, second):
            return False
        merged = merge(a, b, self.context)
        if isinstance(merged, Verdict):
            self._refuse(a, b, merged)
            return False
        self._forget(a)
        self._forget(b)
        del self.groups[second]
        self.groups[first] = merged
        self.order.merge(first, second)
        self._register(merged)
        for name in list(b.loads):
            if name in merged.stores and name not in merged.loads and not self.is_read(name):
                self._forget(merged)
                merged.remove_stores(name)
                self._register(merged)
        return True

    def _refuse(self, a: Group, b: Group, verdict: Verdict) -> None:
        key = (f"{a.label} + {b.label}", verdict.reason)
        if key not in self.refusals:
            subject = f"{key[0]}: {verdict.subject}" if verdict.subject else key[0]
            self.refusals[key] = Verdict.no(verdict.reason, subject)

    def is_read(self, name: str) -> bool:
        """True if the buffer must be stored: an output, read by an Extern or by a group's load, or not a temp at all."""
        if name in self.kept or name in self.extern_reads or self.buffers[name].kind != "temp":
            return True
        return bool(self.readers.get(name)) or self.context.writers.get(name, 0) > 1

    def drop_unread(self, final: bool = False) -> None:
        """Remove stores that nothing reads, statements that serve nothing, and groups that are empty then."""
        for i in sorted(self.groups, reverse=True):
            group = self.groups[i]
            if not final and all(self.is_read(name) for name in group.stores):
                continue
            self._forget(group)
            group.drop(self.is_read)
            if group.phases:
                self._register(group)
            else:
                del self.groups[i]
                self._bypass(i)

    def _bypass(self, i: int) -> None:
        """Take an empty step out; what waited for it waits for what it waited for."""
        order = self.order
        order.alive.discard(i)
        for x in order.alive:
            if order.before[x] & order.members[i]:
                order.before[x] = (order.before[x] & ~order.members[i]) | order.before[i]

    # -- computing again ------------------------------------------------------------------------------------------
    def recompute(self) -> bool:
        """Replace loads of cheap values by their computation where that saves traffic or a kernel; True if any was."""
        changed = False
        for i in sorted(self.groups):
            group = self.groups.get(i)
            if group is None:
                continue
            for name in list(group.stores):
                if name in self.kept or name in self.extern_reads or self.buffers[name].kind != "temp":
                    continue
                consumers = sorted(self.readers.get(name, set()) - {i})
                if consumers and len(group.stores[name]) == 1 and self._worth(group, name, consumers):
                    changed = self._inline(group, name, consumers) or changed
        return changed

    def _cone(self, group: Group, name: str) -> list[Stmt] | None:
        """What computes a stored value, or None if that is not pointwise over memory that stays as it is."""
        (_, store), = group.stores[name]
        if store.mode != "set" or store.mask is not None or self.context.writers.get(name, 0) != 1:
            return None
        if not isinstance(store.value, str):
            return []
        cone = [group.defs[n][1] for n in cone_of(group, store.value)]
        for stmt in cone:
            if isinstance(stmt, Reduce):
                return None
            if isinstance(stmt, Load) and (stmt.buffer in group.stores or not self.context.stable(stmt.buffer)):
                return None
        return cone

    def _worth(self, group: Group, name: str, consumers: list[int]) -> bool:
        cone = self._cone(group, name)
        if cone is None:
            return False
        cost = sum(10 if s.op in TRANSCENDENTAL else COSTS.get(s.op, 1) for s in cone if isinstance(s, Op))
        elements = max(1, hint(storage_extent(self.buffers[name])))
        loads = {s.buffer for s in cone if isinstance(s, Load)}
        alone = len(consumers) == 1
        traffic = self.bytes_of(name) * (1 + len(consumers))
        new_traffic = 0
        for consumer in consumers:
            other = self.groups[consumer]
            repeated = max(points(other.outer) * points(other.phases[p].axes) for p, _ in other.loads[name]) > elements
            if repeated and cost > CHEAP_REPEATED:
                return False
            if not repeated and not alone and cost > CHEAP:
                return False
            if len(other.buffers | loads) > MAX_PARAMS + 1:
                return False
            places = len({load.index for _, load in other.loads[name]})
            if self.target.is_cuda and places > 1 and len(loads) > 1 and elements > SMALL_CUDA:
                return False                               # each place would be read in several tensors (windows of a pooling)
            new_traffic += sum(min(self.bytes_of(b), self.bytes_of(name) * 2) for b in loads if b not in other.loads)
        if len(group.stores) == 1 and len(loads) <= 1:
            return True                                    # the producer's kernel goes away, and reading it cost as much
        if len(group.stores) == 1:                         # its own reading is saved, too
            traffic += sum(self.bytes_of(b) for b in loads)
        return new_traffic <= traffic

    def _inline(self, group: Group, name: str, consumers: list[int]) -> bool:
        (phase, store), = group.stores[name]
        at = address(store.index, (*group.outer, *group.phases[phase].axes))
        if at is None:
            return False
        everywhere = {a.sym for a in group.outer} | {a.sym for a in group.phases[phase].axes}
        if everywhere - {d.axis.sym for d in at.digits}:
            return False
        made = []
        for consumer in consumers:
            copy = self._without_load(self.groups[consumer], group, name, at)
            if copy is None:
                return False
            made.append(copy)
        for consumer, copy in zip(consumers, made):
            self._forget(self.groups[consumer])
            self.groups[consumer] = copy
            self._register(copy)
            self.order.add_before(consumer, self.order.before[group.id])
            copy.ops = group.ops + copy.ops
            copy.origins = list(dict.fromkeys(group.origins + copy.origins))
        return True

    def _without_load(self, consumer: Group, group: Group, name: str, at: Address) -> Group | None:
        """A copy of the consumer that computes what it used to load from `name`; None if that needs new divisions."""
        (_, store), = group.stores[name]
        copy = Group(consumer.id, consumer.outer, tuple({s.name: s for s in (*consumer.sizes, *group.sizes)}.values()))
        copy.position, copy.label, copy.ops, copy.origins = consumer.position, consumer.label, consumer.ops, consumer.origins
        values: dict = {}
        try:
            for draft in consumer.phases:
                writer = Writer(copy, draft.axes, {}, values, self.context)
                for stmt in draft.body:
                    if not (isinstance(stmt, Load) and stmt.buffer == name):
                        writer.add(stmt)
                        continue
                    index = writer.on(stmt.index)
                    point = solve(at, index)
                    if any(_divides(e) for e in point.values()) and not _divides(index):
                        return None
                    value = store.value
                    if isinstance(value, str):
                        value = writer.clone(group, value, point, set(), stmt)
                    values[stmt.name] = writer.chosen(writer.converted(value, stmt), stmt)
                writer.place()
        except Refused:
            return None
        return copy

    # -- siblings -------------------------------------------------------------------------------------------------
    def merge_siblings(self) -> None:
        """Merge groups that read the same buffer, where neither needs the other."""
        for name in list(self.readers):
            seen: list[int] = []
            for i in sorted(self.readers[name]):
                if i not in self.groups:
                    continue
                for j in seen[-MAX_SIBLINGS:]:
                    if j in self.groups and not self.order.depends(i, j) and not self.order.depends(j, i) \
                            and self._alike(j, i) and self.try_merge(j, i):
                        break
                else:
                    seen.append(i)

    def merge_small(self) -> None:
        """Merge small pointwise groups over equal spaces that do not depend on each other: fewer launches."""
        limit = SMALL_CUDA if self.target.is_cuda else SMALL_CPU
        known: dict[tuple, list[int]] = {}
        for i in sorted(self.groups):
            group = self.groups.get(i)
            if group is None or not group.pure or group.work() > limit:
                continue
            axes = space(group)
            if axes is None:
                continue
            key = tuple(a.extent for a in axes)
            for j in known.get(key, [])[-4:]:
                if j in self.groups and not self.order.depends(i, j) and len(self.groups[j].buffers | group.buffers) <= MAX_PARAMS \
                        and self.try_merge(j, i):
                    break
            else:
                known.setdefault(key, []).append(i)

    def _alike(self, a: int, b: int) -> bool:
        first, second = self.groups[a], self.groups[b]
        return first.pure == second.pure and first.work() == second.work() and len(first.buffers | second.buffers) <= MAX_PARAMS


def _divides(e: Int) -> bool:
    return not isinstance(e, int) and any(not isinstance(a, Sym) for m, _ in e.terms for a in m)
