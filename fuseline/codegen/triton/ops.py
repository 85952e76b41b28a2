"""The scalar operations (`ir/ops.py`) as Triton source text, with PyTorch's semantics.

Triton's own operators differ from PyTorch's in places, and the text here makes up for it: `/` on f32 is approximate
(`tl.div_rn` is not), integer `//` and `%` round to zero, `tl.maximum` drops NaN unless told, `tl.sqrt` is approximate.
Transcendental functions come from libdevice (1-2 ulp), as CUDA's own math library has them, but for erf and tanh of f32: libdevice's
select every coefficient by the argument's size, which makes gelu-like kernels wait for arithmetic instead of memory.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from fuseline.codegen.coefficients import ERF32, LOG_ERFC32, TANH32
from fuseline.errors import NotSupported
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType

TRITON_TYPE = {
    dtypes.F16: "tl.float16", dtypes.BF16: "tl.bfloat16", dtypes.F32: "tl.float32", dtypes.F64: "tl.float64",
    dtypes.I8: "tl.int8", dtypes.I16: "tl.int16", dtypes.I32: "tl.int32", dtypes.I64: "tl.int64",
    dtypes.U8: "tl.uint8", dtypes.U16: "tl.uint16", dtypes.U32: "tl.uint32", dtypes.U64: "tl.uint64",
    dtypes.BOOL: "tl.int1",
}
# In memory a bool is a byte.
POINTER_TYPE = {
    dtypes.F16: "*fp16", dtypes.BF16: "*bf16", dtypes.F32: "*fp32", dtypes.F64: "*fp64",
    dtypes.I8: "*i8", dtypes.I16: "*i16", dtypes.I32: "*i32", dtypes.I64: "*i64",
    dtypes.U8: "*u8", dtypes.U16: "*u16", dtypes.U32: "*u32", dtypes.U64: "*u64", dtypes.BOOL: "*u8",
}


def _horner(x: str, coefficients: tuple[float, ...]) -> str:
    """sum of coefficients[k] * x**k as nested fused multiply-adds."""
    text = repr(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        text = f"tl.fma({x}, {text}, {c!r})"
    return text


# Helper functions; a kernel's source gets those that its text names.
HELPERS = {
    "_floordiv_int": """
@triton.jit
def _floordiv_int(a, b):
    q = a // b
    r = a - q * b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), q - 1, q)
""",
    "_rem_int": """
@triton.jit
def _rem_int(a, b):
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
""",
    "_rem_float": """
@triton.jit
def _rem_float(a, b):
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
""",
    "_floordiv_float": """
@triton.jit
def _floordiv_float(a, b, quotient):
    r = libdevice.fmod(a, b)
    d = (a - r) / b
    d = tl.where((r != 0) & ((r < 0) != (b < 0)), d - 1, d)
    f = tl.floor(d)
    f = tl.where(d - f > 0.5, f + 1, f)
    f = tl.where(d == 0, libdevice.copysign(d * 0, quotient), f)
    return tl.where(b == 0, quotient, f)
""",
    "_pow_int": """
@triton.jit
def _pow_int(a, b, one):
    result = one
    base = a
    n = tl.where(b < 0, b * 0, b)
    for _ in range(64):
        result = tl.where((n & 1) != 0, result * base, result)
        base = base * base
        n = n >> 1
    odd = (b & 1) != 0
    inverse = tl.where(a == 1, one, tl.where(a == -1, tl.where(odd, -one, one), one * 0))
    return tl.where(b < 0, inverse, result)
""",
    "_max_nan": """
@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_min_nan": """
@triton.jit
def _min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_mul": """
@triton.jit
def _mul(a, b):
    return a * b
""",
    "_or": """
@triton.jit
def _or(a, b):
    return a | b
""",
    "_and": """
@triton.jit
def _and(a, b):
    return a & b
""",
    "_argmax": """
@triton.jit
def _argmax(v1, i1, v2, i2):
    better = (v1 > v2) | ((v1 != v1) & (v2 == v2))
    same = (v1 == v2) | ((v1 != v1) & (v2 != v2))
    first = better | (same & (i1 < i2))
    return tl.where(first, v1, v2), tl.where(first, i1, i2)
""",
    "_argmin": """
