"""Lists, dicts, sets, deques and tuples from outside: read item by item, or as a shadow copy that takes the writes.

A shadow is made when native code must see the whole container, or when it is written for the first time. Its elements are
wrapped (tensors are fakes); all later reads and writes of the container go to it, and the outside one gets its contents
when the region's effects are replayed.
"""
from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.class_entries import ClassEntries
from fuseline.capture.errors import Break, CannotCapture, ProgramError, RegionEnd, RestartCapture, break_here
from fuseline.capture.inputs import Inputs
from fuseline.capture.provenance import CONSTANTS, IDENTITIES, MISSING, is_python, lookup
from fuseline.capture.values import VIEWS, viewed
from fuseline.ir.region import Computed, Item, KeyAt, Source

PASS_THROUGH = (Break, CannotCapture, ProgramError, RegionEnd, RestartCapture)
_BUILTIN_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


def plain_number(value: Any) -> Any:
    """A symbolic number as the constant it is now, with a guard that it stays so: where only a constant will do."""
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    if type(value) is torch.Size:
        return torch.Size(map(plain_number, value))
    return tuple(map(plain_number, value)) if type(value) is tuple else value


def holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (tuple, list)) and any(map(holds_tensor, value))


class ItemIterator:
    """Iterates over values found beforehand; what is left of it can be rebuilt."""

    def __init__(self, items: list) -> None:
        self.items, self.position = items, 0

    def __iter__(self) -> ItemIterator:
        return self

    def __next__(self) -> Any:
        if self.position >= len(self.items):
            raise StopIteration
        self.position += 1
        return self.items[self.position - 1]

    def rest(self) -> list:
        return self.items[self.position:]


class ProgramIterator:
    """An iterator of a class written in Python, as native code can use it."""

    def __init__(self, world: Any, target: Any) -> None:
        self.world, self.target = world, target

    def __iter__(self) -> ProgramIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self.world.interpreter_call(self.world.special_method(self.target, "__next__"), (), {})
        except ProgramError as error:
            if isinstance(error.value, StopIteration):
                raise StopIteration(error.value.value) from None
            raise
        except Break:
            self.world.touch()                             # the native code that asks may have moved on before
            raise


