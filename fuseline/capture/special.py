"""Callables that look at the interpreter itself: the frame that calls them, the exception being handled, whether we capture."""
from __future__ import annotations

import builtins
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fuseline.capture.autograd_function import apply_function
from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.frame import Unread
from fuseline.capture.provenance import CONSTANTS, MISSING
from fuseline.capture.values import PYTHON_FUNCTIONS
from fuseline.ir.region import Attr, Item, Pinned

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter

SPECIAL: dict[Any, Callable[[Interpreter, tuple, dict], Any]] = {}


def special(*targets: Any) -> Callable:
    """Register what a call of each target does during capture: function(interpreter, args, kwargs) -> value."""
    def register(function: Callable) -> Callable:
        for target in targets:
            SPECIAL[target] = function
        return function
    return register


@special(super)
def super_(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """`super()` finds its class in the cell `__class__` and the instance in the first argument of the frame."""
    if not args:
        frame = interpreter.frames[-1]
        code = frame.code.code
        if not code.co_argcount:
            raise ProgramError(RuntimeError("super(): no arguments"))
        if "__class__" not in frame.locals:
            raise ProgramError(RuntimeError("super(): __class__ cell not found"))
        first = code.co_varnames[0]
        if first not in frame.locals:
            raise ProgramError(RuntimeError("super(): arg[0] deleted"))
        owner = interpreter.world.load_cell(frame.locals["__class__"])
        instance = frame.locals[first]
        if first in code.co_cellvars:
            instance = interpreter.world.load_cell(instance)
        if type(instance) is Unread:
            instance = frame.locals[first] = interpreter.world.read(instance.value, instance.source)
        args = (owner, instance)
    try:
        return super(*args)
    except TypeError as error:
        raise ProgramError(error) from None


@special(sys.exc_info)
def exc_info(interpreter: Interpreter, args: tuple, kwargs: dict) -> tuple:
    error = interpreter.handled
    return (None, None, None) if error is None else (type(error), error, interpreter.world.getattr(error, "__traceback__"))


if hasattr(sys, "exception"):
    @special(sys.exception)
    def exception(interpreter: Interpreter, args: tuple, kwargs: dict) -> BaseException | None:
        return interpreter.handled


@special(builtins.locals)
def locals_(interpreter: Interpreter, args: tuple, kwargs: dict) -> dict:
    """The names bound in the calling frame, in CPython's order, as a new dict."""
    frame, world = interpreter.frames[-1], interpreter.world
    if frame.namespace is not None:
        return frame.namespace
    code = frame.code.code
    found = {}
    for name in dict.fromkeys((*code.co_varnames, *code.co_cellvars, *code.co_freevars)):
        if name not in frame.locals:
            continue
        value = frame.locals[name]
        if type(value) is Unread:
            value = frame.locals[name] = world.read(value.value, value.source)
        if name in code.co_cellvars or name in code.co_freevars:
            try:
                value = world.load_cell(value)
            except ValueError:
                continue
        found[name] = value
    return found


@special(builtins.globals)
def globals_(interpreter: Interpreter, args: tuple, kwargs: dict) -> dict:
    namespace = interpreter.frames[-1].globals
    return interpreter.world.read(namespace, Pinned(namespace))


@special(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
def is_compiling(interpreter: Interpreter, args: tuple, kwargs: dict) -> bool:
    """True, so that libraries take the paths that they wrote for compilers."""
    return True


@special(torch.compiler.is_exporting)
def is_exporting(interpreter: Interpreter, args: tuple, kwargs: dict) -> bool:
    return False


@special(inspect.signature)
def signature(interpreter: Interpreter, args: tuple, kwargs: dict) -> inspect.Signature:
    """The signature of a Python function or method: its code, defaults and what it wraps are guarded."""
    world, function = interpreter.world, args[0] if args else kwargs.get("obj")
    bound = isinstance(function, types.MethodType)
    while isinstance(function, types.MethodType):
        function = world.getattr(function, "__func__")
    shown = function
    while isinstance(function, types.FunctionType) and "__wrapped__" in function.__dict__:
        function = world.getattr(function, "__wrapped__")
    refusal = break_here("stack-inspection", "inspect.signature of this callable is not captured",
                         "inspect it outside the compiled function")
    if not isinstance(function, types.FunctionType) or {"__signature__", "__text_signature__"} & {*function.__dict__, *shown.__dict__} \
            or len(args) + len(kwargs) > 1:
        raise refusal
    source = world.source(function)
    if source is not None:
        world.guard(Attr(source, "__code__"), "is", function.__code__)
        for name in ("__wrapped__", "__signature__"):
            world.guard(source, "absent", name)
        for name, values in (("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__)):
            world.read(values, Attr(source, name))
            for key, value in (values.items() if isinstance(values, dict) else enumerate(values or ())):
                if type(value) not in CONSTANTS:
                    raise refusal
                world.read(value, Item(Attr(source, name), key))
    return world.native(inspect.signature, types.MethodType(function, world) if bound else function)


def _of_constants(function: types.FunctionType) -> Callable:
    def call(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
        found = interpreter.world.of_values(function, args, kwargs)
        return interpreter.inline(function, args, kwargs) if found is MISSING else found
    return call


for _function in PYTHON_FUNCTIONS:
    SPECIAL[_function] = _of_constants(_function)


@special(torch.backends.mha.get_fastpath_enabled)
def attention_fast_path(interpreter: Interpreter, args: tuple, kwargs: dict) -> bool:
    """False: the fused eager operator of encoder layers would hide from us what we fuse better, and it returns None as a tensor."""
    return False


@special(torch.autograd.Variable)
def variable(interpreter: Interpreter, args: tuple, kwargs: dict) -> torch.Tensor:
    """Variable(data, requires_grad=False), of programs older than PyTorch 0.4: `data` detached, in its memory."""
    bound = dict(zip(("data", "requires_grad"), args)) | kwargs
    if len(args) > 2 or bound.keys() - {"data", "requires_grad"} or not isinstance(bound.get("data"), torch.Tensor):
        raise break_here("unsupported-torch", "Variable() of anything but a tensor is not captured", "use the tensor itself")
    if bound.get("requires_grad", False) is not False:
        raise break_here("unsupported-torch", "Variable() makes a leaf that requires gradients", "make it outside the compiled function")
    return interpreter.world.torch_method("detach", (bound["data"],), {})


if isinstance(torch.autograd.Function.apply, types.MethodType):                  # in Python before torch 2.14, in C since
    @special(torch.autograd.Function.apply.__func__)
    def apply(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
        function, *values = args
        if kwargs:
            raise break_here("autograd-function", f"{function.__name__}.apply with keywords is not captured", "pass them by position")
        return apply_function(interpreter.world, function, tuple(values), interpreter.call)
