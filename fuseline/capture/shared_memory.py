"""Tensors from outside that overlap in memory, one of which is written: in the graph they are views of one input.

That input, the span, is a flat tensor over all memory that they reach. It is made on each call from one of them; guards say
that the others lie where they lay.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fuseline import torch_internals
from fuseline.ir.region import Computed, Pinned, Source


@dataclass(frozen=True, slots=True)
class Span:
    """Memory shared by the tensors at `sources`: `length` elements; `offsets[i]` is where the i-th begins in it."""

    sources: tuple[Source, ...]
    offsets: tuple[int, ...]
    length: int

    @property
    def source(self) -> Source:
        """The span, found by its first tensor."""
        return Computed(span_of, (self.sources[0], Pinned(self.offsets[0]), Pinned(self.length)))

    def distances(self) -> list[tuple[Source, int]]:
        """Sources of the distances of the other tensors from the first, with what they are in this call."""
        return [(Computed(distance, (self.sources[0], source)), offset - self.offsets[0])
                for source, offset in zip(self.sources[1:], self.offsets[1:])]

    def view(self, base: torch.Tensor, source: Source, tensor: torch.Tensor, record: Callable) -> torch.Tensor:
        """Record how the graph makes the tensor at `source`, of the form of `tensor`, from the span."""
        start = self.offsets[self.sources.index(source)]
        if tensor.is_contiguous():
            part = record("call_function", torch.narrow, (base, 0, start, tensor.numel()), {})
            return record("call_method", "view", (part, tuple(tensor.shape)), {})
        part = record("call_function", torch.narrow, (base, 0, start, self.length - start), {})
        return record("call_function", torch.as_strided, (part, tuple(tensor.shape), tensor.stride()), {})


class RestartShared(BaseException):
    """Interpret the region anew, with these spans."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        super().__init__()
        self.spans = spans


def span_of(tensor: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """A flat view of `length` elements of a tensor's storage, in which the tensor begins at `offset`."""
    return tensor.as_strided((length,), (1,), tensor.storage_offset() - offset)


def distance(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """How many elements after a begins b, on the same storage; None for tensors on different ones or of different types."""
    if torch_internals.storage_key(a) != torch_internals.storage_key(b) or a.dtype != b.dtype:
        return None
    return int(b.storage_offset()) - int(a.storage_offset())


def spans(tensors: Sequence[tuple[torch.Tensor, Source]], written: Sequence[torch.Tensor]) -> tuple[Span, ...]:
    """The groups of overlapping tensors in which one is written.

    Raises ValueError, with the reason, where a group cannot be the views of one input.
    """
    groups: list[list[tuple[torch.Tensor, Source]]] = []
    for tensor, source in tensors:
        touching = [g for g in groups if any(torch_internals.memory_overlaps(tensor, other) for other, _ in g)]
        apart = [g for g in groups if not any(g is t for t in touching)]
        groups = [*apart, [*(m for g in touching for m in g), (tensor, source)]]
    found = []
    wanted = set(map(id, written))
    for group in groups:
        members = [t for t, _ in group]
        if len(group) == 1 or not any(id(t) in wanted for t in members):
            continue
        if len({t.dtype for t in members}) > 1:
            raise ValueError("tensors of different types share memory")
        if any(t.requires_grad or t.is_inference() or t.is_conj() or t.is_neg() for t in members):
            raise ValueError("two tensors share memory and one of them requires gradients")
        start = min(int(t.storage_offset()) for t in members)
        end = max(int(t.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in members)
        found.append(Span(tuple(s for _, s in group), tuple(int(t.storage_offset()) - start for t in members), end - start))
    return tuple(found)
