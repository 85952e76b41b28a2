"""Measures the candidates of a launch on the device and picks the fastest, within a budget of time and memory (max-autotune)."""
from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from fuseline.log import emit as log
from fuseline.torch_internals import to_torch_dtype

SECONDS = 20.0                # for all measurements of a process; what comes after takes the default
MEMORY_SHARE = 0.25           # of the device's free memory for the scratch buffers of one kernel
REPEATS = 7

_spent = 0.0
_chosen: dict[tuple, int] = {}
_lock = threading.Lock()


def fastest(request: Any, futures: Sequence[Future], platform: Any) -> int:
    """The index of the fastest candidate; 0, the default, where the budget does not allow a measurement.

    Kernels run on scratch buffers (numbers at random, integers 0), so that measuring changes nothing.
    """
    global _spent
    if platform.device.type != "cuda":
        return 0
    with _lock:
        key = (request.kernel, request.spans, request.sizes, platform.device)
        if key in _chosen:
            return _chosen[key]
        buffers = _scratch(request, platform.device)
        if buffers is None or _spent > SECONDS:
            return 0
        start = time.perf_counter()
        times = []
        for candidate, future in zip(request.candidates, futures):
            launch = platform.prepare(candidate.source, future.result(), candidate.grid, len(buffers) + len(request.sizes))
            times.append(_measure(partial(_launch, launch, platform, buffers, request.sizes)))
        _spent += time.perf_counter() - start
        best = min(range(len(times)), key=times.__getitem__)
        if times[best] > 0.97 * times[0]:                     # a difference within the noise is none
            best = 0
        _chosen[key] = best
        log("times", f"{request.kernel.label}: {request.candidates[best].tiling} {times[best]:.4f} ms, default {times[0]:.4f} ms")
        return best


def _scratch(request: Any, device: torch.device) -> list[torch.Tensor] | None:
    sizes = [span * p.dtype.size for span, p in zip(request.spans, request.kernel.params)]
    if sum(sizes) > MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    buffers = []
    for span, param in zip(request.spans, request.kernel.params):
        dtype = to_torch_dtype(param.dtype)
        buffer = torch.zeros(max(span, 1), dtype=dtype, device=device)
        if param.dtype.is_float:
            # Not torch's generator: measuring must not change the program's random numbers.
            buffer.copy_(((torch.arange(max(span, 1), device=device) * 7919) % 1009).to(torch.float32) / 500 - 1)
        buffers.append(buffer)
    return buffers


def _launch(run: Callable[..., None], platform: Any, buffers: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> None:
    run(platform.stream(), *(b.data_ptr() for b in buffers), *sizes)


def _measure(run: Callable[[], None]) -> float:
    """Median time of one launch in ms."""
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
