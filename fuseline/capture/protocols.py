"""Special methods written in Python that native code would call itself: hashing, ordering, equality, conversion to numbers.

Native code must not run them for real during capture, where nothing guards what they read and nothing replays what they do:
they are interpreted first, and native code gets their results.
"""
from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fuseline.capture.containers import plain_number
from fuseline.capture.errors import Break, ProgramError
from fuseline.capture.provenance import CONSTANTS, is_python
from fuseline.capture.torch_calls import TorchCalls

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# Functions of one object -> the special methods that they ask for, the first that its class has.
_CONVERSIONS: dict[Any, tuple[str, ...]] = {
    round: ("__round__",), math.floor: ("__floor__",), math.ceil: ("__ceil__",), math.trunc: ("__trunc__",),
    int: ("__int__", "__index__", "__trunc__"), float: ("__float__", "__index__"), complex: ("__complex__", "__float__", "__index__"),
    bytes: ("__bytes__",), dir: ("__dir__",), operator.length_hint: ("__len__", "__length_hint__")}
TAKES_INDEX = frozenset({bin, oct, hex, chr, range, operator.index})
_EXPECTED = {"__int__": int, "__float__": float, "__complex__": complex, "__index__": int}


class _Ordered:
    """An item of the program as native sorting compares it."""

    __slots__ = ("value", "world")

    def __init__(self, world: Any, value: Any) -> None:
        self.world, self.value = world, value

    def _compare(self, op: Callable, other: _Ordered) -> bool:
        try:
            return self.world.truth(self.world.compare(op, self.value, other.value))
        except Break:
            self.world.touch()
            raise

    def __lt__(self, other: _Ordered) -> bool:
        return self._compare(operator.lt, other)

    def __gt__(self, other: _Ordered) -> bool:
        return self._compare(operator.gt, other)


def defines(value: Any, names: Iterable[str], depth: int = 2) -> bool:
    """Whether the class of a value, or of an item of a list or tuple, has one of the special methods in Python."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (torch.Tensor, enum.Enum)):
        return False
    if any(is_python(kind, name) for name in names):
        return True
    return depth > 0 and isinstance(value, (list, tuple)) and any(defines(v, names, depth - 1) for v in value)


class Protocols(TorchCalls):
    # -- hashing -------------------------------------------------------------------------------------------------
    def hash(self, value: Any) -> int:
        """hash(value), with `__hash__` in the interpreter."""
        if isinstance(value, torch.Tensor) or not defines(value, ("__hash__",)):
            return self.native(hash, plain_number(self.contents(value)))
        if isinstance(value, tuple) and not is_python(type(value), "__hash__"):
            return self.native(hash, tuple(map(self.hash, value)))
        found = self.interpreter_call(self.special_method(value, "__hash__"), (), {})
        if not isinstance(found, int):
            raise ProgramError(TypeError("__hash__ method should return an integer"))
        return hash(found)

    def probe(self, entries: Iterable, key: Any) -> None:
        """Interpret what looking for a key in a dict or set runs: its `__hash__`, and `__eq__` of the keys with the same hash."""
        if type(key) in CONSTANTS or not defines(key, ("__hash__",)):
            return
        if isinstance(key, tuple):
            for part in key:
                self.probe((), part)
            return
        number = self.hash(key)
        for other in list(entries):
            if other is not key and type(other) not in _PLAIN and hash(other) == number and self.truth(
                    self.compare(operator.eq, other, key)):
                return

    # -- ordering and equality -----------------------------------------------------------------------------------
    def ordered(self, function: Callable, items: Sequence, key: Any, reverse: Any = False) -> Any:
        """sorted, min or max of items, compared as their classes say in Python; None if native code can do it."""
        keys = items if key is None else [self.interpreter_call(key, (item,), {}) for item in items]
        if any(defines(k, ("__lt__", "__gt__")) for k in keys):
            keys = [_Ordered(self, k) for k in keys]
        elif key is None:
            return None
        if function is sorted:
            return [items[i] for i in self.native(sorted, range(len(items)), key=keys.__getitem__, reverse=self.truth(reverse))]
        return items[self.native(function, range(len(items)), key=keys.__getitem__)]

    def find(self, items: Sequence, wanted: Any, start: int = 0, stop: int | None = None) -> int:
        """The index of the first item that is or equals `wanted`; -1 if there is none."""
        for i in range(*slice(start, stop).indices(len(items))):
            if items[i] is wanted or self.truth(self.compare(operator.eq, items[i], wanted)):
                return i
        return -1

    # -- conversions ---------------------------------------------------------------------------------------------
    def index_of(self, value: Any) -> Any:
        """A value as native code uses it for an index: the result of its `__index__`."""
        if type(value) in _PLAIN or isinstance(value, torch.Tensor) or not is_python(type(value), "__index__"):
            return value
        return self._converted(value, "__index__", ())

    def converted(self, function: Any, args: tuple) -> tuple[bool, Any]:
        """(True, function(*args)) if the class of args[0] says in Python what that is; else (False, None)."""
        names = _CONVERSIONS.get(function, ()) if args and type(args[0]) not in _PLAIN and not isinstance(args[0], torch.Tensor) else ()
        for name in names:
            if is_python(type(args[0]), name):
                found = self._converted(args[0], name, args[1:])
                return True, self.native(function, found) if function in (int, float, complex, bytes) else found
            if hasattr(type(args[0]), name):
                break
        return False, None

    def _converted(self, value: Any, name: str, args: tuple) -> Any:
        found = self.interpreter_call(self.special_method(value, name), args, {})
        expected = _EXPECTED.get(name)
        if expected is not None and not isinstance(found, (expected, torch.SymInt, torch.SymFloat)):
            kind, what = type(found).__name__, f"{name} returned non-{expected.__name__} (type {{}})"
            raise ProgramError(TypeError((f"{type(value).__name__}." if expected is float else "") + what.format(kind)))
        return found

