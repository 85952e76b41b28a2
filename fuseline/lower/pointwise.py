"""Arithmetic, comparison, logic, conversion: operators that compute each element from the operands' elements at its place."""
from __future__ import annotations

import math

from fuseline.errors import LoweringError
from fuseline.ir.dtypes import BF16, BOOL, DType
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import POINTWISE, Context, elementwise, lowering, scalar
from fuseline.lower.views import View, expand

# ---------------------------------------------------------------- one operand

# ATen name -> scalar operation on the result's type (integers are converted to it first).
_UNARY = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p",
    "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "sin": "sin", "cos": "cos", "tan": "tan", "asin": "asin",
    "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh", "acosh": "acosh",
    "atanh": "atanh", "sigmoid": "sigmoid", "erf": "erf", "erfc": "erfc", "neg": "neg", "bitwise_not": "not",
}


def _unary(name: str, op: str) -> None:
    elementwise(f"aten.{name}.default")(lambda k, x: k.op(op, x))


for _name, _op in _UNARY.items():
    _unary(_name, _op)

# Identity on integers.
for _name in ("floor", "ceil", "trunc", "round"):
    elementwise(f"aten.{_name}.default")(lambda k, x, _op=_name: k.op(_op, x) if x.dtype.is_float else x)


@elementwise("aten.abs.default")
def abs_(k: KernelBuilder, x: Val) -> Val:
    return x if x.dtype.kind in ("bool", "uint") else k.op("abs", x)


@elementwise("aten.sign.default", "aten.sgn.default")
def sign(k: KernelBuilder, x: Val) -> Val:
    return x if x.dtype == BOOL else k.op("sign", x)


@elementwise("aten.relu.default")
def relu(k: KernelBuilder, x: Val) -> Val:
    return k.op("maximum", x, 0)


@elementwise("aten.square.default")
def square(k: KernelBuilder, x: Val) -> Val:
    return x * x


@elementwise("aten.frac.default")
def frac(k: KernelBuilder, x: Val) -> Val:
    return x - k.op("trunc", x)


@elementwise("aten.positive.default")
def positive(k: KernelBuilder, x: Val) -> Val:
    return x


@elementwise("aten.logical_not.default", compute="own")
def logical_not(k: KernelBuilder, x: Val) -> Val:
    return k.op("not", k.cast(x, BOOL))


@elementwise("aten.isnan.default", compute="own")
def isnan(k: KernelBuilder, x: Val) -> Val:
    return k.op("isnan", x) if x.dtype.is_float else k.const(False, BOOL)


@elementwise("aten.isinf.default", compute="own")
def isinf(k: KernelBuilder, x: Val) -> Val:
    return k.op("isinf", x) if x.dtype.is_float else k.const(False, BOOL)


@elementwise("aten.isfinite.default", compute="own")
def isfinite(k: KernelBuilder, x: Val) -> Val:
    return k.op("lt", k.op("abs", x), math.inf) if x.dtype.is_float else k.const(True, BOOL)


@elementwise("aten.isposinf.default", compute="own")
def isposinf(k: KernelBuilder, x: Val) -> Val:
    return x.equals(math.inf) if x.dtype.is_float else k.const(False, BOOL)


@elementwise("aten.isneginf.default", compute="own")
def isneginf(k: KernelBuilder, x: Val) -> Val:
    return x.equals(-math.inf) if x.dtype.is_float else k.const(False, BOOL)


@elementwise("aten.signbit.default", compute="own")
def signbit(k: KernelBuilder, x: Val) -> Val:
    return k.const(False, BOOL) if x.dtype.kind in ("bool", "uint") else k.op("signbit", x)


_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": 1.7976931348623157e308}


@lowering("aten.nan_to_num.default")
def nan_to_num(context: Context, x: View, nan: float | None = None, posinf: float | None = None,
               neginf: float | None = None) -> View:
    largest = _LARGEST.get(x.dtype.name, 0.0)
    low, high = (-largest if neginf is None else neginf), (largest if posinf is None else posinf)

    def value(k: KernelBuilder, v: Val) -> Val:
        if not v.dtype.is_float:
            return v
        finite = k.where(v.equals(math.inf), high, k.where(v.equals(-math.inf), low, v))
        return k.where(k.op("isnan", v), 0.0 if nan is None else nan, finite)
    return context.elementwise(value, (x,), "result")


