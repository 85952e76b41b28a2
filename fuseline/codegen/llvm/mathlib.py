"""Transcendental functions on vectors, written as LLVM IR.

f32: `exp`, `exp2`, `sigmoid`, `tanh` and `erf` compute in f32 with fused multiply-adds, since pointwise kernels are bound by
them; the others compute in f64 with polynomials good to about 1e-10 and round once. f64 calls the C library for each lane.
`ULP` states the largest error of each f32 function against the exact value, in units of the last place, over all of f32,
subnormals included; `tests/codegen/llvm/test_mathlib.py` checks it. NaN, infinities and signed zeros are as in C.

The coefficients are near-minimax (Chebyshev) fits made with mpmath at 40 digits.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from fuseline.codegen.coefficients import ERF32, LOG_ERFC32, TANH32
from fuseline.codegen.llvm.emit import Builder, Val, type_text

ULP = {
    "exp": 1.5, "exp2": 1.5, "sigmoid": 2.0, "tanh": 2.0, "erf": 2.0, "rsqrt": 1.5,
    "expm1": 0.6, "log": 0.6, "log2": 0.6, "log10": 0.6, "log1p": 0.6, "sin": 0.6, "cos": 0.6, "tan": 0.6, "asin": 0.6, "acos": 0.6,
    "atan": 0.6, "atan2": 0.6, "sinh": 0.6, "cosh": 0.6, "asinh": 0.6, "acosh": 0.6, "atanh": 0.6, "erfc": 0.6, "pow": 0.6,
}
INLINE = frozenset(("exp", "exp2", "sigmoid", "tanh", "erf", "rsqrt"))      # f32 only; the others are called
ARITY = {"atan2": 2, "pow": 2}

INF = float("inf")
# Cody-Waite halves of ln 2: the high part has few enough bits for n * high to be exact.
LN2_HI, LN2_LO = 0.693145751953125, 1.428606765330187e-06
LN2_HI64, LN2_LO64 = 0.6931471803691238, 1.9082149292705877e-10
EXP32 = (0.5, 0.16666573381900845, 0.04166655011030512, 0.008363773874405574, 0.0013926926614021907)          # (e^r-1-r)/r^2
EXP2_32 = (0.6931471805599453, 0.2402265093622689, 0.055504108849824686, 0.009618053734326929, 0.0013333500120002693,
           0.00015462610757797552, 1.5298221267173666e-05)                                                    # (2^r-1)/r
EXP64 = (0.5, 0.16666666666646782, 0.0416666666666501, 0.008333333354971901, 0.0013888888906916628, 0.00019841206274785362,
         2.4801534341237888e-05, 2.7626466044935e-06, 2.7614931875440477e-07)
EXPM1_64 = (0.5, 0.16666666665179664, 0.04166666666542842, 0.00833333388397989, 0.0013888889347432188, 0.00019840719452043895,
            2.480112894201006e-05, 2.7760945248727845e-06, 2.7726923638489863e-07)                            # on |x| <= 0.6
ATANH64 = (0.666666666666667, 0.3999999999989607, 0.28571428627528794, 0.22222210881932924, 0.1818290749767138,
           0.1533111258795579, 0.14623956608257405)                                                           # (2atanh(s)/s-2)/s^2
SIN64 = (-0.16666666666666666, 0.008333333333330887, -0.0001984126983666588, 2.755731605459391e-06, -2.5051121875169604e-08,
         1.591741283670716e-10)                                                                               # (sin(r)/r-1)/r^2
COS64 = (0.041666666666666664, -0.0013888888888887359, 2.48015872987077e-05, -2.755731724172776e-07, 2.087614003139097e-09,
         -1.1382184214477387e-11)                                                                             # (cos-1+t/2)/t^2
SINH64 = (0.16666666666666616, 0.008333333333368043, 0.0001984126980271376, 2.755733488224956e-06, 2.5049235524388913e-08,
          1.6301681153198234e-10)                                                                             # |x| <= 1
ATAN64 = (-0.3333333333230858, 0.1999999965269345, -0.14285694570640292, 0.11110666303625405, -0.09085624177886961,
          0.0765429547264386, -0.06487062356604843, 0.05294390881616235, -0.03876702256847214, 0.023248373698383448,
          -0.010257166271466982, 0.0028754856099316305, -0.0003778858076643859)                               # (atan(z)/z-1)/z^2
ASIN64 = (0.16666666666738633, 0.07499999953429712, 0.04464290647458497, 0.03037994521002481, 0.02241241772669709,
          0.01690268388638098, 0.01686409027401464, 0.0010675063149111763, 0.028346745231951537)              # z^2 <= 1/4
ERFCX64 = (1.2530080582697312, -0.13562110612460862, -0.04756229435425108, 0.12964515871159094, -0.11927366336267217,
           0.06830802699593244, -0.02377051621878682, 0.0025293966202414586, 0.0018887062613225673, -0.000779860878510035,
           -0.0001052649432039298, 0.00012516268201985718, 5.327009755918957e-06, -2.003724012575631e-05, -1.4076856222207182e-06,
           2.9791123523256167e-06, 7.749026562102599e-07)                                  # (1+2t) e^(t^2) erfc(t) in (t-3)/(t+3)
PIO2_HI, PIO2_LO = 1.5707963267948966, 6.123233995736766e-17
HUGE_ANGLE = 2.0 ** 28                                      # above it the quotient by pi/2 needs more bits than f64 has


# ---------------------------------------------------------------- pieces

def _k(b: Builder, x: Val, number: object, elem: str | None = None) -> Val:
    return b.const(number, elem or x.elem, x.lanes)


def _clamp(b: Builder, x: Val, low: float, high: float) -> Val:
    """x between the bounds; a NaN stays one (the order of operands is what vminps and vmaxps need for that)."""
    lo, hi = _k(b, x, low), _k(b, x, high)
    x = b.select(b.compare("ogt", x, hi), hi, x)
    return b.select(b.compare("olt", x, lo), lo, x)


def _round(b: Builder, x: Val) -> Val:
    return b.intrinsic("llvm.roundeven", x.elem, x.lanes, [x])


def _to_int(b: Builder, x: Val) -> Val:
    """Whole-valued floats to integers of the same width; a NaN becomes 0 first, since converting it is undefined."""
    whole = b.select(b.compare("uno", x, x), _k(b, x, 0.0), x)
    return b.convert("fptosi", whole, "i32" if x.elem == "float" else "i64")


def _power_of_two(b: Builder, n: Val, elem: str) -> Val:
    """2.0**n for integers n within the normal exponents."""
    bias, shift, whole = (127, 23, "i32") if elem == "float" else (1023, 52, "i64")
    biased = b.binary("add", n, b.const(bias, whole, n.lanes))
    return b.convert("bitcast", b.binary("shl", biased, b.const(shift, whole, n.lanes)), elem)


def _scale32(b: Builder, p: Val, n: Val) -> Val:
    """p * 2.0**n for a whole-valued f32 n within +-252, rounded once also where the result is subnormal."""
    done = b.scale_by_power(p, n)
    if done is not None:
        return done
    whole = _to_int(b, n)
    low = b.binary("ashr", whole, b.const(1, "i32", p.lanes))   # two factors, of which the first product is exact
    high = b.binary("sub", whole, low)
    return b.binary("fmul", b.binary("fmul", p, _power_of_two(b, low, "float")), _power_of_two(b, high, "float"))


def _power32(b: Builder, n: Val) -> Val:
    """2.0**n for a whole-valued f32 n within the normal exponents; NaN gives NaN or 1."""
    done = b.scale_by_power(_k(b, n, 1.0), n)
    return done if done is not None else _power_of_two(b, _to_int(b, n), "float")


def _copysign(b: Builder, x: Val, sign: Val) -> Val:
    return b.intrinsic("llvm.copysign", x.elem, x.lanes, [x, sign])


def _exp_parts(b: Builder, x: Val) -> tuple[Val, Val]:
    """(r + r^2/2 + ..., n) with e^x = 2^n * (1 + first), for x in f32 that is bounded."""
    n = _round(b, b.binary("fmul", x, _k(b, x, 1.4426950408889634)))
    r = b.fma(n, _k(b, x, -LN2_HI), x)
    r = b.fma(n, _k(b, x, -LN2_LO), r)
    q = b.polynomial(r, EXP32)
    return b.fma(b.binary("fmul", r, r), q, r), n


# ---------------------------------------------------------------- f32, in f32

def exp_f32(b: Builder, x: Val) -> Val:
    x = _clamp(b, x, -104.0, 89.0)
    q, n = _exp_parts(b, x)
    return _scale32(b, b.binary("fadd", q, _k(b, x, 1.0)), n)


def exp2_f32(b: Builder, x: Val) -> Val:
    x = _clamp(b, x, -151.0, 129.0)
    n = _round(b, x)
    r = b.binary("fsub", x, n)
    p = b.fma(r, b.polynomial(r, EXP2_32), _k(b, x, 1.0))
    return _scale32(b, p, n)


def sigmoid_f32(b: Builder, x: Val) -> Val:
    """1 / (1 + e^-x) with e^-x = S * (1 + q): the sum is rounded once. Beyond 2^64 both are scaled down, so that results too
    small for 1 / S to be finite come out."""
    q, n = _exp_parts(b, _clamp(b, b.negate(x), -87.0, 104.0))
    big = b.compare("ogt", n, _k(b, x, 64.0))
    power = b.select(big, b.binary("fsub", n, _k(b, x, 64.0)), n)
    one = b.select(big, _k(b, x, 2.0 ** -64), _k(b, x, 1.0))
    scale = _power32(b, power)
    # S + 1 is exact for small S; for large S the small terms are added up first.
    large = b.compare("ogt", n, _k(b, x, 12.0))
    small_terms = b.fma(scale, q, b.select(large, one, b.binary("fadd", scale, one)))
    below = b.binary("fadd", small_terms, b.select(large, scale, _k(b, x, 0.0)))
    return b.binary("fmul", b.binary("fdiv", _k(b, x, 1.0), below), one)


def tanh_f32(b: Builder, x: Val) -> Val:
    """x + x^3 T(x^2) below 0.6; above (e^2|x| - 1) / (e^2|x| + 1) with the numerator computed without cancellation."""
    t = b.absolute(x)
    x2 = b.binary("fmul", x, x)
    near = b.fma(b.binary("fmul", x, x2), b.polynomial(x2, TANH32), x)
    bounded = b.select(b.compare("ogt", t, _k(b, x, 10.0)), _k(b, x, 10.0), t)
    q, n = _exp_parts(b, b.binary("fadd", bounded, bounded))
    scale = _power32(b, n)
    less_one = b.fma(scale, q, b.binary("fsub", scale, _k(b, x, 1.0)))
    far = b.binary("fdiv", less_one, b.binary("fadd", less_one, _k(b, x, 2.0)))
    return _copysign(b, b.select(b.compare("olt", t, _k(b, x, 0.6)), near, far), x)


def erf_f32(b: Builder, x: Val) -> Val:
    """x + x * P(x^2) below 1; 1 - exp(Q(|x|)) above, Q a polynomial for log(erfc)."""
    t = b.absolute(x)
    small = b.fma(x, b.polynomial(b.binary("fmul", x, x), ERF32), x)
    bounded = b.select(b.compare("ogt", t, _k(b, x, 4.0)), _k(b, x, 4.0), t)
    q, n = _exp_parts(b, b.polynomial(bounded, LOG_ERFC32))
    scale = _power32(b, n)
    large = b.binary("fsub", _k(b, x, 1.0), b.fma(scale, q, scale))
    return b.select(b.compare("olt", t, _k(b, x, 1.0)), small, _copysign(b, large, x))


def rsqrt(b: Builder, x: Val) -> Val:
    return b.binary("fdiv", _k(b, x, 1.0), b.intrinsic("llvm.sqrt", x.elem, x.lanes, [x]))


# ---------------------------------------------------------------- cores in f64, for f32 results

def _exp64(b: Builder, x: Val, low: float = -110.0, high: float = 95.0) -> Val:
    """e^x to 1e-14, for results that f64 holds as normal numbers."""
    x = _clamp(b, x, low, high)
    n = _round(b, b.binary("fmul", x, _k(b, x, 1.4426950408889634)))
    r = b.fma(n, _k(b, x, -LN2_LO64), b.fma(n, _k(b, x, -LN2_HI64), x))
    p = b.fma(b.binary("fmul", r, r), b.polynomial(r, EXP64), r)
    return b.binary("fmul", b.binary("fadd", p, _k(b, x, 1.0)), _power_of_two(b, _to_int(b, n), "double"))


def _log64(b: Builder, x: Val) -> Val:
    """log(x) to a relative 1e-13 for normal x; -inf at 0, NaN below, inf at inf."""
    bits = b.convert("bitcast", x, "i64")
    # The mantissa is taken from [sqrt(1/2), sqrt(2)): shift the exponent's boundary there before cutting.
    offset = 0x3FE6A09E667F3BCD
    shifted = b.binary("sub", bits, b.const(offset, "i64", x.lanes))
    n = b.binary("ashr", shifted, b.const(52, "i64", x.lanes))
    m = b.convert("bitcast", b.binary("sub", bits, b.binary("shl", n, b.const(52, "i64", x.lanes))), "double")
    f = b.binary("fsub", m, _k(b, x, 1.0))
    s = b.binary("fdiv", f, b.binary("fadd", f, _k(b, x, 2.0)))
    t = b.binary("fmul", s, s)
    p = b.fma(b.binary("fmul", s, t), b.polynomial(t, ATANH64), b.binary("fadd", s, s))
    nf = b.convert("sitofp", n, "double")
    y = b.fma(nf, _k(b, x, LN2_HI64), b.fma(nf, _k(b, x, LN2_LO64), p))
    y = b.select(b.compare("oeq", x, _k(b, x, 0.0)), _k(b, x, -INF), y)
    y = b.select(b.compare("olt", x, _k(b, x, 0.0)), _k(b, x, math.nan), y)
    # inf and NaN are their own logarithms
    return b.select(b.compare("ult", x, _k(b, x, INF)), b.select(b.compare("uno", x, x), x, y), x)


def _sin_cos(b: Builder, x: Val) -> tuple[Val, Val, Val]:
    """(sin r, cos r, n mod 4) with x = n * pi/2 + r; x holds an f32 value, in f64. Infinities give NaN."""
    n = _round(b, b.binary("fmul", x, _k(b, x, 0.6366197723675814)))
    r = b.fma(n, _k(b, x, -PIO2_LO), b.fma(n, _k(b, x, -PIO2_HI), x))
    huge = b.compare("uge", b.absolute(x), _k(b, x, HUGE_ANGLE))
    tame = b.select(huge, _k(b, x, 0.0), n)
    quadrant = b.binary("and", _to_int(b, tame), b.const(3, "i64", x.lanes))
    some = huge if x.lanes == 1 else b.call(f"llvm.vector.reduce.or.v{x.lanes}i1", "i1", 1, [huge])

    def far() -> list[Val]:
        far_r, far_quadrant = _reduce_huge(b, x, huge)
        return [b.select(huge, far_r, r), b.select(huge, far_quadrant, quadrant)]

    r, quadrant = b.seldom(some, far, [r, quadrant])
    t = b.binary("fmul", r, r)
    sine = b.fma(b.binary("fmul", r, t), b.polynomial(t, SIN64), r)
    cosine = b.fma(b.binary("fmul", t, t), b.polynomial(t, COS64), b.fma(t, _k(b, x, -0.5), _k(b, x, 1.0)))
    return sine, cosine, quadrant


def _bits_of_two_over_pi() -> tuple[int, ...]:
    """64-bit windows of the binary fraction of 2/pi, one starting at each bit position."""
    # Computed from pi by Machin's formula in integers: no table to mistype.
    bits = 320

    def arctan_inverse(k: int) -> int:
        total, power, n, sign = 0, (1 << bits) // k, 1, 1
        while power:
            total += sign * (power // n)
            power //= k * k
            n, sign = n + 2, -sign
        return total

    pi = 4 * (4 * arctan_inverse(5) - arctan_inverse(239))
    fraction = (2 << (2 * bits)) // pi                       # 2/pi * 2**bits
    return tuple((fraction >> (bits - 64 - start)) & ((1 << 64) - 1) for start in range(168))


TWO_OVER_PI = _bits_of_two_over_pi()


def _reduce_huge(b: Builder, x: Val, huge: Val) -> tuple[Val, Val]:
    """(r, quadrant) of |x| >= 2**28 by the Payne-Hanek method; lanes that are not huge get anything defined.

    |x| = m * 2**e with a 24-bit m and e > 0. Of m * 2/pi * 2**e only the value modulo 4 matters, so the bits of 2/pi before
    position e - 2 - 24 are left out. The product with a 64-bit window and the 32 bits after it, modulo 2**64, is the
    quotient's last two whole bits and 62 bits of fraction.
    """
    lanes = x.lanes
    bits = b.convert("bitcast", b.absolute(x), "i64")
    e = b.binary("sub", b.binary("lshr", bits, b.const(52, "i64", lanes)), b.const(1023 + 23, "i64", lanes))
    finite = b.binary("and", huge, b.compare("olt", b.absolute(x), _k(b, x, INF)))
    e = b.select(finite, e, b.const(5, "i64", lanes))
    m = b.binary("or", b.binary("lshr", b.binary("and", bits, b.const((1 << 52) - 1, "i64", lanes)), b.const(29, "i64", lanes)),
                 b.const(1 << 23, "i64", lanes))
    # bit position p of 2/pi has weight 2**-(p+1); after the factor 2**e the first that matters has weight 2 (= modulo 4)
    start = b.binary("sub", e, b.const(2, "i64", lanes))
    table = Val("@two_over_pi", "ptr", 1, 0)
    off = b.const(0, "i64", lanes)
    all_lanes = b.const(True, "i1", lanes)

    def window(at: Val) -> Val:
        where = b.address(table, at, "i64")
        return b.load(where, "i64", 1, pinned=False) if lanes == 1 else b.gather(where, all_lanes, off, pinned=False)

    high = window(start)
    after = b.binary("lshr", window(b.binary("add", start, b.const(64, "i64", lanes))), b.const(32, "i64", lanes))
    carry = b.binary("lshr", b.binary("mul", m, after), b.const(32, "i64", lanes))
    product = b.binary("add", b.binary("mul", m, high), carry)
    nearest = b.binary("lshr", b.binary("add", product, b.const(1 << 61, "i64", lanes)), b.const(62, "i64", lanes))
    rest = b.binary("sub", product, b.binary("shl", nearest, b.const(62, "i64", lanes)))
    r = b.binary("fmul", b.convert("sitofp", rest, "double"), _k(b, x, math.pi / 2 * 2.0 ** -62))
    negative = b.compare("olt", x, _k(b, x, 0.0))
    r = b.select(negative, b.negate(r), r)
    quadrant = b.select(negative, b.binary("sub", b.const(0, "i64", lanes), nearest), nearest)
    r = b.select(finite, r, _k(b, x, math.nan))
    return r, b.binary("and", quadrant, b.const(3, "i64", lanes))


def _pick_quadrant(b: Builder, sine: Val, cosine: Val, quadrant: Val) -> Val:
    one = b.const(1, "i64", quadrant.lanes)
    odd = b.compare("ne", b.binary("and", quadrant, one), b.const(0, "i64", quadrant.lanes))
    value = b.select(odd, cosine, sine)
    minus = b.compare("uge", quadrant, b.const(2, "i64", quadrant.lanes))
    return b.select(minus, b.negate(value), value)


def sin64(b: Builder, x: Val) -> Val:
    return b.select(b.compare("oeq", x, _k(b, x, 0.0)), x, _pick_quadrant(b, *_sin_cos(b, x)))


def cos64(b: Builder, x: Val) -> Val:
    sine, cosine, quadrant = _sin_cos(b, x)
    turned = b.binary("and", b.binary("add", quadrant, b.const(1, "i64", x.lanes)), b.const(3, "i64", x.lanes))
    return _pick_quadrant(b, sine, cosine, turned)


def tan64(b: Builder, x: Val) -> Val:
    sine, cosine, quadrant = _sin_cos(b, x)
    odd = b.compare("ne", b.binary("and", quadrant, b.const(1, "i64", x.lanes)), b.const(0, "i64", x.lanes))
    value = b.binary("fdiv", b.select(odd, b.negate(cosine), sine), b.select(odd, sine, cosine))
    return b.select(b.compare("oeq", x, _k(b, x, 0.0)), x, value)


def expm1_64(b: Builder, x: Val) -> Val:
    near = b.fma(b.binary("fmul", x, x), b.polynomial(x, EXPM1_64), x)
    far = b.binary("fsub", _exp64(b, x), _k(b, x, 1.0))
    y = b.select(b.compare("olt", b.absolute(x), _k(b, x, 0.5)), near, far)
    return b.select(b.compare("oeq", x, _k(b, x, 0.0)), x, y)                  # keeps the sign of zero


def log1p64(b: Builder, x: Val) -> Val:
    near = b.fma(b.binary("fmul", x, x), b.fma(x, _k(b, x, 1 / 3), _k(b, x, -0.5)), x)
    far = _log64(b, b.binary("fadd", x, _k(b, x, 1.0)))
    return b.select(b.compare("olt", b.absolute(x), _k(b, x, 2.0 ** -14)), near, far)


def log_64(b: Builder, x: Val) -> Val:
    return _log64(b, x)


def log2_64(b: Builder, x: Val) -> Val:
    return b.binary("fmul", _log64(b, x), _k(b, x, 1.4426950408889634))


def log10_64(b: Builder, x: Val) -> Val:
    return b.binary("fmul", _log64(b, x), _k(b, x, 0.4342944819032518))


def sinh64(b: Builder, x: Val) -> Val:
    t = b.absolute(x)
    x2 = b.binary("fmul", x, x)
    near = b.fma(b.binary("fmul", x, x2), b.polynomial(x2, SINH64), x)
    e = _exp64(b, t)
    far = b.binary("fmul", b.binary("fsub", e, b.binary("fdiv", _k(b, x, 1.0), e)), _k(b, x, 0.5))
    return b.select(b.compare("olt", t, _k(b, x, 1.0)), near, _copysign(b, far, x))


def cosh64(b: Builder, x: Val) -> Val:
    e = _exp64(b, b.absolute(x))
    return b.binary("fmul", b.binary("fadd", e, b.binary("fdiv", _k(b, x, 1.0), e)), _k(b, x, 0.5))


def asinh64(b: Builder, x: Val) -> Val:
    t = b.absolute(x)
    near = b.fma(b.binary("fmul", b.binary("fmul", x, x), x), _k(b, x, -1 / 6), x)
    root = b.intrinsic("llvm.sqrt", "double", x.lanes, [b.fma(t, t, _k(b, x, 1.0))])
    far = _copysign(b, _log64(b, b.binary("fadd", t, root)), x)
    return _copysign(b, b.select(b.compare("olt", t, _k(b, x, 2.0 ** -10)), near, far), x)


def acosh64(b: Builder, x: Val) -> Val:
    one = _k(b, x, 1.0)
    square = b.binary("fmul", b.binary("fsub", x, one), b.binary("fadd", x, one))
    y = _log64(b, b.binary("fadd", x, b.intrinsic("llvm.sqrt", "double", x.lanes, [square])))
    return b.select(b.compare("olt", x, one), _k(b, x, math.nan), y)


def atanh64(b: Builder, x: Val) -> Val:
    one = _k(b, x, 1.0)
    near = b.fma(b.binary("fmul", b.binary("fmul", x, x), x), _k(b, x, 1 / 3), x)
    y = _log64(b, b.binary("fdiv", b.binary("fadd", one, x), b.binary("fsub", one, x)))
    return b.select(b.compare("olt", b.absolute(x), _k(b, x, 2.0 ** -10)), near, b.binary("fmul", y, _k(b, x, 0.5)))


def _atan_ratio(b: Builder, y: Val, x: Val) -> Val:
    """atan(y / x) for y, x >= 0, not both 0 or infinite: in [0, pi/2]."""
    swap = b.compare("ogt", y, x)
    z = b.binary("fdiv", b.select(swap, x, y), b.select(swap, y, x))
    t = b.binary("fmul", z, z)
    a = b.fma(b.binary("fmul", z, t), b.polynomial(t, ATAN64), z)
    return b.select(swap, b.binary("fsub", _k(b, y, math.pi / 2), a), a)


def atan64(b: Builder, x: Val) -> Val:
    return _copysign(b, _atan_ratio(b, b.absolute(x), _k(b, x, 1.0)), x)


def atan2_64(b: Builder, y: Val, x: Val) -> Val:
    ay, ax = b.absolute(y), b.absolute(x)
    zero, inf, one = _k(b, x, 0.0), _k(b, x, INF), _k(b, x, 1.0)
    both_zero = b.binary("and", b.compare("oeq", ay, zero), b.compare("oeq", ax, zero))
    both_inf = b.binary("and", b.compare("oeq", ay, inf), b.compare("oeq", ax, inf))
    # Both infinite is the diagonal (1, 1); both zero is the axis (0, 1).
    ay = b.select(both_inf, one, ay)
    ax = b.select(b.binary("or", both_zero, both_inf), one, ax)
    a = _atan_ratio(b, ay, ax)
    negative = b.compare("slt", b.convert("bitcast", x, "i64"), b.const(0, "i64", x.lanes))
    a = b.select(negative, b.binary("fsub", _k(b, x, math.pi), a), a)
    a = b.select(b.compare("uno", y, x), _k(b, x, math.nan), a)
    return _copysign(b, a, y)


def _asin_core(b: Builder, z: Val, t: Val) -> Val:
    return b.fma(b.binary("fmul", z, t), b.polynomial(t, ASIN64), z)


def _half_angle(b: Builder, t: Val) -> tuple[Val, Val]:
    """asin(sqrt((1 - t) / 2)): half of acos(t), accurate near t = 1; and its argument squared."""
    q = b.binary("fmul", b.binary("fsub", _k(b, t, 1.0), t), _k(b, t, 0.5))
    return _asin_core(b, b.intrinsic("llvm.sqrt", "double", t.lanes, [q]), q), q


def asin64(b: Builder, x: Val) -> Val:
    t = b.absolute(x)
    near = _asin_core(b, x, b.binary("fmul", x, x))
    half, _ = _half_angle(b, t)
    far = b.fma(half, _k(b, x, -2.0), _k(b, x, math.pi / 2))
    return b.select(b.compare("ole", t, _k(b, x, 0.5)), near, _copysign(b, far, x))


def acos64(b: Builder, x: Val) -> Val:
    t = b.absolute(x)
    near = b.binary("fsub", _k(b, x, math.pi / 2), _asin_core(b, x, b.binary("fmul", x, x)))
    half, _ = _half_angle(b, t)
    twice = b.binary("fadd", half, half)
    far = b.select(b.compare("olt", x, _k(b, x, 0.0)), b.binary("fsub", _k(b, x, math.pi), twice), twice)
    return b.select(b.compare("ole", t, _k(b, x, 0.5)), near, far)


def erfc64(b: Builder, x: Val) -> Val:
    """exp(-t^2) * erfcx(t) with t = |x|; 2 minus it for negative x."""
    t = b.absolute(x)
    t = b.select(b.compare("ogt", t, _k(b, x, 11.0)), _k(b, x, 11.0), t)
    u = b.binary("fdiv", b.binary("fsub", t, _k(b, x, 3.0)), b.binary("fadd", t, _k(b, x, 3.0)))
    scaled = b.binary("fdiv", b.polynomial(u, ERFCX64), b.fma(t, _k(b, x, 2.0), _k(b, x, 1.0)))
    y = b.binary("fmul", _exp64(b, b.negate(b.binary("fmul", t, t)), -125.0, 0.0), scaled)
    return b.select(b.compare("olt", x, _k(b, x, 0.0)), b.binary("fsub", _k(b, x, 2.0), y), y)


def pow64(b: Builder, x: Val, y: Val) -> Val:
    """x ** y by exp(y * log|x|), with C's cases for signs, zeros, ones and infinities."""
    one, zero, inf = _k(b, x, 1.0), _k(b, x, 0.0), _k(b, x, INF)
    ax = b.absolute(x)
    exponent = b.binary("fmul", y, _log64(b, ax))            # 0 * inf is NaN: x = 1 and y = 0 are put right below
    magnitude = _exp64(b, exponent, -115.0, 95.0)
    magnitude = b.select(b.compare("ogt", exponent, _k(b, x, 94.0)), inf, magnitude)
    magnitude = b.select(b.compare("olt", exponent, _k(b, x, -114.0)), zero, magnitude)
    whole = b.compare("oeq", b.intrinsic("llvm.trunc", "double", y.lanes, [y]), y)
    half = b.binary("fmul", y, _k(b, y, 0.5))
    odd = b.binary("and", whole, b.compare("une", b.intrinsic("llvm.trunc", "double", y.lanes, [half]), half))
    minus = b.compare("slt", b.convert("bitcast", x, "i64"), b.const(0, "i64", x.lanes))
    value = b.select(b.binary("and", minus, odd), b.negate(magnitude), magnitude)
    finite_negative = b.binary("and", b.compare("olt", x, zero), b.compare("one", ax, inf))
    fractional = b.binary("and", b.compare("une", b.intrinsic("llvm.trunc", "double", y.lanes, [y]), y), b.compare("ord", y, y))
    value = b.select(b.binary("and", finite_negative, fractional), _k(b, x, math.nan), value)
    unit = b.binary("and", b.compare("oeq", x, _k(b, x, -1.0)), b.compare("oeq", b.absolute(y), inf))
    value = b.select(b.compare("uno", x, y), _k(b, x, math.nan), value)
    is_one = b.binary("or", b.binary("or", b.compare("oeq", x, one), b.compare("oeq", y, zero)), unit)
    return b.select(is_one, one, value)


