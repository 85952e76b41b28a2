"""The one module that touches private parts of torch. Supporting another version of torch means reading this file.

Everything here is a small function or a name with a docstring that says what it stands for and which versions it was
tried with (2.11 and 2.14). It may import `torch.fx.experimental`, `torch._subclasses`, `torch._decomp`, `torch._C`,
`torch.utils._pytree`, but never `torch._dynamo`, `torch._inductor`, `torch._functorch.aot_autograd`, `torch._export`.
"""
from __future__ import annotations

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode

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


# ---------------------------------------------------------------- tracing

def core_decompositions() -> dict:
    """torch's decompositions to the core ATen operators, those that apply below autograd: operator -> function."""
    from torch._decomp import _core_aten_decompositions_post_autograd      # slow to import, needed only when tracing
    return _core_aten_decompositions_post_autograd()


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _FakeTensor)


def new_fake_mode(shape_env: object = None) -> _FakeTensorMode:
    return _FakeTensorMode(shape_env=shape_env)


def to_fake(mode: _FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the geometry of a real one, all sizes constant."""
    return mode.from_tensor(tensor, static_shapes=True)


def no_dispatch() -> object:
    """A context in which operators run on real tensors, whatever dispatch modes are on."""
    return torch._C._DisableTorchDispatch()


def disable_autocast() -> object:
    """A context (cheap: a C++ guard) in which no operator is cast by autocast."""
    return torch._C._DisableAutocast()


def any_autocast_enabled() -> bool:
    return torch._C._is_any_autocast_enabled()


def autograd_sequence_number() -> int:
    """The number that the next node of autograd's graph on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def current_backward_sequence_number() -> int | None:
    """The number of the autograd node whose backward is running on this thread, or None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def foreach_loop(func: torch._ops.OpOverload) -> object:
    """A foreach operator as a function that runs one operator a tensor."""
    return lambda *args, **kwargs: func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


def is_composite(func: torch._ops.OpOverload) -> bool:
    """True if PyTorch itself implements the operator by others, for every device and for autograd."""
    return func._can_decompose()


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill their part of the memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected = expected * size
    return True


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two living tensors have in common if and only if they share a storage."""
    return tensor.untyped_storage()._cdata


def unsupported_in_trace() -> tuple[type[Exception], ...]:
    """What fake tensors raise where the result would depend on data or the operator cannot be traced."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException, UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
            UnsupportedOperatorException, GuardOnDataDependentSymNode)


@functools.cache
def is_random(name: str) -> bool:
    """True for an operator that draws random numbers when called with its usual arguments."""
    found = operator(name)
    return found is not None and torch.Tag.nondeterministic_seeded in found.tags


def has_onednn_convolution() -> bool:
    """True if torch's oneDNN convolution with fused epilogues, and the packing of its weights, can be called on the CPU (2.11, 2.14)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return hasattr(torch.ops.mkldnn, "_convolution_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_convolution_weight")
