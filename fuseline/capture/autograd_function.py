"""torch.autograd.Function: forward is interpreted in place, backward into a graph of its own, and one node binds the two.

`forward` runs under no_grad in the region's graph, as PyTorch runs it. If gradients are wanted, `backward` is interpreted at once,
on tensors like the results, into a subgraph. The node that follows calls a real `torch.autograd.Function` that gives the results
and whose backward runs the subgraph: when the region's graph is traced, autograd calls it and what it does is recorded.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fuseline import torch_internals
from fuseline.capture.errors import break_here
from fuseline.capture.provenance import MISSING, lookup


class Context:
    """What `forward`, `setup_context` and `backward` get as `ctx`: the program may put its own attributes there, too."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.saved_tensors: tuple = ()
        self.fuseline_dirty: tuple = ()
        self.fuseline_fixed: tuple = ()
        self.fuseline_materialize = True

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: torch.Tensor) -> None:
        """For forward-mode differentiation, which is not active."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        self.fuseline_dirty = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.fuseline_fixed = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.fuseline_materialize = value


@dataclass(frozen=True)
class Plan:
    """How the node of a function makes its results and finds its gradients.

    Its values are, in order: the tensors among the function's arguments, the results that `forward` made, and what `backward`
    reads from outside (tensors and numbers).

    name        of the function           inputs, made    how many values of the first and the second kind there are
    results     for each result: ("made" | "copied" | "input" | "dirty", index); "copied" is a view of older memory
    fixed       results without gradients
    saved       places, among what backward reads, of what the program gave to save_for_backward
    results_read  place among what backward reads -> the result that it is
    tangents    results whose gradients backward takes
    gradients   for each argument tensor: its place among backward's results, or None
    once        backward cannot be differentiated
    """
    name: str
    inputs: int
    made: int
    results: tuple[tuple[str, int], ...]
    fixed: tuple[int, ...]
    saved: frozenset[int]
    results_read: dict[int, int]
    tangents: tuple[int, ...]
    gradients: tuple[int | None, ...]
    once: bool


def binding(plan: Plan, backward: torch.fx.GraphModule) -> Callable[..., tuple]:
    """The function that a node calls: values as in `Plan` -> results, with `backward` as their derivative."""

    def forward(ctx: Any, *values: Any) -> tuple:
        inputs, made = values[:plan.inputs], values[plan.inputs:plan.inputs + plan.made]
        read = list(values[plan.inputs + plan.made:])
        results = []
        for kind, index in plan.results:
            if kind == "made":
                results.append(made[index].detach())
            elif kind == "copied":
                results.append(made[index].clone())
            else:
                results.append(inputs[index].clone() if kind == "input" else inputs[index])
        dirty = [inputs[index] for kind, index in plan.results if kind == "dirty"]
        if dirty:
            ctx.mark_dirty(*dirty)
        if plan.fixed:
            ctx.mark_non_differentiable(*[results[i] for i in plan.fixed])
        for place, result in plan.results_read.items():
            read[place] = results[result]
        kept = sorted(plan.saved | plan.results_read.keys())
        ctx.save_for_backward(*[read[i] for i in kept])
        ctx.kept, ctx.read = kept, [None if i in kept else value for i, value in enumerate(read)]
        return tuple(results)

    def derivative(ctx: Any, *grads: Any) -> tuple:
        read = list(ctx.read)
        for place, tensor in zip(ctx.kept, ctx.saved_tensors):
            read[place] = tensor
        grad_enabled = torch.is_grad_enabled()
        try:
            found = backward(*[grads[i] for i in plan.tangents], *read)
        finally:
            torch_internals.set_grad_enabled(grad_enabled)
        return (*(None if place is None else found[place] for place in plan.gradients), *[None] * (plan.made + len(read)))

    function: Any = type(plan.name, (torch.autograd.Function,), {
        "forward": staticmethod(forward), "backward": staticmethod(once_differentiable(derivative) if plan.once else derivative)})

    def apply(*values: Any) -> tuple:
        return function.apply(*values)
    apply.__name__ = apply.__qualname__ = plan.name
    return apply


def apply_function(world: Any, function: type, args: tuple, call: Callable[[Any, tuple, dict], Any]) -> Any:
    """`function.apply(*args)`. Raises Break for what a node cannot express: Python then executes the call.

    call   interprets (callable, args, kwargs)
    """
    if torch_internals.transform_depth():
        raise _refuse(function, "under a torch.func transform")
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    grad_enabled = torch.is_grad_enabled()
    differentiable = grad_enabled and any(t.requires_grad for t in tensors)
    if differentiable and world.subgraph is not None:
        raise _refuse(function, "with gradients inside another backward")
    context = Context(tuple(isinstance(a, torch.Tensor) and a.requires_grad for a in args))
    older = {id(fake) for fake, _ in world.nodes.values()}
    if grad_enabled:
        world.torch_function(torch_internals.set_grad_enabled, (False,), {})
    try:
        result = _forward(world, function, context, args, call)
    finally:
        if grad_enabled:
            world.torch_function(torch_internals.set_grad_enabled, (True,), {})
    results = result if isinstance(result, tuple) else (result,)
    if any(isinstance(r, torch.Tensor) and world.source(r) is not None and not any(r is t for t in tensors) for r in results):
        raise _refuse(function, "that returns a tensor which is no argument and no new one")
    if differentiable:
        found = _bound(world, function, context, args, results, older, call)
    else:
        found = tuple(world.record("call_method", "view_as", (r, r), {}) if any(r is t for t in tensors) and not any(
            r is d for d in context.fuseline_dirty) else r for r in results)
    return found if isinstance(result, tuple) else found[0]


def _refuse(function: type, what: str) -> BaseException:
    return break_here("autograd-function", f"{function.__name__}.apply {what} is not captured", "none: it runs in PyTorch")


def _forward(world: Any, function: type, context: Context, args: tuple, call: Callable) -> Any:
    setup = world.getattr(function, "setup_context")
    forward = world.getattr(function, "forward")
    if setup is torch.autograd.Function.setup_context:      # type: ignore[attr-defined]
        return call(forward, (context, *args), {})
    code = getattr(forward, "__code__", None)
    if code is None or code.co_flags & 0x0C or len(args) != code.co_argcount + code.co_kwonlyargcount:
        raise _refuse(function, "with arguments left to defaults")
    result = call(forward, args, {})
    call(setup, (context, args, result), {})
    return result


def _bound(world: Any, function: type, context: Context, args: tuple, results: tuple, older: set[int], call: Callable) -> tuple:
    """Interpret backward, add the node that binds it to the results, and give the results as the program gets them."""
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    inputs = [args[i] for i in places]
    outputs = [r for r in results if isinstance(r, torch.Tensor)]
    if not outputs:
        raise _refuse(function, "without a tensor among its results")
    if len({id(r) for r in outputs}) < len(outputs):
        raise _refuse(function, "that returns a tensor twice")
    memory = {torch_internals.storage_key(t) for t, _ in world.nodes.values()
              if (id(t) in older or world.source(t) is not None) and not torch_internals.is_transformed(t)}
    made: list[torch.Tensor] = []
    kinds: list[tuple[str, int]] = []
    for r in outputs:
        index = next((i for i, t in enumerate(inputs) if t is r), None)
        if index is not None:
            kinds.append(("dirty" if any(r is d for d in context.fuseline_dirty) else "input", index))
        else:
            kinds.append(("copied" if torch_internals.storage_key(r) in memory else "made", len(made)))
            made.append(r)
    if len([d for d in context.fuseline_dirty if any(d is r for r in outputs)]) < len(context.fuseline_dirty):
        raise _refuse(function, "that writes an argument and does not return it")
    fixed = tuple(i for i, r in enumerate(outputs) if any(r is f for f in context.fuseline_fixed)
                  or not (r.is_floating_point() or r.is_complex()))
    if not context.fuseline_materialize and len(outputs) - len(fixed) > 1:
        raise _refuse(function, "with several results and set_materialize_grads(False)")
    for kind, index in kinds:
        if kind in ("copied", "input"):                    # what is recorded as a copy must not be told from a view
            world.watch(made[index] if kind == "copied" else inputs[index])
    backward, read, found = _backward(world, function, context, results, fixed, call)
    gradients = _gradients(function, found, args, places)
    kept = {id(t) for t in context.saved_tensors if t is not None}
    result_at = {id(r): i for i, (r, kind) in enumerate(zip(outputs, kinds)) if kind[0] in ("made", "copied") and i not in fixed}
    plan = Plan(function.__name__, len(inputs), len(made), tuple(kinds), fixed,
                frozenset(i for i, t in enumerate(read) if id(t) in kept and id(t) not in result_at),
                {i: result_at[id(t)] for i, t in enumerate(read) if id(t) in result_at},
                tuple(i for i in range(len(outputs)) if i not in fixed), gradients,
                _is_once(function))
    bound = iter(world.record("call_function", binding(plan, backward), (*inputs, *made, *read), {}))
    return tuple(next(bound) if isinstance(r, torch.Tensor) else r for r in results)


def _is_once(function: Any) -> bool:
    code = getattr(function.backward, "__code__", None)
    return code is not None and code.co_qualname.startswith("once_differentiable.")


def _gradients(function: type, found: tuple, args: tuple, places: list[int]) -> tuple[int | None, ...]:
    """For each argument tensor, the place of its gradient among the tensors that backward gave."""
    extra = found[len(args):]
    if len(found) < len(args) or any(g is not None for g in extra):
        raise _refuse(function, f"whose backward gives {len(found)} gradients for {len(args)} arguments")
    if any(g is not None and (not isinstance(g, torch.Tensor) or i not in places) for i, g in enumerate(found)):
        raise _refuse(function, "whose backward gives a gradient that is no tensor, or one for no tensor")
    order = [i for i, g in enumerate(found) if g is not None]
    return tuple(order.index(i) if i in order else None for i in places)


def _backward(world: Any, function: type, context: Context, results: tuple, fixed: tuple[int, ...],
              call: Callable) -> tuple[torch.fx.GraphModule, list, tuple]:
    """(the graph of backward, what it reads from outside, what it gave)"""
    if lookup(function, "vjp")[1] not in (MISSING, lookup(torch.autograd.Function, "vjp")[1]):
        raise _refuse(function, "with a method vjp")
    effects, versions = len(world.effects), [(t, torch_internals.version_of(t)) for t, _ in list(world.nodes.values())]
    autocast = torch_internals.autocast_switches()
    with world.separate_graph() as subgraph:
        tensors = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor)]
        grads: list[Any] = [None] * len(results)
        for at, i in enumerate(tensors):
            if at not in fixed:
                with world.fake_mode:
                    grads[i] = subgraph.tangent(torch.empty_like(results[i]))
        for at in fixed:
            grads[tensors[at]] = world.record("call_function", torch.zeros_like, (results[tensors[at]],), {})
        torch_internals.set_grad_enabled(False)
        torch_internals.switch_autocast_off()
        try:
            found = call(world.getattr(function, "backward"), (context, *grads), {})
        finally:
            torch_internals.set_grad_enabled(True)
            torch_internals.restore_autocast(autocast)
        found = found if isinstance(found, tuple) else (found,)
        if len(world.effects) > effects or any(torch_internals.version_of(t) != v for t, v in versions):
            raise _refuse(function, "whose backward changes something outside")
        module = subgraph.finish([g for g in found if isinstance(g, torch.Tensor)])
    return module, subgraph.read, found
