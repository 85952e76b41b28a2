"""Kernels to machine code in this process: generate text, compile on a few threads, keep by kernel value and on disk."""
from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import llvmlite.binding as llvm

from fuseline import log
from fuseline.codegen.llvm import kernel as kernel_text
from fuseline.codegen.llvm.host import host, new_target_machine, target_machine
from fuseline.errors import InternalError
from fuseline.ir.expr import Int
from fuseline.ir.kernels import Kernel


class ObjectCache(Protocol):
    """Where object code survives the process (`fuseline.runtime.cache.DiskCache` is one)."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, data: bytes, meta: dict[str, object]) -> None: ...


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Machine code of a kernel: `i64 address(ptr buffers, ptr sizes, i64 begin, i64 end)`, see `codegen.llvm.kernel`.

    units   work units of the kernel, an expression over its sizes: the whole kernel is address(buffers, sizes, 0, units)
    cost    estimated time of it on one thread in 0.1 ns, an expression; 0: it must run on one thread
    """

    kernel: Kernel
    name: str
    address: int
    units: Int
    cost: Int
    seconds: float                                           # spent compiling; 0.0 where it came from a cache


_known: dict[Kernel, CompiledKernel] = {}
_lock = threading.RLock()
_jit: llvm.LLJIT | None = None
_loaded: dict[str, tuple[object, dict[str, int]]] = {}       # object name -> (what keeps its code alive, its functions' addresses)


def compile_kernels(kernels: Sequence[Kernel], *, cache: ObjectCache | None = None, threads: int | None = None) -> list[CompiledKernel]:
    """One CompiledKernel for each kernel, in order; equal kernels share one, within the call and within the process.

    cache    keeps object code between processes     threads   compile on so many (default: the CPUs of this process, at most 8)
    Raises NotSupported for a kernel with dtypes or operations that have no CPU code.
    """
    with _lock:
        missing = list(dict.fromkeys(k for k in kernels if k not in _known))
        if missing:
            _compile_missing(missing, cache, threads or min(8, len(os.sched_getaffinity(0))))
        return [_known[k] for k in kernels]


def generate_ir(kernels: Sequence[Kernel]) -> str:
    """The LLVM IR of kernels as one module, for people (`FUSELINE_LOG=code`) and tests."""
    h = host()
    texts = [kernel_text.generate(k, f"kernel{n}", h.vector_bytes) for n, k in enumerate(kernels)]
    return kernel_text.module_text(texts, h.triple, h.vector_bytes)


def forget() -> None:
    """Drop what this process compiled (`fuseline.reset`): later calls compile, or load from the cache, anew."""
    with _lock:
        _known.clear()


def kernel_key(kernel: Kernel) -> str:
    """A name for the kernel's machine code on this host: the hash of all that it depends on."""
    lows = [(s.name, s.lo) for s in kernel.sizes]
    facts = {"kernel": repr((kernel.params, kernel.axes, kernel.phases)), "sizes": lows, "generator": _generator_hash(), **host().key}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1)
def _generator_hash() -> str:
    """Changes with every edit of the code generator or of the algebra it uses, so that no stale code is ever loaded."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), here.parent.parent / "ir" / "expr.py"]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile_missing(kernels: list[Kernel], cache: ObjectCache | None, threads: int) -> None:
    h = host()
    jobs: list[tuple[Kernel, str, str]] = []
    found: dict[Kernel, tuple[str, bytes | None, float]] = {}
    for k in kernels:
        key = kernel_key(k)
        found[k] = ("k" + key[:32], cache.get(key) if cache is not None else None, 0.0)
        if found[k][1] is None:
            jobs.append((k, found[k][0], key))

    def build(job: tuple[Kernel, str, str]) -> tuple[Kernel, str, str, bytes, float]:
        k, name, key = job
        start = time.perf_counter()
        text = kernel_text.generate(k, name, h.vector_bytes)
        ir = kernel_text.module_text([text], h.triple, h.vector_bytes)
        log.emit("code", ir)
        try:
            module = llvm.parse_assembly(ir)
        except RuntimeError as error:
            raise InternalError(f"kernel {k.label}: LLVM rejects the generated code: {error}") from error
        data = target_machine().emit_object(module)
        return k, name, key, data, time.perf_counter() - start

    if len(jobs) > 1 and threads > 1:
        with ThreadPoolExecutor(min(threads, len(jobs)), thread_name_prefix="fuseline-llvm") as pool:
            built = list(pool.map(build, jobs))
    else:
        built = [build(j) for j in jobs]
    for k, name, key, data, seconds in built:
        found[k] = (name, data, seconds)
        if cache is not None:
            cache.put(key, data, {"label": k.label, "seconds": round(seconds, 4)})
    _load(found)


def _load(found: dict[Kernel, tuple[str, bytes | None, float]]) -> None:
    for k, (name, data, seconds) in found.items():
        if data is None:
            raise InternalError(f"kernel {name} has no object code")
        address = _link(name, data, [name], {})[name]
        units, cost = kernel_text.measure(k, host().vector_bytes)
        _known[k] = CompiledKernel(k, name, address, units, cost, seconds)


def _link(name: str, data: bytes, functions: Sequence[str], symbols: Mapping[str, int]) -> dict[str, int]:
    """Addresses of the functions of an object, loaded once per process. Code is never freed: callers keep raw addresses.

    JITLink and not MCJIT's loader: it places an object's code and constants together, as the small code model needs.
    """
    global _jit
    if name not in _loaded:
        if _jit is None:
            _jit = llvm.create_lljit_compiler(new_target_machine(jit=True), use_jit_link=True)
        library = llvm.JITLibraryBuilder().add_object_img(data).add_current_process()
        for f in functions:
            library.export_symbol(f)
        for symbol, address in symbols.items():
            library.import_symbol(symbol, address)
        tracker = library.link(_jit, name)
        _loaded[name] = tracker, {f: tracker[f] for f in functions}
    addresses = _loaded[name][1]
    if not all(addresses.get(f) for f in functions):
        raise InternalError(f"object code {name} lacks one of {', '.join(functions)}")
    return addresses


def load_helper(ir: str, functions: Sequence[str], symbols: Mapping[str, int], cache: ObjectCache | None = None) -> list[int]:
    """Addresses of functions of a module of our own (the runtime's launcher); `symbols` gives what it declares but does not define."""
    with _lock:
        facts = json.dumps({"ir": ir, **host().key}, sort_keys=True)
        key = hashlib.sha256(facts.encode()).hexdigest()
        data = cache.get(key) if cache is not None else None
        if data is None:
            data = target_machine().emit_object(llvm.parse_assembly(ir))
            if cache is not None:
                cache.put(key, data, {"label": "launcher"})
        addresses = _link("h" + key[:32], data, functions, symbols)
        return [addresses[f] for f in functions]
