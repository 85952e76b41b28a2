"""Runs generated Triton source in Triton's interpreter, on CPU tensors: how the tests check it without a GPU.

The process must have TRITON_INTERPRET=1 set before triton is imported. libdevice functions, which the interpreter does not
know, are computed by torch here.
"""
from __future__ import annotations

import functools
import linecache
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuseline.codegen.triton.emit import HEADER, Specialisation, TritonSource, emit
from fuseline.codegen.triton.tiling import Tiling, blocks, choose, value
from fuseline.ir.kernels import Kernel


class _Libdevice:
    """libdevice.f(tensor, ...) for the interpreter's tensors."""

    _ALIASES = {"rint": "round", "pow": "pow"}

    def __getattr__(self, name: str) -> Callable:
        function = getattr(torch, self._ALIASES.get(name, name))

        def call(*args: Any) -> Any:
            import numpy
            import triton.language as tl
            from triton.runtime.interpreter import TensorHandle
            like = next(a for a in args if isinstance(a, tl.core.tensor))
            arrays = numpy.broadcast_arrays(*(a.handle.data if isinstance(a, tl.core.tensor) else numpy.asarray(a, like.handle.data.dtype)
                                              for a in args))
            result = function(*(torch.from_numpy(numpy.array(a)) for a in arrays)).numpy()
            block = any(isinstance(a, tl.core.tensor) and a.type.is_block() for a in args)
            kind = tl.block_type(like.dtype, list(result.shape)) if block else like.dtype
            return tl.core.tensor(TensorHandle(result.astype(like.handle.data.dtype), like.dtype), kind)

        return call


libdevice = _Libdevice()


@functools.cache
def _module(source: TritonSource) -> dict[str, Any]:
    text = source.text.replace(HEADER, HEADER.rsplit("from", 1)[0] + f"from {__name__} import libdevice\n")
    filename = f"<triton {hash(text):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace: dict[str, Any] = {"__name__": filename}
    exec(compile(text, filename, "exec"), namespace)
    return namespace


def run(kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: Sequence[int] = (), tiling: Tiling | None = None,
        wide: bool = False) -> TritonSource:
    """Run a kernel on CPU tensors (each seen flat from its first element) in the interpreter. Returns the source it ran."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before importing triton")
    hints = {s.name: n for s, n in zip(kernel.sizes, sizes)}
    tiling = tiling or choose(kernel, hints)
    source = emit(kernel, tiling, Specialisation((True,) * len(kernel.params), tuple(n % 16 == 0 for n in sizes), wide))
    x, y = (value(n, hints) for n in blocks(kernel, tiling))
    grid = (-(-x // tiling.x) * -(-y // max(tiling.y, 1)),)
    if grid[0]:
        flat = [b.view(torch.uint8) if b.dtype is torch.bool else b for b in buffers]
        _module(source)[source.name][grid](*flat, *sizes)
    return source
