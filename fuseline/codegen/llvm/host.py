"""The machine that kernels are compiled for: this process's CPU, its vector width, and LLVM's view of it."""
from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

import llvmlite
import llvmlite.binding as llvm

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Host:
    """cpu and features as LLVM names them; `vector_bytes`: the width of the registers that kernels use."""

    triple: str
    cpu: str
    features: str
    vector_bytes: int

    @property
    def key(self) -> dict[str, object]:
        """All that machine code depends on besides its source."""
        version = ".".join(map(str, llvm.llvm_version_info))
        return {"triple": self.triple, "cpu": self.cpu, "features": self.features, "llvm": version, "llvmlite": llvmlite.__version__}


@lru_cache(maxsize=1)
def host() -> Host:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    wide = features.get("avx512f") and features.get("avx512bw") and features.get("avx512dq") and features.get("avx512vl")
    # Without AVX (or on Arm) the baseline's 128 bits; two registers at a time keep the floating-point units busy there.
    width = 64 if wide else 32
    return Host(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), width)


def new_target_machine(*, jit: bool = False) -> llvm.TargetMachine:
    h = host()
    target = llvm.Target.from_triple(h.triple)
    return target.create_target_machine(cpu=h.cpu, features=h.features, opt=2, reloc="pic", codemodel="small", jit=jit)


def target_machine() -> llvm.TargetMachine:
    """One for each thread: LLVM's target machines are not shared between threads."""
    made = getattr(_local, "machine", None)
    if made is None:
        made = _local.machine = new_target_machine()
    return made
