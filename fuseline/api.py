"""The public interface: `compile` and its companions. Users import these names from `fuseline`."""
from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseline import backends, pipeline
from fuseline.capture.frame import FrameStart
from fuseline.capture.resume import Resumer
from fuseline.ir.record import CompileRecord
from fuseline.options import Options, make_options
from fuseline.runtime import control, memory
from fuseline.runtime.dispatch import DYNAMIC_ATTRIBUTE, Dispatcher, Program

ORIGINAL = "_fuseline_original"                           # on what `compile` returns: the function that it compiled
DISABLED = "_fuseline_disabled"                           # on functions that capture must not look into


def compile(model: Any = None, *, mode: str | None = None, fullgraph: bool = False, dynamic: bool | None = None,
            backend: str | Callable = "fuseline", options: Mapping | None = None, disable: bool = False,
            verbose: bool = False) -> Any:
    """Return a callable equal to `model` that runs fused kernels; a decorator if `model` is left out.

    model      a function, a method, an nn.Module or another callable object. A compiled module is a module of the same class
               that shares parameters, buffers and all other attributes with the original.
    mode       "default"; "reduce-overhead" records CUDA graphs; "max-autotune" measures alternatives too;
               "max-autotune-no-cudagraphs"
    fullgraph  True: a graph break raises GraphBreakError, with its line and remedy
    dynamic    None: a size becomes symbolic the second time it differs; True: sizes are symbolic from the start; False: never
    backend    a name of `list_backends()`, or a callable (GraphModule, example_inputs) -> callable
    options    further choices by name, see `fuseline.options.Options`
    disable    True: return `model` as it is
    verbose    print what was captured and fused
    Raises ValueError for an unknown mode, option or backend; the message lists those that there are.
    What cannot be compiled runs in PyTorch as before.
    """
    backends.check_backend(backend)
    chosen = make_options(mode, fullgraph, dynamic, backend, options, verbose)
    if model is None:
        return lambda target: _compile(target, chosen, disable)
    return _compile(model, chosen, disable)


def _compile(target: Any, options: Options, disable: bool) -> Any:
    if not callable(target):
        raise TypeError(f"fuseline.compile takes a function, a method, a module or another callable, not {type(target).__name__}")
    if disable:
        return target
    return _compiled(target, _make_program(options))


def _make_program(options: Options) -> Program:
    program = Program(options, _compile_frame, FrameStart)
    program.resumer = Resumer(program.resume_dispatcher)
    return program


def _compile_frame(start: FrameStart, options: Options, dynamic: frozenset, program: Program, recompile_reason: str) -> Any:
    return pipeline.compile_frame(start, options, dynamic, program.resumer.factory, recompile_reason)


def _compiled(target: Any, program: Program) -> Any:
    if isinstance(target, torch.nn.Module):
        return _compile_module(target, program)
    if isinstance(target, types.FunctionType):
        return _compile_function(_original(target), program)
    if isinstance(target, types.MethodType):
        function = _original(target.__func__)
        if isinstance(function, types.FunctionType):
            return types.MethodType(_compile_function(function, program), target.__self__)
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_compiled(target.__func__, program))
    called = next((c.__dict__["__call__"] for c in type(target).__mro__ if "__call__" in c.__dict__), None)
    if isinstance(target, (functools.partial, type)) or not isinstance(called, types.FunctionType):
        return _compile_through_wrapper(target, program)
    return _compile_callable_object(target, program)


def _compile_function(function: Any, program: Program) -> Any:
    dispatcher = Dispatcher(program, function.__code__, function.__globals__, function)
    stub = dispatcher.stub()
    functools.update_wrapper(stub, function)
    stub.__dict__.update({ORIGINAL: function, "_fuseline_program": program, "_fuseline_dispatcher": dispatcher})
    return stub


