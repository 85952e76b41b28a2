"""Python floats on their way into kernels: 0-d memory on the program's device, filled anew on each call."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch


def fill_numbers(executable: Callable[..., tuple], positions: Sequence[int], device: str) -> Callable[..., tuple]:
    """The executable with Python floats as its inputs at `positions`, which take 0-d f64 tensors on the device.

    A device is not waited for: the number travels as an argument of the kernel that fills the memory. On the CPU the memory
    is used again by later calls, which the executable allows: no result of it shows the memory of such an input.
    """
    if not positions:
        return executable
    return _on_cpu(executable, tuple(positions)) if device == "cpu" else _on_device(executable, tuple(positions), torch.device(device))


def _on_device(executable: Callable[..., tuple], positions: tuple[int, ...], device: torch.device) -> Callable[..., tuple]:
    full, f64 = torch.full, torch.float64

    def run(*inputs: Any) -> tuple:
        filled = list(inputs)
        for i in positions:
            filled[i] = full((), inputs[i], dtype=f64, device=device)
        return executable(*filled)
    return run


def _on_cpu(executable: Callable[..., tuple], positions: tuple[int, ...]) -> Callable[..., tuple]:
    free: list[tuple[Any, list[torch.Tensor]]] = []          # of calls that are over; popping and appending are atomic
    numbered = tuple(enumerate(positions))

    def new() -> tuple[Any, list[torch.Tensor]]:
        memory = (ctypes.c_double * len(positions))()
        return memory, list(torch.frombuffer(memory, dtype=torch.float64).unbind())

    def run(*inputs: Any) -> tuple:
        try:
            held = free.pop()
        except IndexError:
            held = new()
        memory, tensors = held
        filled = list(inputs)
        for k, i in numbered:
            memory[k] = inputs[i]
            filled[i] = tensors[k]
        result = executable(*filled)
        free.append(held)
        return result
    return run
