"""The OpenMP runtime that torch loaded, found in this process: our parallel loops run on torch's own threads.

Two thread pools on one machine would fight for its cores. torch's CPU library links an OpenMP runtime (libgomp, or libomp and
libiomp, which export the same entry points); its addresses go into our native code. Without one, kernels run on one thread.
"""
from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

_NAME = re.compile(r"lib(gomp|omp|iomp5)[-.\w]*\.(so|dylib)[.\d]*$")


@dataclass(frozen=True, slots=True)
class OpenMP:
    """Addresses of the entry points.

    parallel      void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
    thread_num    int omp_get_thread_num(void)
    num_threads   int omp_get_num_threads(void)
    in_parallel   int omp_in_parallel(void)
    """

    path: str
    parallel: int
    thread_num: int
    num_threads: int
    in_parallel: int


@lru_cache(maxsize=1)
def openmp() -> OpenMP | None:
    """The runtime that torch uses, or None."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
            found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                     for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel")]
        except (OSError, AttributeError):
            continue
        if all(found):
            return OpenMP(path, *found)                      # type: ignore[arg-type]
    return None


def _candidates() -> Iterator[str]:
    """OpenMP libraries mapped into this process, the one that lies in torch's own folder first."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:                                          # not Linux: look beside torch's libraries
        lines = [str(p) for p in (Path(torch.__file__).parent / "lib").glob("lib*omp*")]
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if _NAME.search(line))
    # Other packages (scikit-learn) bring runtimes of their own: a kernel on one of those would fight torch's threads for the cores.
    home = str(Path(torch.__file__).parent) + "/"
    yield from sorted(paths, key=lambda p: not p.startswith(home))
