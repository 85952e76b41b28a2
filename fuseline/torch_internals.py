"""The one module that touches private parts of torch. Supporting another version of torch means reading this file.

Everything here is a small function or a name with a docstring that says what it stands for and which versions it was
tried with (2.11 and 2.14). It may import `torch.fx.experimental`, `torch._subclasses`, `torch._decomp`, `torch._C`,
`torch.utils._pytree`, but never `torch._dynamo`, `torch._inductor`, `torch._functorch.aot_autograd`, `torch._export`.
"""
from __future__ import annotations

import torch

from fuseline.ir import dtypes

_TO_TORCH = {
    dtypes.F16: torch.float16, dtypes.BF16: torch.bfloat16, dtypes.F32: torch.float32, dtypes.F64: torch.float64,
    dtypes.I8: torch.int8, dtypes.I16: torch.int16, dtypes.I32: torch.int32, dtypes.I64: torch.int64,
    dtypes.U8: torch.uint8, dtypes.U16: torch.uint16, dtypes.U32: torch.uint32, dtypes.U64: torch.uint64,
    dtypes.BOOL: torch.bool, dtypes.C64: torch.complex64, dtypes.C128: torch.complex128,
    dtypes.F8E4M3: torch.float8_e4m3fn, dtypes.F8E5M2: torch.float8_e5m2,
}
_FROM_TORCH = {t: d for d, t in _TO_TORCH.items()}


def to_torch_dtype(dtype: dtypes.DType) -> torch.dtype:
    return _TO_TORCH[dtype]


def from_torch_dtype(dtype: torch.dtype) -> dtypes.DType:
    """Our name of a torch dtype; `OTHER` for one that only PyTorch's operators handle."""
    return _FROM_TORCH.get(dtype, dtypes.OTHER)
