"""Compute equal expressions once (common subexpression elimination by hashing)."""
from __future__ import annotations

from fuseline.ir.graph import Graph, Node
from fuseline.passes.edit import Editor, edit
from fuseline.passes.facts import has_effect

# Fresh memory whose contents are not determined by the arguments.
_UNDETERMINED = ("aten.empty", "aten.new_empty")


def merge_duplicates(graph: Graph) -> Graph:
    """Two nodes are merged if operator, arguments and type are equal; floats are compared by their text, so 0.0 is not -0.0."""
    seen: dict[tuple, Node] = {}

    def visit(editor: Editor, node: Node) -> Node | None:
        if has_effect(node) or node.op.startswith(_UNDETERMINED):
            return None
        key = (node.op, _key(editor.new(node.args)), _key(editor.new(node.kwargs)), str(node.type))
        if key in seen:
            return seen[key]
        seen[key] = editor.keep(node)
        return seen[key]

    return edit(graph, visit)


def _key(arg: object) -> object:
    if isinstance(arg, tuple):
        return tuple(_key(a) for a in arg)
    if isinstance(arg, Node):
        return ("node", id(arg))
    return (type(arg).__name__, repr(arg))