class Containers(Inputs):
    # What the layers above define; the World has them all.
    getattr: Callable[..., Any]
    special_method: Callable[..., Any]
    probe: Callable[..., None]
    index_of: Callable[..., Any]
    shows_itself: Callable[..., bool]
    plain_delattr: Callable[..., None]
    attribute_written: Callable[..., None]
    compare: Callable[..., Any]
    truth: Callable[..., bool]
    record: Callable[..., Any]
    callback: Callable[..., Any]
    type_of: Callable[..., type]
    store_global: Callable[..., None]
    cell_source: Callable[..., Source | None]
    written_globals: dict[tuple[int, str], Any]
    made_classes: dict[int, tuple[type, int]]
    calls: int

    """shadows   id of a container from outside -> (container, shadow)      owners   id of an instance dict -> the instance"""

    interpreter_call: Callable[..., Any]
    break_position: Callable[[], int]
    touch: Callable[[], None]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shadows: dict[int, tuple[Any, Any]] = {}
        self.owners: dict[int, Any] = {}
        self.effects: list[tuple] = []
        self.replaced: set[int] = set()

    def effect(self, kind: str, target: Any, name: str = "", *values: Any, extra: Any = None) -> None:
        """Remember a change that the compiled code replays; recipes are made at the end of the region."""
        self.touch()
        self.effects.append((kind, target, name, values, extra))

    def native(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call native code: what it raises is the program's exception."""
        try:
            return function(*args, **kwargs)
        except PASS_THROUGH:
            raise
        except torch_internals.unsupported_in_trace() as error:
            self.touch()
            raise break_here("data-dependent", f"{getattr(function, '__name__', function)} needs the values of a tensor",
                             "keep the values on the device, or read them outside the compiled function") from error
        except Exception as error:
            link: BaseException = error
            while link.__context__ is not None:            # what our own code was handling is no concern of the program
                if isinstance(link.__context__, PASS_THROUGH):
                    link.__context__ = None
                    break
                link = link.__context__
            raise ProgramError(error) from None

    # -- contents ------------------------------------------------------------------------------------------------
    def contents(self, value: Any) -> Any:
        """What native code may look at in place of a container: itself if it is new, else its shadow or a wrapped copy."""
        if type(value) in VIEWS and (source := self.source(value)) is not None:
            shown = self.read(viewed(value), Computed(viewed, (source,)))
            return getattr(self.contents(shown), VIEWS[type(value)])()
        if not isinstance(value, (*_BUILTIN_CONTAINERS, types.MappingProxyType)) or isinstance(value, torch.Size):
            return value
        source = self.source(value)
        if source is None:
            return value
        found = self.shadows.get(id(value))
        if found is not None:
            return found[1]
        shadow = self._copy(value, source)
        self.shadows[id(value)] = (value, shadow)
        return shadow

    def _copy(self, value: Any, source: Any) -> Any:
        if isinstance(value, types.MappingProxyType):
            if not all(type(k) in CONSTANTS for k in value):
                raise break_here("unknown-c-function", "a mappingproxy whose keys are objects is not captured", "make a dict of it outside")
            self.guard(source, "keys", tuple(value))
            return {k: self.read(value[k], Item(source, k)) for k in value}
        if isinstance(value, dict):
            if all(type(k) in CONSTANTS for k in value):
                self.guard(source, "keys", tuple(value))
            else:
                self.guard(source, "length", len(value))
            pairs = [(k if type(k) in CONSTANTS else self.read(k, KeyAt(source, i)), self.read(v, Item(source, k)))
                     for i, (k, v) in enumerate(dict.items(value))]
            if isinstance(value, collections.defaultdict):
                factory = self.getattr(value, "default_factory")
                return collections.defaultdict(self.callback(factory), pairs)
            if isinstance(value, collections.Counter):
                return collections.Counter(dict(pairs))
            return (collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict)(pairs)
        if isinstance(value, (set, frozenset)):
            if not all(type(v) in CONSTANTS or isinstance(v, IDENTITIES) for v in value):
                raise break_here("set-of-objects", "a set of objects from outside is not captured", "use a list or a dict")
            self.guard(source, "equals", type(value)(value))
            return type(value)(value) if type(value) in (set, frozenset) else set(value)
        items = [self.read(v, Item(source, i)) for i, v in enumerate(value)]
        if isinstance(value, tuple):
            same = all(a is b for a, b in zip(items, value))
            return value if same else tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
        if isinstance(value, collections.deque):
            return collections.deque(items, value.maxlen)
        return items

    def writable(self, value: Any) -> Any:
        """The object to change in place of a container: itself if new, else its shadow, whose contents are replayed."""
        if self.source(value) is None:
            return value
        shadow = self.contents(value)
        if id(value) not in self.replaced and id(value) not in self.owners:
            self.replaced.add(id(value))
            self.effect("replace", value)
        return shadow

    def contains_key(self, entries: dict, key: Any) -> bool:
        """`key in entries` for a dict: only this key is guarded."""
        source = self.source(entries)
        if source is None or id(entries) in self.shadows:
            return key in self.contents(entries)
        if key in entries:
            self.read(entries[key], Item(source, key))
            return True
        self.guard(source, "no_key", key)
        return False

    # -- subscripts ----------------------------------------------------------------------------------------------
    def getitem(self, value: Any, key: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.record("call_function", operator.getitem, (value, self._index(key)), {})
        cls = type(value)
        if cls is ClassEntries:
            found = value.get(key, MISSING)
            if found is MISSING:
                raise ProgramError(KeyError(key))
            return found
        if is_python(cls, "__getitem__"):
            return self.interpreter_call(self.special_method(value, "__getitem__"), (key,), {})
        if isinstance(value, type):
            return self._class_getitem(value, key)
        if isinstance(key, torch.Tensor) and not isinstance(value, dict):
            raise break_here("item", "a tensor is used as an index of a Python sequence", "index with a Python int")
        return self.plain_getitem(value, key)

    def plain_getitem(self, value: Any, key: Any) -> Any:
        """As the builtin container has it."""
        if isinstance(value, dict):
            key = plain_number(key)
            if type(key) not in CONSTANTS:
                self.probe(self.contents(value), key)
        elif type(key) is not int:
            key = self.index_of(key)
        source, cls = self.source(value), type(value)
        if source is None or id(value) in self.shadows:
            found = self.contents(value)
            if isinstance(value, dict) and is_python(cls, "__missing__") and key not in found:
                return self.interpreter_call(self.special_method(value, "__missing__"), (key,), {})
            if isinstance(found, collections.defaultdict) and source is not None and key not in found:
                found = self.writable(value)
            return self.native(operator.getitem, found, key)
        if isinstance(value, dict) and type(key) in CONSTANTS:
            if not dict.__contains__(value, key):
                if isinstance(value, collections.defaultdict) and value.default_factory is not None:
                    return self.native(operator.getitem, self.writable(value), key)
                self.guard(source, "no_key", key)
                if is_python(cls, "__missing__"):
                    return self.interpreter_call(self.special_method(value, "__missing__"), (key,), {})
                if cls is not dict and isinstance(value, collections.Counter):
                    return 0
                raise ProgramError(KeyError(key))
            return self.read(dict.__getitem__(value, key), Item(source, key))
        if isinstance(value, (list, tuple, collections.deque)) and type(key) in (int, bool):
            if not -len(value) <= key < len(value):
                return self.native(operator.getitem, value, key)
            return self.read(value[key], Item(source, int(key) % len(value)))
        if isinstance(value, _BUILTIN_CONTAINERS):
            return self.native(operator.getitem, self.contents(value), key)
        if isinstance(value, types.MappingProxyType):
            if type(key) not in CONSTANTS or key not in value:
                return self.native(operator.getitem, self.contents(value), key)
            return self.read(value[key], Item(source, key))
        raise break_here("unknown-c-function", f"subscripting a {cls.__name__} is not captured", "convert it outside the compiled function")

    def _index(self, key: Any) -> Any:
        if isinstance(key, (list, tuple)):
            return type(key)(self._index(k) for k in self.contents(key)) if type(key) in (list, tuple) else key
        return key

    def _class_getitem(self, cls: type, key: Any) -> Any:
        if is_python(type(cls), "__getitem__"):
            return self.interpreter_call(lookup(type(cls), "__getitem__")[1], (cls, key), {})
        return self.native(operator.getitem, cls, key)

    def setitem(self, value: Any, key: Any, new: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.record("call_function", operator.setitem, (value, self._index(key), new), {})
        elif is_python(type(value), "__setitem__"):
            self.interpreter_call(self.special_method(value, "__setitem__"), (key, new), {})
        else:
            self.plain_setitem(value, key, new)

    def plain_setitem(self, value: Any, key: Any, new: Any) -> None:
        if isinstance(value, dict):
            key = plain_number(key)
            if type(key) not in CONSTANTS:
                self.probe(self.contents(value), key)
        elif type(key) is not int:
            key = self.index_of(key)
        if id(value) in self.owners:
            self.setattr_entry(value, key, new)
        elif self.source(value) is None or isinstance(value, (dict, list, collections.deque)):
            self.native(operator.setitem, self.writable(value), key, self.contents(new) if isinstance(key, slice) else new)
        elif isinstance(value, _BUILTIN_CONTAINERS) or type(value) in CONSTANTS:
            self.native(operator.setitem, value, key, new)
        else:
            raise break_here("unknown-c-function", f"writing into a {type(value).__name__} is not captured",
                             "write outside the compiled function")

    def setattr_entry(self, entries: dict, name: str, value: Any) -> None:
        """`obj.__dict__[name] = value` for an object from outside."""
        obj = self.owners[id(entries)]
        self.attribute_written(obj, name, value)
        self.effect("setattr", obj, name, value)

    def delitem(self, value: Any, key: Any) -> None:
        if isinstance(value, torch.Tensor):
            raise ProgramError(TypeError("Tensor does not support deleting items"))
        if is_python(type(value), "__delitem__"):
            self.interpreter_call(self.special_method(value, "__delitem__"), (key,), {})
        elif id(value) in self.owners:
            self.plain_delattr(self.owners[id(value)], key)
        elif self.source(value) is None or isinstance(value, (dict, list, collections.deque)):
            if isinstance(value, dict):
                key = plain_number(key)
                self.probe(self.contents(value), key)
            else:
                key = self.index_of(key)
            self.native(operator.delitem, self.writable(value), key)
        else:
            raise break_here("unknown-c-function", f"deleting from a {type(value).__name__} is not captured",
                             "delete outside the compiled function")

    def contains(self, value: Any, key: Any) -> bool:
        cls = type(value)
        if isinstance(value, torch.Tensor):
            raise break_here("data-dependent-branch", "`in` on a tensor looks at its values", "compute the condition with torch.where")
        if cls is ClassEntries:
            return value.get(key, MISSING) is not MISSING
        if is_python(cls, "__contains__"):
            return self.truth(self.interpreter_call(self.special_method(value, "__contains__"), (key,), {}))
        if isinstance(value, (dict, set, frozenset)):
            key = plain_number(key)
            if type(key) not in CONSTANTS:
                self.probe(self.contents(value), key)
        if isinstance(value, dict) and type(key) in CONSTANTS:
            return self.contains_key(value, key)
        if isinstance(value, (list, tuple, collections.deque)):
            return any(item is key or self.truth(self.compare(operator.eq, item, key)) for item in list(self.contents(value)))
        if is_python(cls, "__iter__"):
            return any(item is key or self.truth(self.compare(operator.eq, item, key)) for item in self.iterate(value))
        return self.native(operator.contains, self.contents(value), key)

    # -- iteration -----------------------------------------------------------------------------------------------
    def iterate(self, value: Any) -> Iterator:
        """A Python iterator over the wrapped items of anything that can be iterated."""
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                raise ProgramError(TypeError("iteration over a 0-d tensor"))
            return ItemIterator(list(self.record("call_method", "unbind", (value, 0), {})))
        cls = type(value)
        if cls is ClassEntries:
            value.whole()
        if hasattr(cls, "__next__"):
            self.touch()                                   # who asks for an iterator's iterator advances it
        if cls in (ItemIterator, ProgramIterator) or hasattr(cls, "symbolic_type"):
            return value
        if is_python(cls, "__iter__"):
            found = self.interpreter_call(self.special_method(value, "__iter__"), (), {})
            if not hasattr(type(found), "__next__"):
                raise ProgramError(TypeError(f"iter() returned non-iterator of type '{self.type_of(found).__name__}'"))
            return ProgramIterator(self, found) if is_python(type(found), "__next__") else found
        if not hasattr(cls, "__iter__") and is_python(cls, "__getitem__"):
            return self._by_index(value)
        if self.source(value) is not None and not isinstance(value, (*_BUILTIN_CONTAINERS, types.MappingProxyType, type, *VIEWS)):
            if hasattr(cls, "__next__"):
                raise break_here("iterator", f"a {cls.__name__} that began outside the captured code is iterated over",
                                 "pass the list or the range and iterate over it inside")
            if hasattr(cls, "__iter__"):
                raise break_here("unknown-c-function", f"iterating over a {cls.__name__} is not captured", "convert it to a list outside")
        return self.native(iter, self.contents(value))

    def _by_index(self, value: Any) -> Iterator:
        items: list[Any] = []
        while True:
            try:
                items.append(self.getitem(value, len(items)))
            except ProgramError as error:
                if isinstance(error.value, IndexError):
                    return ItemIterator(items)
                raise
