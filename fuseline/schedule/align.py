"""Matching two iteration spaces through a buffer that both address.

A dense address is a mixed-radix number: `512*i + 8*j + k` has the digits i, j, k. If one kernel stores a buffer at one
such address and another loads it at a second one, the two sets of axes are two ways to write the same number, and both
can be written over their common refinement: [N, C*H*W] and [N*C, H*W] both over [N, C, H*W].
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fuseline.ir.expr import Int, Sym, floor_div, in_range, modulo, nonnegative
from fuseline.ir.kernels import Axis
from fuseline.schedule.group import Names, hint


@dataclass(frozen=True, slots=True)
class Digit:
    """An axis and its weight in an address."""
    weight: Int
    axis: Axis


@dataclass(frozen=True, slots=True)
class Address:
    """offset + sum of weight * axis over digits, heaviest first. dense: weights and extents fit without gap down to 1."""
    digits: tuple[Digit, ...]
    offset: Int
    dense: bool

    @property
    def span(self) -> Int:
        """One past the largest value, for a dense address without offset."""
        return self.digits[0].weight * self.digits[0].axis.extent if self.digits else 1


def address(index: Int, axes: Iterable[Axis]) -> Address | None:
    """An index as a mixed-radix number over axes, or None if it is not one: not linear, or digits that overlap."""
    by_sym = {a.sym: a for a in axes}
    if isinstance(index, int):
        return Address((), index, index == 0)
    weights: dict[Sym, Int] = {}
    offset: Int = 0
    for monomial, coefficient in index.terms:
        found = None
        rest: Int = coefficient
        for atom in monomial:
            if isinstance(atom, Sym) and atom in by_sym:
                if found is not None:
                    return None
                found = atom
            elif isinstance(atom, Sym) and atom.extent is None and not atom.name.startswith("%"):
                rest = rest * atom
            else:
                return None
        if found is None:
            offset = offset + rest
        else:
            weights[found] = weights[found] + rest if found in weights else rest
    digits = sorted((Digit(w, by_sym[s]) for s, w in weights.items()), key=lambda d: (-hint(d.weight), -hint(d.axis.extent)))
    dense = offset == 0
    below: Int = 1
    for digit in reversed(digits):
        if digit.weight != below:
            dense = False
            if not nonnegative(digit.weight - below):
                return None
        below = digit.weight * digit.axis.extent
    return Address(tuple(digits), offset, dense)


def common_rows(store: Address, index: Int, axes: Iterable[Axis]) -> tuple[Address, Address] | None:
    """The rows in which `store` and an index lie, as two addresses of rows; the index may pick anything inside of a row.

    A row is what the last digits of `store` run over, as few of them as will do.
    """
    if isinstance(index, int) or not store.dense:
        return None
    syms = {a.sym for a in axes}
    for position in range(len(store.digits) - 1, 0, -1):
        unit = store.digits[position - 1].weight
        row: Int = 0
        inside: Int = 0
        for monomial, coefficient in index.terms:
            term: Int = coefficient
            for atom in monomial:
                term = term * atom
            linear = sum(isinstance(a, Sym) and a in syms for a in monomial) == 1 and all(isinstance(a, Sym) for a in monomial)
            if linear and modulo(term, unit) == 0:
                row = row + floor_div(term, unit)
            else:
                inside = inside + term
        if not in_range(inside, unit):
            continue
        right = address(row, axes)
        if right is not None:
            left = tuple(Digit(floor_div(d.weight, unit), d.axis) for d in store.digits[:position])
            return Address(left, 0, True), right
    return None


def solve(store: Address, index: Int) -> dict[Sym, Int]:
    """The axis values with which `store` has the value `index`; right wherever the index is an element that is stored."""
    found: dict[Sym, Int] = {}
    rest = index - store.offset
    for position, digit in enumerate(store.digits):
        found[digit.axis.sym] = floor_div(rest, digit.weight)
        if position + 1 < len(store.digits):
            rest = modulo(rest, digit.weight)
    return found


@dataclass(slots=True)
class Alignment:
    """How the axes of two groups correspond: `left` and `right` map a symbol to the refined axes that replace it."""
    left: dict[Sym, tuple[Axis, ...]] = field(default_factory=dict)
    right: dict[Sym, tuple[Axis, ...]] = field(default_factory=dict)

    def add(self, left: Address, right: Address, names: Names) -> bool:
        """Extend by two addresses of one element; False (and unchanged) if they do not fit each other or what is known."""
        if left.offset != right.offset:
            return False
        same = len(left.digits) == len(right.digits) and all(
            a.weight == b.weight and a.axis.extent == b.axis.extent for a, b in zip(left.digits, right.digits))
        if same:
            pairs = [((a.axis,), a.axis.sym, b.axis.sym) for a, b in zip(left.digits, right.digits)]
            return self._extend({l: axes for axes, l, _ in pairs}, {r: axes for axes, _, r in pairs})
        if not left.dense or not right.dense or left.span != right.span:
            return False
        cuts = _refine([d.weight for d in left.digits] + [d.weight for d in right.digits])
        if cuts is None:
            return False
        sides: list[dict[Sym, tuple[Axis, ...]]] = [{}, {}]
        made: list[tuple[Int, Axis]] = []
        upper = left.span
        exact = {(d.weight, d.axis.extent): d.axis for d in left.digits}
        for cut in cuts:
            extent = floor_div(upper, cut)
            made.append((cut, exact.get((cut, extent)) or names.axis(extent)))
            upper = cut
        for side, at in zip(sides, (left, right)):
            position = 0
            for digit in at.digits:
                parts = []
                while position < len(made):
                    parts.append(made[position][1])
                    position += 1
                    if made[position - 1][0] == digit.weight:
                        break
                side[digit.axis.sym] = tuple(parts)
        return self._extend(sides[0], sides[1])

    def _extend(self, left: dict[Sym, tuple[Axis, ...]], right: dict[Sym, tuple[Axis, ...]]) -> bool:
        for known, new in ((self.left, left), (self.right, right)):
            for sym, parts in new.items():
                if sym in known and known[sym] != parts:
                    return False
        taken = {a.sym for parts in self.left.values() for a in parts} & {a.sym for s, parts in left.items()
                                                                           if s not in self.left for a in parts}
        if taken:
            return False
        known_right = {a.sym for parts in self.right.values() for a in parts}
        if known_right & {a.sym for s, parts in right.items() if s not in self.right for a in parts}:
            return False
        self.left.update(left)
        self.right.update(right)
        return True


def _refine(weights: list[Int]) -> list[Int] | None:
    """All weights, heaviest first, each once, if each is a multiple of the next; else None."""
    ordered: list[Int] = []
    for weight in sorted(weights, key=lambda w: -hint(w)):
        if not ordered or ordered[-1] != weight:
            ordered.append(weight)
    for upper, lower in zip(ordered, ordered[1:]):
        if modulo(upper, lower) != 0 or hint(upper) == hint(lower):
            return None
    return ordered

