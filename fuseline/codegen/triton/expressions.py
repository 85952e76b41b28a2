"""Index expressions (`ir/expr.py`) as Triton source text."""
from __future__ import annotations

from collections.abc import Callable

from fuseline.errors import InternalError
from fuseline.ir.expr import Atom, Div, Expr, Int, Max, Mod, Sym, nonnegative


def show(expr: Int, name: Callable[[Sym], str]) -> str:
    """Triton text of an expression; `name` gives each symbol's text. Division rounds down also for negative numerators."""
    if isinstance(expr, int):
        return str(expr)
    parts: list[str] = []
    for monomial, coefficient in expr.terms:
        factors = [_atom(a, name) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.append(str(abs(coefficient)))
        text = " * ".join(factors)
        if not parts:
            parts.append(f"-{text}" if coefficient < 0 and len(factors) == 1 else f"-({text})" if coefficient < 0 else text)
        else:
            parts.append((" - " if coefficient < 0 else " + ") + text)
    return "(" + "".join(parts) + ")" if len(expr.terms) > 1 else parts[0]


def _atom(atom: Atom, name: Callable[[Sym], str]) -> str:
    if isinstance(atom, Sym):
        return name(atom)
    if isinstance(atom, (Div, Mod)):
        n, d = show(atom.numerator, name), show(atom.denominator, name)
        sign = "//" if isinstance(atom, Div) else "%"
        if nonnegative(atom.numerator):                       # Triton's // and % round to zero, as C does
            return f"({n} {sign} {d})"
        remainder = f"((({n}) % {d} + {d}) % {d})"
        return remainder if isinstance(atom, Mod) else f"((({n}) - {remainder}) // {d})"
    if isinstance(atom, Max):
        return f"tl.maximum({show(atom.a, name)}, {show(atom.b, name)})"
    raise InternalError(f"index atom {type(atom).__name__} has no Triton text", node=atom)


def as_expr(value: object) -> Int:
    if isinstance(value, (int, Expr)):
        return value
    raise InternalError(f"{value!r} is no index expression")
