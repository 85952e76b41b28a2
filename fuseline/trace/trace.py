"""The torch-level graph, run once under fake tensors and a Recorder, gives the ATen graph: the forward one, or joint with
the backward that autograd itself runs under the same recorder."""
from __future__ import annotations

import contextlib
import operator
from collections.abc import Container, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import NotSupported
from fuseline.ir.expr import Expr, substitute
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType, nodes_in
from fuseline.ir.traced import Mutation, OutputSpec, Traced, ViewStep, storage_root
from fuseline.trace.decompose import table
from fuseline.trace.functionalize import Alias
from fuseline.trace.record import Recorder
from fuseline.trace.sizes import Sizes


def trace(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], *, static: Sequence[bool] | None = None,
          shape_env: Any = None, keep: Container[str] = frozenset(), grad_enabled: bool = True, eager_random: bool = False) -> Traced:
    """Trace a torch-level graph (calls of torch functions and methods; may write in place) to a functional ATen graph.

    example_inputs  one per placeholder: FakeTensors of one mode (real tensors become fake ones), SymInts, numbers
    static          for each input, whether it is a parameter or buffer
    keep            names of operators ("aten.gelu.default") to record as they are
    grad_enabled    the grad mode at the graph's start; the graph is joint if then an output depends on an input that requires grad
    eager_random    keep PyTorch's random operators, and so its stream of numbers
    Raises NotSupported with the reason for what cannot be compiled; what the program itself raises passes through.
    """
    attempt = _Trace(graph_module, example_inputs, static, shape_env, keep, grad_enabled, eager_random)
    try:
        return attempt.run(clone=False)
    except _WritesLeaf:
        attempt = _Trace(graph_module, example_inputs, static, shape_env, keep, grad_enabled, eager_random)
        try:
            return attempt.run(clone=True)
        except _WritesLeaf as error:
            raise error.__cause__ from None                      # type: ignore[misc]


_CHECKS_INDICES = frozenset(f"aten.{name}" for name in (
    "index.Tensor", "index_select.default", "gather.default", "embedding.default", "take.default", "index_put.default", "index_add.default",
    "index_copy.default", "index_fill.int_Scalar", "scatter.src", "scatter.value", "scatter_add.default", "scatter_reduce.two"))


class _WritesLeaf(Exception):
    """The program writes to an input that requires grad and, outside, is no leaf: trace again with clones of such inputs."""


