"""The one module that touches private parts of torch. Supporting another version of torch means reading this file.

Everything here is a small function or a name with a docstring that says what it stands for and which versions it was
tried with (2.11 and 2.14). It may import `torch.fx.experimental`, `torch._subclasses`, `torch._decomp`, `torch._C`,
`torch.utils._pytree`, but never `torch._dynamo`, `torch._inductor`, `torch._functorch.aot_autograd`, `torch._export`.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._device
from torch._subclasses.fake_tensor import FakeTensor as _FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

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


# Functions that are called on hot paths, or whose identity matters, under names of ours.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled                       # no context object, no decorator
len_function_modes: Callable[[], int] = torch._C._len_torch_function_stack                  # a default device counts
len_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
functorch_interpreter: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack       # None outside torch.func transforms

Operator = torch._ops.OpOverload                       # torch.ops.aten.add.Tensor
OperatorPacket = torch._ops.OpOverloadPacket           # torch.ops.aten.add: all overloads of a name
COMPILERS = ("torch._dynamo", "torch._inductor")       # modules whose functions capture leaves to Python


def autocast_state() -> tuple:
    """What autocast does now, compared by "mode" guards: () while it is off everywhere (cheap to ask), else (enabled, dtype) for CPU
    and CUDA, and whether casts of weights are cached."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled())


def autocast_switches() -> list[tuple[str, bool, torch.dtype]]:
    """(device, enabled, dtype) of autocast for CPU and CUDA."""
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]


def restore_autocast(switches: list[tuple[str, bool, torch.dtype]]) -> None:
    """Make autocast what `autocast_switches` gave."""
    for device, enabled, dtype in switches:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def switch_autocast_off() -> None:
    """Turn autocast off as a program does: code that runs now can turn it on again."""
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)


def _function_modes() -> list:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def user_modes_active() -> bool:
    """Whether torch-function or torch-dispatch modes are on the stack, which see every operator that runs. A default device does
    not count, though it is such a mode."""
    return bool(torch._C._len_torch_dispatch_stack()
                or any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in _function_modes()))


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose; None if none did."""
    return next((m.device for m in reversed(_function_modes()) if isinstance(m, torch.utils._device.DeviceContext)), None)


def functorch_depth() -> int:
    """How many torch.func transforms (vmap, grad) and levels of forward-mode differentiation are active around the current code."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    forward_mode = torch.autograd.forward_ad._current_level + 1
    return forward_mode if interpreter is None else interpreter.level() + forward_mode


def transform_depth() -> int:
    """How many torch.func transforms are active around the current code."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() if torch._C._functorch.peek_interpreter_stack() is not None else 0


_LEAVE = {"Grad": "_grad_decrement_nesting", "Jvp": "_jvp_decrement_nesting", "Vmap": "_vmap_decrement_nesting",
          "Functionalize": "_func_decrement_nesting"}


def leave_transforms(depth: int) -> None:
    """Leave the torch.func transforms that code entered and did not leave, until `depth` are active."""
    left = transform_depth() > depth
    while transform_depth() > depth:
        kind = torch._C._functorch.peek_interpreter_stack().key().name
        getattr(torch._C._functorch, _LEAVE[kind])()
    if left:
        with contextlib.suppress(RuntimeError):                  # torch 2.11 keeps the flag with the transform, which is gone
            torch._C._functorch.set_inplace_requires_grad_allowed(False)
        with contextlib.suppress(RuntimeError):                  # the only level of forward-mode differentiation, if it is on
            torch._C._exit_dual_level(level=0)


# C functions that enter and leave transforms, or change what they allow: their order in a graph matters.
TRANSFORM_STEPS = frozenset(getattr(torch._C._functorch, name) for name in (
    "_grad_increment_nesting", "_grad_decrement_nesting", "_vmap_increment_nesting", "_vmap_decrement_nesting",
    "_jvp_increment_nesting", "_jvp_decrement_nesting", "set_inplace_requires_grad_allowed")) | {
    torch._C._enter_dual_level, torch._C._exit_dual_level, torch._C._set_fwd_grad_enabled}


def is_transformed(tensor: torch.Tensor) -> bool:
    """True for a tensor as the function under a torch.func transform sees it, also after the transform's end."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def transform_wrappers() -> tuple[dict[Callable, Callable], tuple[Callable, ...]]:
    """(Python function of torch around a C function of transforms -> that C function, functions that load torch's formulas once)."""
    from torch._functorch import predispatch
    found = {getattr(predispatch, name.removesuffix("_impl")): function
             for name, function in vars(predispatch).items() if name.endswith("_impl")}
    load = getattr(torch.autograd.forward_ad, "_maybe_load_decompositions", None)                 # not in every version
    return found, (predispatch.lazy_load_decompositions, *([] if load is None else [load]))


def transform_gradient() -> Callable:
    """The function by which torch.func's transforms call autograd: zeros for what an output does not depend on."""
    from torch._functorch import eager_transforms
    return eager_transforms._autograd_grad


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
    from torch._decomp import _core_aten_decompositions_post_autograd  # slow to import, needed only when tracing
    return _core_aten_decompositions_post_autograd()


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _FakeTensor)


