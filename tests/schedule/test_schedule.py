"""A scheduled program computes what the unscheduled one does, and obeys the rules of loop programs."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import Maker

from fuseline.ir.interp import run_program
from fuseline.ir.kernels import LoopProgram
from fuseline.ir.parse import parse_program
from fuseline.ir.print import show_program
from fuseline.ir.target import H200, Target
from fuseline.ir.verify import verify_program
from fuseline.schedule.schedule import schedule

CPU = Target("cpu", 2, 512)
TINY = Target("cpu", 1, 32)                 # likes every row: more fusion on small sizes


def inputs_of(program: LoopProgram, extents: dict) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for name in program.inputs:
        buffer = program.buffers[name]
        shape = [extents.get(n, n) for n in buffer.shape]
        order = sorted(range(len(shape)), key=lambda i: (-_hint(buffer.stride[i], extents), i))
        data = torch.randn([shape[i] for i in order], generator=generator, dtype=torch.float64)
        made.append(data.permute([order.index(i) for i in range(len(shape))]))
    return made


def _hint(stride, extents) -> int:
    from fuseline.ir.expr import evaluate, symbols
    return evaluate(stride, {s.name: extents[s] for s in symbols(stride)})


def check(program: LoopProgram, target: Target, extents: dict) -> LoopProgram:
    verify_program(program)
    scheduled = schedule(program, target)
    verify_program(scheduled)
    inputs = inputs_of(program, extents)
    for expected, got in zip(run_program(program, inputs), run_program(scheduled, inputs)):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert parse_program(show_program(scheduled)) == _plain(scheduled)
    return scheduled


def _plain(program: LoopProgram) -> LoopProgram:
    from dataclasses import replace
    return replace(program, verdicts=())


@pytest.mark.parametrize("target", [CPU, TINY, H200], ids=["cpu", "tiny", "h200"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), length=st.integers(1, 12), symbolic=st.booleans())
def test_scheduled_programs_compute_the_same(target: Target, seed: int, length: int, symbolic: bool):
    maker = Maker(seed, symbolic)
    check(maker.build(length), target, maker.extents)
