"""The machine that a program is scheduled and compiled for, as the few numbers that decisions depend on."""
from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """kind          "cpu" | "cuda"
    cores            CPU: worker threads that kernels run on; CUDA: streaming multiprocessors
    vector_bits      CPU: width of a vector register; CUDA: 128 (the widest memory access of a thread)
    l1_bytes         per core; CUDA: shared memory of a block
    l2_bytes         CPU: per core; CUDA: of the device
    warp             CUDA: threads that step together; CPU: 1
    capability       CUDA: (major, minor); CPU: (0, 0)
    name             what the vendor calls it
    """
    kind: str
    cores: int
    vector_bits: int = 256
    l1_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    warp: int = 1
    capability: tuple[int, int] = (0, 0)
    name: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"


def cpu_target(threads: int | None = None) -> Target:
    """This machine's CPU with `threads` workers (default: torch's thread count)."""
    return Target("cpu", threads or torch.get_num_threads(), _cpu_vector_bits(), 32 << 10, _cpu_l2_bytes(),
                  name=platform.processor() or platform.machine())


def cuda_target(index: int = 0) -> Target:
    """The CUDA device of that index; raises RuntimeError where there is none."""
    properties = torch.cuda.get_device_properties(index)
    return Target("cuda", properties.multi_processor_count, 128,
                  getattr(properties, "shared_memory_per_block_optin", 0) or 48 << 10,
                  getattr(properties, "L2_cache_size", 0) or 4 << 20, getattr(properties, "warp_size", 32),
                  (properties.major, properties.minor), properties.name)


def target_of(device: str) -> Target:
    """The target of a torch device string, "cpu" or "cuda:1"."""
    if device.startswith("cuda"):
        return cuda_target(int(device.partition(":")[2] or 0))
    return cpu_target()


H200 = Target("cuda", 132, 128, 227 << 10, 50 << 20, 32, (9, 0), "NVIDIA H200")       # for tests without a GPU


def _cpu_vector_bits() -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    return 512 if capability == "AVX512" else 128 if capability in ("DEFAULT", "NO AVX", "ZVECTOR", "VSX") else 256


def _cpu_l2_bytes() -> int:
    """Size of the second-level cache of core 0 as Linux tells it; 1 MiB where it does not."""
    path = "/sys/devices/system/cpu/cpu0/cache/index2/size"
    if not os.path.exists(path):
        return 1 << 20
    with open(path) as file:
        text = file.read().strip()
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)
