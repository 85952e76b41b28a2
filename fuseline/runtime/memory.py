"""Arenas: the memory that holds a program's temporary buffers, kept between calls.

A call takes an arena from its program's pool and puts it back when it is done, so calls that overlap (threads, a program that
calls itself through a hook) each have their own. list.append and list.pop are atomic under the GIL: no lock.
"""
from __future__ import annotations

import torch

ALIGNMENT = 64                                               # bytes: a cache line, and torch's own choice


class Arena:
    """`base`: its address. `views`: tensors made in it, by whoever uses the pool, kept while the arena lives."""

    __slots__ = ("memory", "base", "nbytes", "views")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(max(nbytes, 1) + ALIGNMENT, dtype=torch.uint8)
        address = self.memory.data_ptr()
        self.base = -(-address // ALIGNMENT) * ALIGNMENT
        self.nbytes = nbytes
        self.views: dict[object, torch.Tensor] = {}

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """The memory from `offset` bytes on, seen as a strided tensor; made once for each geometry."""
        key = (offset, dtype, shape, stride)
        found = self.views.get(key)
        if found is None:
            extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            start = offset + self.base - self.memory.data_ptr()
            flat = self.memory[start:start + extent * dtype.itemsize].view(dtype)
            if len(self.views) > 256:                        # sizes that change from call to call must not pile up views
                self.views.clear()
            found = self.views[key] = flat.as_strided(shape, stride)
        return found


class Pool:
    """The arenas of one program that are not in use."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[Arena] = []

    def take(self, nbytes: int) -> Arena:
        try:
            arena = self._free.pop()
        except IndexError:
            return Arena(nbytes)
        return arena if arena.nbytes >= nbytes else Arena(nbytes)

    def put(self, arena: Arena) -> None:
        self._free.append(arena)

    def clear(self) -> None:
        self._free.clear()