@elementwise("aten.logit.default")
def logit(k: KernelBuilder, x: Val, eps: float | None = None) -> Val:
    if eps is not None:
        low = k.rounded(k.const(eps, x.dtype))
        high = k.rounded(1.0 - low)
        x = k.where(x < low, low, k.where(x > high, high, x))                    # the lower bound wins where they cross
    return k.op("log", k.rounded(x / k.rounded(1 - x)))


@elementwise("aten.round.decimals")
def round_decimals(k: KernelBuilder, x: Val, decimals: int = 0) -> Val:
    if not x.dtype.is_float:
        return x
    power = 10.0 ** abs(decimals)
    if decimals >= 0:
        return k.op("round", x * power) / power if decimals else k.op("round", x)
    return k.op("round", x / power) * power


# ---------------------------------------------------------------- arithmetic

@elementwise("aten.add.Tensor", "aten.add.Scalar", operands=2, numbers=True, wide=("cuda",), rounds=("cpu",))
def add(k: KernelBuilder, a: Val, b: Val, alpha: float = 1) -> Val:
    if a.dtype == BOOL:
        return a | b if alpha else a
    return a + (b if alpha == 1 else b * alpha)


@elementwise("aten.sub.Tensor", "aten.sub.Scalar", operands=2, numbers=True, wide=("cuda",), rounds=("cpu",))
def sub(k: KernelBuilder, a: Val, b: Val, alpha: float = 1) -> Val:
    return a - (b if alpha == 1 else b * alpha)


@elementwise("aten.rsub.Tensor", "aten.rsub.Scalar", operands=2, numbers=True, wide=("cuda",), rounds=("cpu",))
def rsub(k: KernelBuilder, a: Val, b: Val, alpha: float = 1) -> Val:
    return b - (a if alpha == 1 else a * alpha)


@elementwise("aten.mul.Tensor", "aten.mul.Scalar", operands=2, wide=("cpu", "cuda"))
def mul(k: KernelBuilder, a: Val, b: Val) -> Val:
    return a & b if a.dtype == BOOL else a * b


@elementwise("aten.div.Tensor", "aten.div.Scalar", operands=2, wide=("cpu", "cuda"))
def div(k: KernelBuilder, a: Val, b: Val) -> Val:
    return a / b


@elementwise("aten.div.Tensor_mode", "aten.div.Scalar_mode", operands=2, wide=("cpu", "cuda"))
def div_mode(k: KernelBuilder, a: Val, b: Val, rounding_mode: str | None = None) -> Val:
    return a / b if rounding_mode is None else _quotient(k, "floordiv" if rounding_mode == "floor" else "truncdiv", a, b)


def _quotient(k: KernelBuilder, op: str, a: Val, b: Val) -> Val:
    """PyTorch's CPU operators raise for an integer divided by zero, which kernels cannot."""
    if a.dtype == BOOL:
        raise LoweringError("integer division of booleans")
    if a.dtype.is_integer and k.device in (None, "cpu") and (isinstance(b.ref, str) or not b.ref):
        raise LoweringError("an integer divisor that may be zero, for which PyTorch raises")
    return k.op(op, a, b)


def _divide(op: str, *names: str) -> None:
    @elementwise(*names, operands=2)
    def lower(k: KernelBuilder, a: Val, b: Val) -> Val:
        return _quotient(k, op, a, b)


