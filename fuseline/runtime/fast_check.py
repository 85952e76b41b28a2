"""The cheap check of an entry whose guards walk a tree of long-lived objects: compare words, evaluate the few guards left.

A guard is *static* if every step on the way from an anchor to its object, and the fact itself, are covered by words of a
`WordTable` (see `words`). An anchor is an argument or closure cell that holds a long-lived object such as a module; the check
asks only whether it is the same object. After all guards held once, the table stands for the static ones; the rest ("live"
guards: tensor arguments, modes, lists) are evaluated on each call. If a word differs, the full check decides, and the table is
renewed, unless renewing would cost more than it saves. Dicts that keep changing are left out: their guards become live.
"""
from __future__ import annotations

import builtins
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from fuseline.ir.fetch import parameter
from fuseline.ir.region import Attr, Builtin, Cell, CellOf, ClassDict, Global, Guard, InDict, Item, KeyAt, Local, Pinned, Source, TypeOf
from fuseline.runtime.guards import GuardWriter, rank
from fuseline.runtime.words import WordTable, native_differs

MIN_STATIC_GUARDS = 6          # below that, evaluating the guards is as cheap as the comparison
RENEW_SHARE = 20               # a table is renewed at most so often that renewing takes 1/20 of the time
VOLATILE_AFTER = 3             # changes of one dict or tensor after which its guards become live
_IMMUTABLE = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size, torch.layout,
              torch.memory_format, range, slice, frozenset, type(Ellipsis))


class _NotStatic(Exception):
    """A source or fact that no words cover."""


class _Walker:
    """Follows sources from anchors, adding the words that each step depends on to a table."""

    def __init__(self, table: WordTable, arguments: dict[str, Any], cells: dict[str, types.CellType], volatile: set[int]) -> None:
        self.table, self.arguments, self.cells, self.volatile = table, arguments, cells, volatile
        self.anchors: dict[Source, Any] = {}
        self._objects: dict[Source, Any] = {}
        self._refused: set[Source] = set()

    def object(self, source: Source) -> Any:
        """The object at a static source. Raises _NotStatic."""
        if source in self._objects:
            return self._objects[source]
        if source in self._refused:
            raise _NotStatic
        try:
            value = self._step(source)
        except _NotStatic:
            self._refused.add(source)
            raise
        self._objects[source] = value
        return value

    def need(self, covered: Any) -> None:
        if covered is False or covered is None:
            raise _NotStatic

    def dict_word(self, d: Any) -> None:
        if type(d) not in (dict, OrderedDict) or id(d) in self.volatile:
            raise _NotStatic
        self.need(self.table.add_dict(d))

    def instance_dict(self, instance: Any) -> dict:
        d = self.table.add_instance_dict(instance) if hasattr(instance, "__dict__") else None
        self.need(d)
        self.dict_word(d)
        return d                                          # type: ignore[return-value]

    def _step(self, source: Source) -> Any:
        match source:
            case Local(name):
                return self._anchor(source, self.arguments[name])
            case Cell(name):
                return self._anchor(source, self.cells[name].cell_contents)
            case CellOf(function, index):
                cell = self.object(function).__closure__[index]
                self.need(self.table.add_cell(cell))
                return cell.cell_contents
            case Global(name, namespace):
                self.dict_word(namespace)
                return namespace[name]
            case Builtin(name):
                self.dict_word(builtins.__dict__)
                return builtins.__dict__[name]
            case Pinned(value):
                return value
            case InDict(base, name):
                return self.instance_dict(self.object(base))[name]
            case TypeOf(base):
                instance = self.object(base)
                self.need(self.table.add_type_of(instance))
                return type(instance)
            case ClassDict(base, name):
                cls = self.object(base)
                self.need(isinstance(cls, type) and self.table.add_class(cls))
                return cls.__dict__[name]
            case Attr(base, name):
                return self._attribute(self.object(base), name)
            case Item(base, key):
                container = self.object(base)
                if type(container) is not tuple:
                    self.dict_word(container)
                return container[key] if type(container) is tuple else dict.__getitem__(container, key)
            case KeyAt(base, index):
                container = self.object(base)
                if type(container) is not dict:           # an OrderedDict may be reordered without a new version
                    raise _NotStatic
                self.dict_word(container)
                return list(container)[index]
        raise _NotStatic

    def _anchor(self, source: Source, value: Any) -> Any:
        """Long-lived objects only: what is made anew for each call would never match again."""
        cls = type(value)
        long_lived = isinstance(value, (torch.nn.Module, types.FunctionType, types.ModuleType, type)) or (
            bool(cls.__flags__ & (1 << 9)) and hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, dict, list, tuple)))
        if not long_lived or cls.__weakrefoffset__ == 0:
            raise _NotStatic
        self.anchors[source] = value
        return value

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, types.ModuleType):
            d = self.instance_dict(owner)
            if name in d:
                return d[name]
        elif (isinstance(owner, types.FunctionType) and self.table.add_function_field(owner, name)
              or isinstance(owner, types.MethodType) and name in ("__func__", "__self__")):
            return getattr(owner, name)
        elif isinstance(owner, type):
            self.need(self.table.add_class(owner))
            raw = next((c.__dict__[name] for c in owner.__mro__ if name in c.__dict__), None)
            if raw is getattr(owner, name, self):
                return raw
        elif isinstance(owner, torch.nn.Module):
            self.need(self.table.add_type_of(owner) and self.table.add_class(type(owner)))
            d = self.instance_dict(owner)
            if not any(name in c.__dict__ for c in type(owner).__mro__):
                if name in d:
                    return d[name]
                for part in ("_parameters", "_buffers", "_modules"):
                    self.dict_word(d[part])
                    if name in d[part]:
                        return d[part][name]
        raise _NotStatic

    def cover(self, guard: Guard) -> None:
        """Add the words that a guard depends on. Raises _NotStatic where there are none."""
        if guard.source is None:
            raise _NotStatic
        value = self.object(guard.source)
        match guard.kind:
            case "type":
                self.need(self.table.add_type_of(value))
            case "is":
                pass
            case "equals":
                if not _is_immutable(value):
                    raise _NotStatic
            case "tensor":
                if id(value) in self.volatile:
                    raise _NotStatic
                self.need(isinstance(value, torch.Tensor) and self.table.add_tensor(value))
            case "length" | "no_key":
                if type(value) not in (tuple, str, frozenset, range):
                    self.dict_word(value)
            case "keys":
                if type(value) is OrderedDict and len(value) > 1:
                    raise _NotStatic
                self.dict_word(value)
            case "absent":
                if isinstance(value, type):
                    self.need(self.table.add_class(value))
                else:
                    self.instance_dict(value)
            case "same" | "distinct":
                self.object(guard.value)
            case _:
                raise _NotStatic


