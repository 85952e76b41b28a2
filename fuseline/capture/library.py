"""Calls of the standard library and of NumPy that depend on constant arguments alone: Python makes them during capture."""
from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fuseline.capture import values
from fuseline.capture.containers import plain_number
from fuseline.capture.errors import break_here
from fuseline.capture.protocols import Protocols
from fuseline.capture.provenance import CONSTANTS, MISSING
from fuseline.ir.region import Computed

_CONTAINERS = (list, tuple, dict, set, frozenset)


class _NotPlain(Exception):
    """An argument is no constant and no container of constants."""


class Library(Protocols):
    def of_values(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """What a pure function gives for constants; MISSING where an argument is none."""
        looks = values.takes_functions(function)
        try:
            plain = [self._plain_value(a, looks) for a in args]
            named = {key: self._plain_value(a, looks) for key, a in kwargs.items()}
        except _NotPlain:
            return MISSING
        if named.get("out") is not None:
            return MISSING
        return self.native(function, *plain, **named)

    def _plain_value(self, value: Any, functions: bool = False) -> Any:
        value = plain_number(value)
        if type(value) in CONSTANTS or isinstance(value, (type, *values.FROZEN)):
            return value
        if functions and isinstance(value, (types.FunctionType, types.MethodType)):
            return value
        if type(value) in _CONTAINERS:
            inside = self.contents(value)
            if type(inside) is dict:
                return {self._plain_value(k): self._plain_value(v) for k, v in inside.items()}
            return type(inside)(map(self._plain_value, inside))
        if values.is_array(value) and self.source(value) is None:
            return value
        raise _NotPlain

    def known_state(self, value: Any, what: str) -> None:
        """Raise Break for an object from outside whose state only C code sees: no guard would notice that it changed."""
        if self.source(value) is not None and values.is_opaque(type(value)) and not isinstance(value, (torch.Tensor, *values.VIEWS)):
            raise break_here("unknown-c-function", f"{what} of a {type(value).__name__} is not captured",
                             "convert it outside the compiled function")

    def dereference(self, reference: weakref.ReferenceType) -> Any:
        """What a weak reference refers to: found again through the reference on each call."""
        source, found = self.source(reference), reference()
        if source is None:
            return found
        if self.source(found) is not None or isinstance(found, torch.Tensor) and id(found) in self.fakes:
            known = self.source(found) or self.source(self.fakes[id(found)][1])
            self.guard(Computed(values.dereference, (source,)), "same", known)
            return self.fakes[id(found)][1] if isinstance(found, torch.Tensor) else found
        return self.read(found, Computed(values.dereference, (source,)))

    def call_method(self, caller: operator.methodcaller, target: Any) -> Any:
        """`operator.methodcaller(name, ...)(target)`."""
        parts: Any = caller.__reduce__()
        made_by, given = parts[0], parts[1]                        # the class, or a partial of it with name and keywords
        words = [*getattr(made_by, "args", ()), *given]
        return self.interpreter_call(self.getattr(target, words[0]), tuple(words[1:]), dict(getattr(made_by, "keywords", {})))
