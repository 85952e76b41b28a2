"""Binding arguments as CPython does, which Python functions are inlined, and small helpers around iteration."""
from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from fuseline import torch_internals
from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.instructions import Code
from fuseline.ir.region import Attr, Item

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter

# Standard modules whose functions talk to the world outside, look at the Python stack, or keep state that no graph can
# hold: a call of one is executed by Python itself. The remedy is the user's to read.
NOT_INLINED = {
    "logging": ("logging", "log outside the compiled function"),
    "warnings": ("warnings", "warn outside the compiled function"),
    "threading": ("threads", "start threads outside the compiled function"),
    "multiprocessing": ("processes", "start processes outside the compiled function"),
    "concurrent": ("threads", "start threads outside the compiled function"),
    "asyncio": ("async", "compile the synchronous function that does the tensor work"),
    "random": ("python-random", "draw Python random numbers outside, or use torch's"),
    "traceback": ("stack-inspection", "inspect the stack outside the compiled function"),
    "inspect": ("stack-inspection", "inspect signatures and frames outside the compiled function"),
    "importlib": ("import", "import at the top of the file"),
    "pickle": ("pickle", "pickle outside the compiled function"),
    "subprocess": ("processes", "start processes outside the compiled function"),
    "numpy": ("numpy", "use torch operations instead of NumPy inside the compiled function"),
    "tqdm": ("print", "show progress outside the compiled function"),
}

# The same for modules of torch, by prefix.
TORCH_NOT_INLINED = {
    "torch.func": ("torch-func", "apply torch.func transforms outside the compiled function"),
    "torch.autograd.forward_ad": ("forward-mode", "use forward-mode differentiation outside the compiled function"),
    "torch.autograd.function": ("autograd-function", "none: it runs in PyTorch"),
    "torch.autograd.graph": ("autograd", "use hooks on saved tensors outside the compiled function"),
    "torch.autograd.profiler": ("profiler", "profile outside the compiled function"),
    "torch.profiler": ("profiler", "profile outside the compiled function"),
    "torch.random": ("generator-state", "seed outside the compiled function"),
    "torch.cuda": ("device-state", "synchronise and query devices outside the compiled function"),
    "torch.utils.checkpoint": ("checkpoint", "none: it runs in PyTorch"),
    "torch.utils.data": ("data-loading", "load data outside the compiled function"),
    "torch.optim": ("optimizer", "step the optimizer outside the compiled function"),
    "torch.distributed": ("distributed", "communicate outside the compiled function"),
    "torch.compiler": ("torch-compile", "do not nest torch.compile in it"),
    **dict.fromkeys(torch_internals.COMPILERS, ("torch-compile", "do not nest torch.compile in it")),
    "torch.jit": ("torchscript", "compile the Python original"),
    "torch.serialization": ("input-output", "load and save outside the compiled function"),
    "torch.multiprocessing": ("processes", "start processes outside the compiled function"),
    "torch.fx": ("symbolic-tracing", "trace outside the compiled function"),
    "torch._subclasses": ("symbolic-tracing", "trace outside the compiled function"),
}
_TORCH_INLINED = frozenset({"is_scripting", "is_tracing", "is_initialized", "is_available", "_is_tracing", "unused", "ignore",
                            "annotate"})
# The mark of `torch.jit.script_if_tracing`, whose wrapper is the Python function except under `torch.jit.trace`.
_SCRIPT_IF_TRACING = "__script_if_tracing_wrapper"
# What `inspect` has that depends on its arguments alone.
_INSPECT_INLINED = frozenset({"isfunction", "ismethod", "isclass", "ismodule", "isbuiltin", "isroutine", "isgenerator", "iscode",
                              "isgeneratorfunction", "iscoroutinefunction", "_has_code_flag",
                              "getmro", "cleandoc"})


def check_inlined(function: FunctionType) -> None:
    """Raise Break if a call of the Python function must be left to Python."""
    if function.__dict__ and ("_fuseline_disabled" in function.__dict__ or "_torchdynamo_disable" in function.__dict__):
        raise break_here("disabled", f"{function.__qualname__} is marked as not to be compiled", "remove the mark to compile it")
    module = function.__globals__.get("__name__") or ""
    known = NOT_INLINED.get(module.partition(".")[0])
    if module == "inspect" and (function.__name__ in _INSPECT_INLINED
                                or function.__qualname__.startswith(("Signature.", "Parameter.", "BoundArguments."))):
        return
    if known is None and module.startswith("torch."):
        if module == "torch.autograd" and function.__name__ in ("grad", "backward"):
            known = ("autograd", "differentiate outside the compiled function")
        elif function.__name__ not in _TORCH_INLINED and _SCRIPT_IF_TRACING not in function.__dict__ and not _differentiates(function):
            parts = module.split(".")
            known = next((TORCH_NOT_INLINED[p] for p in (".".join(parts[:n]) for n in (2, 3)) if p in TORCH_NOT_INLINED), None)
    if known is not None:
        raise break_here(known[0], f"{module}.{function.__qualname__} is not captured", known[1])


def _differentiates(function: FunctionType) -> bool:
    """Whether a Python function of torch's packages for gradients is one that is interpreted."""
    module, name = function.__globals__.get("__name__"), function.__code__.co_qualname
    return module == "torch.autograd.function" and name.startswith("once_differentiable.") or module == "torch.autograd.forward_ad" \
        and torch_internals.transform_depth() > 0 or module == "torch.utils.checkpoint" and name.startswith("checkpoint_sequential")


# ---------------------------------------------------------------- arguments

