"""torch.func: the Python code of vmap, grad, vjp, jvp and their kin is interpreted like the program's.

Its C functions, which enter and leave transforms and wrap tensors, run on fake tensors and become nodes; when the graph is traced
they run again, so that what the transforms derive is recorded. No region can end while a transform is active: a break inside
leads back to the call of the transform, which Python then executes (see `Interpreter.call`).
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from fuseline import torch_internals
from fuseline.capture.errors import break_here
from fuseline.capture.special import SPECIAL, special

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter


def is_transform(function: FunctionType) -> bool:
    """Whether a Python function is part of torch.func, or of a level of forward-mode differentiation within it."""
    return (function.__globals__.get("__name__") or "").startswith("torch._functorch.")


def _calling(function: Callable) -> Callable[[Interpreter, tuple, dict], Any]:
    def call(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
        return interpreter.call(function, args, kwargs)
    return call


def _loading(load: Callable[[], None]) -> Callable[[Interpreter, tuple, dict], None]:
    def call(interpreter: Interpreter, args: tuple, kwargs: dict) -> None:
        load()
    return call


def _register() -> None:
    """Python functions of torch around C functions: the C function is called."""
    wrappers, loaders = torch_internals.transform_wrappers()
    for wrapper, function in wrappers.items():
        SPECIAL[wrapper] = _calling(function)

    for load in loaders:
        SPECIAL[load] = _loading(load)


_register()


@special(torch.autograd.graph.disable_saved_tensors_hooks)
def without_hooks(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """Hooks on saved tensors are not there while a graph is traced; where some are active, eager raises."""
    return contextlib.nullcontext()


@special(torch_internals.transform_gradient())
def transform_gradient(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """How transforms differentiate: one node."""
    world = interpreter.world
    args = tuple(_plain(world, a) for a in args)
    return world.record("call_function", gradients, args, {k: _plain(world, v) for k, v in kwargs.items()})


def _plain(world: Any, value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else tuple(world.iterate(value))


def gradients(outputs: tuple, inputs: tuple, grad_outputs: tuple | None = None, retain_graph: bool = False,
              create_graph: bool = True) -> tuple:
    """The gradients of those outputs that have any, weighted by grad_outputs; zeros for inputs that they do not depend on."""
    chosen = [i for i, out in enumerate(outputs) if out.requires_grad]
    if not chosen:
        return tuple(map(torch.zeros_like, inputs))
    weights = None if grad_outputs is None else [grad_outputs[i] for i in chosen]
    found = torch.autograd.grad([outputs[i] for i in chosen], inputs, weights, retain_graph=retain_graph, create_graph=create_graph,
                                allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs))


@special(torch.autograd.grad)
def autograd_grad(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """torch.autograd.grad(...) of what the captured code computed: one node, which autograd differentiates again when it is traced."""
    world = interpreter.world
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched",
             "materialize_grads")
    given = {**dict(zip(names, args)), **kwargs}
    tensors = {}
    for name in names[:3]:
        value = given.pop(name, None)
        single = isinstance(value, torch.Tensor)
        tensors[name] = value if value is None else [value] if single else list(world.iterate(value))
        if name != "grad_outputs" and not all(isinstance(t, torch.Tensor) for t in tensors[name] or [None]):
            raise break_here("autograd", "torch.autograd.grad of what is no tensor is not captured",
                             "differentiate outside the compiled function")
    return world.record("call_function", torch.autograd.grad, (tensors["outputs"], tensors["inputs"], tensors["grad_outputs"]), given)
