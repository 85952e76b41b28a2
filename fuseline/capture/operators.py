"""Operators, comparisons and truth on every kind of value."""
from __future__ import annotations

import collections
import operator
from collections.abc import Callable
from typing import Any

import torch

from fuseline.capture.attributes import Attributes
from fuseline.capture.containers import holds_tensor, plain_number
from fuseline.capture.errors import break_here
from fuseline.capture.provenance import MISSING, is_python

_EXACT = frozenset({int, float, bool, str, complex})
_NUMBERS = frozenset({int, float, bool, complex, torch.SymInt, torch.SymFloat})
_SEQUENCES = (str, bytes, list, tuple)
_FALLBACK = {"iadd": operator.add, "iand": operator.and_, "ifloordiv": operator.floordiv, "ilshift": operator.lshift,
             "imatmul": operator.matmul, "imul": operator.mul, "imod": operator.mod, "ior": operator.or_, "ipow": operator.pow,
             "irshift": operator.rshift, "isub": operator.sub, "itruediv": operator.truediv, "ixor": operator.xor,
             "iconcat": operator.concat}
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
        if op is operator.mul and (isinstance(a, _SEQUENCES) or isinstance(b, _SEQUENCES)):
            a, b = (v if isinstance(v, _SEQUENCES) else plain_number(v) for v in (a, b))
        name = op.__name__.strip("_")
        return self._dispatch(op, a, b, f"__{name}__", f"__r{name}__")

    def compare(self, op: Callable, a: Any, b: Any) -> Any:
        if type(a) in _EXACT and type(b) in _EXACT:
            return self.native(op, a, b)
        if _in_floats(a, b):
            found = self.derive(op, a, b)
            return self.native(op, self.native(plain_number, a), self.native(plain_number, b)) if found is MISSING else found
        name = op.__name__
        if name == "ne" and not is_python(type(a), "__ne__") and is_python(type(a), "__eq__") and not isinstance(b, torch.Tensor):
            found = self.interpreter_call(self.getattr(a, "__eq__"), (b,), {})
            if found is not NotImplemented:
                return not self.truth(found)
        if name in ("eq", "ne") and isinstance(a, (list, tuple)) and isinstance(b, type(a)) and not is_python(type(a), "__eq__"):
            return self._equal_sequences(a, b) is (name == "eq")
        return self._dispatch(op, a, b, f"__{name}__", _MIRROR[name])

    def _equal_sequences(self, a: Any, b: Any) -> bool:
        left, right = self.contents(a), self.contents(b)
        return len(left) == len(right) and all(x is y or self.truth(self.compare(operator.eq, x, y)) for x, y in zip(left, right))

    def _dispatch(self, op: Callable, a: Any, b: Any, method: str, reflected: str) -> Any:
        left, right = type(a), type(b)
        tensor_left = isinstance(a, torch.Tensor)
        order = [(a, b, method), (b, a, reflected)]
        if left is not right and issubclass(right, left) and is_python(right, reflected):
            order.reverse()
        for target, other, name in order:
            if not isinstance(target, torch.Tensor) and is_python(type(target), name):
                if target is b and tensor_left and hasattr(b, "__torch_function__"):
                    continue
                found = self.interpreter_call(self.getattr(target, name), (other,), {})
                if found is not NotImplemented:
                    return found
        if tensor_left or isinstance(b, torch.Tensor):
            other = b if tensor_left else a
            if not isinstance(other, (torch.Tensor, int, float, complex, bool, torch.SymInt, torch.SymFloat)) and op not in (
                    operator.eq, operator.ne):
                return self.native(op, a, b) if not isinstance(other, (list, tuple)) else self.record(
                    "call_function", op, (a, b), {})
            return self.record("call_function", op, (a, b), {})
        if is_python(left, method) or is_python(right, reflected):
            if op in (operator.eq, operator.ne):
                return (a is b) is (op is operator.eq)
            symbol = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "** or pow()",
                      "matmul": "@", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.get(op.__name__, op.__name__)
            text = f"unsupported operand type(s) for {symbol}" if method in ("__add__",) else f"unsupported operand type(s) for {symbol}"
            return self.native(_raise, TypeError(f"{text}: '{left.__name__}' and '{right.__name__}'"))
        self._known(a, op)
        self._known(b, op)
        return self.native(op, self.fixed(self.contents(a)), self.fixed(self.contents(b)))

    def _known(self, value: Any, op: Callable) -> None:
        """Raise Break for an object from outside whose operators are written in C, apart from Python's own types."""
        if self.source(value) is not None and type(value).__module__ not in ("builtins", "collections", "enum") and not isinstance(
                value, (int, float, str, tuple, list, dict, set, frozenset, type)) and not is_python(type(value), "__init__") \
                and op not in (operator.eq, operator.ne) and not hasattr(type(value), "__dataclass_fields__"):
            raise break_here("unknown-c-function", f"operators of {type(value).__name__} are not captured", "convert the value outside")

    def inplace(self, op: Callable, a: Any, b: Any) -> Any:
        if type(a) in _EXACT:
            return self.binary(_FALLBACK[op.__name__], a, b)
        if isinstance(a, torch.Tensor):
            return self.record("call_function", op, (a, b), {})
        name = f"__{op.__name__}__"
        if is_python(type(a), name):
            found = self.interpreter_call(self.getattr(a, name), (b,), {})
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
        if is_python(type(a), name):
            return self.interpreter_call(self.getattr(a, name), (), {})
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
                return self.native(bool, self.interpreter_call(self.getattr(value, name), (), {}))
            if name in type(value).__dict__:
                break
        source = self.source(value)
        if source is not None and isinstance(value, dict) and id(value) not in self.shadows:
            self.guard(source, "length", len(value)) if not value else self.guard(source, "keys", tuple(value))
            return bool(value)
        return self.native(bool, self.contents(value))


def _raise(error: Exception) -> None:
    raise error