def bind(interpreter: Interpreter, function: FunctionType, code: Code, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The locals a call starts with. Raises ProgramError with CPython's TypeError message for a wrong argument list."""
    positional, n = code.positional, len(args)
    names = dict(zip(positional, args))
    if n > len(positional):
        if code.varargs is None:
            raise _too_many(function, code, n, kwargs)
        names[code.varargs] = tuple(args[len(positional):])
    elif code.varargs is not None:
        names[code.varargs] = ()
    extra: dict[str, Any] = {}
    if kwargs:
        _bind_keywords(function, code, kwargs, names, extra)
    if code.varkw is not None:
        names[code.varkw] = extra
    if len(names) < len(positional) + len(code.keyword_only) + (code.varargs is not None) + (code.varkw is not None):
        _fill_defaults(interpreter, function, code, names)
    return names


def _bind_keywords(function: FunctionType, code: Code, kwargs: dict[str, Any], names: dict[str, Any], extra: dict[str, Any]) -> None:
    by_keyword = code.positional[code.positional_only:]
    wrong_positional = []
    for key, value in kwargs.items():
        if key in by_keyword or key in code.keyword_only:
            if key in names:
                raise ProgramError(TypeError(f"{function.__qualname__}() got multiple values for argument '{key}'"))
            names[key] = value
        elif code.varkw is not None:
            extra[key] = value
        elif key in code.positional[:code.positional_only]:
            wrong_positional.append(key)
        else:
            raise ProgramError(TypeError(f"{function.__qualname__}() got an unexpected keyword argument '{key}'"))
    if wrong_positional:
        raise ProgramError(TypeError(f"{function.__qualname__}() got some positional-only arguments passed as keyword arguments: "
                                     f"'{', '.join(wrong_positional)}'"))


def _fill_defaults(interpreter: Interpreter, function: FunctionType, code: Code, names: dict[str, Any]) -> None:
    world, source = interpreter.world, interpreter.world.source(function)
    defaults = function.__defaults__ or ()
    first = len(code.positional) - len(defaults)
    missing = []
    if source is not None and any(name not in names for name in code.positional):
        world.read(function.__defaults__, Attr(source, "__defaults__"))
    for i, name in enumerate(code.positional):
        if name in names:
            continue
        if i < first:
            missing.append(name)
        else:
            value = defaults[i - first]
            names[name] = value if source is None else world.read(value, Item(Attr(source, "__defaults__"), i - first))
    if missing:
        _missing(function, missing, "positional")
    by_name = function.__kwdefaults__ or {}
    for name in code.keyword_only:
        if name in names:
            continue
        if name not in by_name:
            missing.append(name)
        else:
            value = by_name[name]
            names[name] = value if source is None else world.read(value, Item(Attr(source, "__kwdefaults__"), name))
    if missing:
        _missing(function, missing, "keyword-only")


def _missing(function: FunctionType, names: list[str], kind: str) -> None:
    quoted = [f"'{n}'" for n in names]
    if len(quoted) == 1:
        listed = quoted[0]
    elif len(quoted) == 2:
        listed = f"{quoted[0]} and {quoted[1]}"
    else:
        listed = f"{', '.join(quoted[:-1])}, and {quoted[-1]}"
    plural = "" if len(names) == 1 else "s"
    raise ProgramError(TypeError(f"{function.__qualname__}() missing {len(names)} required {kind} argument{plural}: {listed}"))


def _too_many(function: FunctionType, code: Code, given: int, kwargs: dict[str, Any]) -> ProgramError:
    most, defaults = len(code.positional), len(function.__defaults__ or ())
    takes = f"from {most - defaults} to {most}" if defaults else str(most)
    plural = "s" if defaults or most != 1 else ""
    only = sum(1 for key in kwargs if key in code.keyword_only)
    also = f" positional argument{'' if given == 1 else 's'} (and {only} keyword-only argument{'' if only == 1 else 's'})" if only else ""
    was = "was" if given == 1 and not only else "were"
    return ProgramError(TypeError(f"{function.__qualname__}() takes {takes} positional argument{plural} but {given}{also} {was} given"))


# ---------------------------------------------------------------- iteration

def next_item(interpreter: Interpreter, iterator: Iterator) -> tuple[bool, Any]:
    """(True, the next item), or (False, what the StopIteration carried) at the end."""
    try:
        return True, next(iterator)
    except StopIteration as stop:
        return False, stop.value
    except ProgramError as error:
        if isinstance(error.value, StopIteration):
            return False, error.value.value
        raise
    except torch_internals.unsupported_in_trace() as error:
        interpreter.touch()                           # the iterator is in the middle of something
        raise break_here("data-dependent", f"a {type(iterator).__name__} needs the values of a tensor",
                         "keep the values on the device, or read them outside the compiled function") from error
    except (RuntimeError, ValueError, TypeError) as error:      # "changed size during iteration", zip(strict=True), an item that is none
        raise ProgramError(error) from None


def mapping_items(interpreter: Interpreter, mapping: Any, message: str) -> list[tuple[Any, Any]]:
    """The (key, value) pairs of a mapping in order; TypeError with `message` if it has no keys()."""
    world = interpreter.world
    if type(mapping) is dict and world.source(mapping) is None:
        return list(mapping.items())
    if not hasattr(mapping, "keys"):
        raise ProgramError(TypeError(message.format(type(mapping).__name__)))
    keys = list(world.iterate(interpreter.call(world.getattr(mapping, "keys"), (), {})))
    return [(key, world.getitem(mapping, key)) for key in keys]