_IN_F32: dict[str, Callable[..., Val]] = {
    "exp": exp_f32, "exp2": exp2_f32, "sigmoid": sigmoid_f32, "tanh": tanh_f32, "erf": erf_f32, "rsqrt": rsqrt,
}
_IN_F64: dict[str, Callable[..., Val]] = {
    "expm1": expm1_64, "log": log_64, "log2": log2_64, "log10": log10_64, "log1p": log1p64, "sin": sin64, "cos": cos64,
    "tan": tan64, "asin": asin64, "acos": acos64, "atan": atan64, "atan2": atan2_64, "sinh": sinh64, "cosh": cosh64,
    "asinh": asinh64, "acosh": acosh64, "atanh": atanh64, "erfc": erfc64, "pow": pow64,
}
FUNCTIONS = frozenset(_IN_F32) | frozenset(_IN_F64)


# ---------------------------------------------------------------- use

def apply(b: Builder, name: str, args: list[Val]) -> Val:
    """name(*args) for f32 or f64 values of the same number of lanes: inline, or a call of a function `definition` makes."""
    x = args[0]
    if x.elem == "float" and name in INLINE:
        return _IN_F32[name](b, *args)
    if name == "rsqrt":
        return rsqrt(b, x)
    b.functions.add((name, x.lanes, x.elem))
    return b.call(_symbol(name, x.lanes, x.elem), x.elem, x.lanes, args, declare=False)


