"""Kernels become machine code for sm_90 without a GPU, in the worker processes; what they return is kept on disk."""
from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from fuseline.codegen.triton.compile import request
from fuseline.codegen.triton.emit import TritonSource
from fuseline.codegen.triton.tiling import Chip
from fuseline.errors import InternalError
from fuseline.ir.dtypes import F16, F32
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import Axis, Kernel, Load, Op, Param, Phase, Reduce, Store
from fuseline.runtime import triton_compile

triton = pytest.importorskip("triton")


def softmax(rows: int, columns: int, dtype=F32) -> Kernel:
    i, j = Sym("i", rows), Sym("j", columns)
    at, inner = columns * i + j, (Axis(j, columns),)
    return Kernel((Param("p0", dtype), Param("p1", dtype, True)), (), (Axis(i, rows),), (
        Phase(inner, (Load("%0", "p0", at, dtype), Reduce(("%m",), "max", ("%0",), F32))),
        Phase(inner, (Op("%1", "sub", ("%0", "%m"), F32), Op("%2", "exp", ("%1",), F32), Reduce(("%s",), "sum", ("%2",), F32))),
        Phase(inner, (Op("%3", "div", ("%2", "%s"), F32), Store("p1", at, "%3")))), "softmax")


def columns(rows: int, width: int) -> Kernel:
    i, j = Sym("i", width), Sym("j", rows)
    return Kernel((Param("p0", F32), Param("p1", F32, True)), (), (Axis(i, width),), (
        Phase((Axis(j, rows),), (Load("%0", "p0", width * j + i, F32), Reduce(("%m", "%q"), "welford", ("%0",), F32))),
        Phase((), (Store("p1", i, "%q"),))), "columns")


def chain(n: int) -> Kernel:
    i = Sym("i", n)
    return Kernel((Param("p0", F16), Param("p1", F16, True)), (), (Axis(i, n),), (Phase((), (
        Load("%0", "p0", i, F16), Op("%1", "tanh", ("%0",), F32), Op("%2", "erf", ("%1",), F32), Op("%3", "pow", ("%2", 3.0), F32),
        Store("p1", i, "%3"))),), "chain")


def resources(cubin: bytes, folder: pathlib.Path) -> tuple[int, str]:
    """(bytes of stack a thread, the disassembly)."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    (folder / "k.cubin").write_bytes(cubin)
    usage, code = (subprocess.run([tool, option, folder / "k.cubin"], capture_output=True, text=True, check=True).stdout
                   for option in ("--dump-resource-usage", "--dump-sass"))
    return int(re.search(r"STACK:(\d+)", usage)[1]), code


def test_kernels_compile_without_spills_and_with_wide_accesses(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSELINE_CACHE_DIR", str(tmp_path / "cache"))
    kernels = [softmax(4096, 4096), softmax(64, 50257), softmax(128, 100, F16), columns(100352, 64), chain(1 << 20)]
    sources = [request(k, {}, [True, True], [1, 1], Chip()).candidates[0].source for k in kernels]
    binaries = triton_compile.compile_all(sources, 90)
    for source, binary in zip(sources, binaries):
        stack, code = resources(binary.cubin, tmp_path)
        assert stack == 0 and "LDL" not in code, source.text
        if source.name != "fl_softmax" or "4096" in source.text:
            assert "LDG.E.128" in code, source.text
    triton_compile._known.clear()
    monkeypatch.setattr(triton_compile, "start_workers", lambda: pytest.fail("the disk cache was not used"))
    assert triton_compile.compile_all(sources, 90) == binaries


def test_a_kernel_that_does_not_compile_is_our_error_with_its_source() -> None:
    source = TritonSource("bad", "import triton\nimport triton.language as tl\n@triton.jit\ndef bad(p):\n    tl.store(p, no_such_name)\n",
                          (("p", "*fp32"),), (), 4, 2)
    with pytest.raises(InternalError, match="no_such_name"):
        triton_compile.submit(source, 90, cache=False).result(timeout=60)
