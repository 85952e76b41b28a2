"""Memory that is used again: arenas for a program's temporary buffers, recycled blocks for its large results.

A call takes an arena from its program's pool and puts it back when it is done, so calls that overlap (threads, a program that
calls itself through a hook) each have their own. A result belongs to the caller; its block is free again once no tensor refers
to it any more. list.append and list.pop are atomic under the GIL: no lock.
"""
from __future__ import annotations

import ctypes
import os
import sys
from collections import deque

import torch

from fuseline import torch_internals

ALIGNMENT = 64                                               # bytes: a cache line, and torch's own choice
HUGE_PAGE = 2 << 20
# Fresh memory of this size or more comes from the system, a page fault each 4 KiB: writing 64 MB took 28 ms on machine C, with
# huge pages 8.7 ms (80 while the system has to move other pages to make room), into memory that had been touched before 5.3 ms.
WORTH_HUGE_PAGES = 2 * HUGE_PAGE
WORTH_RECYCLING = 1 << 20                                    # bytes: below, finding a block takes longer than the faults
_TRIES = 4                                                   # blocks of the right size that are looked at, the longest used first
_MADV_HUGEPAGE = 14

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask the system to back the whole huge pages in there as such. Only a hint: where it is not taken nothing changes."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    end = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
    if _madvise is not None and end > start:
        _madvise(start, end - start, _MADV_HUGEPAGE)


class Arena:
    """`base`: its address. `views`: tensors made in it, by whoever uses the pool, kept while the arena lives."""

    __slots__ = ("memory", "base", "nbytes", "views")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(max(nbytes, 1) + ALIGNMENT, dtype=torch.uint8)
        if nbytes >= WORTH_HUGE_PAGES:
            advise_huge_pages(self.memory.data_ptr(), nbytes)
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


class _Block:
    """A storage of the recycler's, with what it is like while nobody else refers to it."""

    __slots__ = ("storage", "address", "nbytes", "references")

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        self.address, self.nbytes = self.storage.data_ptr(), nbytes
        if nbytes >= WORTH_HUGE_PAGES:
            advise_huge_pages(self.address, nbytes)
        self.references = sys.getrefcount(self.storage)          # as `free` counts them

    @property
    def free(self) -> bool:
        """Nobody can see the memory: no tensor, no array made of one, nobody who was handed the storage itself."""
        return (torch_internals.storage_references(self.storage) == 1 and sys.getrefcount(self.storage) == self.references
                and self.intact)

    @property
    def intact(self) -> bool:
        """False once a user resized the storage or moved it (to memory that processes share)."""
        return self.storage.data_ptr() == self.address and self.storage.nbytes() == self.nbytes


class Recycler:
    """Fresh tensors whose memory is that of earlier ones that are gone.

    limit  bytes of memory, in use and free, that are remembered; what does not fit is allocated and freed as in eager
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._blocks: dict[int, deque[_Block]] = {}

    @property
    def held(self) -> int:
        """Bytes remembered, in use or free."""
        return sum(nbytes * len(blocks) for nbytes, blocks in self._blocks.items())

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the CPU, like torch.empty_strided's."""
        nbytes = 0 if 0 in shape else dtype.itemsize * (1 + sum([(n - 1) * s for n, s in zip(shape, stride)]))
        if nbytes < WORTH_RECYCLING:
            return torch.empty_strided(shape, stride, dtype=dtype)
        block = self._find(nbytes) or self._make(nbytes)
        if block is None:
            made = torch.empty_strided(shape, stride, dtype=dtype)
            if nbytes >= WORTH_HUGE_PAGES:
                advise_huge_pages(made.data_ptr(), nbytes)
            return made
        made = torch.empty(0, dtype=dtype).set_(block.storage, 0, shape, stride)
        self._blocks.setdefault(nbytes, deque()).append(block)   # only now: until it is in use, another thread must not find it
        return made

    def _find(self, nbytes: int) -> _Block | None:
        blocks = self._blocks.get(nbytes)
        for _ in range(min(_TRIES, len(blocks)) if blocks else 0):
            try:
                block = blocks.popleft()                         # type: ignore[union-attr]
            except IndexError:                                   # another thread took the last one
                return None
            if block.free:
                return block
            if block.intact:
                blocks.append(block)                             # type: ignore[union-attr]
        return None

    def _make(self, nbytes: int) -> _Block | None:
        if self.held + nbytes > self.limit:
            self._let_go()
        return _Block(nbytes) if self.held + nbytes <= self.limit else None

    def _let_go(self) -> None:
        """Free what nobody uses, and forget what cannot be used again."""
        for blocks in list(self._blocks.values()):
            for _ in range(len(blocks)):
                try:
                    block = blocks.popleft()
                except IndexError:
                    break
                if block.intact and not block.free:
                    blocks.append(block)

    def clear(self) -> None:
        self._blocks.clear()


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 << 30


# A thirty-second of the machine: enough for what a training step saves for backward, little beside what the step itself takes.
results = Recycler(_physical_memory() // 32)
