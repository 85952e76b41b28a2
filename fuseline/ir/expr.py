"""The index algebra: exact integer expressions over loop variables and sizes.

An expression is a plain int or an Expr: a polynomial with integer coefficients over atoms. Atoms are symbols, floor
divisions, remainders and maxima. Everything is kept in one canonical form, so equal expressions compare equal after
`+ - *`. Divisions simplify as far as ranges prove it: `(8*i + j) // 8` is `i` when 0 <= j < 8, also for symbolic
extents (`(s0*i + j) // s0`). All values are mathematical integers; division rounds down, as in Python.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Union

Int = Union[int, "Expr"]
Monomial = tuple["Atom", ...]


class Expr:
    """A polynomial: `terms` maps a monomial (sorted tuple of atoms, () for the constant) to its coefficient."""

    __slots__ = ("terms", "_hash", "_symbols")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)
        self._symbols: frozenset[Sym] | None = None          # filled by `symbols`

    # -- arithmetic -------------------------------------------------------------------------------------------
    def __add__(self, other: Int) -> Int:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        return _combine(self, other, -1)

    def __rsub__(self, other: Int) -> Int:
        return _combine(-self, other, 1)

    def __neg__(self) -> Int:
        return _polynomial({m: -c for m, c in self.terms})

    def __mul__(self, other: Int) -> Int:
        if isinstance(other, int):
            return _polynomial({m: c * other for m, c in self.terms})
        if not isinstance(other, Expr):
            return NotImplemented
        product: dict[Monomial, int] = {}
        for m1, c1 in self.terms:
            for m2, c2 in other.terms:
                m = tuple(sorted(m1 + m2, key=_atom_key))
                product[m] = product.get(m, 0) + c1 * c2
        return _polynomial(product)

    __rmul__ = __mul__

    def __floordiv__(self, other: Int) -> Int:
        return floor_div(self, other)

    def __rfloordiv__(self, other: int) -> Int:
        return floor_div(other, self)

    def __mod__(self, other: Int) -> Int:
        return modulo(self, other)

    def __rmod__(self, other: int) -> Int:
        return modulo(other, self)

    # -- identity ---------------------------------------------------------------------------------------------
    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of index expression {self} is not known; compare with prove_nonnegative or ==")

    def __str__(self) -> str:
        parts = []
        for monomial, coefficient in self.terms:
            factors = [str(a) for a in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    __repr__ = __str__


class Atom(Expr):
    """An expression that is a factor of monomials: it equals the polynomial 1*itself."""

    __slots__ = ("key", "rank")

    def __init__(self, key: tuple) -> None:
        self.key = key
        self._hash = hash(key)
        self._symbols = None
        self.terms = (((self,), 1),)
        self.rank = (0, key[1]) if key[0] == "sym" else (1, str(self))      # its place in a monomial

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Atom) and self._hash == other._hash and self.key == other.key

    __hash__ = Expr.__hash__


class Sym(Atom):
    """A symbol: a loop variable with 0 <= value < extent, or a size (extent None) with value >= lo.

    Two symbols are the same if their names are: a name has one meaning in a program.
    """

    __slots__ = ("name", "extent", "lo")

    def __init__(self, name: str, extent: Int | None = None, lo: int = 0) -> None:
        self.name, self.extent, self.lo = name, extent, lo
        super().__init__(("sym", name))

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


class Div(Atom):
    """floor(numerator / denominator), denominator > 0."""

    __slots__ = ("numerator", "denominator")

    def __init__(self, numerator: Int, denominator: Int) -> None:
        self.numerator, self.denominator = numerator, denominator
        super().__init__(("div", numerator, denominator))

    def __str__(self) -> str:
        return f"({_wrap(self.numerator)} // {_wrap(self.denominator)})"


class Mod(Atom):
    """numerator - denominator * floor(numerator / denominator), denominator > 0."""

    __slots__ = ("numerator", "denominator")

    def __init__(self, numerator: Int, denominator: Int) -> None:
        self.numerator, self.denominator = numerator, denominator
        super().__init__(("mod", numerator, denominator))

    def __str__(self) -> str:
        return f"({_wrap(self.numerator)} % {_wrap(self.denominator)})"


class Max(Atom):
    """The larger of two expressions; minimum(a, b) is -maximum(-a, -b)."""

    __slots__ = ("a", "b")

    def __init__(self, a: Int, b: Int) -> None:
        self.a, self.b = a, b
        super().__init__(("max", a, b))

    def __str__(self) -> str:
        return f"max({self.a}, {self.b})"


def _wrap(e: Int) -> str:
    return str(e) if isinstance(e, (int, Atom)) else f"({e})"


def _atom_key(atom: Atom) -> tuple:
    return atom.rank


def _term_key(term: tuple[Monomial, int]) -> tuple:
    monomial = term[0]
    if len(monomial) == 1:
        return -1, [monomial[0].rank]
    return -len(monomial), [a.rank for a in monomial]


def _terms(e: Int) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(e, int):
        return (((), int(e)),) if e else ()
    return e.terms


def _polynomial(terms: Mapping[Monomial, int]) -> Int:
    kept = [(m, c) for m, c in terms.items() if c]
    if not kept:
        return 0
    if len(kept) == 1:
        m, c = kept[0]
        if not m:
            return c
        if c == 1 and len(m) == 1:
            return m[0]
    kept.sort(key=_term_key)
    return Expr(tuple(kept))


def _combine(a: Int, b: Int, sign: int) -> Int:
    if not isinstance(b, (int, Expr)):
        return NotImplemented
    total = dict(_terms(a))
    for m, c in _terms(b):
        total[m] = total.get(m, 0) + sign * c
    return _polynomial(total)


# ---------------------------------------------------------------- division

def _divide_monomial(monomial: Monomial, coefficient: int, by: tuple[Monomial, int]) -> tuple[Monomial, int] | None:
    """(monomial * coefficient) / by if it is a whole monomial, else None."""
    by_atoms, by_coefficient = by
    if coefficient % by_coefficient:
        return None
    rest = list(monomial)
    for atom in by_atoms:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest), coefficient // by_coefficient


def _split(numerator: Int, denominator: Int) -> tuple[Int, Int]:
    """(q, r) with numerator = q * denominator + r, q as large a part as divides term by term."""
    if isinstance(denominator, Expr) and len(denominator.terms) != 1:
        return (1, 0) if numerator == denominator else (0, numerator)
    (by,) = _terms(denominator)
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for m, c in _terms(numerator):
        whole = _divide_monomial(m, c, by)
        if whole is not None:
            quotient[whole[0]] = quotient.get(whole[0], 0) + whole[1]
        elif not by[0]:                                   # a number: 7*i // 4 is i + 3*i // 4
            q, r = divmod(c, by[1])
            if q and not m:
                quotient[m] = quotient.get(m, 0) + q
                rest[m] = r
            else:
                rest[m] = c
        else:
            rest[m] = c
    return _polynomial(quotient), _polynomial(rest)


def floor_div(numerator: Int, denominator: Int) -> Int:
    """floor(numerator / denominator) for a positive denominator; raises ZeroDivisionError for 0."""
    if isinstance(denominator, int):
        if denominator == 0:
            raise ZeroDivisionError(f"{numerator} // 0")
        if denominator < 0:
            return floor_div(-numerator, -denominator)
        if denominator == 1:
            return numerator
        if isinstance(numerator, int):
            return numerator // denominator
    whole, rest = _split(numerator, denominator)
    if rest == 0 or in_range(rest, denominator):
        return whole
    if isinstance(denominator, int):
        common = math.gcd(denominator, *(c for _, c in _terms(rest)))
        if common > 1:
            return whole + floor_div(_exact(rest, common), denominator // common)
        if isinstance(rest, Div) and isinstance(rest.denominator, int):
            return whole + floor_div(rest.numerator, rest.denominator * denominator)
        # Terms that are multiples of g with a remainder below g do not reach the quotient's next step.
        simpler = _drop_small_part(rest, denominator)
        if simpler is not None:
            return whole + floor_div(*simpler)
    return whole + Div(rest, denominator)


def _drop_small_part(e: Int, denominator: int) -> tuple[Int, int] | None:
    """(g*a + b) // (g*d) is a // d when 0 <= b < g: return (a, d), or None."""
    terms = _terms(e)
    for g in sorted({math.gcd(c, denominator) for m, c in terms if m}, reverse=True):
        if g <= 1:
            continue
        large = _polynomial({m: c // g for m, c in terms if c % g == 0})
        small = _polynomial({m: c for m, c in terms if c % g})
        if small != 0 and in_range(small, g):
            return large, denominator // g
    return None


def _exact(e: Int, by: int) -> Int:
    return _polynomial({m: c // by for m, c in _terms(e)})


def modulo(numerator: Int, denominator: Int) -> Int:
    """numerator mod denominator, in [0, denominator) for a positive denominator."""
    if isinstance(denominator, int):
        if denominator == 0:
            raise ZeroDivisionError(f"{numerator} % 0")
        if denominator < 0:
            return -modulo(-numerator, -denominator)
        if denominator == 1:
            return 0
        if isinstance(numerator, int):
            return numerator % denominator
    _, rest = _split(numerator, denominator)
    if rest == 0 or in_range(rest, denominator):
        return rest
    if isinstance(rest, int) and isinstance(denominator, int):
        return rest % denominator
    if isinstance(denominator, int):
        common = math.gcd(denominator, *(c for _, c in _terms(rest)))
        if common > 1:
            return modulo(_exact(rest, common), denominator // common) * common
        simpler = _drop_small_part(rest, denominator)
        if simpler is not None:                           # (g*a + b) % (g*d) = g*(a % d) + b
            large, d = simpler
            return modulo(large, d) * (denominator // d) + (rest - large * (denominator // d))
        if isinstance(rest, Mod) and isinstance(rest.denominator, int) and rest.denominator % denominator == 0:
            return modulo(rest.numerator, denominator)
    return Mod(rest, denominator)


def ceil_div(numerator: Int, denominator: Int) -> Int:
    return -floor_div(-numerator, denominator)


def maximum(a: Int, b: Int) -> Int:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if nonnegative(a - b):
        return a
    if nonnegative(b - a):
        return b
    return Max(*sorted((a, b), key=str))


def minimum(a: Int, b: Int) -> Int:
    return -maximum(-a, -b)


# ---------------------------------------------------------------- ranges

def in_range(e: Int, extent: Int) -> bool:
    """True if 0 <= e < extent is proved."""
    return nonnegative(e) and nonnegative(extent - 1 - e)


def nonnegative(e: Int) -> bool:
    """True if e >= 0 is proved from the ranges of its symbols; False means "not proved"."""
    return _least(e) is not None


def _least(e: Int, depth: int = 0) -> bool | None:
    """True if e is proved nonnegative, None otherwise.

    Loop variables with an extent are replaced, term by term, by the end of their range that makes the term smallest;
    sizes by lo + t with t >= 0; the result is nonnegative if no coefficient is negative.
    """
    if isinstance(e, int):
        return True if e >= 0 else None
    if all(c >= 0 for _, c in e.terms) and all(_atom_nonnegative(a) for m, _ in e.terms for a in m):
        return True
    if depth > 6:
        return None
    for atom in sorted({a for m, _ in e.terms for a in m}, key=lambda a: isinstance(a, Sym) and a.extent is None):
        low, high = _ends(atom)
        coefficient, linear = _coefficient(e, atom)
        if linear is None:
            continue
        if nonnegative_quick(coefficient) and low is not None:
            if low == 0 and not isinstance(atom, Sym):
                return _least(linear, depth + 1)
            if isinstance(atom, Sym) and atom.extent is None:
                if low == 0:
                    return _least(linear, depth + 1)
                continue                                  # sizes last, all at once, below
            return _least(linear + coefficient * low, depth + 1)
        if nonnegative_quick(-coefficient) and high is not None:
            return _least(linear + coefficient * high, depth + 1)
        if nonnegative_quick(-coefficient) and high is None and isinstance(atom, (Div, Mod)):
            return None
    shifted: Int = e
    for atom in {a for m, _ in e.terms for a in m}:
        if isinstance(atom, Sym) and atom.extent is None and atom.lo:
            shifted = substitute(shifted, {atom: Sym(f"{atom.name}'", None, 0) + atom.lo})
    if isinstance(shifted, int):
        return True if shifted >= 0 else None
    fine = all(c >= 0 for _, c in shifted.terms) and all(_atom_nonnegative(a) for m, _ in shifted.terms for a in m)
    return True if fine else None


def nonnegative_quick(e: Int) -> bool:
    if isinstance(e, int):
        return e >= 0
    return all(c >= 0 for _, c in e.terms) and all(_atom_nonnegative(a) for m, _ in e.terms for a in m)


def _coefficient(e: Expr, atom: Atom) -> tuple[Int, Int | None]:
    """(c, r) with e = c * atom + r and atom in neither c nor r; r is None if e is not linear in it."""
    with_atom: dict[Monomial, int] = {}
    without: dict[Monomial, int] = {}
    for m, c in e.terms:
        count = m.count(atom)
        if count == 0:
            without[m] = c
        elif count == 1:
            rest = list(m)
            rest.remove(atom)
            with_atom[tuple(rest)] = c
        else:
            return 0, None
    return _polynomial(with_atom), _polynomial(without)


def _atom_nonnegative(atom: Atom) -> bool:
    low, _ = _ends(atom)
    return isinstance(low, int) and low >= 0


def _ends(atom: Atom) -> tuple[Int | None, Int | None]:
    """(lowest, highest) value of an atom, None where unknown."""
    if isinstance(atom, Sym):
        return (0, atom.extent - 1) if atom.extent is not None else (atom.lo, None)
    if isinstance(atom, Mod):
        return 0, atom.denominator - 1
    if isinstance(atom, Div):
        low = 0 if nonnegative(atom.numerator) else None
        high = upper_bound(atom.numerator)
        if high is None or not isinstance(atom.denominator, int) or not isinstance(high, int):
            return low, None
        return low, high // atom.denominator
    if isinstance(atom, Max):
        low = 0 if nonnegative(atom.a) or nonnegative(atom.b) else None
        return low, None
    return None, None


def upper_bound(e: Int) -> Int | None:
    """An int that e never exceeds, or None if none is known."""
    if isinstance(e, int):
        return e
    total = 0
    for m, c in e.terms:
        low, high = 1, 1
        for atom in m:
            a, b = _ends(atom)
            if not isinstance(a, int) or a < 0 or not isinstance(b, int):
                return None
            low, high = low * a, high * b
        total += c * (high if c > 0 else low)
    return total


# ---------------------------------------------------------------- looking inside

def symbols(e: Int) -> frozenset[Sym]:
    """All symbols that occur in e, at any depth."""
    if isinstance(e, int):
        return frozenset()
    if e._symbols is None:
        found: set[Sym] = set()
        for m, _ in e.terms:
            for atom in m:
                if isinstance(atom, Sym):
                    found.add(atom)
                elif isinstance(atom, (Div, Mod)):
                    found |= symbols(atom.numerator) | symbols(atom.denominator)
                elif isinstance(atom, Max):
                    found |= symbols(atom.a) | symbols(atom.b)
        e._symbols = frozenset(found)
    return e._symbols


def substitute(e: Int, mapping: Mapping[Sym, Int]) -> Int:
    """e with every symbol that the mapping has replaced, simplified again."""
    if isinstance(e, int) or not any(s in mapping for s in symbols(e)):
        return e
    total: dict[Monomial, int] = {}
    for m, c in e.terms:
        plain: list[Atom] = []
        others: list[Expr] = []
        for atom in m:
            new = _substitute_atom(atom, mapping)
            if isinstance(new, int):
                c *= new
            elif isinstance(new, Atom):
                plain.append(new)
            else:
                others.append(new)
        if not c:
            continue
        if len(plain) > 1:
            plain.sort(key=_atom_key)
        if not others:
            monomial = tuple(plain)
            total[monomial] = total.get(monomial, 0) + c
            continue
        term: Int = _polynomial({tuple(plain): c})
        for factor in others:
            term = term * factor
        for monomial, coefficient in _terms(term):
            total[monomial] = total.get(monomial, 0) + coefficient
    return _polynomial(total)


def _substitute_atom(atom: Atom, mapping: Mapping[Sym, Int]) -> Int:
    if isinstance(atom, Sym):
        return mapping.get(atom, atom)
    if not any(s in mapping for s in symbols(atom)):
        return atom
    if isinstance(atom, Div):
        return floor_div(substitute(atom.numerator, mapping), substitute(atom.denominator, mapping))
    if isinstance(atom, Mod):
        return modulo(substitute(atom.numerator, mapping), substitute(atom.denominator, mapping))
    if not isinstance(atom, Max):
        raise TypeError(f"unknown atom {atom!r}")
    return maximum(substitute(atom.a, mapping), substitute(atom.b, mapping))


def evaluate(e: Int, values: Mapping[str, int]) -> int:
    """The value of e when the symbol named n is values[n]; KeyError for a missing one."""
    if isinstance(e, int):
        return e
    total = 0
    for m, c in e.terms:
        for atom in m:
            if isinstance(atom, Sym):
                c *= values[atom.name]
            elif isinstance(atom, Div):
                c *= evaluate(atom.numerator, values) // evaluate(atom.denominator, values)
            elif isinstance(atom, Mod):
                c *= evaluate(atom.numerator, values) % evaluate(atom.denominator, values)
            elif isinstance(atom, Max):
                c *= max(evaluate(atom.a, values), evaluate(atom.b, values))
        total += c
    return total


def linear_in(e: Int, sym: Sym) -> tuple[Int, Int] | None:
    """(stride, rest) with e = stride * sym + rest and sym in neither, or None if e is not linear in sym."""
    if isinstance(e, int):
        return 0, e
    coefficient, rest = _coefficient(e, sym)
    if rest is None or sym in symbols(coefficient) or sym in symbols(rest):
        return None
    return coefficient, rest


def product(factors: tuple[Int, ...]) -> Int:
    total: Int = 1
    for f in factors:
        total = total * f
    return total
