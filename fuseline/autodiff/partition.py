"""Cut a joint graph into a forward and a backward graph.

What depends on a tangent is backward. Of the rest, the forward outputs need some; what backward reads of it is saved, or
recomputed from what is saved. Recomputing an elementwise operator costs little, because it is fused into its reader;
saving costs a write and a read of its bytes. The least number of bytes is a minimum cut: a node is split into
in -> out with its bytes as capacity; operators that must not run twice hang on the source; readers in backward
on the sink. Views are never saved, always their base: a view holds its base's memory anyway.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fuseline.autodiff.max_flow import INFINITE, FlowNetwork
from fuseline.errors import InternalError, NotSupported
from fuseline.ir.expr import Expr, Int, Sym, evaluate, product, symbols
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType, nodes_in, substitute
from fuseline.ir.traced import Partitioned, Traced, is_view, storage_root

# Elementwise operators of few instructions: recomputed in the backward rather than read from memory.
_CHEAP = frozenset(f"aten.{n}" for n in (
    "abs", "add", "addcmul", "addcdiv", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "copy", "div", "eq", "floor", "full", "full_like", "ge", "gt", "hardsigmoid", "hardswish", "hardtanh",
    "isinf", "isnan", "le", "leaky_relu", "logical_and", "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum",
    "mul", "ne", "neg", "ones", "ones_like", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "scalar_tensor",
    "sgn", "sign", "sqrt", "square", "sub", "threshold", "tril", "triu", "trunc", "where", "zeros", "zeros_like", "_to_copy", "arange",
    "empty", "empty_strided", "empty_like", "iota", "new_zeros", "new_ones", "new_full", "fill", "zero",
))
# Elementwise and dearer, some tens of instructions an element: worth a recomputation only where that saves whole tensors.
_TRANSCENDENTAL = frozenset(f"aten.{n}" for n in (
    "cos", "elu", "erf", "exp", "expm1", "gelu", "log", "log1p", "log2", "mish", "pow", "sigmoid", "silu", "sin", "softplus", "tanh",
))
_REDUCTIONS = frozenset(f"aten.{n}" for n in (
    "sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin", "max", "min", "native_layer_norm",
    "native_group_norm", "_softmax", "_log_softmax", "logsumexp", "cumsum",
))
_SYMBOL_HINT = 64            # what an unknown size counts as


_MASK_OPERATIONS = 6         # full-sized elementwise operations that a mask may cost in place of a read
_SMALL = 64                  # a tensor with this share of the elements is no traffic


def partition(traced: Traced, graph: Graph | None = None) -> Partitioned:
    """graph: the joint graph after passes, in place of `traced.graph`; same inputs and outputs."""
    graph = graph if graph is not None else traced.graph
    parts = _cut(traced, graph)
    without_results = _masks_from_operands(graph, parts)
    if without_results is None:
        return parts
    again = _cut(traced, without_results)
    return again if again.saved_bytes <= parts.saved_bytes else parts


def _masks_from_operands(graph: Graph, parts: Partitioned) -> Graph | None:
    """The joint graph with relu's gradient masked by what relu was given (y <= 0 just where x <= 0) rather than by its result,
    where backward has x at hand; None if nowhere.

    After batch norm x is a few operations on a tensor that batch norm's own gradient reads in the same kernels, while the
    result, in memory for the convolution after it, would be read for the mask only: a quarter of what those kernels read.
    """
    saved = set(parts.saved)
    read = {o.name for n in parts.backward.nodes if (_recomputable(n) or _reduces(n)) and n.op != _MASKED for o in n.operands}
    masks: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op == _MASKED and node.args[2] == 0 and node.args[1] in saved and node.args[1].op == "aten.relu.default":
            given = node.args[1].args[0]
            if given.type == node.args[1].type and _at_hand(given, saved, read):
                masks[node] = given
    if not masks:
        return None
    known: dict[Node, object] = {}
    nodes = []
    for node in graph.nodes:
        made = node.with_operands(known)
        if node in masks:
            made = replace(made, args=(made.args[0], masks[node], *made.args[2:]))
        if made is not node:
            known[node] = made
        nodes.append(made)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(substitute(o, known) for o in graph.outputs))


_MASKED = "aten.threshold_backward.default"


def _at_hand(value: Node, saved: set[Node], read: set[str]) -> bool:
    """True if a value takes a few elementwise operations on small tensors and one that backward's loops read anyway."""
    whole: set[Node] = set()
    operations = 0
    stack, seen = [value], {value}
    while stack:
        node = stack.pop()
        if not isinstance(node.type, TensorType):
            return False
        large = _bytes(node) * _SMALL > _bytes(value)
        if node in saved or node.op == "input" or not _recomputable(node):
            if node not in saved and not (node.op == "input" and node.static):
                return False
            if large:
                whole.add(node)
            continue
        operations += large and not is_view(node)
        if operations > _MASK_OPERATIONS or node.op.rpartition(".")[0] in _TRANSCENDENTAL:
            return False
        stack.extend(o for o in node.operands if o not in seen)
        seen.update(node.operands)
    return len(whole) == 1 and all(n.name in read for n in whole)


