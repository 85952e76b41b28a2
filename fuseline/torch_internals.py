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


def autocast_state() -> tuple:
    """What autocast does now: (enabled, dtype) for CPU and CUDA, and whether casts of weights are cached. Compared by "mode" guards."""
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())


def user_modes_active() -> bool:
    """Whether torch-function or torch-dispatch modes are on the stack, which see every operator that runs."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose; None for the CPU of old."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device


def functorch_depth() -> int:
    """How many torch.func transforms (vmap, grad) are being applied around the current code."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level()


def dispatch_keys(tensor: torch.Tensor) -> int:
    """The dispatch key set of a tensor as an opaque number: conj, neg, inference and wrapper bits are in it."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def operator(name: str) -> torch._ops.OpOverload | None:
    """The operator called "aten.add.Tensor" (namespace, name, overload), or None if this build of torch has none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None


def returns_alias(name: str) -> bool:
    """True if a result of the operator may show the memory of an argument (by its schema)."""
    found = operator(name)
    return found is not None and any(r.alias_info is not None for r in found._schema.returns)


def is_effectful(name: str) -> bool:
    """True if calling the operator again, or not calling it, could be noticed: it draws random numbers or changes an argument."""
    found = operator(name)
    return found is None or found._schema.is_mutable or torch.Tag.nondeterministic_seeded in found.tags
