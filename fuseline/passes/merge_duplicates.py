"""Compute equal expressions once (common subexpression elimination by hashing)."""
from __future__ import annotations

from fuseline.ir.graph import Graph, Node, nodes_in
from fuseline.passes.edit import Editor, edit
from fuseline.passes.facts import belongs_to_operand, has_effect

# Fresh memory whose contents are not determined by the arguments.
_UNDETERMINED = ("aten.empty", "aten.new_empty")


def merge_duplicates(graph: Graph) -> Graph:
    """Two nodes are merged if operator, arguments and type are equal; floats are compared by their text, so 0.0 is not -0.0.

    Two results that are distinct tensors in eager mode must stay so: a node whose memory one output shows is never merged
    with one that another output shows.
    """
    seen: dict[tuple, Node] = {}
    shown = _shown(graph)
    shown_new: set[Node] = set()

    def visit(editor: Editor, node: Node) -> Node | None:
        if has_effect(node) or node.op.startswith(_UNDETERMINED):
            return None
        key = (node.op, _key(editor.new(node.args)), _key(editor.new(node.kwargs)), str(node.type))
        if key in seen and not (node in shown and seen[key] in shown_new):
            return seen[key]
        made = editor.keep(node)
        seen.setdefault(key, made)
        if node in shown:
            shown_new.add(made)
        return made

    return edit(graph, visit)


def _key(arg: object) -> object:
    if isinstance(arg, tuple):
        return tuple(_key(a) for a in arg)
    if isinstance(arg, Node):
        return ("node", id(arg))
    return (type(arg).__name__, repr(arg))


def _shown(graph: Graph) -> frozenset[Node]:
    """The outputs, and the nodes that they may be views of."""
    shown = set(nodes_in(graph.outputs))
    for node in reversed(graph.nodes):
        if node in shown and belongs_to_operand(node):
            shown.update(node.operands[:1])
    return frozenset(shown)
