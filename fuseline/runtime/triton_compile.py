"""Compiles many Triton kernels at once, in worker processes that never import torch; results are kept on disk.

This process does not import Triton at all: a worker returns machine code and what a launch must know of it. The workers
start with the first request (or `start_workers`, which returns at once) and live as long as this process.
"""
from __future__ import annotations

import atexit
import base64
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from fuseline.codegen.triton.emit import TritonSource
from fuseline.errors import InternalError
from fuseline.log import emit as log
from fuseline.runtime.cache import default_directory, disk_cache

MAX_WORKERS = 16              # one kernel takes 0.15 s of one core; a model has some tens of distinct ones
FORMAT = 1                    # of the disk cache's entries


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code of one kernel. shared: bytes of dynamic shared memory a block needs; scratch: of global memory (0)."""
    name: str
    cubin: bytes
    shared: int
    num_warps: int
    scratch: int = 0


class _Server:
    """The worker process and the answers awaited from it."""

    def __init__(self, workers: int) -> None:
        self.pid = os.getpid()
        script = str(pathlib.Path(__file__).with_name("triton_worker.py"))
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment.setdefault("TRITON_CACHE_DIR", str(default_directory() / "triton"))
        # -P: modules beside the script do not stand in for those of the standard library with their names.
        self.process = subprocess.Popen([sys.executable, "-P", script, str(workers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=environment, text=True)
        if self.process.stdin is None or self.process.stdout is None:
            raise InternalError("the Triton compile process has no pipes")
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.pending: dict[int, Future] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        threading.Thread(target=self._read, name="fuseline-triton-answers", daemon=True).start()

    def submit(self, request: dict) -> Future:
        future: Future = Future()
        with self.lock:
            request["id"] = next(self.numbers)
            self.pending[request["id"]] = future
            try:
                self.requests.write(json.dumps(request) + "\n")
                self.requests.flush()
            except OSError as error:
                self.pending.pop(request["id"])
                future.set_exception(InternalError(f"the Triton compile process is gone: {error}"))
        return future

    def _read(self) -> None:
        for line in self.answers:
            answer = json.loads(line)
            with self.lock:
                future = self.pending.pop(answer["id"], None)
            if future is not None:
                future.set_result(answer)
        with self.lock:
            left, self.pending = list(self.pending.values()), {}
        for future in left:
            future.set_exception(InternalError("the Triton compile process ended before it answered"))

    def alive(self) -> bool:
        return self.pid == os.getpid() and self.process.poll() is None

    def stop(self) -> None:
        if self.pid == os.getpid():
            self.requests.close()


_server: _Server | None = None
_lock = threading.Lock()
_known: dict[tuple, Future] = {}                  # every binary of this process, by key


def start_workers() -> _Server:
    """The compile process, started if it is not there; returns at once, while it is still importing Triton."""
    global _server
    with _lock:
        if _server is None or not _server.alive():
            _server = _Server(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
            atexit.register(_server.stop)
        return _server


def submit(source: TritonSource, arch: int, cache: bool = True) -> Future:
    """A future of the Binary for compute capability `arch` (90). The same source is compiled once.

    cache: look on the disk first, and keep the result there.
    """
    key = (source, arch)
    with _lock:
        future = _known.get(key)
        if future is not None and not (future.done() and future.exception()):
            return future
        future = _known[key] = Future()
    stored = _read(_key(source, arch)) if cache else None
    if stored is not None:
        future.set_result(stored)
        return future
    server = start_workers()
    log("code", source.text)
    request = {**asdict(source), "arch": arch}
    server.submit(request).add_done_callback(functools.partial(_deliver, future, _key(source, arch) if cache else None))
    return future


def compile_all(sources: Sequence[TritonSource], arch: int) -> list[Binary]:
    """Compile in parallel. Raises InternalError with the compiler's message and the source for one that fails."""
    return [f.result() for f in [submit(s, arch) for s in sources]]


def _deliver(future: Future, cache_key: str | None, answered: Future) -> None:
    error = answered.exception()
    if error is not None:
        future.set_exception(error)
        return
    answer = answered.result()
    if "error" in answer:
        future.set_exception(InternalError(f"Triton could not compile a kernel\n{answer['error']}"))
        return
    binary = Binary(answer["name"], base64.b64decode(answer["cubin"]), answer["shared"], answer["num_warps"], answer["scratch"])
    if binary.scratch:
        future.set_exception(InternalError(f"kernel {binary.name} wants {binary.scratch} bytes of global scratch memory"))
        return
    if cache_key is not None:
        _write(cache_key, binary)
    future.set_result(binary)


# ---------------------------------------------------------------- disk

@functools.lru_cache(maxsize=1)
def _compiler_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _key(source: TritonSource, arch: int) -> str:
    """Everything that the machine code depends on, as one hash."""
    facts = json.dumps([FORMAT, _compiler_version(), arch, asdict(source)], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def _read(key: str) -> Binary | None:
    """The stored binary; None if there is none, or one that is not understood."""
    data = disk_cache().get(key)
    if data is None:
        return None
    try:
        head, cubin = data.split(b"\n", 1)
        facts = json.loads(head)
        return Binary(str(facts["name"]), cubin, int(facts["shared"]), int(facts["num_warps"]))
    except (ValueError, KeyError, TypeError):
        return None


def _write(key: str, binary: Binary) -> None:
    facts = {"name": binary.name, "shared": binary.shared, "num_warps": binary.num_warps}
    disk_cache().put(key, json.dumps(facts).encode() + b"\n" + binary.cubin, {"kind": "cubin", "kernel": binary.name})