def _is_immutable(value: Any) -> bool:
    return all(map(_is_immutable, value)) if type(value) is tuple else type(value) in _IMMUTABLE or isinstance(value, type)


class FastCheck:
    """The cheap check of one entry; `prepare(values)` gives it once it can be made. Thread-safe under the dispatcher's lock."""

    def __init__(self, guards: Sequence[Guard], names: Sequence[str], freevars: Sequence[str], prefetch: Sequence[Source],
                 full: Callable[..., tuple | None]) -> None:
        self.guards, self.names, self.freevars = sorted(guards, key=rank), tuple(names), tuple(freevars)
        self.prefetch, self.full = tuple(prefetch), full
        self.check: Callable[..., tuple | None] | None = None
        self.renewals = 0
        self._volatile: dict[int, Any] = {}               # the objects themselves, so that their ids stay theirs
        self._changes: Counter[int] = Counter()
        self._signature: tuple = ()
        self._table: WordTable | None = None
        self._references: list[weakref.ref] = []
        self._renewed_at, self._cost = -1e9, 0.0
        self._useless = len(self.guards) < MIN_STATIC_GUARDS or native_differs() is None

    def prepare(self, values: Sequence[Any]) -> Callable[..., tuple | None] | None:
        """The cheap check, made for these values, for which all guards hold; None if there is too little for words to stand for."""
        if self.check is None and not self._useless:
            self._renew(values)
        return self.check

    def _renew(self, values: Sequence[Any]) -> None:
        """Walk the guards, take the words, and let them stand for the guards if the full check still passes after that."""
        start = perf_counter()
        table = WordTable()
        arguments, cells = dict(zip(self.names, values)), dict(zip(self.freevars, values[-1]))
        walker = _Walker(table, arguments, cells, set(self._volatile))
        live: list[int] = []
        for i, guard in enumerate(self.guards):
            try:
                walker.cover(guard)
            except Exception:                             # whatever cannot be followed stays a guard that is evaluated
                live.append(i)
        if len(self.guards) - len(live) < MIN_STATIC_GUARDS:
            self._useless = self.check is None
            return
        fetched: list[int] = []
        objects = []
        for i, source in enumerate(self.prefetch):
            try:
                objects.append(walker.object(source))
            except Exception:
                fetched.append(i)
                objects.append(None)
        table.seal()
        if self.full(*values) is None or table.differs_in_python():
            return
        anchors = tuple(walker.anchors)
        signature = (tuple(live), anchors, tuple(fetched))
        if self.check is None or signature != self._signature:
            self.check = self._generate(live, anchors, fetched)
            self._signature = signature
        self._references = []
        for source in anchors:
            held = walker.anchors[source]
            self._references.append(weakref.ref(held, self._anchor_died))
            table.forget(held)
        identities = tuple(id(walker.anchors[source]) for source in anchors)
        constants = self.check.__defaults__ or ()
        # One assignment: a call in another thread has either the old values or the new ones.
        self.check.__defaults__ = (table, table.pointer, tuple(objects), identities, *constants[4:])
        self._table = table
        self.renewals += 1
        self._renewed_at = perf_counter()
        self._cost = self._renewed_at - start

    def _anchor_died(self, reference: weakref.ref) -> None:
        """Let go of the objects under an anchor; the address of the anchor may be used again by another object."""
        check = self.check
        if check is not None and _NOTHING is not None:     # None at the interpreter's exit
            constants = check.__defaults__ or ()
            dead = tuple(-1 for _ in constants[3])
            check.__defaults__ = (None, _NOTHING.pointer, (), dead or (-1,), *constants[4:])
        self._table = None
        self._renewed_at = -1e9

    def _slow(self, *values: Any) -> tuple | None:
        """An anchor is another object or a word differs: the full check decides."""
        result = self.full(*values)
        if result is None:
            return None
        if perf_counter() - self._renewed_at > RENEW_SHARE * self._cost:
            self._note_change()
            self._renew(values)
        return result

    def _note_change(self) -> None:
        differs = native_differs()
        if self._table is None or differs is None:
            return
        index = differs(self._table.pointer)
        if index:
            owner = self._table.owner_of(index - 1)
            self._changes[id(owner)] += 1
            if self._changes[id(owner)] >= VOLATILE_AFTER and isinstance(owner, (dict, torch.Tensor)):
                self._volatile[id(owner)] = owner

    def _generate(self, live: list[int], anchors: tuple[Source, ...], fetched: list[int]) -> Callable[..., tuple | None]:
        """The check's code: anchors, words, live guards; prefetched objects come from the table where they are static."""
        guards = [self.guards[i] for i in live]
        writer = GuardWriter(self.names, self.freevars, guards)
        for i, source in enumerate(anchors):
            name = getattr(source, "name", "")            # an anchor is a Local or a Cell
            here = parameter(name) if isinstance(source, Local) else f"C[{self.freevars.index(name)}].cell_contents"
            writer.lines.append(f"if id({here}) != IDENTITIES[{i}]: return SLOW({', '.join([*map(parameter, self.names), 'C'])})")
        writer.lines.append(f"if DIFFERS(POINTER): return SLOW({', '.join([*map(parameter, self.names), 'C'])})")
        for guard in guards:
            writer.guard(guard)
        result = "OBJECTS"
        if fetched:
            at = {i: writer.fetcher.name(self.prefetch[i]) for i in fetched}
            parts = [at.get(i, f"OBJECTS[{i}]") for i in range(len(self.prefetch))]
            result = f"({', '.join(parts)},)"
        writer.constants.namespace.update(SLOW=self._slow, DIFFERS=native_differs(), id=id)
        return writer.finish(result, leading=("TABLE", "POINTER", "OBJECTS", "IDENTITIES"))


_NOTHING = WordTable().seal()