def _cut(traced: Traced, graph: Graph) -> Partitioned:
    count = len(traced.tangents)
    if not count:
        raise InternalError("partition of a graph without gradients")
    primals, tangents = graph.inputs[:len(graph.inputs) - count], graph.inputs[len(graph.inputs) - count:]
    results, gradients = graph.outputs[:traced.num_forward], graph.outputs[traced.num_forward:]

    backward = set(tangents)
    for node in graph.nodes:
        if any(o in backward for o in node.operands):
            backward.add(node)
    if any(n in backward for n in nodes_in(results)):
        raise NotSupported("a forward result depends on a gradient")
    inputs = set(primals)
    needed = _ancestors(nodes_in(gradients))                         # of the gradients
    forward = _ancestors(nodes_in(results))
    forward.update(n for n in graph.nodes if n not in backward and n not in needed)      # effects: random draws, asserts
    wanted = {o for n in graph.nodes if n in needed and n in backward for o in n.operands if o not in backward}
    wanted.update(n for n in nodes_in(gradients) if n not in backward)

    written = _heavy_operands(graph, forward) | _reduced_and_read(graph, forward)
    in_memory = _heavy_operands(graph, forward) & _heavy_operands(graph, backward & needed)
    saved = _minimum_cut(graph, inputs, wanted, results, written, in_memory)
    backward_nodes = _backward_nodes(graph, backward & needed, gradients, set(saved))
    forward.update(_ancestors(saved))
    order = {n: i for i, n in enumerate((*graph.inputs, *graph.nodes))}
    saved = sorted(saved, key=order.__getitem__)
    forward_graph = Graph(primals, tuple(n for n in graph.nodes if n in forward), (*results, *saved), "forward", graph.notes)
    sizes = _missing_sizes(backward_nodes, gradients, (*saved, *tangents))
    names = {n.name for n in (*saved, *tangents, *backward_nodes)}
    scalars = tuple(Node(_fresh(s.name, names), "input", type=ScalarType("int", s)) for s in sizes)
    held = {s: Node(s.name, "input", type=s.type, static=s.static) for s in saved}
    backward_graph = _substituted(Graph((), tuple(backward_nodes), gradients, "backward", graph.notes), held)
    backward_graph = Graph((*held.values(), *scalars, *tangents), backward_graph.nodes, backward_graph.outputs, "backward", graph.notes)
    outputs = set(nodes_in(results))
    extra = sum(_bytes(s) for s in saved if s not in inputs and s not in outputs)
    return Partitioned(forward_graph, backward_graph, tuple(saved), tuple(s.name for s in sizes), extra)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.operands)
    return found


# ---------------------------------------------------------------- what to save

def _recomputable(node: Node) -> bool:
    if node.op == "getitem":
        return is_view(node)
    name = node.op.rpartition(".")[0]
    return is_view(node) or name in _CHEAP or name in _TRANSCENDENTAL


def _reduces(node: Node) -> bool:
    return node.op.rpartition(".")[0] in _REDUCTIONS


def _bytes(node: Node) -> int:
    """Bytes of a tensor, unknown sizes by a hint."""
    if not isinstance(node.type, TensorType):
        raise InternalError("a node that is no tensor has no bytes", node=node)
    elements: Int = product(node.type.shape)
    if isinstance(elements, Expr):
        elements = evaluate(elements, {s.name: _SYMBOL_HINT for s in symbols(elements)})
    return max(int(elements), 1) * node.type.dtype.size


