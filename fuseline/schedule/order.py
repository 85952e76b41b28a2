"""Which step must come before which: the dependences of a list of steps, kept up to date while steps merge.

Sets of steps are bit masks. A step depends on the last writer of what it reads, on the readers and the last writer of what
it overwrites, and, if its result depends on when it runs (random numbers, operators that change their arguments), on the
one before it of that kind.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heappop, heappush

import torch

from fuseline.errors import InternalError
from fuseline.ir.kernels import Extern, Launch
from fuseline.ir.steps import reads, writes


@cache
def has_effect(op: str) -> bool:
    """True for an operator that draws random numbers, changes an argument, or of which we know nothing."""
    parts = op.split(".")
    if len(parts) != 3:
        return True
    try:
        overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        return True
    return overload._schema.is_mutable or torch.Tag.nondeterministic_seeded in overload.tags


def changes(step: Launch | Extern) -> tuple[str, ...]:
    """The buffers whose memory a step changes: those it writes, and all arguments of an operator that changes some of them."""
    if isinstance(step, Launch) or not _mutates(step.op):
        return writes(step)
    return tuple(dict.fromkeys((*writes(step), *reads(step))))


@cache
def _mutates(op: str) -> bool:
    parts = op.split(".")
    try:
        overload = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError, IndexError):
        return False
    return overload._schema.is_mutable


class Order:
    """Dependences between steps 0..n-1; merged steps share one entry."""

    def __init__(self, steps: Sequence[Launch | Extern]) -> None:
        self.owner = list(range(len(steps)))
        self.members = [1 << i for i in range(len(steps))]
        self.before = [0] * len(steps)                     # direct
        self.ancestors = [0] * len(steps)                  # direct and indirect
        self.alive = set(range(len(steps)))
        writer: dict[str, int] = {}
        readers: dict[str, int] = {}
        effect: int | None = None
        for i, step in enumerate(steps):
            mask = 0
            for name in reads(step):
                if name in writer:
                    mask |= 1 << writer[name]
                readers[name] = readers.get(name, 0) | 1 << i
            for name in changes(step):
                mask |= readers.get(name, 0)
                if name in writer:
                    mask |= 1 << writer[name]
                writer[name] = i
                readers[name] = 0
            if isinstance(step, Extern) and has_effect(step.op):
                if effect is not None:
                    mask |= 1 << effect
                effect = i
            mask &= ~(1 << i)
            self.before[i] = mask
            above = mask
            for j in bits(mask):
                above |= self.ancestors[j]
            self.ancestors[i] = above

    def find(self, i: int) -> int:
        while self.owner[i] != i:
            self.owner[i] = self.owner[self.owner[i]]
            i = self.owner[i]
        return i

    def depends(self, a: int, b: int) -> bool:
        """True if a must run after b."""
        return bool(self.ancestors[a] & self.members[b])

    def can_merge(self, a: int, b: int) -> bool:
        """True if no third step has to run between the two, in either direction."""
        for first, second in ((a, b), (b, a)):
            if not self.depends(second, first):
                continue
            for x in {self.find(j) for j in bits(self.before[second])}:
                if x not in (first, second) and self.depends(x, first):
                    return False
        return True

    def merge(self, a: int, b: int) -> None:
        """Let a stand for both. The caller has asked can_merge."""
        self.owner[b] = a
        self.alive.discard(b)
        self.members[a] |= self.members[b]
        self.before[a] = (self.before[a] | self.before[b]) & ~self.members[a]
        self.ancestors[a] = (self.ancestors[a] | self.ancestors[b]) & ~self.members[a]
        self._spread(a)

    def add_before(self, a: int, mask: int) -> None:
        """Let a depend on more steps: those whose work it has taken over."""
        mask &= ~self.members[a]
        self.before[a] |= mask
        above = self.ancestors[a] | mask
        for j in bits(mask):
            above |= self.ancestors[self.find(j)]
        self.ancestors[a] = above & ~self.members[a]
        self._spread(a)

    def _spread(self, a: int) -> None:
        members, above = self.members[a], self.ancestors[a] | self.members[a]
        for x in self.alive:
            if x != a and self.ancestors[x] & members:
                self.ancestors[x] |= above & ~self.members[x]

    def sequence(self, position: dict[int, int]) -> list[int]:
        """All live steps so that each comes after what it depends on, otherwise by position."""
        waiting = {i: {self.find(j) for j in bits(self.before[i])} - {i} for i in self.alive}
        after: dict[int, list[int]] = {i: [] for i in self.alive}
        for i, needs in waiting.items():
            needs &= self.alive                            # what was dropped needs no place
            for j in needs:
                after[j].append(i)
        ready = [(position[i], i) for i, needs in waiting.items() if not needs]
        heapify(ready)
        done = []
        while ready:
            _, i = heappop(ready)
            done.append(i)
            for k in after[i]:
                waiting[k].discard(i)
                if not waiting[k]:
                    heappush(ready, (position[k], k))
        if len(done) != len(self.alive):
            raise InternalError("fused steps depend on each other in a circle")
        return done


def bits(mask: int) -> list[int]:
    """The positions of the set bits."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
