"""Arenas: the memory that holds a program's temporary buffers, kept between calls.

A call takes an arena from its program's pool and puts it back when it is done, so calls that overlap (threads, a program that
calls itself through a hook) each have their own. list.append and list.pop are atomic under the GIL: no lock.
"""
from __future__ import annotations

import ctypes
import sys

import torch

ALIGNMENT = 64                                               # bytes: a cache line, and torch's own choice
HUGE_PAGE = 2 << 20
# Fresh memory of this size or more comes from the system, a page fault each 4 KiB: writing 64 MB took 28 ms on machine C, with
# huge pages 8.7 ms, into memory that had been touched before 5.3 ms.
WORTH_HUGE_PAGES = 2 * HUGE_PAGE
_MADV_HUGEPAGE = 14

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system to back the tensor's own whole huge pages as such. Only a hint: where it is not taken nothing changes."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.untyped_storage().nbytes()) // HUGE_PAGE * HUGE_PAGE
    if _madvise is not None and end > start:
        _madvise(start, end - start, _MADV_HUGEPAGE)


class Arena:
    """`base`: its address. `views`: tensors made in it, by whoever uses the pool, kept while the arena lives."""

    __slots__ = ("memory", "base", "nbytes", "views")

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.empty(max(nbytes, 1) + ALIGNMENT, dtype=torch.uint8)
        if nbytes >= WORTH_HUGE_PAGES:
            advise_huge_pages(self.memory)
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
