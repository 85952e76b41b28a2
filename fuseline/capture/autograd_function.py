"""torch.autograd.Function without gradients: its forward is interpreted, with a context that nothing will read later."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseline.capture.errors import break_here


class Context:
    """What `forward` and `setup_context` get where no backward will follow."""

    def __init__(self, arguments: int) -> None:
        self.needs_input_grad = (False,) * arguments
        self.saved_tensors: tuple = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: torch.Tensor) -> None:
        """For forward-mode differentiation, which is not active."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Without gradients nothing is differentiable."""

    def set_materialize_grads(self, value: bool) -> None:
        """No gradients will come."""


def apply_without_gradient(world: Any, function: type, args: tuple, call: Callable[[Any, tuple, dict], Any]) -> Any:
    """`function.apply(*args)` in inference. Raises Break where gradients may be wanted, or a result is no new tensor.

    call   interprets (callable, args, kwargs)
    """
    if torch.is_grad_enabled():
        raise break_here("autograd-function", f"{function.__name__}.apply with gradients is not captured", "none: it runs in PyTorch")
    context = Context(len(args))
    setup = world.getattr(function, "setup_context")
    if setup is torch.autograd.Function.setup_context:      # type: ignore[attr-defined]
        result = call(world.getattr(function, "forward"), (context, *args), {})
    else:
        result = call(world.getattr(function, "forward"), args, {})
        call(setup, (context, args, result), {})
    for item in result if isinstance(result, tuple) else (result,):
        if not isinstance(item, torch.Tensor) or any(item is a for a in args) or world.source(item) is not None:
            raise break_here("autograd-function", f"{function.__name__}.forward returns an input, or no tensor", "none: it runs in PyTorch")
    return result