class _Trace:
    def __init__(self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any], static: Sequence[bool] | None, shape_env: Any,
                 keep: Container[str], grad_enabled: bool, eager_random: bool) -> None:
        self.graph_module, self.grad_enabled = graph_module, grad_enabled
        fakes: list[Any] = [x for x in inputs if isinstance(x, torch.Tensor) and torch_internals.is_fake(x)]
        self.fake_mode = fakes[0].fake_mode if fakes else torch_internals.new_fake_mode(shape_env)
        self.shape_env = shape_env if shape_env is not None else self.fake_mode.shape_env
        made: dict[int, Any] = {}
        self.inputs = [self._fake(x, made) for x in inputs]
        self.static = list(static) if static is not None else [False] * len(self.inputs)
        self.sizes = Sizes(self.shape_env)
        self.recorder = Recorder(self.fake_mode, self.sizes, table(eager_random), keep)
        self.graph_inputs: list[Node] = []
        self.leaves: dict[int, torch.Tensor] = {}                # input index -> the leaf that stands for it

    def _fake(self, x: Any, made: dict[int, Any]) -> Any:
        if not isinstance(x, torch.Tensor) or torch_internals.is_fake(x):
            return x
        if id(x) not in made:
            made[id(x)] = torch_internals.to_fake(self.fake_mode, x)
        return made[id(x)]

    def run(self, *, clone: bool) -> Traced:
        recorder = self.recorder
        autocast = torch_internals.any_autocast_enabled()
        with _state(self.grad_enabled), self.fake_mode:
            arguments = self._placeholders()
            with recorder:
                if clone:
                    arguments = [self._cloned(i, a) for i, a in enumerate(arguments)]
                symbolic = any(isinstance(x, torch.SymInt) for a in arguments
                               for x in (a.shape if isinstance(a, torch.Tensor) else (a,)))
                with torch_internals.symbolic_kernels() if symbolic else contextlib.nullcontext():
                    results = self._forward(arguments)
        outputs, mutations, forward, tensors = self._forward_outputs(results, arguments)
        differentiable = [i for i, t in enumerate(tensors)
                          if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None]
        tangents: list[Node] = []
        gradients: dict[int, Node] = {}
        if differentiable and not self.leaves:
            raise NotSupported("a result depends on a leaf that was made in the graph")
        if differentiable:
            tangents, gradients = self._backward([tensors[i] for i in differentiable])
        else:
            differentiable = []
        inputs = (*self.graph_inputs, *(n for _, n in recorder.constants), *tangents)
        graph = _live(Graph(inputs, tuple(recorder.nodes), (*forward, *gradients.values())))
        graph = _resized(graph, self.sizes)
        return Traced(
            graph, len(self.graph_inputs), len(forward), tuple(outputs), tuple(t for t, _ in recorder.constants),
            tuple(Mutation(i, o, o in differentiable) for i, o in mutations), tuple(differentiable), tuple(gradients),
            self.sizes.guards(), self._symbols(), any(torch_internals.is_random(n.op) for n in graph.nodes if n.op != "getitem"),
            autocast, self.grad_enabled and any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.inputs))

    # ------------------------------------------------------------ inputs
    def _placeholders(self) -> list[Any]:
        """Graph inputs and, for each, the value that the program computes with: tensors as leaves of their own."""
        names = [n.name for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        if len(names) != len(self.inputs):
            raise ValueError(f"the graph has {len(names)} placeholders, given were {len(self.inputs)} inputs")
        arguments = []
        for i, (name, x, static) in enumerate(zip(names, self.inputs, self.static)):
            if isinstance(x, torch.Tensor):
                leaf = x.detach().requires_grad_(x.requires_grad)
                if x.requires_grad:
                    self.leaves[i] = leaf
                self.graph_inputs.append(self.recorder.input(leaf, name, static=static, index=i))
                arguments.append(leaf)
                continue
            if isinstance(x, torch.SymInt):
                type_ = ScalarType("int", self.sizes.of(x))
            elif isinstance(x, torch.SymFloat):
                type_ = ScalarType("float")
            elif isinstance(x, (bool, int, float)):
                kind = type(x).__name__
                type_ = ScalarType(kind, x if isinstance(x, int) and kind == "int" else None)
            else:
                raise NotSupported(f"a graph input of type {type(x).__name__}")
            self.graph_inputs.append(Node(self.recorder.name(name), "input", type=type_, static=static))
            if isinstance(x, torch.SymFloat):
                self.recorder.floats[torch_internals.own_symbol(x)] = self.graph_inputs[-1]
            arguments.append(x)
        return arguments

    def _cloned(self, index: int, value: Any) -> Any:
        if index not in self.leaves or self.inputs[index].is_leaf:
            return value
        with torch.enable_grad():
            copy = value.clone()
        self.recorder.adopt(copy, value)
        return copy

    def _symbols(self) -> dict[str, tuple[tuple[int, int | None], ...]]:
        found: dict[str, list[tuple[int, int | None]]] = {}
        for i, node in enumerate(self.graph_inputs):
            if isinstance(node.type, ScalarType):
                if isinstance(node.type.expr, Expr):
                    found.setdefault(str(node.type.expr), []).append((i, None))
            elif isinstance(node.type, TensorType):
                for axis, size in enumerate(node.type.shape):
                    if isinstance(size, Expr):
                        found.setdefault(str(size), []).append((i, axis))
        for i, x in enumerate(self.inputs):
            if isinstance(x, torch.SymFloat):
                found.setdefault(str(torch_internals.own_symbol(x)), []).append((i, None))
            elif isinstance(x, torch.SymInt):
                found.setdefault(str(torch_internals.own_symbol(x)), [(i, None)])
            elif isinstance(x, torch.Tensor):                # symbols found equal to others: the guard that says so names them
                for axis, size in enumerate(x.shape):
                    if isinstance(size, torch.SymInt):
                        found.setdefault(str(torch_internals.own_symbol(size)), [(i, axis)])
        return {name: tuple(places) for name, places in found.items() if name.isidentifier()}

    # ------------------------------------------------------------ forward
    def _forward(self, arguments: list[Any]) -> tuple:
        """Run the torch-level graph node by node."""
        values: dict[torch.fx.Node, Any] = {}
        remaining = iter(arguments)

        def load(a: Any) -> Any:
            return torch.fx.node.map_arg(a, lambda n: values[n])

        for node in self.graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
                continue
            if node.op == "output":
                result = load(node.args[0])
                return tuple(result) if isinstance(result, (tuple, list)) else (result,)
            self.recorder.set_origin(node.meta.get("origin", ""))
            values[node] = self._call(node, load(node.args), load(node.kwargs))
        return ()

    def _call(self, node: torch.fx.Node, args: tuple, kwargs: dict) -> Any:
        target: Any = node.target
        try:
            if node.op == "call_function":
                return target(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            value = operator.attrgetter(target)(self.graph_module)
            if node.op == "call_module":
                return value(*args, **kwargs)
        except torch_internals.unsupported_in_trace() as error:
            raise NotSupported(f"{node.target} depends on data, or cannot be traced: {error}", at=self.recorder.origin) from error
        except RuntimeError as error:
            if "a leaf Variable that requires grad" in str(error) or "a view of a leaf Variable" in str(error):
                raise _WritesLeaf from error
            if torch_internals.reads_fake_data(error):
                raise NotSupported(f"{node.target} reads the data of a tensor", at=self.recorder.origin) from error
            raise
        return self.recorder.constant(value, copy=False).tensor if isinstance(value, torch.Tensor) else value

    def _forward_outputs(self, results: tuple, arguments: list[Any]) -> tuple[list[OutputSpec], list[tuple[int, int]], list, list]:
        """(output specs, (input, forward output) of each written input, graph outputs, the tensor of each or None)."""
        recorder = self.recorder
        forward: list = []                                       # Node, number or Expr
        tensors: list = []
        written: list[tuple[int, int]] = []
        inputs = {a.store: a for a in (recorder.alias(x) for x in arguments if isinstance(x, torch.Tensor))}
        changed = {s: a for s, a in inputs.items() if s.generation}
        for store, alias in changed.items():
            if len(store.inputs) > 1:
                raise NotSupported("an input is written that shares memory with another input")
            node = recorder.current(alias.tensor)
            root = storage_root(node)
            if root.op == "input" and root is not self.graph_inputs[alias.input] and any(     # type: ignore[index]
                    root is self.graph_inputs[a.input] for a in changed.values()):            # type: ignore[index]
                node = recorder.clone(node)                      # read before that input is written
            written.append((alias.input, len(forward)))          # type: ignore[arg-type]
            forward.append(node)
            tensors.append(alias.tensor)
        shared: dict[Any, int] = {}
        seen: set[int] = set()
        for r in results:
            if isinstance(r, torch.Tensor) and id(r) not in seen:
                seen.add(id(r))
                store = recorder.alias(r).store
                shared[store] = shared.get(store, 0) + 1
        outputs: list[OutputSpec] = []
        at: dict[int, int] = {}                                  # id of a result -> its place among the outputs
        base_at: dict[Any, int] = {}                             # store -> forward output that is its root
        for place, r in enumerate(results):
            if not isinstance(r, torch.Tensor):
                outputs.append(self._number(r, forward, tensors))
                continue
            if id(r) in at:
                outputs.append(OutputSpec("same", at[id(r)], requires_grad=r.requires_grad))
                continue
            at[id(r)] = place
            outputs.append(self._tensor(r, recorder.alias(r), shared, base_at, forward, tensors))
        for node in self._unread_checks(forward):
            forward.append(node)
            tensors.append(None)
        return outputs, written, forward, tensors

    def _unread_checks(self, forward: list) -> list[Node]:
        """Indexed reads and writes that nobody reads: eager raises for an index out of bounds all the same (on the CPU)."""
        candidates = [n for n in self.recorder.nodes
                      if n.op in _CHECKS_INDICES and isinstance(n.type, TensorType) and n.type.device == "cpu"]
        if not candidates:
            return []
        live = set(nodes_in(forward))
        found = []
        for node in reversed(self.recorder.nodes):
            if node not in live and node in candidates:
                found.append(node)
                live.add(node)
            if node in live:
                live.update(node.operands)
        return found[::-1]

    def _number(self, value: Any, forward: list, tensors: list) -> OutputSpec:
        if isinstance(value, torch.SymInt):
            expr = self.sizes.of(value)
            if not isinstance(expr, Expr):
                return OutputSpec("const", value=expr)
            forward.append(expr)
            tensors.append(None)
            return OutputSpec("value", len(forward) - 1)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise NotSupported("a number that is computed from sizes is returned")
        return OutputSpec("const", value=value)

    def _tensor(self, r: torch.Tensor, alias: Alias, shared: dict, base_at: dict, forward: list, tensors: list) -> OutputSpec:
        recorder, grad, tracked = self.recorder, r.requires_grad, r.grad_fn is not None
        untracked_view = grad and not tracked and alias.parent is not None           # a view that was made under no_grad
        if grad and not tracked and alias.parent is None and alias.input is None:
            raise NotSupported("a tensor made in the graph is a leaf that requires grad")
        root, steps = alias.path()
        if grad and not tracked and alias.parent is not None and (
                not root.tensor.requires_grad or any(step.op == "aten.detach.default" for step in steps)):
            raise NotSupported("a tensor made in the graph is a leaf that requires grad")
        if root.input is not None:
            if alias.parent is None:
                return OutputSpec("input", root.input, requires_grad=grad)
            return OutputSpec("view", root.input, "input", steps, None, grad, tracked, root.tensor.storage_offset())
        alone = shared[alias.store] == 1 and not untracked_view                       # the only result in its memory needs no base
        if tracked and not alone and not root.tensor.requires_grad:      # a result of a custom function, or a view of one
            root, steps = self._differentiable_base(alias)
        if root.tensor is r or alone:
            if alias.store not in base_at:
                forward.append(recorder.fresh(recorder.current(r), r))
                tensors.append(r)
                if root.tensor is r:
                    base_at[alias.store] = len(forward) - 1
                return OutputSpec("value", len(forward) - 1, requires_grad=grad)
            return OutputSpec("value", base_at[alias.store], requires_grad=grad)
        if alias.store in base_at and tracked and tensors[base_at[alias.store]] is not root.tensor:
            raise NotSupported("two results of autograd functions share memory")
        if alias.store not in base_at:
            base_at[alias.store] = len(forward)
            forward.append(recorder.fresh(recorder.current(root.tensor), root.tensor))
            tensors.append(root.tensor)
        return OutputSpec("view", base_at[alias.store], "output", steps, None, grad, tracked)

    def _differentiable_base(self, alias: Alias) -> tuple[Alias, tuple[ViewStep, ...]]:
        """(the oldest alias that has a gradient, which must show the whole memory, and the view steps from it to here)"""
        steps: list[ViewStep] = []
        while alias.parent is not None and alias.parent.tensor.requires_grad:
            steps.append(alias.step)                             # type: ignore[arg-type]
            alias = alias.parent
        if any(step.op not in ("aten.detach.default", "aten.alias.default") for step in alias.path()[1]):
            raise NotSupported("a differentiable view of a tensor without gradient is returned")
        return alias, tuple(reversed(steps))

    # ------------------------------------------------------------ backward
    def _backward(self, differentiable: list[torch.Tensor]) -> tuple[list[Node], dict[int, Node]]:
        """Tangent inputs, and input index -> gradient node."""
        recorder = self.recorder
        recorder.set_origin("")
        with self.fake_mode:
            tangents = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in differentiable]
            nodes = [recorder.input(t, "tangent") for t in tangents]
            try:
                with recorder, _state(False), torch.autograd.set_multithreading_enabled(False):
                    torch_internals.switch_autocast_off()
                    grads = torch.autograd.grad(differentiable, list(self.leaves.values()), tangents, allow_unused=True)
                    return nodes, {i: recorder.current(g) for i, g in zip(self.leaves, grads) if g is not None}
            except torch_internals.unsupported_in_trace() as error:
                raise NotSupported(f"the backward depends on data, or cannot be traced: {error}") from error
            except RuntimeError as error:
                if "modified by an inplace operation" in str(error):
                    raise NotSupported(f"eager's backward would fail: {error}") from error
                raise


@contextmanager
def _state(grad_enabled: bool) -> Any:
    """Grad mode as given inside; it, autocast and the random generators afterwards as before, whatever the graph does."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    grad, depth = torch.is_grad_enabled(), torch_internals.transform_depth()
    autocast = torch_internals.autocast_switches()
    try:
        with torch.random.fork_rng(devices):
            torch_internals.set_grad_enabled(grad_enabled)
            yield
    finally:
        torch_internals.leave_transforms(depth)
        torch_internals.set_grad_enabled(grad)
        torch_internals.restore_autocast(autocast)


# ---------------------------------------------------------------- finishing the graph

def _live(graph: Graph) -> Graph:
    """Without nodes that nobody reads and that have no effect of their own."""
    needed = set(nodes_in(graph.outputs))
    kept = []
    for node in reversed(graph.nodes):
        effect = node.op != "getitem" and (torch_internals.is_random(node.op) or node.type is None)
        if node in needed or effect:
            needed.update(node.operands)
            kept.append(node)
    return Graph(graph.inputs, tuple(reversed(kept)), graph.outputs)


def _resized(graph: Graph, sizes: Sizes) -> Graph:
    """With the equalities between sizes that the trace found put into every type and argument."""
    known = sizes.replaced()
    if not known:
        return graph
    mapping: dict[Node, Node] = {}

    def change(a: Any) -> Any:
        if isinstance(a, Node):
            return mapping[a]
        if isinstance(a, Expr):
            return substitute(a, known)
        if isinstance(a, TensorType):
            return TensorType(a.dtype, change(a.shape), change(a.stride), a.device)
        if isinstance(a, ScalarType):
            return ScalarType(a.kind, change(a.expr))
        return tuple(map(change, a)) if isinstance(a, (tuple, list)) else a

    for node in (*graph.inputs, *graph.nodes):
        mapping[node] = Node(node.name, node.op, change(node.args), tuple((k, change(v)) for k, v in node.kwargs),
                             change(node.type), node.origin, node.static)
    return Graph(tuple(mapping[n] for n in graph.inputs), tuple(mapping[n] for n in graph.nodes), change(graph.outputs), graph.name)
