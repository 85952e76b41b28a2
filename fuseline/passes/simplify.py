"""Local identities that are exact for NaN, infinities and negative zero, and that keep the type."""
from __future__ import annotations

from collections.abc import Callable

from fuseline.ir.graph import Graph, Node, TensorType
from fuseline.passes.edit import Editor, edit
from fuseline.passes.facts import is_tensor

Rule = Callable[[Node], "Node | None"]
RULES: dict[str, list[Rule]] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule for nodes of these operators: it returns the operand that stands for the node, or None to refuse."""
    def register(function: Rule) -> Rule:
        for op in ops:
            RULES.setdefault(op, []).append(function)
        return function
    return register


def simplify(graph: Graph) -> Graph:
    """Apply the rules to each node, operands first; an output is left alone, for its identity and strides matter."""
    outputs = {o for o in graph.outputs if isinstance(o, Node)}

    def visit(editor: Editor, node: Node) -> Node | None:
        if node in outputs:
            return None
        current = node.with_operands(editor.mapping)
        for apply in RULES.get(current.op, ()):
            made = apply(current)
            if made is not None:
                return made
        return None

    return edit(graph, visit)


def _same_type(a: object, b: Node) -> bool:
    return is_tensor(a) and isinstance(b.type, TensorType) and a.type == b.type    # type: ignore[attr-defined]


@rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
def drop_factor_one(node: Node) -> Node | None:
    """x * 1 and x / 1 are x, bit for bit; refused where the result has another type (an int tensor times 1.0 is a float)."""
    x, factor = node.args[:2]
    if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor == 1 and _same_type(x, node):
        return x
    return None


@rule("aten.sub.Tensor")
def drop_minus_zero(node: Node) -> Node | None:
    """x - 0 is x (x + 0 is not: -0.0 + 0 is 0.0)."""
    x, other = node.args[:2]
    if isinstance(other, (int, float)) and other == 0 and str(other) in ("0", "0.0") and _same_type(x, node):
        return x
    return None


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.expand.default", "aten.alias.default",
      "aten.detach.default", "aten._to_copy.default", "aten.lift_fresh_copy.default")
def drop_change_of_nothing(node: Node) -> Node | None:
    """A view, expansion or conversion to the type that its operand already has. In a functional graph nobody can tell."""
    x = node.args[0]
    return x if _same_type(x, node) else None


@rule("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
def merge_views(node: Node) -> Node | None:
    """view(view(x)) back to x's own shape is x."""
    inner = node.args[0]
    if isinstance(inner, Node) and inner.op == node.op and _same_type(inner.args[0], node):
        return inner.args[0]
    return None


@rule("aten.permute.default")
def cancel_permutes(node: Node) -> Node | None:
    """permute(permute(x, p), q) is x if q undoes p."""
    inner, order = node.args[:2]
    if isinstance(inner, Node) and inner.op == node.op and _same_type(inner.args[0], node):
        first = inner.args[1]
        if all(isinstance(i, int) for i in (*first, *order)) and [first[i] for i in order] == list(range(len(order))):
            return inner.args[0]
    return None


@rule("aten.neg.default")
def cancel_double_neg(node: Node) -> Node | None:
    inner = node.args[0]
    if isinstance(inner, Node) and inner.op == node.op and _same_type(inner.args[0], node):
        return inner.args[0]
    return None
