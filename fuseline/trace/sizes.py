"""Symbolic sizes of torch (sympy expressions of a ShapeEnv) as our index expressions, and ShapeEnv's guards as text."""
from __future__ import annotations

import operator
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import NotSupported
from fuseline.ir import expr
from fuseline.ir.expr import Expr, Int, Sym

_LEAST = 1 << 63


class Sizes:
    """Converts one ShapeEnv's expressions. A symbol keeps torch's name; `lo` is the lower bound that torch knows."""

    def __init__(self, shape_env: Any) -> None:
        self.shape_env = shape_env
        self._known: dict[Any, Int] = {}

    def of(self, size: int | torch.SymInt) -> Int:
        if type(size) is int:
            return size
        if isinstance(size, torch.SymInt):
            return self.convert(size.node.expr)
        return int(size)

    def convert(self, e: Any) -> Int:
        found = self._known.get(e)
        if found is None:
            found = self._known[e] = self._convert(e)
        return found

    def _convert(self, e: Any) -> Int:
        if e.is_Integer:
            return int(e)
        if e.is_Symbol:
            return self._symbol(e)
        kind = type(e).__name__
        if e.is_Add:
            return _fold(operator.add, [self.convert(a) for a in e.args])
        if e.is_Mul:
            return _fold(operator.mul, [self.convert(a) for a in e.args])
        if e.is_Pow and e.args[1].is_Integer and int(e.args[1]) >= 0:
            return _fold(operator.mul, [self.convert(e.args[0])] * int(e.args[1]) + [1])
        args = [self.convert(a) for a in e.args]
        if kind in ("FloorDiv", "CleanDiv", "IntTrueDiv"):
            if kind == "IntTrueDiv":
                raise NotSupported(f"a size that is a true division: {e}")
            return expr.floor_div(*args)
        if kind in ("Mod", "PythonMod"):
            return expr.modulo(*args)
        if kind in ("Max", "Min"):
            return _fold(expr.maximum if kind == "Max" else expr.minimum, args)
        raise NotSupported(f"a size of a form that is not compiled: {e}")

    def _symbol(self, s: Any) -> Int:
        name = str(s)
        if not name.startswith("s"):
            raise NotSupported(f"a size that depends on data: {name}", hint="sizes must follow from the sizes of inputs")
        known = None if self.shape_env is None else self.shape_env.var_to_range.get(s)
        low = 0 if known is None else known.lower                # below any integer for a number that may be negative
        return Sym(name, None, int(low) if getattr(low, "is_Integer", True) and abs(low) < _LEAST else -_LEAST)

    def replaced(self) -> dict[Sym, Int]:
        """Symbols that the trace found equal to something else, which types made earlier still have."""
        if self.shape_env is None:
            return {}
        found: dict[Sym, Int] = {}
        for s in list(self._known):
            ours = self._known[s]
            if s.is_Symbol and self.shape_env.replace(s) != s and isinstance(ours, Sym):
                found[ours] = self._convert(self.shape_env.replace(s))
        return found

    def guards(self) -> tuple[str, ...]:
        """What ShapeEnv relied on so far, as Python text over the symbols."""
        if self.shape_env is None:
            return ()
        texts = [self._text(g.expr) for g in self.shape_env.guards]
        return tuple(dict.fromkeys(t for t in texts if t != "True"))

    def _text(self, e: Any) -> str:
        if any(not str(s).startswith("s") for s in e.free_symbols):       # floats
            try:
                return torch_internals.python_text(e)
            except NotImplementedError as error:
                raise NotSupported(str(error)) from None
        if e.is_Relational:
            sign = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "StrictLessThan": "<", "GreaterThan": ">=",
                    "StrictGreaterThan": ">"}[type(e).__name__]
            return f"{self.convert(e.lhs)} {sign} {self.convert(e.rhs)}"
        if type(e).__name__ in ("And", "Or"):
            return f" {type(e).__name__.lower()} ".join(sorted(f"({self._text(a)})" for a in e.args))
        if type(e).__name__ == "Not":
            return f"not ({self._text(e.args[0])})"
        return str(e)


def _fold(combine: Any, values: list[Int]) -> Int:
    total = values[0]
    for v in values[1:]:
        total = combine(total, v)
    return total


def is_symbolic(value: object) -> bool:
    return isinstance(value, (torch.SymInt, Expr))
