"""Operators, comparisons and truth on every kind of value."""
from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import torch

from fuseline.capture.attributes import Attributes
from fuseline.capture.containers import holds_tensor, plain_number
from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.provenance import CONSTANTS, IDENTITIES, MISSING, is_python, lookup
from fuseline.capture.values import is_opaque, is_scalar

_EXACT = frozenset({int, float, bool, str, complex})
_NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat})
_SEQUENCES = (str, bytes, list, tuple)
_FALLBACK = {"iadd": operator.add, "iand": operator.and_, "ifloordiv": operator.floordiv, "ilshift": operator.lshift,
             "imatmul": operator.matmul, "imul": operator.mul, "imod": operator.mod, "ior": operator.or_, "ipow": operator.pow,
             "irshift": operator.rshift, "isub": operator.sub, "itruediv": operator.truediv, "ixor": operator.xor,
             "iconcat": operator.concat}
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "** or pow()", "matmul": "@",
            "lshift": "<<", "rshift": ">>", "and_": "&", "or_": "|", "xor": "^", "divmod": "divmod()",
            "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITWISE = frozenset({operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift})
_MIRROR = {"lt": "__gt__", "gt": "__lt__", "le": "__ge__", "ge": "__le__", "eq": "__eq__", "ne": "__ne__"}


def _in_floats(a: Any, b: Any) -> bool:
    """Whether Python computes with these numbers in doubles: then so must we, not in a ShapeEnv's exact expressions."""
    kinds = (type(a), type(b))
    return (torch.SymFloat in kinds or float in kinds or complex in kinds) and kinds[0] in _NUMBERS and kinds[1] in _NUMBERS


