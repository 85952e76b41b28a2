"""Graph -> graph. The order of passes is read here, nowhere else."""
from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from fuseline.ir.graph import Graph
from fuseline.passes.drop_unused import drop_unused
from fuseline.passes.fold_affine import fold_affine
from fuseline.passes.fuse_convolution import fuse_convolution
from fuseline.passes.layout import choose_layout
from fuseline.passes.merge_duplicates import merge_duplicates
from fuseline.passes.simplify import simplify

Observer = Callable[[str, Graph], None]
_observers: list[Observer] = []


@contextmanager
def observe_passes(observer: Observer) -> Iterator[None]:
    """Call observer(name, graph) after each pass: for dumps, timings, and the tests' verifier."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@dataclass(frozen=True, slots=True)
class PassContext:
    """What the passes must know besides the graph.

    lowered, pointwise  operator names: those that become loops of ours, those that are elementwise
    libraries           "onednn", "cudnn": library kernels with epilogues that can be called
    inference           no gradients: parameters may be folded and packed
    channels_last       see `Options`
    """

    lowered: Container[str] = frozenset()
    pointwise: Container[str] = frozenset()
    libraries: frozenset[str] = field(default_factory=frozenset)
    inference: bool = False
    fold_constants: bool = True
    channels_last: bool | None = None


def run(graph: Graph, context: PassContext) -> Graph:
    """All passes in order. Inputs keep their number and order; outputs keep their types."""
    passes: list[Callable[[Graph], Graph]] = [simplify, merge_duplicates, drop_unused]
    if context.inference and context.fold_constants:
        passes.append(fold_affine)
    passes.append(partial(choose_layout, lowered=context.lowered, pointwise=context.pointwise, wanted=context.channels_last))
    if context.inference and context.fold_constants:
        passes.append(partial(fuse_convolution, libraries=context.libraries))
    passes += [merge_duplicates, drop_unused]
    for change in passes:
        graph = change(graph)
        for observer in _observers:
            observer(getattr(change, "__name__", None) or change.func.__name__, graph)      # type: ignore[attr-defined]
    return graph
