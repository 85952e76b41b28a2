"""Runs one compiled kernel on tensors: whole, or cut into work ranges at random places as threads would."""
from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping, Sequence

import torch

from fuseline.codegen.llvm.compile import compile_kernels
from fuseline.ir.expr import evaluate
from fuseline.ir.kernels import Kernel

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


def run(kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int] | None = None, cuts: int = 2) -> None:
    """Run the kernel on CPU tensors, its work units split at `cuts` places and done in a random order."""
    values = dict(sizes or {})
    (compiled,) = compile_kernels([kernel])
    pointers = (ctypes.c_void_p * max(1, len(buffers)))(*(b.data_ptr() for b in buffers))
    numbers = (ctypes.c_int64 * max(1, len(kernel.sizes)))(*(values[s.name] for s in kernel.sizes))
    units = evaluate(compiled.units, values)
    if units <= 0:
        return
    serial = compiled.cost == 0
    rng = random.Random(units)
    places = sorted({0, units, *(rng.randint(0, units) for _ in range(0 if serial else cuts))})
    ranges = list(zip(places, places[1:]))
    rng.shuffle(ranges)
    for begin, end in ranges:
        _FUNCTION(compiled.address)(ctypes.addressof(pointers), ctypes.addressof(numbers), begin, end)