def new_fake_mode(shape_env: Any = None) -> _FakeTensorMode:
    return _FakeTensorMode(shape_env=shape_env)


_quiet = threading.local()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not getattr(_quiet, "on", False))


@contextlib.contextmanager
def quiet_failures() -> Iterator[None]:
    """Within it, in this thread, torch does not log the traceback of an operator that fails on fake tensors: we handle it."""
    before, _quiet.on = getattr(_quiet, "on", False), True
    try:
        yield
    finally:
        _quiet.on = before


def to_fake(mode: _FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the geometry of a real one, all sizes constant."""
    return mode.from_tensor(tensor, static_shapes=True)


def no_dispatch() -> AbstractContextManager:
    """A context in which operators run on real tensors, whatever dispatch modes are on."""
    return torch._C._DisableTorchDispatch()


def disable_autocast() -> AbstractContextManager:
    """A context (cheap: a C++ guard) in which no operator is cast by autocast."""
    return torch._C._DisableAutocast()


def autograd_sequence_number() -> int:
    """The number that the next node of autograd's graph on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def current_backward_sequence_number() -> int | None:
    """The number of the autograd node whose backward is running on this thread, or None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def foreach_loop(func: torch._ops.OpOverload) -> Callable:
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
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
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


# ---------------------------------------------------------------- symbolic sizes, for capture

class _Name(str):
    """A name that is an attribute in some versions of torch and a method in others."""

    def __call__(self) -> str:
        return str(self)


class InputSource(torch._guards.Source):
    """What torch's ShapeEnv wants to know of where a symbol came from: a name."""

    label: str

    def __init__(self, label: str) -> None:
        object.__setattr__(self, "label", label)

    @property
    def name(self) -> _Name:                                     # type: ignore[override]
        return _Name(self.label)

    @property
    def guard_source(self) -> object:                            # type: ignore[override]
        return torch._guards.GuardSource.LOCAL

    def __hash__(self) -> int:
        return hash(self.label)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputSource) and self.label == other.label


def new_shape_env(data_dependent_sizes: bool = True) -> Any:
    """A ShapeEnv; without `data_dependent_sizes`, operators whose result has a size that only the data tell raise."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    return ShapeEnv(duck_shape=False, allow_dynamic_output_shape_ops=data_dependent_sizes)


def symbolic_formulas(wanted: bool) -> AbstractContextManager:
    """A context in which operators use torch's Python formulas where there are any: C++ ones do not take every symbolic size."""
    return torch._C._EnablePythonDispatcher() if wanted else contextlib.nullcontext()


def to_symbolic_fake(mode: _FakeTensorMode, tensor: torch.Tensor, axes: frozenset[int], label: str) -> torch.Tensor:
    """A fake tensor whose extents along `axes` are symbols; the others are constants."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
    sizes = [DimDynamic.DYNAMIC if i in axes else DimDynamic.STATIC for i in range(tensor.dim())]
    return mode.from_tensor(tensor, source=InputSource(label), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def new_symbolic_int(shape_env: Any, value: int, label: str) -> torch.SymInt:
    """A symbolic int with a hint, of any sign."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    source = InputSource(label)
    symbol = shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def new_symbolic_float(shape_env: Any, value: float, label: str) -> torch.SymFloat:
    """A symbolic float with a hint."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    source = InputSource(label)
    symbol = shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    return shape_env.create_symfloatnode(symbol, hint=value, source=source)


def hint_of(number: torch.SymInt) -> int | None:
    """The value that a symbolic int has in the call that is captured; None where it depends on data."""
    hint = number.node.hint
    return None if hint is None else int(hint)


def own_symbol(number: Any) -> Any:
    """The symbol that a symbolic number was made with, also where it has been found to equal a constant since."""
    return number.node._expr


def expression_of(number: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool; of a plain number, the number itself."""
    import sympy
    return number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else sympy.sympify(number)


def symbol_of(number: Any) -> Any:
    return number.node.expr


def number_from(shape_env: Any, expression: Any) -> torch.SymInt | int:
    """The SymInt of an expression over known symbols."""
    return int(expression) if expression.is_Integer else shape_env.create_symintnode(expression, hint=None)


def operation_of(expression: Any) -> tuple[Any, tuple]:
    """(operator function, operands) of a compound size expression. Raises NotImplementedError for one without a Python form."""
    import operator as op

    import sympy
    name = type(expression).__name__
    args = expression.args
    if isinstance(expression, sympy.Add):
        return op.add, args
    if isinstance(expression, sympy.Mul):
        return op.mul, args
    if name in ("FloorDiv", "CleanDiv"):
        return op.floordiv, args
    if name in ("Mod", "PythonMod"):
        return op.mod, args
    if name in ("Pow", "PowByNatural"):
        return op.pow, args
    if name == "Max":
        return torch.sym_max, args
    if name == "Min":
        return torch.sym_min, args
    if name == "ToFloat":
        return torch.sym_float, args
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        return op.truediv, args
    relations: dict[str, Any] = {"Equality": op.eq, "Unequality": op.ne, "LessThan": op.le, "StrictLessThan": op.lt, "GreaterThan": op.ge,
                                 "StrictGreaterThan": op.gt, "Not": op.not_}
    if name in relations:
        return relations[name], args
    raise NotImplementedError(f"a size expression {name}")


