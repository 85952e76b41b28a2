"""The operations of `fuseline.ir.ops` as LLVM instructions, on scalars and vectors alike.

Values in kernels have compute types: f32, f64, integers, b1 (`i1`). In memory b1 is a byte, f16 is LLVM's half, bf16 the upper
half of an f32 handled as i16 (the hardware's conversion flushes subnormals, so rounding is done in integers).
"""
from __future__ import annotations

import math
from collections.abc import Callable

from fuseline.codegen.llvm import mathlib
from fuseline.codegen.llvm.emit import BITS, Builder, Val
from fuseline.errors import NotSupported
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType

_VALUE = {"f32": "float", "f64": "double", "f16": "float", "bf16": "float", "b1": "i1",
          "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "u8": "i8", "u16": "i16", "u32": "i32", "u64": "i64"}
_MEMORY = {**_VALUE, "f16": "half", "bf16": "i16", "b1": "i8"}


def value_elem(dtype: DType) -> str:
    """LLVM's type of a value of this dtype in a kernel."""
    if dtype.name not in _VALUE:
        raise NotSupported(f"kernels do not compute with {dtype}")
    return _VALUE[dtype.name]


def memory_elem(dtype: DType) -> str:
    if dtype.name not in _MEMORY:
        raise NotSupported(f"kernels do not address buffers of {dtype}")
    return _MEMORY[dtype.name]


# ---------------------------------------------------------------- memory <-> value

def from_memory(b: Builder, v: Val, dtype: DType) -> Val:
    if dtype == dtypes.BOOL:
        return b.compare("ne", v, b.const(0, "i8", v.lanes))
    if dtype == dtypes.F16:
        return b.convert("fpext", v, "float")
    if dtype == dtypes.BF16:
        wide = b.binary("shl", b.convert("zext", v, "i32"), b.const(16, "i32", v.lanes))
        return b.convert("bitcast", wide, "float")
    return v


def to_memory(b: Builder, v: Val, dtype: DType, *, rounded: bool = False) -> Val:
    """A value of dtype.compute rounded once to the memory type. `rounded`: it is a value of that type already."""
    if dtype == dtypes.BOOL:
        return b.convert("zext", v, "i8")
    if dtype == dtypes.F16:
        return b.convert("fptrunc", v, "half")
    if dtype == dtypes.BF16:
        bits = b.convert("bitcast", v, "i32") if rounded else _bf16_bits(b, v)
        return b.convert("trunc", b.binary("lshr", bits, b.const(16, "i32", v.lanes)), "i16")
    return v


def _bf16_bits(b: Builder, v: Val) -> Val:
    """The bits of an f32 rounded to bf16 (to even; any NaN becomes the quiet one), in the upper half; the lower is not clean."""
    n = v.lanes
    bits = b.convert("bitcast", v, "i32")
    odd = b.binary("and", b.binary("lshr", bits, b.const(16, "i32", n)), b.const(1, "i32", n))
    rounded = b.binary("add", b.binary("add", bits, b.const(0x7FFF, "i32", n)), odd)
    return b.select(b.compare("uno", v, v), b.const(0x7FC00000, "i32", n), rounded)


def cast(b: Builder, v: Val, source: DType, target: DType) -> Val:
    """As C does; float to b1 is != 0. Half types as targets give f32: they round at the store."""
    source, target = source.compute, target.compute
    if source == target:
        return v
    to, n = value_elem(target), v.lanes
    if target == dtypes.BOOL:
        zero = b.const(0, v.elem, n)
        return b.compare("une" if source.is_float else "ne", v, zero)
    if source == dtypes.BOOL:
        return b.convert("uitofp" if target.is_float else "zext", v, to)
    if source.is_float and target.is_float:
        return b.convert("fpext" if target == dtypes.F64 else "fptrunc", v, to)
    if target.is_float:
        return b.convert("sitofp" if source.kind == "int" else "uitofp", v, to)
    if source.is_float:
        return _float_to_int(b, v, target)
    if BITS[to] > BITS[v.elem]:
        return b.convert("sext" if source.kind == "int" else "zext", v, to)
    return v if BITS[to] == BITS[v.elem] else b.convert("trunc", v, to)


def _float_to_int(b: Builder, v: Val, target: DType) -> Val:
    """Truncation toward zero. Out of range is undefined in C; here as x86 and eager have it: the smallest integer of 64 or
    32 bits, cut to the target's width. (In LLVM itself it would be poison.)"""
    wide = "i64" if target.size == 8 or target == dtypes.U32 else "i32"
    limit = 2.0 ** (BITS[wide] - 1)
    good = b.binary("and", b.compare("oge", v, b.const(-limit, v.elem, v.lanes)), b.compare("olt", v, b.const(limit, v.elem, v.lanes)))
    safe = b.select(good, v, b.const(-limit, v.elem, v.lanes))
    whole = b.convert("fptosi", safe, wide)
    if target == dtypes.U64:
        # 2**63 .. 2**64 - 1: convert what is left above 2**63, and put the top bit back
        half = b.const(2.0 ** 63, v.elem, v.lanes)
        high = b.binary("and", b.compare("oge", v, half), b.compare("olt", v, b.const(2.0 ** 64, v.elem, v.lanes)))
        less = b.binary("fsub", b.select(high, v, half), half)
        upper = b.binary("xor", b.convert("fptosi", less, "i64"), b.const(-(1 << 63), "i64", v.lanes))
        whole = b.select(high, upper, whole)
    to = value_elem(target)
    return whole if to == wide else b.convert("trunc", whole, to)


def number(b: Builder, value: object, dtype: DType) -> Val:
    """A Python number as a constant of the dtype, converted as C does."""
    elem = value_elem(dtype)
    if dtype == dtypes.BOOL:
        return b.const(bool(value), elem)
    if dtype.is_integer and isinstance(value, float):
        value = 0 if math.isnan(value) or math.isinf(value) else int(value)
    if dtype.is_integer and isinstance(value, bool):
        value = int(value)
    return b.const(float(value) if dtype.is_float else value, elem)         # type: ignore[arg-type]


# ---------------------------------------------------------------- operations

Emit = Callable[[Builder, list[Val], DType], Val]
_TABLE: dict[str, Emit] = {}


def _op(*names: str) -> Callable[[Emit], Emit]:
    def register(function: Emit) -> Emit:
        for name in names:
            if name in _TABLE:
                raise ValueError(f"two definitions of {name}")
            _TABLE[name] = function
        return function
    return register


def emit_op(b: Builder, op: str, args: list[Val], dtype: DType) -> Val:
    """op(*args) for arguments of the one type `dtype` (for `where` the type of the last two)."""
    if op in mathlib.FUNCTIONS and dtype.is_float:
        return mathlib.apply(b, op, b.same_lanes(*args))
    if op not in _TABLE:
        raise NotSupported(f"operation {op} on {dtype} has no CPU code")
    return _TABLE[op](b, args, dtype)


_SIMPLE = {"add": ("fadd", "add"), "sub": ("fsub", "sub"), "mul": ("fmul", "mul")}
for _name, (_f, _i) in _SIMPLE.items():
    def _simple(b: Builder, args: list[Val], dtype: DType, f: str = _f, i: str = _i) -> Val:
        return b.binary(f if dtype.is_float else i, *args)
    _op(_name)(_simple)

for _name, _bits in {"and": "and", "or": "or", "xor": "xor", "div": "fdiv", "shl": "shl"}.items():
    def _plain(b: Builder, args: list[Val], dtype: DType, op: str = _bits) -> Val:
        return b.binary(op, *args)
    if _name != "shl":
        _op(_name)(_plain)

# predicate: float, signed, unsigned
_COMPARE = {"eq": ("oeq", "eq", "eq"), "ne": ("une", "ne", "ne"), "lt": ("olt", "slt", "ult"), "le": ("ole", "sle", "ule"),
            "gt": ("ogt", "sgt", "ugt"), "ge": ("oge", "sge", "uge")}


def predicate(op: str, dtype: DType) -> str:
    f, s, u = _COMPARE[op]
    return f if dtype.is_float else s if dtype.kind == "int" else u


for _name in _COMPARE:
    def _comparison(b: Builder, args: list[Val], dtype: DType, op: str = _name) -> Val:
        return b.compare(predicate(op, dtype), *args)
    _op(_name)(_comparison)


@_op("fma")
def _fma(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.fma(*args)


@_op("neg")
def _neg(b: Builder, args: list[Val], dtype: DType) -> Val:
    (x,) = args
    return b.negate(x) if dtype.is_float else b.binary("sub", b.const(0, x.elem, x.lanes), x)


@_op("abs")
def _abs(b: Builder, args: list[Val], dtype: DType) -> Val:
    (x,) = args
    if dtype.is_float:
        return b.absolute(x)
    if dtype.kind != "int":
        return x
    return b.select(b.compare("slt", x, b.const(0, x.elem, x.lanes)), b.binary("sub", b.const(0, x.elem, x.lanes), x), x)


@_op("sign")
def _sign(b: Builder, args: list[Val], dtype: DType) -> Val:
    """-1, 0, 1; for a NaN 0, as both comparisons are false. The zero's sign is positive."""
    (x,) = args
    if dtype == dtypes.BOOL:
        return x
    zero, one = b.const(0, x.elem, x.lanes), b.const(1, x.elem, x.lanes)
    above = b.select(b.compare(predicate("gt", dtype), x, zero), one, zero)
    if dtype.kind == "uint":
        return above
    return b.select(b.compare(predicate("lt", dtype), x, zero), b.const(-1, x.elem, x.lanes), above)


@_op("maximum")
def _maximum(b: Builder, args: list[Val], dtype: DType) -> Val:
    return extreme(b, args[0], args[1], dtype, "gt")


@_op("minimum")
def _minimum(b: Builder, args: list[Val], dtype: DType) -> Val:
    return extreme(b, args[0], args[1], dtype, "lt")


def extreme(b: Builder, x: Val, y: Val, dtype: DType, which: str) -> Val:
    """The larger ("gt") or smaller ("lt") of two values; a NaN wins."""
    if dtype == dtypes.BOOL:
        return b.binary("or" if which == "gt" else "and", x, y)
    chosen = b.select(b.compare(predicate(which, dtype), x, y), x, y)         # y where either is NaN: a NaN of y is kept
    return b.select(b.compare("uno", x, x), x, chosen) if dtype.is_float else chosen


@_op("where")
def _where(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.select(*args)


@_op("not")
def _not(b: Builder, args: list[Val], dtype: DType) -> Val:
    (x,) = args
    return b.binary("xor", x, b.const(True if dtype == dtypes.BOOL else -1, x.elem, x.lanes))


@_op("shl")
def _shl(b: Builder, args: list[Val], dtype: DType) -> Val:
    """As torch: 0 for a shift by the width or more, or by a negative number."""
    x, count = b.same_lanes(*args)
    bits = BITS[x.elem]
    fine = b.compare("ult", count, b.const(bits, x.elem, x.lanes))
    safe = b.select(fine, count, b.const(0, x.elem, x.lanes))
    return b.select(fine, b.binary("shl", x, safe), b.const(0, x.elem, x.lanes))


@_op("shr")
def _shr(b: Builder, args: list[Val], dtype: DType) -> Val:
    """As torch: the sign fills for a shift by the width or more, or by a negative number."""
    x, count = b.same_lanes(*args)
    bits = BITS[x.elem]
    fine = b.compare("ult", count, b.const(bits, x.elem, x.lanes))
    if dtype.kind == "int":
        return b.binary("ashr", x, b.select(fine, count, b.const(bits - 1, x.elem, x.lanes)))
    safe = b.select(fine, count, b.const(0, x.elem, x.lanes))
    return b.select(fine, b.binary("lshr", x, safe), b.const(0, x.elem, x.lanes))


def _safe_divisor(b: Builder, x: Val, y: Val, dtype: DType) -> Val:
    """Division by zero (undefined in the IR) and the smallest integer by -1 must not trap: the divisor becomes 1."""
    bad = b.compare("eq", y, b.const(0, y.elem, y.lanes))
    if dtype.kind == "int":
        least = b.const(-(1 << (BITS[x.elem] - 1)), x.elem, x.lanes)
        overflow = b.binary("and", *b.same_lanes(b.compare("eq", x, least), b.compare("eq", y, b.const(-1, y.elem, y.lanes))))
        bad, overflow = b.same_lanes(bad, overflow)
        bad = b.binary("or", bad, overflow)
    return b.select(bad, b.const(1, y.elem, y.lanes), y)


@_op("truncdiv")
def _truncdiv(b: Builder, args: list[Val], dtype: DType) -> Val:
    x, y = b.same_lanes(*args)
    if dtype.is_float:
        return b.intrinsic("llvm.trunc", x.elem, x.lanes, [b.binary("fdiv", x, y)])
    # the smallest integer / -1 wraps to itself, as x / 1 does
    return b.binary("sdiv" if dtype.kind == "int" else "udiv", x, _safe_divisor(b, x, y, dtype))


@_op("floordiv")
def _floordiv(b: Builder, args: list[Val], dtype: DType) -> Val:
    x, y = b.same_lanes(*args)
    if dtype.is_float:
        return _float_floordiv(b, x, y)
    if dtype.kind == "uint":
        return b.binary("udiv", x, _safe_divisor(b, x, y, dtype))
    y = _safe_divisor(b, x, y, dtype)
    q, r = b.binary("sdiv", x, y), b.binary("srem", x, y)
    zero = b.const(0, x.elem, x.lanes)
    differs = b.binary("and", b.compare("ne", r, zero), b.compare("slt", b.binary("xor", r, y), zero))
    return b.select(differs, b.binary("sub", q, b.const(1, x.elem, x.lanes)), q)


def _float_floordiv(b: Builder, x: Val, y: Val) -> Val:
    """torch.floor_divide: (x - fmod(x, y)) / y, one less where fmod's sign is not y's, rounded to the nearest whole number."""
    zero, one = b.const(0.0, x.elem, x.lanes), b.const(1.0, x.elem, x.lanes)
    mod = _fmod_float(b, x, y)
    div = b.binary("fdiv", b.binary("fsub", x, mod), y)
    other_sign = b.binary("xor", b.compare("olt", y, zero), b.compare("olt", mod, zero))
    div = b.select(b.binary("and", b.compare("une", mod, zero), other_sign), b.binary("fsub", div, one), div)
    floor = b.intrinsic("llvm.floor", x.elem, x.lanes, [div])
    floor = b.select(b.compare("ogt", b.binary("fsub", div, floor), b.const(0.5, x.elem, x.lanes)), b.binary("fadd", floor, one), floor)
    none = b.intrinsic("llvm.copysign", x.elem, x.lanes, [zero, b.binary("fdiv", x, y)])
    whole = b.select(b.compare("une", div, zero), floor, none)
    return b.select(b.compare("oeq", y, zero), b.binary("fdiv", x, y), whole)


def _fmod_float(b: Builder, x: Val, y: Val) -> Val:
    """C's fmod, lane by lane: the exact remainder needs a loop that the C library has."""
    name = "fmodf" if x.elem == "float" else "fmod"
    lanes = x.lanes
    result = Val("poison", x.elem, lanes, 0)
    for k in range(lanes):
        r = b.call(name, x.elem, 1, [b.lane(x, k), b.lane(y, k)])
        if lanes == 1:
            return r
        result = b.emit(x.elem, lanes, f"insertelement {result.typed}, {r.typed}, i32 {k}", [result, r])
    return result


@_op("fmod")
def _fmod(b: Builder, args: list[Val], dtype: DType) -> Val:
    x, y = b.same_lanes(*args)
    if dtype.is_float:
        return _fmod_float(b, x, y)
    return b.binary("srem" if dtype.kind == "int" else "urem", x, _safe_divisor(b, x, y, dtype))


@_op("rem")
def _rem(b: Builder, args: list[Val], dtype: DType) -> Val:
    """Python's %: the sign of the divisor."""
    x, y = b.same_lanes(*args)
    zero = b.const(0, x.elem, x.lanes)
    if dtype.is_float:
        mod = _fmod_float(b, x, y)
        other_sign = b.binary("xor", b.compare("olt", y, zero), b.compare("olt", mod, zero))
        return b.select(b.binary("and", b.compare("une", mod, zero), other_sign), b.binary("fadd", mod, y), mod)
    if dtype.kind == "uint":
        return b.binary("urem", x, _safe_divisor(b, x, y, dtype))
    y = _safe_divisor(b, x, y, dtype)
    r = b.binary("srem", x, y)
    differs = b.binary("and", b.compare("ne", r, zero), b.compare("slt", b.binary("xor", r, y), zero))
    return b.select(differs, b.binary("add", r, y), r)


@_op("pow")
def _pow_int(b: Builder, args: list[Val], dtype: DType) -> Val:
    """Integer powers by squaring; a negative exponent gives 0 but for bases 1 and -1."""
    x, y = b.same_lanes(*args)
    zero, one = b.const(0, x.elem, x.lanes), b.const(1, x.elem, x.lanes)
    known = args[1].const
    bits = max(1, int(known).bit_length()) if isinstance(known, int) and known >= 0 else BITS[x.elem]
    result, base = one, x
    for k in range(bits):
        bit = b.compare("ne", b.binary("and", y, b.const(1 << k if k < BITS[x.elem] - 1 else -(1 << k), x.elem, x.lanes)), zero)
        result = b.select(bit, b.binary("mul", result, base), result)
        if k + 1 < bits:
            base = b.binary("mul", base, base)
    if dtype.kind == "uint" or bits < BITS[x.elem]:
        return result
    minus_one = b.const(-1, x.elem, x.lanes)
    odd = b.compare("ne", b.binary("and", y, one), zero)
    inverse = b.select(b.compare("eq", x, one), one, b.select(b.compare("eq", x, minus_one), b.select(odd, minus_one, one), zero))
    return b.select(b.compare("slt", y, zero), inverse, result)


@_op("sqrt")
def _sqrt(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.intrinsic("llvm.sqrt", args[0].elem, args[0].lanes, args)


@_op("reciprocal")
def _reciprocal(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.binary("fdiv", b.const(1.0, args[0].elem, args[0].lanes), args[0])


for _name, _full in {"floor": "llvm.floor", "ceil": "llvm.ceil", "trunc": "llvm.trunc", "round": "llvm.roundeven"}.items():
    def _rounding(b: Builder, args: list[Val], dtype: DType, full: str = _full) -> Val:
        return b.intrinsic(full, args[0].elem, args[0].lanes, args) if dtype.is_float else args[0]
    _op(_name)(_rounding)


@_op("copysign")
def _copysign(b: Builder, args: list[Val], dtype: DType) -> Val:
    args = b.same_lanes(*args)
    return b.intrinsic("llvm.copysign", args[0].elem, args[0].lanes, args)


@_op("signbit")
def _signbit(b: Builder, args: list[Val], dtype: DType) -> Val:
    (x,) = args
    if dtype.kind in ("uint", "bool"):
        return b.const(False, "i1", x.lanes)
    bits = b.convert("bitcast", x, "i32" if x.elem == "float" else "i64") if dtype.is_float else x
    return b.compare("slt", bits, b.const(0, bits.elem, bits.lanes))


@_op("isnan")
def _isnan(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.compare("uno", args[0], args[0])


@_op("isinf")
def _isinf(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.compare("oeq", b.absolute(args[0]), b.const(float("inf"), args[0].elem, args[0].lanes))


@_op("round_f16")
def _round_f16(b: Builder, args: list[Val], dtype: DType) -> Val:
    return b.convert("fpext", b.convert("fptrunc", args[0], "half"), args[0].elem)


@_op("round_bf16")
def _round_bf16(b: Builder, args: list[Val], dtype: DType) -> Val:
    x = args[0] if args[0].elem == "float" else b.convert("fptrunc", args[0], "float")
    bits = b.binary("and", _bf16_bits(b, x), b.const(-65536, "i32", x.lanes))
    rounded = b.convert("bitcast", bits, "float")
    return rounded if args[0].elem == "float" else b.convert("fpext", rounded, args[0].elem)
