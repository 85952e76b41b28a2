"""The scalar operations of kernel bodies: name -> arity and meaning. All code generators implement all of them.

Semantics are PyTorch's: `maximum` and `minimum` propagate NaN, `rem` takes the divisor's sign, integer division by zero is
undefined. Arguments have one common type (except where/cast/pow_int) and comparisons give b1. Numbers may stand for arguments.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """arity; `kinds`: letters of the argument kinds it accepts, f float, i integer, b bool; `result`: "same", "b1" or "given"."""

    name: str
    arity: int
    kinds: str
    result: str
    meaning: str


def _ops(*rows: tuple[str, int, str, str, str]) -> dict[str, ScalarOp]:
    return {row[0]: ScalarOp(*row) for row in rows}


OPS = _ops(
    ("add", 2, "fi", "same", "a + b"), ("sub", 2, "fi", "same", "a - b"), ("mul", 2, "fi", "same", "a * b"),
    ("div", 2, "f", "same", "a / b"), ("fma", 3, "f", "same", "a * b + c rounded once (used only where eager does so)"),
    ("floordiv", 2, "fi", "same", "floor(a / b); for floats as torch.floor_divide has it"),
    ("truncdiv", 2, "fi", "same", "a / b rounded to zero"),
    ("rem", 2, "fi", "same", "Python's a % b"), ("fmod", 2, "fi", "same", "C's fmod: the sign of a"),
    ("neg", 1, "fi", "same", "-a"), ("abs", 1, "fi", "same", "|a|"), ("sign", 1, "fi", "same", "-1, 0, 1 (NaN: 0... as torch.sign)"),
    ("maximum", 2, "fib", "same", "NaN wins"), ("minimum", 2, "fib", "same", "NaN wins"),
    ("eq", 2, "fib", "b1", "a == b"), ("ne", 2, "fib", "b1", "a != b"), ("lt", 2, "fib", "b1", "a < b"),
    ("le", 2, "fib", "b1", "a <= b"), ("gt", 2, "fib", "b1", "a > b"), ("ge", 2, "fib", "b1", "a >= b"),
    ("and", 2, "ib", "same", "bitwise"), ("or", 2, "ib", "same", "bitwise"), ("xor", 2, "ib", "same", "bitwise"),
    ("not", 1, "ib", "same", "bitwise; logical for b1"), ("shl", 2, "i", "same", "a << b"),
    ("shr", 2, "i", "same", "arithmetic for signed types"),
    ("check", 2, "b", "same", "a, which is true wherever b is: the CPU's kernels report where it is not, and the call raises"),
    ("where", 3, "fib", "same", "a ? b : c with a of type b1"),
    ("cast", 1, "fib", "given", "to the statement's dtype, as C does; float to b1 is != 0"),
    ("round_f16", 1, "f", "same", "to the nearest half value, kept as f32"),
    ("round_bf16", 1, "f", "same", "to the nearest bfloat16 value, kept as f32"),
    ("exp", 1, "f", "same", ""), ("exp2", 1, "f", "same", ""), ("expm1", 1, "f", "same", ""),
    ("log", 1, "f", "same", ""), ("log2", 1, "f", "same", ""), ("log10", 1, "f", "same", ""), ("log1p", 1, "f", "same", ""),
    ("sqrt", 1, "f", "same", "correctly rounded"), ("rsqrt", 1, "f", "same", "1 / sqrt(a)"), ("reciprocal", 1, "f", "same", "1 / a"),
    ("sin", 1, "f", "same", ""), ("cos", 1, "f", "same", ""), ("tan", 1, "f", "same", ""),
    ("asin", 1, "f", "same", ""), ("acos", 1, "f", "same", ""), ("atan", 1, "f", "same", ""), ("atan2", 2, "f", "same", ""),
    ("sinh", 1, "f", "same", ""), ("cosh", 1, "f", "same", ""), ("tanh", 1, "f", "same", ""),
    ("asinh", 1, "f", "same", ""), ("acosh", 1, "f", "same", ""), ("atanh", 1, "f", "same", ""),
    ("sigmoid", 1, "f", "same", "1 / (1 + exp(-a))"), ("erf", 1, "f", "same", ""), ("erfc", 1, "f", "same", ""),
    ("pow", 2, "fi", "same", "a ** b with C's special cases"),
    ("floor", 1, "f", "same", ""), ("ceil", 1, "f", "same", ""), ("trunc", 1, "f", "same", ""),
    ("round", 1, "f", "same", "half to even"), ("copysign", 2, "f", "same", ""), ("signbit", 1, "fi", "b1", ""),
    ("isnan", 1, "f", "b1", ""), ("isinf", 1, "f", "b1", ""),
)

REDUCTIONS = ("sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "welford", "welford_combine")
