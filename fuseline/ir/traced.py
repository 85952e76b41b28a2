"""What trace hands on: a functional ATen graph, joint with the backward when gradients are needed, and what is around it.

Numbering. The graph's inputs are, in order: the `num_inputs` inputs of the torch-level graph, one per tensor in
`constants`, one per tangent. Its outputs are: `num_forward` forward outputs, then one per entry of `gradients`.
A Graph -> Graph pass may replace `graph` as long as inputs and outputs keep their number, order and types.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuseline.ir.graph import Graph, Node

# Operators whose result is, or may be, the memory of their first operand.
VIEWS = frozenset(
    f"aten.{name}" for name in (
        "alias", "as_strided", "detach", "diagonal", "expand", "permute", "reshape", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex",
        "view_as_real", "_unsafe_view", "_reshape_alias", "chunk", "real", "imag", "lift_fresh", "narrow", "contiguous", "view_as",
    ))


def is_view(node: Node) -> bool:
    """True for an operator whose result may show its first operand's memory (also for a result of `split`, `unbind`)."""
    if node.op == "getitem":
        return node.args[0].op.rpartition(".")[0] in VIEWS
    return node.op.rpartition(".")[0] in VIEWS


def storage_root(node: Node) -> Node:
    """The node whose memory this one may show: itself unless it is a view."""
    while node.op != "input" and is_view(node):
        node = node.args[0]
    return node


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operator: `op(base, *args, **kwargs)`, its `index`-th result if it has several. Arguments as in Node."""

    op: str
    args: tuple = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    index: int | None = None


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How one output of the torch-level graph is made from the executable's outputs.

    kind      meaning of `index`
    "value"   forward output `index`: a fresh tensor or a number, no other output shares its memory
    "input"   input `index` itself, the same object
    "same"    torch-level output `index`, which comes before: the same object
    "view"    `steps` applied to the base: input `index` or forward output `index`, as `base` says ("input" | "output")
    "const"   the Python value `value`
    requires_grad   what eager gives
    tracked   the view has a grad_fn in eager; without, it is made under no_grad
    storage_offset  of the base in the trace: as_strided counts from the start of the storage
    """

    kind: str
    index: int = 0
    base: str = ""
    steps: tuple[ViewStep, ...] = ()
    value: Any = None
    requires_grad: bool = False
    tracked: bool = False
    storage_offset: int = 0


@dataclass(frozen=True, slots=True)
class Mutation:
    """Input `input` gets the value of forward output `output` by copy_. differentiable: the new value has a gradient."""

    input: int
    output: int
    differentiable: bool = False


@dataclass(frozen=True)
class Traced:
    """The result of tracing (see the module's docstring for the numbering).

    outputs     one OutputSpec for each output of the torch-level graph
    mutations   inputs that the program writes to, in input order
    tangents    for each tangent input, the forward output that it belongs to; empty: no gradients, an inference graph
    gradients   for each gradient output, the input that it belongs to
    guards      texts over size symbols ("s0 <= 512") that held in the trace and that the graph relies on
    symbols     symbol name -> where its value is found: (input, axis), axis None for a scalar input; all places must agree
    random      the graph draws random numbers
    autocast    autocast was on around the trace, so it is on around every call: to be kept off inside
    track_grad  gradients were on and some input requires them: the executable must run under no_grad
    """

    graph: Graph
    num_inputs: int
    num_forward: int
    outputs: tuple[OutputSpec, ...]
    constants: tuple[Any, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    tangents: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    guards: tuple[str, ...] = ()
    symbols: dict[str, tuple[tuple[int, int | None], ...]] = field(default_factory=dict)
    random: bool = False
    autocast: bool = False
    track_grad: bool = False

    @property
    def joint(self) -> bool:
        return bool(self.tangents)


@dataclass(frozen=True)
class Partitioned:
    """A joint graph in two.

    forward   inputs: those of the joint graph but the tangents; outputs: the forward outputs, then `saved`
    backward  inputs: one per saved, one scalar per `sizes`, one per tangent; outputs: the gradients
    saved     the saved nodes of the forward graph: inputs, forward outputs or intermediates
    sizes     names of size symbols that backward needs and that none of its tensors has
    saved_bytes  of the saved tensors that are neither inputs nor outputs; symbols counted with their hint
    """

    forward: Graph
    backward: Graph
    saved: tuple[Node, ...]
    sizes: tuple[str, ...] = ()
    saved_bytes: int = 0
