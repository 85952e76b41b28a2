"""Is the compiled program faster? Timed against eager on the user's own step, with a verdict in one sentence."""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Measurement:
    """Eager and compiled side by side.

    eager_ms, compiled_ms  median of the timed steps
    compile_s              seconds that the compiled program's first steps took beyond what they take later
    largest_difference     largest absolute difference of the outputs from eager's
    iterations             timed steps of each
    """

    name: str
    device: str
    eager_ms: float
    compiled_ms: float
    compile_s: float
    largest_difference: float
    iterations: int

    @property
    def ratio(self) -> float:
        """Compiled over eager: below 1 is faster."""
        return self.compiled_ms / self.eager_ms

    @property
    def pays_off_after(self) -> float:
        """Steps after which compiling has paid for itself; infinity if it never does."""
        saved = (self.eager_ms - self.compiled_ms) / 1e3
        return math.ceil(self.compile_s / saved) if saved > 0 else math.inf

    @property
    def verdict(self) -> str:
        if self.ratio < 0.98:
            return (f"{self.name}: {1 / self.ratio:.2f} times as fast as eager; compiling ({self.compile_s:.1f} s) pays off after "
                    f"{self.pays_off_after:.0f} steps")
        if self.ratio <= 1.02:
            return f"{self.name}: as fast as eager; compiling gains nothing here"
        return f"{self.name}: SLOWER than eager by a factor of {self.ratio:.2f}; leave it eager (`disable=True`)"


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def compare(name: str, eager: Callable[[], torch.Tensor], compiled: Callable[[], torch.Tensor], *, device: str,
            iterations: int = 20, warm_up: int = 3) -> Measurement:
    """Time two steps that return a tensor; they take turns, so that the ratio holds on a noisy machine.

    The first step of each must do the same work from the same state: its results are compared.
    """
    def timed(step: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        out = step()
        synchronize(device)
        return time.perf_counter() - start, out.detach()

    reference = timed(eager)[1].double().clone()
    first_s, out = timed(compiled)
    difference = float((reference - out.double()).abs().max())
    for _ in range(warm_up - 1):
        timed(eager)
        first_s += timed(compiled)[0]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(iterations):
        times[0].append(timed(eager)[0])
        times[1].append(timed(compiled)[0])
    eager_s, compiled_s = (statistics.median(t) for t in times)
    return Measurement(name, device, eager_s * 1e3, compiled_s * 1e3, max(0.0, first_s - warm_up * compiled_s), difference, iterations)


def print_table(measurements: list[Measurement]) -> None:
    """One table of measurements, and a verdict for each, on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="fuseline against eager PyTorch")
    for column in ("program", "device", "eager ms", "compiled ms", "ratio", "compile s", "largest difference", "pays off after"):
        table.add_column(column, justify="left" if column in ("program", "device") else "right")
    for m in measurements:
        after = "never" if math.isinf(m.pays_off_after) else f"{m.pays_off_after:.0f} steps"
        table.add_row(m.name, m.device, f"{m.eager_ms:.3f}", f"{m.compiled_ms:.3f}", f"{m.ratio:.2f}", f"{m.compile_s:.2f}",
                      f"{m.largest_difference:.1e}", after)
    console = Console(width=120)
    console.print(table)
    for m in measurements:
        console.print(m.verdict, highlight=False)