def _compile_through_wrapper(target: Callable, program: Program) -> Callable:
    """For callables that are no Python code themselves (partials, classes, builtins): compile a function that calls them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    compiled = _compile_function(call, program)
    functools.update_wrapper(compiled, target, updated=())
    return compiled


def _compile_callable_object(target: Any, program: Program) -> Any:
    """An object with `__call__` in Python: a view of the same object whose class dispatches."""
    compiled = _compile_function(type(target).__call__, program)
    return types.MethodType(compiled, target)


# ---------------------------------------------------------------- modules

_BUILTIN_CALL = torch.nn.Module.__call__


def _compile_module(model: torch.nn.Module, program: Program) -> torch.nn.Module:
    """A module of a subclass made for it, which shares the instance dict with the original; calls go to the dispatcher."""
    original = getattr(type(model), ORIGINAL, None)
    if isinstance(original, torch.nn.Module):              # compiled already: compile the original again, with the new options
        model = original
    cls = type(model)
    if isinstance(model, torch.jit.ScriptModule):
        return model
    entry = _compile_function(cls.__call__, program)
    forward = _compile_function(cls.forward, program) if isinstance(cls.forward, types.FunctionType) else None

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return entry(model, *args, **kwargs)

    def __deepcopy__(self: Any, memo: dict) -> Any:
        made = _compile(copy.deepcopy(model, memo), program.options, False)
        memo[id(self)] = made
        return made

    def __copy__(self: Any) -> Any:
        return _compile(copy.copy(model), program.options, False)

    def __reduce_ex__(self: Any, protocol: int) -> Any:
        return _compile_again, (model, program.options)

    __call__.__dict__.update({ORIGINAL: cls.__call__})
    members: dict[str, Any] = {
        "__call__": __call__, "__deepcopy__": __deepcopy__, "__copy__": __copy__, "__reduce_ex__": __reduce_ex__,
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
        ORIGINAL: model, "_fuseline_program": program, "_fuseline_dispatcher": entry._fuseline_dispatcher,
    }
    if forward is not None:
        def compiled_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(model, *args, **kwargs)

        functools.update_wrapper(compiled_forward, cls.forward)
        compiled_forward.__dict__.update({ORIGINAL: cls.forward})
        members["forward"] = compiled_forward
    metaclass: Any = type(cls)
    sub = metaclass(cls.__name__, (cls,), members)
    made = object.__new__(sub)
    made.__dict__ = model.__dict__
    for base in cls.__mro__:
        for slot in _slots(base):
            if hasattr(model, slot):
                object.__setattr__(made, slot, getattr(model, slot))
    return made


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return tuple(s for s in ((slots,) if isinstance(slots, str) else slots) if s not in ("__dict__", "__weakref__"))


def _compile_again(model: torch.nn.Module, options: Options) -> torch.nn.Module:
    """Unpickling a compiled module compiles it anew."""
    return _compile(model, options, False)


# ---------------------------------------------------------------- companions

class disable:  # noqa: N801  used as a function
    """Keep code out of compilation: `@fuseline.disable` on a function, `with fuseline.disable():` around calls.

    A disabled function that compiled code calls is a graph break: it runs in PyTorch, the code around it stays compiled.
    """

    def __new__(cls, fn: Callable | None = None) -> Any:
        if fn is None:
            return super().__new__(cls)
        if isinstance(fn, torch.nn.Module):
            fn = getattr(type(fn), ORIGINAL, fn)
            fn.forward = _disabled_function(fn.forward)
            return fn
        return _disabled_function(fn)

    def __enter__(self) -> None:
        self._block = control.disabled()
        self._block.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._block.__exit__(*exception)

    def __call__(self, fn: Callable) -> Callable:
        return _disabled_function(fn)


def _disabled_function(fn: Callable) -> Callable:
    original = getattr(fn, ORIGINAL, fn)

    @functools.wraps(original)
    def run_disabled(*args: Any, **kwargs: Any) -> Any:
        with control.disabled():
            return original(*args, **kwargs)

    run_disabled.__dict__[DISABLED] = True
    return run_disabled


def explain(fn: Callable) -> Callable[..., Any]:
    """`explain(fn)(*args)` compiles fn for these arguments, runs it and returns an Explanation (print it)."""
    from fuseline.report.explain import Explanation  # report is above this module

    program = getattr(fn, "_fuseline_program", None)
    options = program.options if isinstance(program, Program) else Options()
    target = _original(fn)

    @functools.wraps(target, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        records: list[CompileRecord] = []
        fresh = _make_program(options)
        with control.observe(records.append):
            result = _compiled(target, fresh)(*args, **kwargs)
        return Explanation(tuple(records), result)

    return run


def _original(fn: Any) -> Any:
    if isinstance(fn, torch.nn.Module):
        return getattr(type(fn), ORIGINAL, fn)
    if isinstance(fn, types.MethodType):
        return types.MethodType(_original(fn.__func__), fn.__self__)
    return getattr(fn, ORIGINAL, fn)


def is_enabled() -> bool:
    """Whether compiled functions compile: False within `with fuseline.disable():`."""
    return not control.is_disabled()


def set_strict_mode(strict: bool) -> None:
    """True: a graph break in any compiled function is an error. False, the start: what cannot be captured runs in PyTorch."""
    control.set_strict(strict)


def is_compiling() -> bool:
    """True in code that is being captured, False when it runs in PyTorch."""
    return control.is_capturing()


def reset() -> None:
    """Forget all that was compiled in this process, and all counts; functions compile anew on their next call."""
    control.reset()
    pipeline.reset_count()
    memory.results.clear()


def compile_count() -> int:
    """How many regions with tensor operators were compiled since the start or the last `reset`."""
    return pipeline.compile_count()


def recompile_reasons(fn: Callable) -> list[str]:
    """Why a compiled function was compiled again, once for each time: "argument x: size 1 was 128, now 160"."""
    holder = type(fn) if isinstance(fn, torch.nn.Module) else fn
    program = getattr(holder, "_fuseline_program", None)
    if not isinstance(program, Program):
        raise TypeError(f"{fn!r} is not compiled by fuseline")
    return [reason for reference in program.dispatchers if (d := reference()) is not None for reason in d.recompile_reasons]


def mark_dynamic(tensor: torch.Tensor, axis: int | tuple[int, ...] | list[int]) -> None:
    """Make axes of an argument symbolic from the first compilation on. Raises IndexError for an axis that is not there."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -tensor.dim() <= a < tensor.dim():
            raise IndexError(f"axis {a} of a tensor with {tensor.dim()} dimensions")
    marked: frozenset[int] = getattr(tensor, DYNAMIC_ATTRIBUTE, frozenset())
    setattr(tensor, DYNAMIC_ATTRIBUTE, marked | {a % tensor.dim() for a in axes})


list_backends = backends.list_backends
register_backend = backends.register_backend


def signature(fn: Callable) -> inspect.Signature:
    """The signature of a function or of its original."""
    return inspect.signature(_original(fn))
