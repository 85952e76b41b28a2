"""Rebuilding a graph node by node: what every pass is written with."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fuseline.ir.graph import Graph, Node, Type, substitute


class Editor:
    """Builds a new graph from an old one in execution order.

    `keep(node)` copies a node with its operands replaced; `emit` adds a new one; `mapping[old] = new` says what later
    readers of an old node read. `done()` gives the graph, with the old inputs.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.mapping: dict[Node, Any] = {}
        self.nodes: list[Node] = []
        self._names = {n.name for n in (*graph.inputs, *graph.nodes)}

    def new(self, arg: Any) -> Any:
        """An argument of the old graph as the new graph has it."""
        return substitute(arg, self.mapping)

    def keep(self, node: Node) -> Node:
        made = node.with_operands(self.mapping)
        self.nodes.append(made)
        self.mapping[node] = made
        return made

    def emit(self, op: str, args: tuple, type_: Type, *, kwargs: tuple = (), origin: str = "", hint: str = "n") -> Node:
        made = Node(self.fresh(hint), op, args, tuple(sorted(kwargs)), type_, origin)
        self.nodes.append(made)
        return made

    def fresh(self, hint: str) -> str:
        name, count = hint, 0
        while name in self._names:
            count += 1
            name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def done(self) -> Graph:
        return replace(self.graph, nodes=tuple(self.nodes), outputs=tuple(self.new(o) for o in self.graph.outputs))


def edit(graph: Graph, visit: Callable[[Editor, Node], Node | None]) -> Graph:
    """Run visit(editor, node) on every node: it returns the node's replacement in the new graph, or None to keep it."""
    editor = Editor(graph)
    for node in graph.nodes:
        made = visit(editor, node)
        if made is None:
            editor.keep(node)
        else:
            editor.mapping[node] = made
    return editor.done()
