"""Remove nodes that nobody reads and that have no effect of their own."""
from __future__ import annotations

from dataclasses import replace

from fuseline.ir.graph import Graph, nodes_in
from fuseline.passes.facts import has_effect


def drop_unused(graph: Graph) -> Graph:
    needed = set(nodes_in(graph.outputs))
    kept = []
    for node in reversed(graph.nodes):
        if node in needed or has_effect(node):
            needed.update(node.operands)
            kept.append(node)
    return graph if len(kept) == len(graph.nodes) else replace(graph, nodes=tuple(reversed(kept)))
