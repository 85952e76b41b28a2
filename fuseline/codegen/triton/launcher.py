"""Loads machine code on a CUDA device and launches it, through the CUDA driver's C functions.

Triton's own launchers differ between its versions and need a C compiler for each new signature; what they do for kernels
like ours is one call of cuLaunchKernel. The arguments of a kernel compiled by Triton 3.6 to 3.8 are its non-constant
arguments in order, then the addresses of two scratch areas, which are null where the kernel needs none.
"""
from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any

from fuseline.errors import InternalError

_MAX_DYNAMIC_SHARED, _LOCAL_BYTES, _REGISTERS = 8, 3, 4           # CUfunction_attribute
_STATIC_SHARED_LIMIT = 48 * 1024


class CudaDriverError(InternalError):
    """The CUDA driver refused a call."""


@functools.lru_cache(maxsize=1)
def driver() -> Any:
    """The CUDA driver library. Raises OSError where there is none."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    library.cuFuncGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.c_void_p]
    return library


def check(code: int, what: str) -> None:
    """Raises CudaDriverError with the driver's message for a code other than success."""
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaDriverError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


class LoadedKernel:
    """Machine code on the current device. registers and spilled (bytes a thread) are what the driver says of it."""

    __slots__ = ("function", "name", "shared", "threads", "registers", "spilled", "_module")

    def __init__(self, name: str, cubin: bytes, shared: int, num_warps: int) -> None:
        self.name, self.shared, self.threads = name, shared, 32 * num_warps
        module, function, number = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        cuda = driver()
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        if shared > _STATIC_SHARED_LIMIT:
            check(cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"{name} with {shared} bytes of shared memory")
        self.function, self._module = function.value, module.value
        facts = []
        for attribute in (_REGISTERS, _LOCAL_BYTES):
            check(cuda.cuFuncGetAttribute(ctypes.byref(number), attribute, function), f"attribute of {name}")
            facts.append(number.value)
        self.registers, self.spilled = facts

    def prepare(self, grid: int, arguments: int) -> Callable[..., None]:
        """launch(stream, *arguments): arguments are addresses and sizes as ints, `arguments` of them.

        May be called from several threads. The kernel's device must be current.
        """
        values = (ctypes.c_uint64 * (arguments + 2))()
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * (arguments + 2))(*(first + 8 * i for i in range(arguments + 2)))
        pack = struct.Struct(f"={arguments}Q").pack_into
        call, function, threads, shared, name = driver().cuLaunchKernel, self.function, self.threads, self.shared, self.name
        address = ctypes.addressof(pointers)
        lock = threading.Lock()
        keep = pointers

        def launch(stream: int, *args: int, _keep: object = keep) -> None:
            with lock:                                    # the driver copies the values before it returns
                pack(values, 0, *args)
                code = call(function, grid, 1, 1, threads, 1, 1, shared, stream, address, None)
            if code:
                check(code, f"launching {name}")

        return launch
