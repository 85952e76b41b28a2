"""A long reduction becomes two kernels also where its row stores something first."""
from __future__ import annotations

import torch

from fuseline.ir.dtypes import F32
from fuseline.ir.expr import Sym
from fuseline.ir.interp import run_program
from fuseline.ir.kernels import Axis, Buffer, Kernel, Launch, Load, LoopProgram, Op, Output, Param, Phase, Reduce, Store
from fuseline.ir.target import H200
from fuseline.ir.verify import verify_program
from fuseline.schedule.schedule import schedule


def test_what_a_row_stores_before_its_reduction_is_left_to_the_second_kernel() -> None:
    rows, width = 20000, 4
    i, j = Sym("i", width), Sym("j", rows)
    kernel = Kernel((Param("p0", F32), Param("p1", F32, True), Param("p2", F32), Param("p3", F32, True)), (), (Axis(i, width),), (
        Phase((), (Load("%0", "p0", i, F32), Op("%1", "mul", ("%0", 2.0), F32), Store("p1", i, "%1"))),
        Phase((Axis(j, rows),), (Load("%2", "p2", width * j + i, F32), Op("%3", "mul", ("%2", "%1"), F32),
                                 Reduce(("%4",), "sum", ("%3",), F32))),
        Phase((), (Op("%5", "add", ("%4", "%0"), F32), Store("p3", i, "%5")))), "row")
    shapes = {"w": (width,), "s": (width,), "x": (rows, width), "o": (width,)}
    buffers = {n: Buffer(n, F32, s, (width, 1)[-len(s):], "cuda:0", "input" if n in "wx" else "output") for n, s in shapes.items()}
    program = LoopProgram(("w", "x"), buffers, (Launch(kernel, ("w", "s", "x", "o")),), (Output("s"), Output("o")), "cuda:0")
    scheduled = schedule(program, H200)
    verify_program(scheduled)
    assert len(scheduled.steps) == 2
    inputs = [torch.randn(width, dtype=torch.float64).float(), torch.randn(rows, width)]
    for got, expected in zip(run_program(scheduled, inputs), run_program(program, inputs)):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
