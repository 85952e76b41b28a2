"""What happened in a compilation, as data that explain, verbose output, the HTML report and the tests read."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from fuseline.ir.region import GraphBreak


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One launch: the kernel's label, the operators fused in it and the user's lines that they came from."""

    label: str
    ops: tuple[str, ...]
    origins: tuple[str, ...] = ()


@dataclass
class GraphRecord:
    """One graph of a region (the forward or the backward one) and what it became."""

    direction: str                                   # "inference" | "forward" | "backward"
    device: str
    aten: str                                        # the graph's text after the passes
    operators: int
    kernels: tuple[KernelRecord, ...] = ()
    externs: tuple[str, ...] = ()                    # calls of PyTorch operators, in order
    hoisted: int = 0                                 # steps that run once
    refusals: tuple[str, ...] = ()                   # fusions and lowerings refused, with reasons
    memory_bytes: int | None = None                  # of the arena for temporaries
    loops: str = ""


@dataclass
class CompileRecord:
    """One compiled region (the code between a start and a return or graph break), or a refusal to compile."""

    function: str
    where: str
    torch_graph: str = ""
    operators: int = 0
    guards: tuple[str, ...] = ()
    graph_break: GraphBreak | None = None            # what ended the region
    graphs: list[GraphRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recompile_reason: str = ""
    fallback: str = ""                               # why (a part of) this region runs in eager PyTorch

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        return tuple(k for g in self.graphs for k in g.kernels)
