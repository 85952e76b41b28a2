"""The index algebra against plain Python integers."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseline.ir.expr import (
    Sym,
    ceil_div,
    evaluate,
    floor_div,
    in_range,
    linear_in,
    maximum,
    minimum,
    modulo,
    nonnegative,
    product,
    substitute,
    symbols,
    upper_bound,
)
from fuseline.ir.parse import parse_expr

S0, S1 = Sym("s0", None, 2), Sym("s1", None, 0)
EXTENTS = {"i": 3, "j": 8, "k": 1, "n": S0, "m": S0 * 4}
LOOPS = {name: Sym(name, extent) for name, extent in EXTENTS.items()}
SYMBOLS = (*LOOPS.values(), S0, S1)


def leaves():
    return st.one_of(st.integers(-9, 20), st.sampled_from(SYMBOLS))


def grow(inner):
    divisor = st.one_of(st.integers(1, 12), st.sampled_from([S0, S0 * 2, S0 * 4]))
    return st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "max", "min"]), inner, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, divisor))


TREES = st.recursive(leaves(), grow, max_leaves=8)


def build(tree):
    if not isinstance(tree, tuple):
        return tree
    op, a, b = tree
    a, b = build(a), build(b)
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "max": lambda: maximum(a, b),
            "min": lambda: minimum(a, b), "//": lambda: floor_div(a, b), "%": lambda: modulo(a, b)}[op]()


def plain(tree, values):
    if isinstance(tree, Sym):
        return values[tree.name]
    if not isinstance(tree, tuple):
        return evaluate(tree, values)
    op, a, b = tree
    a, b = plain(a, values), plain(b, values)
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "max": lambda: max(a, b),
            "min": lambda: min(a, b), "//": lambda: a // b, "%": lambda: a % b}[op]()


@st.composite
def values(draw):
    """Values of all symbols, within their ranges."""
    found = {"s0": draw(st.integers(2, 9)), "s1": draw(st.integers(0, 9))}
    for name, extent in EXTENTS.items():
        found[name] = draw(st.integers(0, evaluate(extent, found) - 1))
    return found


@settings(max_examples=1500, deadline=None)
@given(TREES, values())
def test_simplification_keeps_the_value(tree, at):
    assert evaluate(build(tree), at) == plain(tree, at)


@settings(max_examples=800, deadline=None)
@given(TREES, values())
def test_proofs_hold(tree, at):
    e = build(tree)
    value = evaluate(e, at)
    if nonnegative(e):
        assert value >= 0
    bound = upper_bound(e)
    if bound is not None:
        assert value <= bound
    for sym in SYMBOLS:
        linear = linear_in(e, sym)
        if linear is not None:
            assert value == evaluate(linear[0], at) * at[sym.name] + evaluate(linear[1], at)


@settings(max_examples=500, deadline=None)
@given(TREES, TREES, values())
def test_substitution_commutes_with_evaluation(tree, other, at):
    """Also where the replacement has a narrower range, as loop variables are only ever replaced within their extent."""
    e, replacement = build(tree), build(other)
    moved = modulo(replacement, 8)
    assert evaluate(substitute(e, {LOOPS["j"]: moved}), at) == evaluate(e, {**at, "j": evaluate(moved, at)})


@settings(max_examples=500, deadline=None)
@given(TREES)
def test_text_round_trip(tree):
    e = build(tree)
    names = {s.name: s for s in SYMBOLS}
    assert parse_expr(str(e), names) == e


@settings(max_examples=300, deadline=None)
@given(TREES, TREES, TREES)
def test_ring_laws_are_syntactic(x, y, z):
    """Equal polynomials have one form: commuted, regrouped or multiplied out."""
    a, b, c = build(x), build(y), build(z)
    assert (a + b) - b == a and a * b == b * a and a * (b + c) == a * b + a * c and hash(a + b) == hash(b + a)


@pytest.mark.parametrize("text, simple", [
    ("(8*i + j) // 8", "i"), ("(8*i + j) % 8", "j"), ("(s0*i + n) // s0", "i"), ("(s0*i + n) % s0", "n"),
    ("(4*s0*i + m) // (4*s0)", "i"), ("(16*i + 2*j + k) // 2", "8*i + j"), ("(16*i + 2*j) % 16 // 2", "j"),
    ("(24*i + 3*j + 2) // 3", "8*i + j"), ("j // 2 // 2", "j // 4"), ("j % 8", "j"), ("j // 8", "0"), ("(j + 8) // 8", "1"),
    ("(4*i + j // 2) // 4", "i"), ("(j % 4) % 2", "j % 2"), ("max(i, 2 + j)", "max(i, j + 2)"), ("max(j, j + 1)", "j + 1"),
    ("(s0*s1*i + s1*n) // s1", "s0*i + n"), ("k", "k"), ("k // 1", "k"),
])
def test_known_simplifications(text, simple):
    names = {s.name: s for s in SYMBOLS}
    names["s1"] = Sym("s1", None, 1)
    assert parse_expr(text, names) == parse_expr(simple, names)


def test_division_by_zero_and_signs():
    with pytest.raises(ZeroDivisionError):
        floor_div(LOOPS["i"], 0)
    with pytest.raises(ZeroDivisionError):
        modulo(3, 0)
    assert floor_div(7, -2) == -4 and modulo(7, -2) == -1 and ceil_div(7, 2) == 4 and ceil_div(-7, 2) == -3


def test_truth_of_an_expression_is_an_error():
    with pytest.raises(TypeError, match="not known"):
        bool(LOOPS["i"] + 1)


def test_helpers():
    assert product((2, S0, 3)) == 6 * S0 and product(()) == 1
    assert symbols((LOOPS["i"] * 2 + 1) // 3 + S0) == {LOOPS["i"], S0}
    assert in_range(LOOPS["i"] * 8 + LOOPS["j"], 24) and not in_range(LOOPS["i"] * 8 + LOOPS["j"], 23)
    assert in_range(LOOPS["i"] * S0 + LOOPS["n"], S0 * 3)