def shape_guard_texts(shape_env: Any) -> list[tuple[str, set[str]]]:
    """What a ShapeEnv decided so far: pairs of a condition in Python and the names of its symbols."""
    found = []
    for guard in shape_env.guards:
        if guard.expr.free_symbols:
            found.append((python_text(guard.expr), {str(s) for s in guard.expr.free_symbols}))
    return found


def python_text(e: Any) -> str:
    """A condition or expression of a ShapeEnv in Python, exact for floats. Raises NotImplementedError where there is none."""
    import sympy
    if isinstance(e, sympy.Float):
        return repr(float(e))
    signs = {"Equality": "==", "Unequality": "!=", "LessThan": "<=", "StrictLessThan": "<", "GreaterThan": ">=", "StrictGreaterThan": ">"}
    name = type(e).__name__
    if name in signs:
        return f"({python_text(e.lhs)} {signs[name]} {python_text(e.rhs)})"
    if name in ("And", "Or"):
        return "(" + f" {name.lower()} ".join(python_text(a) for a in e.args) + ")"
    if name == "Not":
        return f"(not {python_text(e.args[0])})"
    if isinstance(e, (sympy.Symbol, sympy.Number)):
        return str(e)
    if isinstance(e, sympy.Add):
        return "(" + " + ".join(python_text(a) for a in e.args) + ")"
    if isinstance(e, sympy.Mul):
        return "(" + " * ".join(python_text(a) for a in e.args) + ")"
    two = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "Pow": "**", "PowByNatural": "**", "IntTrueDiv": "/",
           "FloatTrueDiv": "/", "FloatPow": "**"}
    if name in two:
        return f"({python_text(e.args[0])} {two[name]} {python_text(e.args[1])})"
    if name in ("Max", "Min"):
        return f"{name.lower()}({', '.join(python_text(a) for a in e.args)})"
    call = {"ToFloat": "float", "CeilToInt": "math.ceil", "FloorToInt": "math.floor", "TruncToInt": "int", "RoundToInt": "round",
            "Abs": "abs"}.get(name)
    if call is not None:
        return f"{call}({python_text(e.args[0])})"
    raise NotImplementedError(f"a guard on {name}")


def reads_fake_data(error: RuntimeError) -> bool:
    """True for what PyTorch raises when C++ code reads the memory of a fake tensor."""
    return "data is not allocated yet" in str(error) or "Cannot access data pointer" in str(error)


def capture_modes() -> tuple[tuple[str, object], ...]:
    """The process state that every captured graph relies on, by the names of `runtime.modes`."""
    return (("grad", torch.is_grad_enabled()), ("inference", torch.is_inference_mode_enabled()), ("autocast", autocast_state()),
            ("default_dtype", torch.get_default_dtype()), ("default_device", default_device()),
            ("torch_function", user_modes_active()), ("functorch", functorch_depth()))


def memory_overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the extents of memory that two strided tensors reach have bytes in common."""
    if a.numel() == 0 or b.numel() == 0 or storage_key(a) != storage_key(b):
        return False
    first, second = _extent(a), _extent(b)
    return first[0] < second[1] and second[0] < first[1]


def _extent(t: torch.Tensor) -> tuple[int, int]:
    start = t.storage_offset() * t.element_size()
    return int(start), int(start + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def raw_stream_getter(index: int) -> Callable[[], int]:
    """A function that returns the address of the CUDA device's current stream, as the driver's C functions take it."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)


def storage_references(storage: torch.UntypedStorage) -> int:
    """How many tensors and other owners refer to a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """targets[i].copy_(sources[i]) in few kernels."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def foreach_clone(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of dense tensors of one real type, in few kernels: a product with 1, which is exact."""
    return list(torch._foreach_mul(tensors, 1))


def setting(name: str) -> Any:
    """What torch answers when it is asked for a setting of the process ("get_num_threads", "_get_deterministic_algorithms")."""
    return (getattr(torch._C, name, None) or getattr(torch, name))()


def asks_setting(function: Callable, name: str) -> bool:
    """Whether `function` is the one that `setting(name)` calls."""
    where = torch._C if isinstance(function, types.BuiltinFunctionType) else torch
    return getattr(where, name, None) is function


def assert_async() -> Callable:
    """The operator (condition, message) that raises RuntimeError(message) when it runs, if the condition is false."""
    return torch._assert_async


def symbolic_kernels() -> AbstractContextManager:
    """Inside, operators made of others work on symbolic sizes: before torch 2.14 some do so only by their kernels in Python."""
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.14":
        return contextlib.nullcontext()
    from torch._dispatch.python import enable_python_dispatcher
    return enable_python_dispatcher()