@triton.jit
def _argmin(v1, i1, v2, i2):
    better = (v1 < v2) | ((v1 != v1) & (v2 == v2))
    same = (v1 == v2) | ((v1 != v1) & (v2 != v2))
    first = better | (same & (i1 < i2))
    return tl.where(first, v1, v2), tl.where(first, i1, i2)
""",
    # tl.exp and `/` are approximate; here their errors are of a term that is small beside 1.
    "_erf": f"""
@triton.jit
def _erf(x):
    x2 = x * x
    small = tl.fma(x, {_horner("x2", ERF32)}, x)
    t = tl.minimum(tl.abs(x), 4.0)                       # a NaN is lost here, and goes by way of small
    large = 1.0 - tl.exp({_horner("t", LOG_ERFC32)})
    return tl.where(tl.abs(x) >= 1.0, libdevice.copysign(large, x), small)
""",
    "_tanh": f"""
@triton.jit
def _tanh(x):
    x2 = x * x
    small = x * tl.fma(x2, {_horner("x2", TANH32)}, 1.0)
    t = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(t + t) + 1.0)
    return tl.where(t >= 0.6, libdevice.copysign(large, x), small)
""",
    "_welford": """
@triton.jit
def _welford(mean1, m1, n1, mean2, m2, n2):
    n = n1 + n2
    share = tl.where(n2 == 0, n2, n2 / n)
    delta = mean2 - mean1
    return mean1 + delta * share, m1 + m2 + delta * delta * n1 * share, n
""",
}


def helpers_for(text: str) -> str:
    """The source of the helper functions that `text` calls."""
    return "".join(source for name, source in HELPERS.items() if name + "(" in text or f", {name})" in text)


def literal(value: int | float, dtype: DType) -> str:
    """A number as a typed Triton scalar: typed, since Triton would take a float constant as f32."""
    if dtype is dtypes.BOOL:
        return f"tl.full([], {1 if value else 0}, tl.int1)"
    if dtype.is_float:
        value = float(value)
        if math.isnan(value):
            text = 'float("nan")'
        elif math.isinf(value):
            text = 'float("inf")' if value > 0 else '-float("inf")'
        else:
            text = repr(value)
    else:
        text = str(int(value))
    return f"tl.full([], {text}, {TRITON_TYPE[dtype]})"


def _call(function: str) -> Callable[..., str]:
    return lambda dtype, *args: f"{function}({', '.join(args)})"


def _f32_helper(name: str) -> Callable[..., str]:
    """Our own function for f32, libdevice's for f64."""
    return lambda dtype, a: f"_{name}({a})" if dtype is dtypes.F32 else f"libdevice.{name}({a})"


def _infix(operator: str) -> Callable[..., str]:
    return lambda dtype, a, b: f"{a} {operator} {b}"


def _div(dtype: DType, a: str, b: str) -> str:
    return f"tl.div_rn({a}, {b})" if dtype is dtypes.F32 else f"{a} / {b}"


def _floordiv(dtype: DType, a: str, b: str) -> str:
    if dtype.is_float:
        return f"_floordiv_float({a}, {b}, {_div(dtype, a, b)})"
    return f"{a} // {b}" if dtype.kind == "uint" else f"_floordiv_int({a}, {b})"


def _truncdiv(dtype: DType, a: str, b: str) -> str:
    return f"libdevice.trunc({_div(dtype, a, b)})" if dtype.is_float else f"{a} // {b}"


def _rem(dtype: DType, a: str, b: str) -> str:
    if dtype.is_float:
        return f"_rem_float({a}, {b})"
    return f"{a} % {b}" if dtype.kind == "uint" else f"_rem_int({a}, {b})"


def _extreme(which: str) -> Callable[..., str]:
    def text(dtype: DType, a: str, b: str) -> str:
        if dtype is dtypes.BOOL:
            return f"{a} {'|' if which == 'max' else '&'} {b}"
        return f"_{which}_nan({a}, {b})" if dtype.is_float else f"tl.{which}imum({a}, {b})"
    return text


def _sign(dtype: DType, a: str) -> str:
    if dtype.kind == "uint":
        return f"({a} > 0).to({TRITON_TYPE[dtype]})"
    return f"({a} > 0).to({TRITON_TYPE[dtype]}) - ({a} < 0).to({TRITON_TYPE[dtype]})"


