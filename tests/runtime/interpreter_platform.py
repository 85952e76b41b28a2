"""A stand-in for a CUDA device: kernels run in Triton's interpreter on CPU memory. Needs TRITON_INTERPRET=1."""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from fuseline.codegen.triton.interpret import _module
from fuseline.codegen.triton.tiling import Chip

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "i8": torch.int8,
          "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8}


class InterpreterPlatform:
    device = torch.device("cpu")
    chip = Chip()

    def stream(self) -> int:
        return 0

    def compile(self, source: Any, cache: bool = True) -> Future:
        future: Future = Future()
        future.set_result(source)
        return future

    def prepare(self, source: Any, binary: Any, grid: int, arguments: int) -> Callable[..., None]:
        types = [t for _, t in source.signature]

        def launch(stream: int, *args: int) -> None:
            values = []
            for kind, arg in zip(types, args):
                if kind.startswith("*"):
                    memory = (ctypes.c_uint8 * 16).from_address(arg)
                    values.append(torch.frombuffer(memory, dtype=_TORCH[kind[1:]], count=1))
                else:
                    values.append(arg)
            _module(source)[source.name][(grid,)](*values)

        return launch