class Operators(Attributes):
    def binary(self, op: Callable, a: Any, b: Any) -> Any:
        """`a op b`, with the reflected methods of classes written in Python."""
        if type(a) in _EXACT and type(b) in _EXACT:
            return self.native(op, a, b)
        if _in_floats(a, b) or op is operator.truediv and type(a) in _NUMBERS and type(b) in _NUMBERS:
            found = self.derive(op, a, b)
            return self.native(op, self.native(plain_number, a), self.native(plain_number, b)) if found is MISSING else found
        if op is operator.mod and isinstance(a, (str, bytes)):
            b = plain_number(self.contents(b))
            if holds_tensor(b):
                raise break_here("item", "a tensor is turned into text", "format it outside the compiled function")
            shown = self.contents(b)
            if any(map(self.shows_itself, shown if isinstance(shown, tuple) else shown.values() if isinstance(shown, dict) else (shown,))):
                raise break_here("text-of-objects", "the text of objects with their own __repr__ or __str__ is not captured",
                                 "format them outside the compiled function")
        if op is operator.mul and (isinstance(a, _SEQUENCES) or isinstance(b, _SEQUENCES)):
            a, b = (v if isinstance(v, _SEQUENCES) else plain_number(v) for v in (a, b))
        if op in _BITWISE and torch.SymInt in (type(a), type(b)):
            a, b = self.native(plain_number, a), self.native(plain_number, b)    # no graph computes the bits of a size
        name = op.__name__.strip("_")
        method, reflected = f"__{name}__", f"__r{name}__"
        left, right = type(a), type(b)
        mirrored = left is not right and is_python(right, reflected)
        first = mirrored and issubclass(right, left) and lookup(left, reflected)[1] is not lookup(right, reflected)[1]
        return self._dispatch(op, a, b, method, reflected if mirrored else None, first)

    def compare(self, op: Callable, a: Any, b: Any) -> Any:
        if type(a) in _EXACT and type(b) in _EXACT:
            return self.native(op, a, b)
        if _in_floats(a, b):
            found = self.derive(op, a, b)
            return self.native(op, self.native(plain_number, a), self.native(plain_number, b)) if found is MISSING else found
        name = op.__name__
        kind = list if isinstance(a, list) and isinstance(b, list) else tuple if isinstance(a, tuple) and isinstance(b, tuple) else None
        if kind is not None and not any(is_python(type(v), m) for v in (a, b) for m in (f"__{name}__", _MIRROR[name])):
            return self._compare_sequences(op, a, b)
        if name in ("eq", "ne") and isinstance(a, dict) and isinstance(b, dict) and not is_python(type(a), "__eq__") \
                and not isinstance(a, collections.OrderedDict):
            return self._equal_dicts(self.contents(a), self.contents(b)) is (name == "eq")
        reflected, left, right = _MIRROR[name], type(a), type(b)
        first = left is not right and issubclass(right, left) and (
            is_python(right, reflected) or name == "ne" and is_python(right, "__eq__"))
        return self._dispatch(op, a, b, f"__{name}__", reflected, first)

    def _compare_sequences(self, op: Callable, a: Any, b: Any) -> Any:
        """Lists and tuples: the first items that differ decide, else the lengths."""
        left, right = self.contents(a), self.contents(b)
        if op in (operator.eq, operator.ne) and len(left) != len(right):
            return op is operator.ne
        for x, y in zip(left, right):
            if x is not y and not self.truth(self.compare(operator.eq, x, y)):
                return op is operator.ne if op in (operator.eq, operator.ne) else self.compare(op, x, y)
        return op(len(left), len(right))

    def _equal_dicts(self, left: dict, right: dict) -> bool:
        return len(left) == len(right) and all(key in right and (
            value is right[key] or self.truth(self.compare(operator.eq, value, right[key]))) for key, value in left.items())

    def _dispatch(self, op: Callable, a: Any, b: Any, method: str, reflected: str | None, reflected_first: bool) -> Any:
        """reflected: the method of b's class to ask too; None: b is not asked."""
        left, right = type(a), type(b)
        tensor_left = isinstance(a, torch.Tensor)
        order = [(a, b, method)] if reflected is None else [(a, b, method), (b, a, reflected)]
        if reflected_first:
            order.reverse()
        for target, other, name in order:
            if isinstance(target, torch.Tensor) or target is b and tensor_left and hasattr(b, "__torch_function__"):
                continue
            negated = name == "__ne__" and not is_python(type(target), name)       # object.__ne__ asks __eq__
            if negated:
                name = "__eq__"
            if is_python(type(target), name):
                found = self.interpreter_call(self.special_method(target, name), (other,), {})
                if found is not NotImplemented:
                    return not self.truth(found) if negated else found
        if tensor_left or isinstance(b, torch.Tensor):
            other = b if tensor_left else a
            if not isinstance(other, torch.Tensor) and hasattr(type(other), "__torch_function__"):
                raise break_here("torch-function", f"{type(other).__name__}.__torch_function__ decides what the operator does",
                                 "pass it tensors, or call the method yourself")
            if is_scalar(other):
                return self.record("call_function", op, (a, b), {})
            if not isinstance(other, (torch.Tensor, int, float, complex, bool, torch.SymInt, torch.SymFloat)) and op not in (
                    operator.eq, operator.ne):
                return self.native(op, a, b) if not isinstance(other, (list, tuple)) else self.record(
                    "call_function", op, (a, b), {})
            return self.record("call_function", op, (a, b), {})
        if is_python(left, method) or reflected is not None and is_python(right, reflected):
            if op in (operator.eq, operator.ne):
                return (a is b) is (op is operator.eq)
            symbol = _SYMBOLS.get(op.__name__, op.__name__)
            names = f"'{left.__name__}' and '{right.__name__}'"
            raise ProgramError(TypeError(f"'{symbol}' not supported between instances of {names}" if op.__name__ in _MIRROR else
                                         f"unsupported operand type(s) for {symbol}: {names}"))
        self._known(a, op)
        self._known(b, op)
        if is_scalar(a) or is_scalar(b):
            a, b = plain_number(a), plain_number(b)
        return self.native(op, self.fixed(self.contents(a)), self.fixed(self.contents(b)))

    def _known(self, value: Any, op: Callable) -> None:
        """Raise Break for an object from outside whose operators are written in C, apart from Python's own types."""
        if self.source(value) is not None and type(value).__module__ not in ("builtins", "collections", "enum") and not isinstance(
                value, (int, float, str, tuple, list, dict, set, frozenset, type)) and not is_python(type(value), "__init__") \
                and op not in (operator.eq, operator.ne) and not hasattr(type(value), "__dataclass_fields__"):
            raise break_here("unknown-c-function", f"operators of {type(value).__name__} are not captured", "convert the value outside")
        if self.source(value) is not None and is_opaque(type(value)) and not isinstance(value, (*CONSTANTS, *IDENTITIES)):
            raise break_here("unknown-c-function", f"comparing a {type(value).__name__} is not captured", "compare it outside")

    def inplace(self, op: Callable, a: Any, b: Any) -> Any:
        """`a op= b`: the new value of a."""
        try:
            return self._inplace(op, a, b)
        except ProgramError as error:
            symbol, text = _SYMBOLS.get(_FALLBACK[op.__name__].__name__, ""), str(error.value)
            start = f"unsupported operand type(s) for {symbol}: "
            if type(error.value) is TypeError and text.startswith(start):
                raise ProgramError(TypeError(f"unsupported operand type(s) for {symbol.split()[0]}=: {text[len(start):]}")) from None
            raise

    def _inplace(self, op: Callable, a: Any, b: Any) -> Any:
        if type(a) in _EXACT:
            return self.binary(_FALLBACK[op.__name__], a, b)
        if isinstance(a, torch.Tensor):
            return self.record("call_function", op, (a, b), {})
        name = f"__{op.__name__}__"
        if is_python(type(a), name):
            found = self.interpreter_call(self.special_method(a, name), (b,), {})
            return found if found is not NotImplemented else self.binary(_FALLBACK[op.__name__], a, b)
        if isinstance(a, (list, dict, set, collections.deque)) and hasattr(type(a), name):
            if isinstance(a, (list, collections.deque)) and op is operator.iadd:
                self.native(self.writable(a).extend, list(self.iterate(b)))
            else:
                self.native(op, self.writable(a), self.contents(b))
            return a
        return self.binary(_FALLBACK[op.__name__], a, b)

    def unary(self, op: Callable, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self.record("call_function", op, (a,), {})
        name = f"__{op.__name__.strip('_')}__"
        if op is operator.invert and isinstance(a, torch.SymInt):
            a = self.native(plain_number, a)
        if is_python(type(a), name):
            return self.interpreter_call(self.special_method(a, name), (), {})
        if isinstance(a, torch.SymFloat) or isinstance(a, torch.SymInt) and op is operator.abs:
            found = self.derive(op, a)
            if found is not MISSING:
                return found
        return self.native(op, a)

    def truth(self, value: Any) -> bool:
        """bool(value). A tensor is a graph break; a relation of symbolic sizes is decided and guarded."""
        if value is None or type(value) in _EXACT:
            return bool(value)
        if isinstance(value, torch.SymFloat):
            return self.native(bool, self.fixed(value) if (found := self.derive(bool, value)) is MISSING else found)
        if isinstance(value, torch.Tensor):
            raise break_here("data-dependent-branch", "a branch depends on the values of a tensor",
                             "use torch.where, or keep the branch outside the compiled function")
        for name in ("__bool__", "__len__"):
            if is_python(type(value), name):
                found = self.interpreter_call(self.special_method(value, name), (), {})
                if name == "__len__":
                    return self.native(bool, self.length(found))
                if type(found) is not bool:
                    raise ProgramError(TypeError(f"__bool__ should return bool, returned {type(found).__name__}"))
                return found
            if name in type(value).__dict__:
                break
        source = self.source(value)
        if source is not None and isinstance(value, dict) and id(value) not in self.shadows:
            self.guard(source, "length", len(value)) if not value else self.guard(source, "keys", tuple(value))
            return bool(value)
        return self.native(bool, self.contents(value))

    def length(self, found: Any) -> Any:
        """What `len` makes of the result of a `__len__`."""
        return found if isinstance(found, torch.SymInt) else self.native(len, _Sized(found))


class _Sized:
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length
