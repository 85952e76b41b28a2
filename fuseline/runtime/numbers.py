"""Python floats on their way into kernels: 0-d memory on the program's device, filled anew on each call."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def fill_numbers(executable: Callable[..., tuple], positions: Sequence[int], device: str) -> Callable[..., tuple]:
    """The executable with Python floats as its inputs at `positions`, which take 0-d f64 tensors on the device.

    A device is not waited for: the number travels as an argument of the kernel that fills the memory.
    """
    if not positions:
        return executable
    full, f64, where = torch.full, torch.float64, torch.device(device)

    def run(*inputs: Any) -> tuple:
        filled = list(inputs)
        for i in positions:
            filled[i] = full((), inputs[i], dtype=f64, device=where)
        return executable(*filled)
    return run
