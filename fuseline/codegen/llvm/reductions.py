"""Reductions as accumulators over vector lanes.

Floating-point sums, products, means and variances accumulate in f64 whatever the data: the conversions hide behind memory,
and the result is then at least as near to the exact one as any blocked f32 summation. Variances are sums of d and d*d with
d = x - shift, where the shift is the first element of the reduced row: no division in the loop, and no cancellation unless
the first element is an outlier by many orders of magnitude.
"""
from __future__ import annotations

from collections.abc import Sequence

from fuseline.codegen.llvm import scalars
from fuseline.codegen.llvm.emit import BITS, Builder, Val
from fuseline.errors import NotSupported
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType
from fuseline.ir.kernels import Reduce

NEEDS_SHIFT = ("welford", "welford_combine")


class Reduction:
    """How one Reduce statement accumulates. `accumulators` are the LLVM element types; every method works on any lane count."""

    def __init__(self, stmt: Reduce, arg_dtype: DType) -> None:
        self.stmt, self.op, self.dtype, self.arg_dtype = stmt, stmt.op, stmt.dtype, arg_dtype
        value = scalars.value_elem(arg_dtype)
        self.which = "gt" if self.op in ("max", "argmax") else "lt"
        if self.op in ("sum", "prod"):
            self.wide = dtypes.F64 if stmt.dtype.is_float else stmt.dtype
            self.accumulators: tuple[str, ...] = (scalars.value_elem(self.wide),)
        elif self.op in ("max", "min"):
            self.accumulators = (value,)
        elif self.op in ("any", "all"):
            self.accumulators = ("i1",)
        elif self.op in ("argmax", "argmin"):
            self.accumulators = (value, "i64")
        elif self.op == "welford":
            self.accumulators = ("double", "double")
        elif self.op == "welford_combine":
            self.accumulators = ("double", "double", "double", "double")
        else:
            raise NotSupported(f"reduction {self.op} has no CPU code")

    def initial(self, b: Builder, lanes: int) -> list[Val]:
        if self.op == "sum":
            first: list[object] = [0]
        elif self.op == "prod":
            first = [1]
        elif self.op in ("max", "min"):
            first = [_worst(self.arg_dtype, self.op)]
        elif self.op in ("any", "all"):
            first = [self.op == "all"]
        elif self.op in ("argmax", "argmin"):
            first = [_worst(self.arg_dtype, self.op[3:]), (1 << 63) - 1]
        else:
            first = [0] * len(self.accumulators)
        return [b.const(v, e, lanes) for v, e in zip(first, self.accumulators, strict=True)]

    def step(self, b: Builder, acc: Sequence[Val], args: Sequence[Val], position: Val | None, shift: Val | None) -> list[Val]:
        """The accumulators after one more element (of each lane)."""
        if self.op in ("sum", "prod"):
            x = scalars.cast(b, args[0], self.arg_dtype, self.wide)
            op = {"sum": "add", "prod": "mul"}[self.op]
            if self.wide == dtypes.BOOL:
                return [b.binary("or" if self.op == "sum" else "and", acc[0], x)]
            return [b.binary(f"f{op}" if self.wide.is_float else op, acc[0], x)]
        if self.op in ("max", "min"):
            return [scalars.extreme(b, args[0], acc[0], self.arg_dtype, self.which)]
        if self.op in ("any", "all"):
            x = scalars.cast(b, args[0], self.arg_dtype, dtypes.BOOL)
            return [b.binary("or" if self.op == "any" else "and", acc[0], x)]
        if self.op in ("argmax", "argmin"):
            if position is None:
                raise NotSupported("argmax without a position")
            return self._nearer(b, list(b.same_lanes(*args, acc[0]))[:1] + [position], list(acc))
        if shift is None:
            raise NotSupported(f"{self.op} without a shift")
        wide = [scalars.cast(b, a, self.arg_dtype, dtypes.F64) for a in args]
        if self.op == "welford":
            d = b.binary("fsub", wide[0], shift)
            return [b.binary("fadd", acc[0], d), b.fma(d, d, acc[1])]
        mean, m2, count = wide
        # a part without elements has no mean (0/0): it must add nothing
        empty, zero = b.compare("oeq", count, b.const(0.0, "double", count.lanes)), b.const(0.0, "double", mean.lanes)
        d, m2 = b.select(empty, zero, b.binary("fsub", mean, shift)), b.select(empty, zero, m2)
        cd = b.binary("fmul", count, d)
        return [b.binary("fadd", acc[0], count), b.binary("fadd", acc[1], cd), b.fma(cd, d, acc[2]), b.binary("fadd", acc[3], m2)]

    def _nearer(self, b: Builder, x: Sequence[Val], y: Sequence[Val]) -> list[Val]:
        """Of two (value, position): the more extreme value, the smaller position among equals; NaN is most extreme."""
        value, position = x
        best, at = y
        better = b.compare(scalars.predicate(self.which, self.arg_dtype), value, best)
        equal = b.compare("oeq" if self.arg_dtype.is_float else "eq", value, best)
        if self.arg_dtype.is_float:
            x_nan, y_nan = b.compare("uno", value, value), b.compare("uno", best, best)
            not_y = b.binary("xor", y_nan, b.const(True, "i1", y_nan.lanes))
            better = b.binary("or", better, b.binary("and", *b.same_lanes(x_nan, not_y)))
            equal = b.binary("or", equal, b.binary("and", *b.same_lanes(x_nan, y_nan)))
        earlier = b.compare("slt", position, at)
        take = b.binary("or", better, b.binary("and", *b.same_lanes(equal, earlier)))
        return [b.select(take, value, best), b.select(take, position, at)]

    def merge(self, b: Builder, x: Sequence[Val], y: Sequence[Val]) -> list[Val]:
        """Two sets of accumulators as one."""
        if self.op in ("max", "min"):
            return [scalars.extreme(b, x[0], y[0], self.arg_dtype, self.which)]
        if self.op in ("any", "all"):
            return [b.binary("or" if self.op == "any" else "and", x[0], y[0])]
        if self.op in ("argmax", "argmin"):
            return self._nearer(b, x, y)
        if self.op in ("sum", "prod") and self.wide == dtypes.BOOL:
            return [b.binary("or" if self.op == "sum" else "and", x[0], y[0])]
        word = "mul" if self.op == "prod" else "add"
        return [b.binary(("f" if e == "double" else "") + word, p, q) for p, q, e in zip(x, y, self.accumulators, strict=True)]

    def across_lanes(self, b: Builder, acc: Sequence[Val]) -> list[Val]:
        """The accumulators of all lanes as one scalar set: halves are merged, a tree."""
        while acc[0].lanes > 1:
            acc = self.merge(b, [b.half_of(a, False) for a in acc], [b.half_of(a, True) for a in acc])
        return list(acc)

    def finish(self, b: Builder, acc: Sequence[Val], count: Val, shift: Val | None) -> list[Val]:
        """The statement's results; `count` is the number of elements of the reduced row, as i64."""
        if self.op in ("sum", "prod"):
            return [scalars.cast(b, acc[0], self.wide, self.dtype)]
        if self.op in ("max", "min"):
            return [scalars.cast(b, acc[0], self.arg_dtype, self.dtype)]
        if self.op in ("any", "all"):
            return [scalars.cast(b, acc[0], dtypes.BOOL, self.dtype)]
        if self.op in ("argmax", "argmin"):
            return [scalars.cast(b, acc[1], dtypes.I64, self.dtype)]
        if shift is None:
            raise NotSupported(f"{self.op} without a shift")
        if self.op == "welford":
            n, first, second, below = b.convert("sitofp", count, "double"), acc[0], acc[1], None
        else:
            n, first, second, below = acc[0], acc[1], acc[2], acc[3]
        mean_d = b.binary("fdiv", *b.same_lanes(first, n))
        m2 = b.binary("fsub", second, b.binary("fmul", mean_d, first))
        zero = b.const(0.0, "double", m2.lanes)
        m2 = b.select(b.compare("olt", m2, zero), zero, m2)       # rounding may leave a tiny negative number; NaN stays
        if below is not None:
            m2 = b.binary("fadd", m2, below)
        mean = b.binary("fadd", mean_d, shift)
        return [scalars.cast(b, mean, dtypes.F64, self.dtype), scalars.cast(b, m2, dtypes.F64, self.dtype)]


def finite_or_zero(b: Builder, x: Val) -> Val:
    """The shift: an infinite or NaN first element must not make every difference NaN."""
    size = b.absolute(x)
    fine = b.compare("olt", size, b.const(float("inf"), x.elem, x.lanes))
    return b.select(fine, x, b.const(0.0, x.elem, x.lanes))


def _worst(dtype: DType, op: str) -> object:
    """The value that every other beats."""
    if dtype.is_float:
        return float("-inf") if op == "max" else float("inf")
    if dtype == dtypes.BOOL:
        return op != "max"
    bits = BITS[scalars.value_elem(dtype)]
    if dtype.kind == "uint":
        return 0 if op == "max" else (1 << bits) - 1
    return -(1 << (bits - 1)) if op == "max" else (1 << (bits - 1)) - 1
