"""Element types by their short names, and what the compiler must know of each. No torch import: `fuseline.torch_bridge` maps them."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its short name, size in bytes and kind ('float', 'int', 'uint', 'bool', 'complex')."""

    name: str
    size: int
    kind: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integers; a bool is not an integer."""
        return self.kind in ("int", "uint")

    @property
    def compute(self) -> DType:
        """The type that arithmetic on this one is done in: half types compute in f32 and round once, at the store."""
        return F32 if self in (F16, BF16) else self


F16, BF16, F32, F64 = DType("f16", 2, "float"), DType("bf16", 2, "float"), DType("f32", 4, "float"), DType("f64", 8, "float")
I8, I16, I32, I64 = DType("i8", 1, "int"), DType("i16", 2, "int"), DType("i32", 4, "int"), DType("i64", 8, "int")
U8, U16, U32, U64 = DType("u8", 1, "uint"), DType("u16", 2, "uint"), DType("u32", 4, "uint"), DType("u64", 8, "uint")
BOOL = DType("b1", 1, "bool")
C64, C128 = DType("c64", 8, "complex"), DType("c128", 16, "complex")
# Types that pass through the graph to PyTorch operators but that no kernel of ours computes with.
F8E4M3, F8E5M2 = DType("f8e4m3", 1, "opaque"), DType("f8e5m2", 1, "opaque")
OTHER = DType("other", 1, "opaque")

ALL = (F16, BF16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, BOOL, C64, C128, F8E4M3, F8E5M2, OTHER)
BY_NAME = {d.name: d for d in ALL}