def _signbit(dtype: DType, a: str) -> str:
    if dtype.is_float:
        return f"{a}.to(tl.int{8 * dtype.size}, bitcast=True) < 0"
    return f"{a} < 0"


def _pow(dtype: DType, a: str, b: str) -> str:
    return f"libdevice.pow({a}, {b})" if dtype.is_float else f"_pow_int({a}, {b}, {a} * 0 + 1)"


def _sqrt(dtype: DType, a: str) -> str:
    return f"tl.sqrt_rn({a})" if dtype is dtypes.F32 else f"libdevice.sqrt({a})"


def _sigmoid(dtype: DType, a: str) -> str:
    return f"1.0 / (1.0 + libdevice.exp({a} * -1.0))"


def _reciprocal(dtype: DType, a: str) -> str:
    return f"tl.div_rn(1.0, {a})" if dtype is dtypes.F32 else f"1.0 / {a}"


def _abs(dtype: DType, a: str) -> str:
    return a if dtype.kind == "uint" else f"tl.abs({a})"


def _neg(dtype: DType, a: str) -> str:
    return f"{a} * -1.0" if dtype.is_float else f"0 - {a}"


def _not(dtype: DType, a: str) -> str:
    if dtype.kind == "uint":
        return f"{a} ^ {literal(2 ** (8 * dtype.size) - 1, dtype)}"
    return f"{a} == 0" if dtype is dtypes.BOOL else f"~{a}"


def _where(dtype: DType, a: str, b: str, c: str) -> str:
    return f"tl.where({a}, {b}, {c})"


_LIBDEVICE = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan",
              "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "trunc", "copysign", "fmod")

# op -> text(dtype of the arguments, argument texts...)
TEXT: dict[str, Callable[..., str]] = {
    **{name: _call(f"libdevice.{name}") for name in _LIBDEVICE},
    **{name: _infix(sign) for name, sign in dict(
        add="+", sub="-", mul="*", eq="==", ne="!=", lt="<", le="<=", gt=">", ge=">=", xor="^", shl="<<", shr=">>",
        **{"and": "&", "or": "|"}).items()},
    "fmod": lambda dtype, a, b: f"libdevice.fmod({a}, {b})" if dtype.is_float else f"{a} % {b}",
    "div": _div, "fma": _call("tl.fma"), "floordiv": _floordiv, "truncdiv": _truncdiv, "rem": _rem,
    "neg": _neg, "abs": _abs, "sign": _sign, "maximum": _extreme("max"), "minimum": _extreme("min"),
    "check": lambda dtype, a, b: a,                          # lower makes none for CUDA: the loads' masks protect memory
    "not": _not, "where": _where, "sqrt": _sqrt, "reciprocal": _reciprocal, "sigmoid": _sigmoid, "pow": _pow,
    "floor": _call("tl.floor"), "ceil": _call("tl.ceil"), "round": _call("libdevice.rint"),
    "erf": _f32_helper("erf"), "tanh": _f32_helper("tanh"),
    "signbit": _signbit, "isnan": lambda dtype, a: f"{a} != {a}", "isinf": lambda dtype, a: f'tl.abs({a}) == float("inf")',
    "round_f16": lambda dtype, a: f"{a}.to(tl.float16).to(tl.float32)",
    "round_bf16": lambda dtype, a: f"{a}.to(tl.bfloat16).to(tl.float32)",
}


def cast(text: str, source: DType, target: DType) -> str:
    """The conversion as C does it; float to bool is != 0; a float goes to a narrow unsigned type through i64, as in PyTorch."""
    if source is target:
        return text
    if target is dtypes.BOOL:
        return f"({text} != 0)"
    if source.is_float and target.kind == "uint":
        return f"{text}.to(tl.int64).to({TRITON_TYPE[target]})"
    if source is dtypes.BOOL and target.is_integer:
        return f"{text}.to(tl.uint8).to({TRITON_TYPE[target]})"      # an i1 is 0 or 1, never -1
    if source is dtypes.BOOL:
        return f"{text}.to(tl.uint8).to({TRITON_TYPE[target]})"
    return f"{text}.to({TRITON_TYPE[target]})"


def require(dtype: DType, what: str) -> None:
    """Raises NotSupported for a type that Triton kernels do not compute with (complex, float8)."""
    if dtype not in TRITON_TYPE:
        raise NotSupported(f"{what} of type {dtype} has no Triton code")
