"""The world of values during capture: what each stands for, where it came from, what was changed.

Built up by subject: `provenance` (sources, guards), `inputs` (tensors and symbolic numbers from outside), `containers`,
`attributes`, `operators`, `torch_calls` (nodes of the graph), `native` (other calls) and `recipes`. Here are names, closure
cells, and the end of a region.
"""
from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.attributes import ABSENT
from fuseline.capture.errors import CannotCapture, ProgramError, break_here
from fuseline.capture.inputs import is_argument
from fuseline.capture.provenance import MISSING
from fuseline.capture.recipes import Recipes, pinned
from fuseline.capture.shared_memory import RestartShared, Span, spans
from fuseline.ir.region import Builtin, Const, Effect, Global, GraphBreak, GraphInput, Guard, Pinned, Source
from fuseline.options import Options


class World(Recipes):
    """The interpreter sets `interpreter_call`: the world calls it for functions of the program.

    options   of the compile call           dynamic   (source, axis) of symbolic axes, (source, None) of symbolic numbers
    where     gives the user's current line
    """

    def __init__(self, options: Options, dynamic: frozenset, where: Callable[[], str]) -> None:
        super().__init__(options, dynamic, where)
        self.written_globals: dict[tuple[int, str], Any] = {}
        self._cells: dict[int, tuple[types.CellType, Source]] = {}
        self._cell_contents: dict[int, Any] = {}
        self.made_classes: dict[int, tuple[type, int]] = {}       # with the step before they were made
        self.calls = 0
        self.asks_modes = False                            # whether the program asked for grad mode, default dtype and the like
        self.modes = torch_internals.capture_modes()
        if torch_internals.functorch_depth() or torch_internals.user_modes_active():
            raise CannotCapture(GraphBreak("modes", where(), "a torch.func transform, forward-mode differentiation or a mode that watches "
                                           "operators is active", "compile the function that applies it, or none"))
        self._versions: dict[int, int] = {}
        self.spans: tuple[Span, ...] = ()                  # memory that several inputs share, and one of them writes
        self._span_inputs: dict[Span, torch.Tensor] = {}

    # -- names ---------------------------------------------------------------------------------------------------
    def load_global(self, namespace: dict, name: str) -> Any:
        written = self.written_globals.get((id(namespace), name), MISSING)
        if written is not MISSING and written is not ABSENT:
            return written
        if name in namespace and written is not ABSENT:
            return self.read(namespace[name], Global(name, namespace))
        found = builtins.__dict__.get(name, MISSING)
        if found is MISSING:
            raise ProgramError(NameError(f"name '{name}' is not defined"))
        if written is MISSING:
            self.guard(Pinned(namespace), "no_key", name)
        return self.read(found, Builtin(name))

    def store_global(self, namespace: dict, name: str, value: Any) -> None:
        self.written_globals[id(namespace), name] = value
        self.effect("setglobal", None, name, value, extra=namespace)

    def delete_global(self, namespace: dict, name: str) -> None:
        if name not in namespace and self.written_globals.get((id(namespace), name), ABSENT) is ABSENT:
            raise ProgramError(NameError(f"name '{name}' is not defined"))
        self.written_globals[id(namespace), name] = ABSENT
        self.effect("setglobal", None, name, extra=namespace)

    # -- closure cells -------------------------------------------------------------------------------------------
    def adopt_cell(self, cell: types.CellType, source: Source) -> None:
        """A closure cell from outside whose contents are found at `source` (a Cell or CellOf)."""
        self._cells.setdefault(id(cell), (cell, source))

    def cell_source(self, cell: types.CellType) -> Source | None:
        found = self._cells.get(id(cell))
        return None if found is None else found[1]

    def load_cell(self, cell: types.CellType) -> Any:
        """The contents. Raises ValueError for an empty cell."""
        found = self._cells.get(id(cell))
        if found is None:
            return cell.cell_contents
        written = self._cell_contents.get(id(cell), MISSING)
        if written is ABSENT:
            raise ValueError("Cell is empty")
        if written is not MISSING:
            return written
        try:
            value = cell.cell_contents
        except ValueError:
            raise break_here("empty-cell", "a closure variable that is not assigned yet is read", "assign it before") from None
        return self.read(value, found[1])

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        if id(cell) in self._cells:
            self._cell_contents[id(cell)] = value
            self.effect("setcell", cell, "", value)
        else:
            cell.cell_contents = value

    def delete_cell(self, cell: types.CellType) -> None:
        if id(cell) in self._cells:
            self._cell_contents[id(cell)] = ABSENT
            self.effect("setcell", cell)
        else:
            del cell.cell_contents

    # -- the end -------------------------------------------------------------------------------------------------
    def finish(self, roots: tuple) -> tuple[Any, tuple[GraphInput, ...], tuple[Guard, ...], tuple[Effect, ...]]:
        """(graph module or None, inputs, guards, effects) once the recipes of all that survives have been asked for."""
        for root in roots:
            self.recipe(root)
        effects = tuple(self._effect(*e) for e in self.effects)
        self._guard_aliases()
        module = self._graph_module()
        if self.calls or self.outputs or self.asks_modes:
            for name, state in self.modes:
                self.guard(None, "mode", (name, state))
        return module, tuple(self.inputs), (*self._guards.values(), *self.size_guards()), effects

    def _effect(self, kind: str, target: Any, name: str, values: tuple, extra: Any) -> Effect:
        if kind == "replace":
            return Effect("replace", self.recipe(target), "", (self.recipe(self.shadows[id(target)][1]),))
        made = None if target is None else self.recipe(target)
        if isinstance(made, Const):
            made = pinned(target)
        return Effect(kind, made, name, tuple(map(self.recipe, values)), extra)

    def _guard_aliases(self) -> None:
        """Inputs that are written must not share memory with others: the graph takes its inputs for apart.

        Raises RestartShared if they do in this call, CannotCapture if then they cannot be views of one input.
        """
        if any(base.requires_grad for base in self._span_inputs.values()):
            # In eager only the tensor that is written to becomes differentiable, here all that share the span would.
            raise CannotCapture(GraphBreak("aliased-inputs", self.where(), "a write into memory that two tensors share is differentiable",
                                           "pass a clone, or write outside the compiled function"))
        fakes = list(self.fakes.values())
        written = [(real, fake) for real, fake in fakes if torch_internals.version_of(fake) != self._versions.get(id(fake), 0)]
        apart = [(real, self.found_at(fake)) for real, fake in fakes if written and self._span(self.source(fake)) is None]
        try:
            found = spans(apart, [real for real, _ in written])
        except ValueError as refusal:
            raise CannotCapture(GraphBreak("aliased-inputs", self.where(), str(refusal), "pass a clone, or write outside the compiled "
                                           "function")) from None
        if found:
            raise RestartShared(found)
        arguments = [fake for _, fake in fakes if is_argument(self.source(fake))]
        for _, fake in written:
            place = self.source(fake)
            span = self._span(place)
            for twin in [twin for _, twin in fakes] if is_argument(place) else arguments:
                if twin is not fake and (span is None or self._span(self.source(twin)) is not span):
                    self.guard(place, "no_overlap", self.source(twin))

    def _span(self, source: Source | None) -> Span | None:
        return next((span for span in self.spans if source in span.sources), None)

    def _input(self, tensor: torch.Tensor, source: Source, static: bool) -> tuple[torch.Tensor, Any]:
        span = self._span(source)
        if span is None:
            return super()._input(tensor, source, static)
        base = self._span_inputs.get(span)
        if base is None:
            with self.fake_mode:
                base = self._span_inputs[span] = torch.empty(span.length, dtype=tensor.dtype, device=tensor.device)
            self.nodes[id(base)] = (base, self._placeholder(span.source, base, False))
            for place, found in span.distances():
                self.guard(place, "equals", found)
        fake = span.view(base, source, tensor, self.record)
        return fake, self.nodes[id(fake)][1]

    def wrap(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        fake = super().wrap(tensor, source)
        self._versions.setdefault(id(fake), torch_internals.version_of(fake))
        return fake

    def first_version(self, fake: torch.Tensor) -> int:
        """How often an input had been written when it was first read."""
        return self._versions.get(id(fake), 0)

    def _graph_module(self) -> Any:
        """The graph without inputs that nothing uses; None if there is nothing to run."""
        if not self.calls and not self.outputs:
            self.inputs.clear()
            return None
        self.graph.output(tuple(self.outputs))
        used = {i.name: i for i in self.inputs}
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users:
                used.pop(node.target, None)
                self.graph.erase_node(node)
        self.inputs = [i for i in self.inputs if i.name in used]
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)


