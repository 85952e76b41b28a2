"""PyTorch's type promotion, for operators whose result type does not tell the type that they compute in (comparisons)."""
from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from fuseline.errors import LoweringError
from fuseline.ir import dtypes
from fuseline.ir.dtypes import BF16, BOOL, F16, F32, F64, I16, I32, I64, DType
from fuseline.lower.views import RuntimeNumber, View

_CATEGORY = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


def promote(a: DType, b: DType) -> DType:
    """The type of a sum of tensors of types a and b."""
    if a == b:
        return a
    if "opaque" in (a.kind, b.kind):
        raise LoweringError(f"promotion of {a} and {b}")
    if _CATEGORY[a.kind] > _CATEGORY[b.kind]:
        a, b = b, a
    if _CATEGORY[a.kind] < _CATEGORY[b.kind]:
        if b.kind == "complex" and a.kind == "float":
            return dtypes.C128 if F64 in (a, b) or b == dtypes.C128 else dtypes.C64
        return b
    if b.kind == "float":
        return F32 if {a, b} == {F16, BF16} else max(a, b, key=lambda d: d.size)
    if b.kind == "complex":
        return dtypes.C128
    if a.kind == b.kind:
        return max(a, b, key=lambda d: d.size)
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    if signed.size > unsigned.size:
        return signed
    if unsigned.size >= 4:
        raise LoweringError(f"promotion of {a} and {b}")
    return {1: I16, 2: I32}[unsigned.size]


def _combined(first: DType | None, second: DType | None) -> DType | None:
    """The first group's type, unless the second is of a higher category."""
    if first is None or second is None:
        return first or second
    return promote(first, second) if _CATEGORY[second.kind] > _CATEGORY[first.kind] else first


def result_type(args: Iterable[object]) -> DType:
    """torch.result_type of Views and numbers: tensors with axes decide, then 0-d tensors, then numbers."""
    groups: list[DType | None] = [None, None, None]
    for arg in args:
        if isinstance(arg, View):
            where, dtype = (0 if arg.rank else 1), arg.dtype
        elif isinstance(arg, bool):
            where, dtype = 2, BOOL
        elif isinstance(arg, (float, RuntimeNumber)):
            where, dtype = 2, F32
        else:
            where, dtype = 2, I64
        held = groups[where]
        groups[where] = dtype if held is None else promote(held, dtype)
    found = _combined(groups[0], _combined(groups[1], groups[2]))
    if found is None:
        raise LoweringError("no operands to promote")
    return found


def round_number(x: float, dtype: DType) -> float:
    """The nearest value of a half type, as a Python float; x itself for wider types."""
    if dtype not in (F16, BF16) or not math.isfinite(x):
        return x
    x = float(x)
    if dtype == F16:
        try:
            return struct.unpack("e", struct.pack("e", x))[0]
        except OverflowError:
            return math.copysign(math.inf, x)
    try:
        (bits,) = struct.unpack("I", struct.pack("f", x))
    except OverflowError:
        return math.copysign(math.inf, x)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("f", struct.pack("I", bits))[0]


def integer_range(dtype: DType) -> tuple[int, int]:
    bits = 8 * dtype.size
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if dtype.kind == "int" else (0, (1 << bits) - 1)