def _heavy_operands(graph: Graph, nodes: set[Node]) -> set[Node]:
    """What library calls among the nodes (not elementwise, view or reduction) read: it has to be in memory there."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node in nodes and not _recomputable(node) and node.op != "getitem" and not _reduces(node):
            found.update(storage_root(o) for o in node.operands)
    return found


def _reduced_and_read(graph: Graph, nodes: set[Node]) -> set[Node]:
    """What a reduction among the nodes reads and another of them too: two kernels, so it is in memory."""
    readers: dict[Node, int] = {}
    reduced: set[Node] = set()
    for node in graph.nodes:
        if node in nodes:
            for operand in {storage_root(o) for o in node.operands}:
                readers[operand] = readers.get(operand, 0) + 1
                if _reduces(node):
                    reduced.add(operand)
    return {n for n in reduced if readers[n] > 1}


def _minimum_cut(graph: Graph, inputs: set[Node], wanted: set[Node], results: tuple, written: set[Node],
                 in_memory: set[Node]) -> list[Node]:
    """The nodes to save so that everything wanted can be computed from them without the operators that must not run twice.

    written: nodes that forward has to have in memory, whether saved or not
    in_memory: nodes that both forward and backward have to have in memory; saving these costs nothing but the memory.
    """
    reached = _reach(wanted, in_memory)
    region = [n for n in (*graph.inputs, *graph.nodes) if n in reached]
    index = {n: i for i, n in enumerate(region)}
    alive = set(nodes_in(results))
    source, sink = 2 * len(region), 2 * len(region) + 1
    network = FlowNetwork(2 * len(region) + 2)
    depth: dict[Node, int] = {}
    for node, i in index.items():
        scalar = not isinstance(node.type, TensorType)
        base = node in inputs or node in in_memory or not _recomputable(node)
        if scalar and node in inputs and isinstance(node.type, ScalarType):
            capacity = 1
        elif scalar or (is_view(node) and node.op != "input"):
            capacity = INFINITE                                      # a tuple has no memory; of a view, the base is saved
        else:
            # Saving is a read in backward, and a write in forward unless the value is in memory there anyway.
            capacity = _bytes(node) * 16
            if node in inputs:
                capacity = 1 if node.static else capacity * 3 // 8  # alive in any case, or most likely
            elif node in alive or node in written or not _recomputable(node):
                capacity //= 2
        depth[node] = 0 if base else 1 + max((depth.get(o, 0) for o in node.operands), default=0)
        if capacity < INFINITE:                                      # of equals, save what needs less recomputing
            dear = node.op.rpartition(".")[0] in _TRANSCENDENTAL
            capacity = max(1, capacity - (capacity // 64 if not base and depth[node] > 8 else 0) - (capacity // 16 if dear else 0))
        network.edge(2 * i, 2 * i + 1, capacity)
        if base:
            network.edge(source, 2 * i, INFINITE)
        elif not node.operands:
            pass                                                     # a constant: always made again
        else:
            for operand in dict.fromkeys(node.operands):
                network.edge(2 * index[operand] + 1, 2 * i, INFINITE)
        if node in wanted:
            network.edge(2 * i + 1, sink, INFINITE)
    value, near_source = network.minimum_cut(source, sink)
    if value >= INFINITE:
        raise InternalError("no finite cut of the joint graph")
    return [n for n, i in index.items() if near_source[2 * i] and not near_source[2 * i + 1]]


def _reach(wanted: set[Node], in_memory: set[Node]) -> set[Node]:
    """The wanted nodes and what they could be recomputed from."""
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.op != "input" and node not in in_memory and _recomputable(node):
                stack.extend(node.operands)
    return found


# ---------------------------------------------------------------- the backward graph

def _backward_nodes(graph: Graph, backward: set[Node], gradients: tuple, saved: set[Node]) -> list[Node]:
    """Backward's nodes in joint order, each recomputed node right before its first reader."""
    emitted: list[Node] = []
    done = set(saved)

    def emit(node: Node) -> None:
        stack = [node]
        while stack:
            n = stack[-1]
            missing = [o for o in n.operands if o not in done and o.op != "input"]
            if n in done or not missing:
                stack.pop()
                if n not in done:
                    if n not in backward and not _recomputable(n):
                        raise InternalError("an operator that must not run twice is recomputed", node=n)
                    done.add(n)
                    emitted.append(n)
            else:
                stack.extend(reversed(missing))

    for node in graph.nodes:
        if node in backward:
            emit(node)
    for node in nodes_in(gradients):
        if node.op != "input":
            emit(node)
    return emitted


def _missing_sizes(nodes: list[Node], gradients: tuple, inputs: tuple[Node, ...]) -> list[Sym]:
    """Size symbols that the nodes use and that are no axis of an input."""
    used: set[Sym] = set()

    def look(a: object) -> None:
        if isinstance(a, Expr):
            used.update(symbols(a))
        elif isinstance(a, TensorType):
            look(a.shape)
            look(a.stride)
        elif isinstance(a, ScalarType):
            look(a.expr)
        elif isinstance(a, (tuple, list)):
            for b in a:
                look(b)

    for node in nodes:
        look(node.args)
        look(tuple(v for _, v in node.kwargs))
        look(node.type)
    for node in inputs:
        look(node.type)
    look(gradients)
    found = {size for n in inputs if isinstance(n.type, TensorType) for size in n.type.shape if isinstance(size, Sym)}
    found.update(n.type.expr for n in inputs if isinstance(n.type, ScalarType) and isinstance(n.type.expr, Sym))
    return sorted(used - found, key=lambda s: s.name)


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _substituted(graph: Graph, mapping: dict[Node, Node]) -> Graph:
    """The graph with mapped nodes replaced in every operand and output."""
    known: dict[Node, object] = dict(mapping)
    nodes = []
    for node in graph.nodes:
        made = node.with_operands(known)
        if made is not node:
            known[node] = made
        nodes.append(made)

    def change(a: object) -> object:
        if isinstance(a, Node):
            return known.get(a, a)
        return tuple(map(change, a)) if isinstance(a, (tuple, list)) else a

    return Graph(graph.inputs, tuple(nodes), tuple(map(change, graph.outputs)), graph.name, graph.notes)
