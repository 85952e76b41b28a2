"""The compiled graph of a region as a callable: executables, and around them what a functional graph cannot say.

Writes to inputs, outputs that alias, and gradients: one `torch.autograd.Function` whose forward and backward are executables.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.expr import Expr, evaluate
from fuseline.ir.graph import Graph, Node, TensorType
from fuseline.ir.traced import OutputSpec, Partitioned, Traced, ViewStep, storage_root
from fuseline.torch_internals import set_grad_enabled

Executable = Callable[..., tuple]
_version = attrgetter("_version")
Compile = Callable[[Graph], Executable]


def wrap(traced: Traced, partitioned: Partitioned | None, compile_graph: Compile, graph_module: torch.fx.GraphModule, *,
         lazy_backward: bool = True) -> Callable[..., tuple]:
    """A callable of the torch-level graph's inputs that returns the flat tuple of its outputs.

    compile_graph   graph -> executable; called with the graph named "graph" (inference), "forward" or "backward". An
                    executable returns tensors that nobody else writes to; it may return an input, or a view of one, where
                    the graph's output is one, and None for the new value of an input that it has written in place.
    graph_module    the torch-level graph, for gradients of gradients: they are differentiated by eager PyTorch
    lazy_backward   compile the backward at the first backward pass, not now
    """
    if partitioned is None:
        return _inference(traced, compile_graph(traced.graph))
    function = _training_function(traced, partitioned, compile_graph, graph_module, lazy_backward)
    if not torch.is_grad_enabled():                          # the graph itself leaves no_grad: a break inside the block starts it there
        function = torch.enable_grad()(function)
    finish = _Epilogue(traced)
    if finish.trivial:
        return function
    return lambda *inputs: finish(inputs, function(*inputs))


def _inference(traced: Traced, run: Executable) -> Callable[..., tuple]:
    constants, finish = traced.constants, _Epilogue(traced)
    copies = _to_copy(traced, traced.graph.outputs, keep_inputs=False)
    bare = not constants and not copies and not traced.autocast and not traced.track_grad
    if bare and finish.trivial:
        return run

    def call(*inputs: Any) -> tuple:
        values = run(*inputs, *constants)
        if copies:
            values = _copied(values, copies)
        return values

    if traced.autocast:
        call = _without_autocast(call)
    if traced.track_grad:
        call = torch.no_grad()(call)
    if finish.trivial:
        return call
    return lambda *inputs: finish(inputs, call(*inputs))


def _without_autocast(call: Executable) -> Executable:
    """The graph has its casts already: operators that it calls must not cast again."""
    def outside_autocast(*inputs: Any) -> tuple:
        with torch_internals.disable_autocast():
            return call(*inputs)
    return outside_autocast


def _to_copy(traced: Traced, outputs: Sequence[Any], *, keep_inputs: bool) -> tuple[int, ...]:
    """Forward outputs that are fresh tensors in eager, but in the graph (after passes) show an input's or another output's memory."""
    written = {traced.graph.inputs[m.input].name for m in traced.mutations}
    values = {m.output for m in traced.mutations}
    seen: set[Node] = set()
    found = []
    for i, node in enumerate(outputs[:traced.num_forward]):
        if not isinstance(node, Node) or not isinstance(node.type, TensorType):
            continue
        root = storage_root(node)
        harmless = i in values and root.op == "input" and root.name not in written and not keep_inputs
        if not harmless and (root.op == "input" or root in seen):
            found.append(i)
        seen.add(root)
    return tuple(found)


def _copied(values: tuple, which: tuple[int, ...]) -> tuple:
    changed = list(values)
    for i in which:
        if changed[i] is not None:                               # written in place
            changed[i] = changed[i].clone()
    return tuple(changed)


# ---------------------------------------------------------------- mutations and aliases

class _Epilogue:
    """From the forward outputs to the outputs of the torch-level graph: writes to inputs first, then aliases in order."""

    def __init__(self, traced: Traced) -> None:
        self.specs = traced.outputs
        self.plain = tuple((m.input, m.output) for m in traced.mutations if not m.differentiable)
        self.differentiable = tuple((m.input, m.output) for m in traced.mutations if m.differentiable)
        self.symbols = traced.symbols
        self.trivial = (not traced.mutations and len(self.specs) == traced.num_forward
                        and all(s.kind == "value" and s.index == i for i, s in enumerate(self.specs)))
        self.values = all(s.kind == "value" for s in self.specs)
        self.indices = tuple(s.index for s in self.specs)

    def __call__(self, inputs: Sequence[Any], outputs: tuple) -> tuple:
        if self.plain:
            grad = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                for i, o in self.plain:
                    if outputs[o] is not None:
                        inputs[i].copy_(outputs[o])
            finally:
                set_grad_enabled(grad)
            increment_version([inputs[i] for i, o in self.plain if outputs[o] is None])
        for i, o in self.differentiable:
            inputs[i].copy_(outputs[o])
        if self.values:
            return tuple([outputs[i] for i in self.indices])
        results: list[Any] = []
        for spec in self.specs:
            if spec.kind == "value":
                results.append(outputs[spec.index])
            elif spec.kind == "input":
                results.append(inputs[spec.index])
            elif spec.kind == "same":
                results.append(results[spec.index])
            elif spec.kind == "view":
                results.append(self._view(spec, inputs, outputs))
            else:
                results.append(spec.value)
        return tuple(results)

    def _view(self, spec: OutputSpec, inputs: Sequence[Any], outputs: tuple) -> torch.Tensor:
        base = inputs[spec.index] if spec.base == "input" else outputs[spec.index]
        with torch.set_grad_enabled(torch.is_grad_enabled() and spec.tracked):
            value, shift = base, base.storage_offset() - spec.storage_offset
            for step in spec.steps:
                value = self._step(step, value, shift, inputs)
        return value

    def _step(self, step: ViewStep, value: torch.Tensor, shift: int, inputs: Sequence[Any]) -> torch.Tensor:
        args = tuple(self._number(a, inputs) for a in step.args)
        if step.op == "aten.as_strided.default":
            return torch.as_strided(value, args[0], args[1], args[2] + shift)
        result = _operator(step.op)(value, *args, **{k: self._number(v, inputs) for k, v in step.kwargs})
        return result if step.index is None else result[step.index]

    def _number(self, a: Any, inputs: Sequence[Any]) -> Any:
        if isinstance(a, Expr):
            return evaluate(a, {name: _size(inputs, places[0]) for name, places in self.symbols.items()})
        if isinstance(a, tuple):
            return [self._number(b, inputs) for b in a]
        return torch_internals.to_torch_dtype(a) if hasattr(a, "kind") and hasattr(a, "size") else a


def _size(inputs: Sequence[Any], place: tuple[int, int | None]) -> int:
    index, axis = place
    return inputs[index] if axis is None else inputs[index].shape[axis]


def _operator(name: str) -> Any:
    found = torch_internals.operator(name)
    if found is None:
        raise InternalError(f"no operator {name}")
    return found


# ---------------------------------------------------------------- gradients

def _training_function(traced: Traced, parts: Partitioned, compile_graph: Compile, graph_module: torch.fx.GraphModule,
                       lazy_backward: bool) -> Callable[..., tuple]:
    """`apply` of an autograd.Function from inputs to forward outputs."""
    run_forward = compile_graph(parts.forward)
    backward = _Backward(parts, compile_graph, lazy_backward)
    constants, count = traced.constants, traced.num_forward
    forward_inputs = parts.forward.inputs
    copies = _to_copy(traced, parts.forward.outputs, keep_inputs=True)
    written = {m.input for m in traced.mutations}
    position = {node: i for i, node in enumerate(forward_inputs)}
    # Saved inputs that the epilogue writes to are copied first.
    save_copies = tuple(k for k, node in enumerate(parts.saved) if position.get(node) in written)
    saved_scalars = tuple(k for k, node in enumerate(parts.saved) if not isinstance(node.type, TensorType))
    scalar_inputs = {k: position[parts.saved[k]] for k in saved_scalars if parts.saved[k] in position}
    output_at = {node: i for i, node in enumerate(parts.forward.outputs[:count]) if isinstance(node, Node) and i not in copies}
    # A saved value that is also an output (the same node) must be the output's tensor object: autograd then checks its version.
    as_output = tuple((k, output_at[node]) for k, node in enumerate(parts.saved) if node in output_at and node not in position)
    fixed = set(traced.tangents)
    stopped = tuple(i for i, node in enumerate(parts.forward.outputs[:count])
                    if i not in fixed and isinstance(node, Node) and isinstance(node.type, TensorType))
    tangent_types: Any = tuple(n.type for n in parts.backward.inputs[len(parts.backward.inputs) - len(traced.tangents):])
    tangents = tuple(zip(traced.tangents, tangent_types, map(_constant_strides, tangent_types)))
    symbols = {name: places[0] for name, places in traced.symbols.items()}
    need_sizes = bool(parts.sizes) or any(strides is None for _, _, strides in tangents)
    number_inputs, gradients = traced.num_inputs, traced.gradients
    again = _Again(traced, graph_module)

    def forward(ctx: Any, *inputs: Any) -> tuple:
        if torch_internals.any_autocast_enabled():
            with torch_internals.disable_autocast():
                values = run_forward(*inputs, *constants)
        else:
            values = run_forward(*inputs, *constants)
        outputs, saved = list(values[:count]), list(values[count:])
        for i in copies:
            if outputs[i] is not None:
                outputs[i] = outputs[i].clone()
        for i, value in enumerate(outputs):
            if isinstance(value, torch.Tensor) and value._is_view():
                outputs[i] = value.data                          # a fresh tensor for autograd, whatever memory it lies in
        for k, i in as_output:
            saved[k] = outputs[i]
        for k in save_copies:
            saved[k] = saved[k].clone()
        if saved_scalars:
            ctx.scalars = [inputs[scalar_inputs[k]] if k in scalar_inputs else saved[k] for k in saved_scalars]
            for k in saved_scalars:
                saved[k] = None
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        if stopped:
            ctx.mark_non_differentiable(*[outputs[i] for i in stopped if outputs[i] is not None])
        if need_sizes:
            ctx.sizes = {name: _size(inputs, place) for name, place in symbols.items()}
        ctx.again = again.remember(inputs)
        return tuple(outputs)

    def gradient(ctx: Any, *grads: Any) -> tuple:
        if all(g is None for g in grads):
            return (None,) * number_inputs
        if torch.is_grad_enabled():
            return again.differentiate(ctx.again, grads)
        saved = ctx.saved_tensors
        if saved_scalars:
            saved = list(saved)
            for k, value in zip(saved_scalars, ctx.scalars):
                saved[k] = value
        sizes = ctx.sizes if need_sizes else {}
        given = [_tangent(grads[i], type_, strides, sizes) for i, type_, strides in tangents]
        scalars = [sizes[name] for name in parts.sizes]
        with torch_internals.disable_autocast():
            found = backward()(*saved, *scalars, *given)
        results: list[Any] = [None] * number_inputs
        wanted = ctx.needs_input_grad
        for i, g in zip(gradients, found):
            if wanted[i]:
                results[i] = g
        return tuple(results)

    function: Any = type("CompiledBackward", (torch.autograd.Function,),
                    {"forward": staticmethod(forward), "backward": staticmethod(gradient)})
    return function.apply


class _Backward:
    """The backward executable, compiled when it is first wanted."""

    def __init__(self, parts: Partitioned, compile_graph: Compile, lazy: bool) -> None:
        self._graph, self._compile = parts.backward, compile_graph
        self._run: Executable | None = None if lazy else compile_graph(parts.backward)

    def __call__(self) -> Executable:
        if self._run is None:
            self._run = self._compile(self._graph)
        return self._run


def _constant_strides(type_: TensorType) -> tuple[int, ...] | None:
    return None if any(isinstance(s, Expr) for s in (*type_.shape, *type_.stride)) else type_.stride      # type: ignore[return-value]


def _tangent(grad: torch.Tensor | None, type_: TensorType, strides: tuple[int, ...] | None, sizes: dict[str, int]) -> torch.Tensor:
    """The gradient that autograd hands over in the layout that the backward was compiled for; None is zeros."""
    if strides is None:
        strides = tuple(evaluate(s, sizes) for s in type_.stride)
    if grad is not None and grad.stride() == strides:
        return grad
    shape = tuple(evaluate(s, sizes) for s in type_.shape)
    made = torch.empty_strided(shape, strides, dtype=torch_internals.to_torch_dtype(type_.dtype), device=type_.device)
    return made.zero_() if grad is None else made.copy_(grad)


class _Again:
    """Gradients of gradients: run the torch-level graph once more, in eager PyTorch under grad mode, and differentiate that."""

    def __init__(self, traced: Traced, graph_module: torch.fx.GraphModule) -> None:
        self.graph_module, self.random = graph_module, traced.random
        self.gradients, self.tangents, self.num_inputs = traced.gradients, traced.tangents, traced.num_inputs
        self.written = tuple(m.input for m in traced.mutations)
        tensors = [i for i, n in enumerate(traced.graph.inputs[:traced.num_inputs]) if isinstance(n.type, TensorType)]
        unwritten = tuple(i for i in tensors if i not in self.written)
        self.unwritten = None if len(unwritten) == traced.num_inputs else unwritten
        # An input whose new value has this function in its history: holding it would be a cycle.
        self.lost = {m.input for m in traced.mutations if m.differentiable or m.input in traced.gradients}
        self.mutated_at = {m.output: m.input for m in traced.mutations}
        self.values_at: dict[int, int] = {}                      # forward output -> torch-level output of the same value
        self.bases_at: dict[int, int] = {}                       # forward output -> torch-level output that is a view of it
        for place, spec in enumerate(traced.outputs):
            if spec.kind == "value":
                self.values_at.setdefault(spec.index, place)
            elif spec.kind == "view" and spec.base == "output":
                self.bases_at.setdefault(spec.index, place)

    def remember(self, inputs: tuple) -> tuple[tuple, int]:
        """The inputs and the sum of their versions, which grows with every write."""
        held = tuple(None if i in self.lost else x for i, x in enumerate(inputs)) if self.lost else inputs
        return held, self._versions(inputs)

    def _versions(self, inputs: tuple) -> int:
        try:
            return sum(map(_version, inputs if self.unwritten is None else [inputs[i] for i in self.unwritten]))
        except RuntimeError:                                     # inference tensors have no version, and cannot be written
            return 0

    def differentiate(self, remembered: tuple[tuple, int], grads: Sequence[Any]) -> tuple:
        inputs, versions = remembered
        if self.random:
            raise RuntimeError("fuseline: create_graph=True through a compiled function that draws random numbers is not supported")
        if self.lost:
            raise RuntimeError("fuseline: create_graph=True through a compiled function that writes to a differentiable input "
                               "is not supported")
        if self._versions(inputs) != versions:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace operation: "
                               "an input of a compiled function, before create_graph=True")
        # Views, so that the gradient for one input does not run through the history of another.
        parts = [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else
                 x.clone() if i in self.written else x for i, x in enumerate(inputs)]
        results = self.graph_module(*parts)
        results = results if isinstance(results, (tuple, list)) else (results,)
        outputs, tangents = [], []
        for i, grad in enumerate(grads):
            if grad is None or i not in self.tangents:
                continue
            if i in self.values_at:
                outputs.append(results[self.values_at[i]])
            elif i in self.mutated_at:
                outputs.append(parts[self.mutated_at[i]])
            else:
                view = results[self.bases_at[i]]
                outputs.append(view if view._base is None else view._base)
            tangents.append(grad)
        found = torch.autograd.grad(outputs, [parts[i] for i in self.gradients], tangents, create_graph=True, allow_unused=True)
        every: list[Any] = [None] * self.num_inputs
        for i, g in zip(self.gradients, found):
            every[i] = g
        return tuple(every)
