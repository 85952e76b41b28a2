"""Where the values on the symbolic stack came from, and what was learned about them: sources and guards."""
from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from typing import Any

import torch

from fuseline.capture.values import LIBRARY_CONSTANTS, LIBRARY_IDENTITIES
from fuseline.errors import InternalError
from fuseline.ir.region import Guard, Pinned, Source, TypeOf

# Values that are guarded by what they are equal to, and that need no source: they are their own recipe.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.layout,
             torch.memory_format, torch.Size, range, *LIBRARY_CONSTANTS)
# Objects that are guarded by identity: they live long and their meaning does not depend on mutable contents.
IDENTITIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType,
              types.WrapperDescriptorType, types.ClassMethodDescriptorType, classmethod, staticmethod, property,
              types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, enum.Enum, *LIBRARY_IDENTITIES)
SYMBOLIC = frozenset({torch.SymInt, torch.SymFloat, torch.SymBool})
SEQUENCES = (list, tuple, collections.deque)


class Provenance:
    """The tables by identity. They hold what they name, so that an id stays the object's own."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self._sources: dict[int, tuple[Any, Source]] = {}
        self._guards: dict[tuple, Guard] = {}

    def source(self, value: Any) -> Source | None:
        """Where an object was found; None for one made during this capture, and for constants."""
        found = self._sources.get(id(value))
        return None if found is None else found[1]

    def found_at(self, value: Any) -> Source:
        """The source of an object that is known to come from outside. Raises InternalError for one that does not."""
        found = self.source(value)
        if found is None:
            raise InternalError(f"a {type(value).__name__} made during capture has no source")
        return found

    def is_fresh(self, value: Any) -> bool:
        return id(value) not in self._sources

    def register(self, value: Any, source: Source) -> None:
        self._sources[id(value)] = (value, source)

    def guard(self, source: Source | None, kind: str, value: Any, symbols: tuple = ()) -> None:
        """Rely on a fact, once."""
        key = (source, kind, _key(value))
        if key not in self._guards:
            self._guards[key] = Guard(source, kind, value, self.where(), symbols)

    def read_object(self, value: Any, source: Source) -> Any:
        """Guard an object that is no tensor and no symbolic number, and remember its source."""
        kind = type(value)
        if kind in CONSTANTS:
            self.guard(source, "equals", value)
            return value
        known = self._sources.get(id(value))
        if isinstance(value, IDENTITIES):
            if type(source) is not Pinned:
                self.guard(source, "is", value)
        elif known is not None and known[1] != source:
            self.guard(source, "same", known[1])
        else:
            self.guard(source, "type", kind)
            if isinstance(value, SEQUENCES):
                self.guard(source, "length", len(value))
            elif isinstance(value, (int, float, complex, str, bytes, slice)):
                self.guard(source, "equals", value)
        if known is None:
            self._sources[id(value)] = (value, source)
        return value

    def class_source(self, cls: type, instance: Any = None) -> Source:
        """A source of a class: where it was found, the type of an instance, or the class itself."""
        found = self._sources.get(id(cls))
        if found is not None:
            return found[1]
        origin = self.source(instance) if instance is not None else None
        return TypeOf(origin) if origin is not None and type(instance) is cls else Pinned(cls)


def _key(value: Any) -> Any:
    """What two equal facts have in common."""
    if isinstance(value, (str, int, float, bytes, complex)):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        return "id", id(value)
    return type(value), value


def lookup(cls: type, name: str) -> tuple[Any, Any]:
    """(the class in the MRO that defines a name, what it is bound to there), without descriptors; (None, MISSING)."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base, base.__dict__[name]
    return None, MISSING


def is_python(cls: type, name: str) -> bool:
    """Whether a class defines a special method in Python (symbolic numbers count as the numbers that they stand for)."""
    return cls not in SYMBOLIC and isinstance(lookup(cls, name)[1], types.FunctionType)


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


MISSING = _Missing()
