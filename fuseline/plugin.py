"""fuseline as a back end of torch.compile: `torch.compile(model, backend="fuseline")`.

PyTorch finds it through the entry point group `torch_dynamo_backends` (see pyproject.toml), its documented way for back ends.
Capture is then PyTorch's; the graph goes through all of our other stages.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuseline import pipeline
from fuseline.ir.record import CompileRecord
from fuseline.ir.region import GraphInput, Local
from fuseline.options import make_options


def backend(graph_module: Any, example_inputs: list, *, mode: str | None = None, options: dict | None = None) -> Callable[..., Any]:
    """The convention of back ends: a graph and example inputs -> a callable that takes the inputs and returns a tuple."""
    chosen = make_options(mode, False, None, "fuseline", options, False)
    names = [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]
    inputs = tuple(GraphInput(name, Local(name), example) for name, example in zip(names, example_inputs))
    record = CompileRecord("torch.compile graph", "")
    compiled, _ = pipeline.compile_torch_graph(graph_module, inputs, None, chosen, record)
    return compiled
