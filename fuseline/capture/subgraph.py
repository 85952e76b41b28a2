"""A graph within the region's graph: a piece of the program that runs at another time, such as a custom backward."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fuseline.capture.inputs import Inputs


class Subgraph:
    """graph   under construction: its placeholders are the tangents, then what it reads
    read    values of the enclosing graph that it reads: tensors, symbolic numbers; their nodes there are `nodes`
    """

    def __init__(self, world: Inputs) -> None:
        self.world, self.graph = world, torch.fx.Graph()
        self.read: list[Any] = []
        self._tangents: list[Any] = []
        self._placeholders: dict[Any, Any] = {}             # node of the enclosing graph -> placeholder

    def tangent(self, example: torch.Tensor) -> torch.Tensor:
        """A tensor that the caller of the subgraph gives, first of all."""
        node = self._placeholder(f"tangent{len(self._tangents)}", example)
        self._tangents.append(node)
        self.world.nodes[id(example)] = (example, node)
        return example

    def lift(self, node: Any) -> Any:
        """The placeholder for a node of the enclosing graph."""
        found = self._placeholders.get(node)
        if found is None:
            value = node.meta["example_value"]
            found = self._placeholders[node] = self._placeholder(f"read{len(self.read)}", value)
            self.read.append(value)
        return found

    def _placeholder(self, name: str, example: Any) -> Any:
        """A placeholder after those that are there already, before all operators."""
        taken = [*self._tangents, *self._placeholders.values()]
        with self.graph.inserting_after(taken[-1]) if taken else self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        return node

    def finish(self, results: list[torch.Tensor]) -> torch.fx.GraphModule:
        self.graph.output(tuple(self.world.operand(r) for r in results))       # type: ignore[attr-defined]
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)