_divide("floordiv", "aten.floor_divide.default", "aten.floor_divide.Scalar")
_divide("rem", "aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
_divide("fmod", "aten.fmod.Tensor", "aten.fmod.Scalar")

for _name in ("maximum", "minimum"):
    elementwise(f"aten.{_name}.default", operands=2)(lambda k, a, b, _op=_name: k.op(_op, a, b))
for _name in ("atan2", "copysign"):
    for _overload in (("default",) if _name == "atan2" else ("Tensor", "Scalar")):
        elementwise(f"aten.{_name}.{_overload}", operands=2)(lambda k, a, b, _op=_name: k.op(_op, a, b))


@elementwise("aten.fmax.default", operands=2)
def fmax(k: KernelBuilder, a: Val, b: Val) -> Val:
    if not a.dtype.is_float:
        return k.op("maximum", a, b)
    return k.where(k.op("isnan", a), b, k.where(k.op("isnan", b), a, k.op("maximum", a, b)))


@elementwise("aten.fmin.default", operands=2)
def fmin(k: KernelBuilder, a: Val, b: Val) -> Val:
    if not a.dtype.is_float:
        return k.op("minimum", a, b)
    return k.where(k.op("isnan", a), b, k.where(k.op("isnan", b), a, k.op("minimum", a, b)))


@elementwise("aten.hypot.default", operands=2)
def hypot(k: KernelBuilder, a: Val, b: Val) -> Val:
    """Scaled by the larger side, so that squares neither overflow nor vanish; an infinite side wins over NaN."""
    a, b = k.op("abs", a), k.op("abs", b)
    large, small = k.op("maximum", a, b), k.op("minimum", a, b)
    ratio = small / k.where(large.equals(0.0), 1.0, large)
    found = large * k.op("sqrt", ratio * ratio + 1.0)
    return k.where(a.equals(math.inf) | b.equals(math.inf), math.inf, found)


@elementwise("aten.xlogy.Tensor", "aten.xlogy.Scalar_Self", "aten.xlogy.Scalar_Other", operands=2)
def xlogy(k: KernelBuilder, a: Val, b: Val) -> Val:
    return k.where(k.op("isnan", b), math.nan, k.where(a.equals(0.0), 0.0, a * k.rounded(k.op("log", b))))


@elementwise("aten.logaddexp.default", operands=2)
def logaddexp(k: KernelBuilder, a: Val, b: Val) -> Val:
    large = k.op("maximum", a, b)
    same_infinity = k.op("isinf", a) & a.equals(b)
    return k.where(same_infinity, a, large + k.op("log1p", k.op("exp", -k.op("abs", a - b))))


@elementwise("aten.pow.Tensor_Tensor", "aten.pow.Scalar", operands=2)
def pow_(k: KernelBuilder, a: Val, b: Val) -> Val:
    if a.dtype == BOOL:
        raise LoweringError("power of booleans")
    return k.op("pow", a, b)


@elementwise("aten.pow.Tensor_Scalar", operands=2)
def pow_scalar(k: KernelBuilder, x: Val, exponent: Val) -> Val:
    """The exponents that PyTorch computes without pow are computed so here."""
    e = exponent.ref
    if x.dtype == BOOL:
        raise LoweringError("power of booleans")
    if isinstance(e, str):
        raise LoweringError("an exponent that is known at run time only")
    if x.dtype.is_integer and e < 0:
        raise LoweringError("a negative power of integers, for which PyTorch raises")
    if e == 1:
        return x
    if e == 2:
        return x * x
    steps = k.rounded if k.half == BF16 or k.device != "cpu" else (lambda value: value)        # f16 on the CPU is computed in f32
    if e == 3:
        return steps(x * x) * x
    if x.dtype.is_float:
        if e == 0:
            return k.const(1.0, x.dtype)
        if e == 0.5:
            return k.op("sqrt", x)
        if e == -0.5:
            return k.op("rsqrt", x)
        if e == -1:
            return k.op("reciprocal", x)
        if e == -2:
            return k.op("reciprocal", steps(x * x))
    return k.op("pow", x, exponent)


@elementwise("aten.addcmul.default", operands=3, numbers=True)
def addcmul(k: KernelBuilder, x: Val, a: Val, b: Val, value: float = 1) -> Val:
    return x + (a * b if value == 1 else a * value * b)


@elementwise("aten.addcdiv.default", operands=3, numbers=True)
def addcdiv(k: KernelBuilder, x: Val, a: Val, b: Val, value: float = 1) -> Val:
    return x + (a if value == 1 else a * value) / b


@elementwise("aten.lerp.Tensor", "aten.lerp.Scalar", operands=3, wide=("cpu", "cuda"))
def lerp(k: KernelBuilder, start: Val, end: Val, weight: Val) -> Val:
    """From the nearer end, as PyTorch has it."""
    step = end - start
    near, far = start + step * weight, end - step * (1 - weight if isinstance(weight.ref, str) else 1 - float(weight.ref))
    if not isinstance(weight.ref, str):
        return near if abs(weight.ref) < 0.5 else far
    return k.where(k.op("abs", weight) < 0.5, near, far)


# ---------------------------------------------------------------- comparison and logic

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    elementwise(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", operands=2, compute="promoted")(
        lambda k, a, b, _op=_name: k.op(_op, a, b))

for _name, _op in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor")):
    elementwise(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", f"aten.{_name}.Scalar_Tensor", operands=2)(
        lambda k, a, b, _op=_op: k.op(_op, a, b))

for _name, _op in (("logical_and", "and"), ("logical_or", "or"), ("logical_xor", "xor")):
    elementwise(f"aten.{_name}.default", operands=2, compute="own")(
        lambda k, a, b, _op=_op: k.op(_op, k.cast(a, BOOL), k.cast(b, BOOL)))


def _shift(op: str, *names: str) -> None:
    @elementwise(*names, operands=2)
    def lower(k: KernelBuilder, a: Val, b: Val) -> Val:
        """Shifts outside the type's width give what PyTorch gives: 0, or the sign for a right shift."""
        if not a.dtype.is_integer:
            raise LoweringError(f"shift of {a.dtype}")
        bits = 8 * a.dtype.size
        outside = b >= bits if b.dtype.kind == "uint" else (b >= bits) | (b < 0)
        if op == "shl":
            return k.where(outside, 0, k.op("shl", a, k.where(outside, 0, b)))
        # A signed right shift leaves the sign, reached one bit short of the width.
        if a.dtype.kind == "uint":
            return k.where(outside, 0, k.op("shr", a, k.where(outside, 0, b)))
        return k.op("shr", a, k.where(outside, bits - 1, b))


_shift("shl", "aten.bitwise_left_shift.Tensor", "aten.bitwise_left_shift.Tensor_Scalar", "aten.__lshift__.Scalar",
       "aten.__lshift__.Tensor")
_shift("shr", "aten.bitwise_right_shift.Tensor", "aten.bitwise_right_shift.Tensor_Scalar", "aten.__rshift__.Scalar",
       "aten.__rshift__.Tensor")


# ---------------------------------------------------------------- selection

@lowering("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(context: Context, condition: View, a: object, b: object) -> View:
    return _select(context, condition, a, b)


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(context: Context, x: View, mask: View, value: object) -> View:
    return _select(context, mask, value, x)


POINTWISE.update(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar",
                  "aten.masked_fill.Scalar", "aten.masked_fill.Tensor"))


def _select(context: Context, condition: View, a: object, b: object) -> View:
    out = context.result()
    views = [expand(o, out.shape) if isinstance(o, View) else o for o in (condition, a, b)]

    def value(k: KernelBuilder, index: tuple) -> Val:
        chosen = k.cast(scalar(k, views[0], index, None), BOOL)
        x, y = scalar(k, views[1], index, out.dtype), scalar(k, views[2], index, out.dtype)
        return k.where(chosen, x, y, out.dtype.compute)
    return context.fill(out, value)


@lowering("aten.clamp.default", "aten.clamp.Tensor")
def clamp(context: Context, x: View, min: object = None, max: object = None) -> View:     # the schema's names
    bounds = [("maximum", min), ("minimum", max)]
    used = [(op, bound) for op, bound in bounds if bound is not None]

    def value(k: KernelBuilder, v: Val, *limits: Val) -> Val:
        for (op, _), limit in zip(used, limits):
            v = k.op(op, v, limit)
        return v
    return context.elementwise(value, (x, *(bound for _, bound in used)), "result")


POINTWISE.update(("aten.clamp.default", "aten.clamp.Tensor"))
for _name, _op in (("clamp_min", "maximum"), ("clamp_max", "minimum")):
    elementwise(f"aten.{_name}.default", f"aten.{_name}.Tensor", operands=2)(lambda k, a, b, _op=_op: k.op(_op, a, b))


# ---------------------------------------------------------------- copies and conversions

@lowering("aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default", "aten.contiguous.default")
def clone(context: Context, x: View, **_: object) -> View:
    """A copy laid out and typed as the node's type says; an explicit conversion to a half type rounds here."""
    if x.device != context.type.device:
        raise LoweringError(f"copy from {x.device} to {context.type.device}")
    return context.copy(x, context.result())


@lowering("aten._neg_view.default")
def neg_view(context: Context, x: View) -> View:
    """PyTorch's lazy negation: memory that holds the negated numbers, so it must be done before kernels read it."""
    return context.elementwise(lambda k, v: -v, (x,), "result")


@lowering("aten.copy.default")
def copy(context: Context, x: View, source: View, non_blocking: bool = False) -> View:
    if source.device != context.type.device:
        raise LoweringError(f"copy from {source.device} to {context.type.device}")
    return context.copy(source, context.result())


@lowering("prims.convert_element_type.default")
def convert_element_type(context: Context, x: View, dtype: DType) -> View:
    return context.copy(x, context.result())


POINTWISE.update(("aten.clone.default", "aten._to_copy.default", "aten.lift_fresh_copy.default", "aten.copy.default",
                  "prims.convert_element_type.default"))
