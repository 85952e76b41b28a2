"""What passes ask about nodes: random or not, dependent on parameters only or not, elementwise or not."""
from __future__ import annotations

from typing import TypeGuard

from fuseline.ir.graph import Graph, Node, TensorType
from fuseline.ir.traced import is_view

RANDOM = frozenset({
    "aten.rand.default", "aten.rand_like.default", "aten.randn.default", "aten.randn_like.default", "aten.randint.default",
    "aten.randint.low", "aten.randint_like.default", "aten.randint_like.low_dtype", "aten.randperm.default",
    "aten.bernoulli.default", "aten.bernoulli.p", "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float",
    "aten.normal.float_Tensor", "aten.normal_functional.default", "aten.multinomial.default", "aten.poisson.default",
    "aten.exponential.default", "aten.uniform.default", "aten.native_dropout.default", "aten.rrelu_with_noise.default",
    "aten.rrelu_with_noise_functional.default", "aten.geometric.default", "aten.cauchy.default", "aten.log_normal.default",
    "aten._scaled_dot_product_flash_attention.default", "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default", "aten.binomial.default", "aten._standard_gamma.default",
    "aten._fused_dropout.default", "aten._sample_dirichlet.default", "aten._cudnn_rnn.default",
})


def belongs_to_operand(node: Node) -> bool:
    """True for a result of its first operand: a view of its memory, or one of the results of a node with several."""
    return node.op == "getitem" or is_view(node)


def is_random(node: Node) -> bool:
    """True for an operator that draws random numbers (it is neither merged, moved nor dropped)."""
    return node.op in RANDOM


def has_effect(node: Node) -> bool:
    """True if the node must stay although nobody reads it: random draws keep the generator's course, checks may raise."""
    return is_random(node) or "_assert" in node.op or node.type is None or node.op.rpartition(".")[0].endswith("_")


def static_nodes(graph: Graph) -> frozenset[Node]:
    """The nodes (and inputs) whose value depends on static inputs only: parameters and buffers."""
    static = {i for i in graph.inputs if i.static}
    for node in graph.nodes:
        if node.operands and all(o in static for o in node.operands) and not has_effect(node):
            static.add(node)
    return frozenset(static)


def is_tensor(node: object) -> TypeGuard[Node]:
    return isinstance(node, Node) and isinstance(node.type, TensorType)
