"""From a kernel and a call's facts to machine code and a launch: the entry of the Triton code generator."""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fuseline.codegen.triton.emit import Specialisation, TritonSource, emit
from fuseline.codegen.triton.tiling import Chip, Tiling, alternatives, blocks, choose, value
from fuseline.ir.kernels import Kernel

INT32_LIMIT = 2 ** 31 - 2 ** 16          # room for the last block's indices past the end


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a kernel: its source and the number of blocks."""
    source: TritonSource
    tiling: Tiling
    grid: int


@dataclass(frozen=True, slots=True)
class Request:
    """A launch to be compiled: candidates (the default first), the size arguments, and how many arguments there are."""
    kernel: Kernel
    candidates: tuple[Candidate, ...]
    sizes: tuple[int, ...]
    spans: tuple[int, ...]

    @property
    def grid(self) -> int:
        return self.candidates[0].grid

    def submit(self, compiler: Callable[[TritonSource], Future]) -> list[Future]:
        """Start compiling every candidate."""
        return [compiler(c.source) for c in self.candidates]

    def resolve(self, futures: Sequence[Future], platform: Any) -> Callable[..., None]:
        """Wait for the machine code; the launch function of the default, or of the fastest candidate."""
        chosen = 0
        if len(self.candidates) > 1:
            from fuseline.codegen.triton.tune import fastest
            chosen = fastest(self, futures, platform)
        best = self.candidates[chosen]
        return platform.prepare(best.source, futures[chosen].result(), best.grid, len(self.kernel.params) + len(self.sizes))


@functools.lru_cache(maxsize=4096)
def source_of(kernel: Kernel, tiling: Tiling, special: Specialisation) -> TritonSource:
    return emit(kernel, tiling, special)


def request(kernel: Kernel, sizes: Mapping[str, int], aligned: Sequence[bool], spans: Sequence[int], chip: Chip,
            tune: bool = False) -> Request:
    """What to compile for a launch of `kernel` when the program's size symbols have the values `sizes`.

    aligned: for each param, whether its address is a multiple of 16; spans: elements its buffer reaches over.
    """
    values = tuple(sizes[s.name] for s in kernel.sizes)
    hints = {s.name: n for s, n in zip(kernel.sizes, values)}
    found = []
    for tiling in alternatives(kernel, hints, chip) if tune else [choose(kernel, hints, chip)]:
        x, y = (value(n, hints) for n in blocks(kernel, tiling))
        grid = -(-x // tiling.x) * -(-y // max(tiling.y, 1))
        wide = max([x * y, *spans], default=0) >= INT32_LIMIT
        special = Specialisation(tuple(aligned), tuple(n % 16 == 0 for n in values), wide)
        found.append(Candidate(source_of(kernel, tiling, special), tiling, grid))
    return Request(kernel, tuple(found), values, tuple(spans))