def _symbol(name: str, lanes: int, elem: str) -> str:
    return f"fl_{name}_{elem}_{lanes}"


_DEFINED: dict[tuple[str, int, str, bool], tuple[str, frozenset[str]]] = {}


def definition(name: str, lanes: int, elem: str, avx512: bool) -> tuple[str, frozenset[str]]:
    """(text of the internal function, declarations that it needs). The text is made once per process."""
    key = (name, lanes, elem, avx512)
    if key not in _DEFINED:
        b = Builder("entry", avx512)
        params = [Val(f"%x{k}", elem, lanes, 0) for k in range(ARITY.get(name, 1))]
        if elem == "double":
            result = _by_lane(b, name, params)
        else:
            result = b.convert("fptrunc", _IN_F64[name](b, *[b.convert("fpext", p, "double") for p in params]), "float")
        head = f"define internal {type_text(elem, lanes)} @{_symbol(name, lanes, elem)}({', '.join(p.typed for p in params)}) #1 {{\nentry:"
        _DEFINED[key] = "\n".join([head, *b.text(), f"  ret {result.typed}", "}"]), frozenset(b.declarations)
    return _DEFINED[key]


def _by_lane(b: Builder, name: str, params: list[Val]) -> Val:
    """f64: the C library's function, lane after lane."""
    lanes = params[0].lanes
    result = Val("poison", "double", lanes, 0)
    for k in range(lanes):
        x = [b.lane(p, k) for p in params]
        if name == "sigmoid":
            one = b.const(1.0, "double")
            e = b.call("exp", "double", 1, [b.negate(b.absolute(x[0]))])
            top = b.select(b.compare("oge", x[0], b.const(0.0, "double")), one, e)
            y = b.binary("fdiv", top, b.binary("fadd", one, e))
        else:
            y = b.call(name, "double", 1, x)
        if lanes == 1:
            return y
        result = b.emit("double", lanes, f"insertelement {result.typed}, {y.typed}, i32 {k}", [result, y])
    return result


def tables() -> str:
    """The constant tables that the definitions refer to."""
    return (f"@two_over_pi = internal constant [{len(TWO_OVER_PI)} x i64] ["
            + ", ".join(f"i64 {w - (1 << 64) if w >> 63 else w}" for w in TWO_OVER_PI) + "]")
