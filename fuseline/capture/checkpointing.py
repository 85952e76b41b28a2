"""torch.utils.checkpoint: the function is interpreted in place. What is saved for backward and what computed again is then decided
for the whole graph, so that only a function that draws on or changes the world outside could tell a second run from the first."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from fuseline import torch_internals
from fuseline.capture.errors import break_here
from fuseline.capture.special import special

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter

_OWN = ("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state")


@special(torch.utils.checkpoint.checkpoint)
def checkpoint(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """Raises Break for contexts around the two runs, and where the second run would repeat a change: Python executes the call."""
    world = interpreter.world
    own = {name: kwargs[name] for name in _OWN if name in kwargs}
    given = {name: value for name, value in kwargs.items() if name not in _OWN}
    function, args = (args[0], args[1:]) if args else (given.pop("function"), args)
    reentrant = own.get("use_reentrant") is not False
    if own.get("context_fn", torch.utils.checkpoint.noop_context_fn) is not torch.utils.checkpoint.noop_context_fn or own.get("debug") \
            or reentrant and given:
        raise break_here("checkpoint", "a checkpoint with contexts, debugging or keyword arguments of a reentrant one is not captured",
                         "none: it runs in PyTorch")
    tracked = torch.is_grad_enabled()
    if tracked and reentrant and not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        tracked = False                                    # its results then have no gradient, whatever else the function reads
        world.torch_function(torch_internals.set_grad_enabled, (False,), {})
        try:
            return interpreter.call(function, args, given)
        finally:
            world.torch_function(torch_internals.set_grad_enabled, (True,), {})
    effects = len(world.effects)
    versions = [(t, torch_internals.version_of(t)) for t, _ in world.nodes.values()]
    buffers = set(map(id, world.fakes.values()))
    result = interpreter.call(function, args, given)
    read = [fake for pair in world.fakes.values() if id(pair) not in buffers for fake in pair[1:]]
    if tracked and (len(world.effects) > effects or any(torch_internals.version_of(t) != v for t, v in versions)
                    or any(torch_internals.version_of(t) != world.first_version(t) for t in read)):
        raise break_here("checkpoint", "a checkpointed function changes something outside, which backward would repeat",
                         "none: it runs in PyTorch")
    return result
