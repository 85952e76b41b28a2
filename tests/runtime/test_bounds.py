"""An index outside of its axis raises in compiled code on the CPU, as in eager mode, and no other index does."""
from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import fuseline
from fuseline.errors import InternalError
from fuseline.ir.dtypes import F32
from fuseline.ir.interp import run_kernel
from fuseline.ir.kernels import Buffer, Launch, LoopProgram, Output
from fuseline.ir.parse import parse_kernel
from fuseline.options import Options
from fuseline.runtime.executor import load

STRICT = {"strict": True}
PROGRAMS = {
    "index": lambda x, i: x[i] * 2,
    "index columns": lambda x, i: torch.softmax(x[:, i], -1),
    "index_select": lambda x, i: x.index_select(0, i) + 1,
    "index_select columns": lambda x, i: x.index_select(1, i) + 1,
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 4)) + 1,
    "embedding": lambda x, i: F.layer_norm(F.embedding(i, x), (4,)),
    "a loss": lambda x, i: F.cross_entropy(x[:3], i),
    "scattered": lambda x, i: torch.scatter(x[:, :3], 0, i[None, :], 3.0) * 2,
    "scattered sums": lambda x, i: torch.scatter_add(x[:3], 1, i[:, None], x[:3]) * 2,
    "index_add": lambda x, i: x.index_add(0, i, x[:3]) * 2,
    "index_copy": lambda x, i: x.index_copy(0, i, x[:3]) * 2,
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0) * 2,
    "concatenated": lambda x, i: torch.cat([x[i] * 2, x]),
    "padded": lambda x, i: F.pad(x[i - 1] * 2, (1, 2, 3, 4)),
    "summed": lambda x, i: (x[i].exp()).sum(),
    "two operators": lambda x, i: x[i] + x.gather(0, i[:, None].expand(-1, 4))}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_raise_as_eager_does(name: str, dynamic: bool) -> None:
    fn, x = PROGRAMS[name], torch.randn(4, 4)
    compiled = fuseline.compile(fn, dynamic=dynamic, options=STRICT)
    for number in (1, 0, 3, 4, -1, -2, 1 << 40, -6, 2):
        i = torch.tensor([0, number, 2])
        try:
            expected = fn(x, i)
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error), match=re.escape(str(error))):      # Python ran the code: eager's own words
                compiled(x, i)
        else:
            torch.testing.assert_close(compiled(x, i), expected)


@pytest.mark.parametrize("fn", [
    lambda x, i: x[i] * 2, lambda x, i: (x[i] * 2).sum(), lambda x, i: (x[i] * 2).sum(0), lambda x, i: x[i].std(-1),
    lambda x, i: x.gather(0, i[:, None].expand(-1, 70)) + 1, lambda x, i: x.half()[i.int()] + 1], ids=list("abcdef"))
@pytest.mark.parametrize("threads", [1, 2])
def test_lanes_tails_threads_and_split_reductions(fn, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, compiled = torch.randn(3001, 70), fuseline.compile(fn, options=STRICT)
        for wrong in (None, 0, 1234, 3000):
            i = torch.randint(0, 3001, (3001,))
            if wrong is None:
                torch.testing.assert_close(compiled(x, i), fn(x, i), rtol=1e-3, atol=1e-2)
                continue
            i[wrong] = 3001
            with pytest.raises((IndexError, RuntimeError), match="size 3001"):
                compiled(x, i)
    finally:
        torch.set_num_threads(before)


def test_a_call_after_one_that_raised_is_right_and_modules_train() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    compiled = fuseline.compile(model, options=STRICT)
    good, bad = torch.tensor([[1, 2], [3, 9]]), torch.tensor([[1, 2], [3, 10]])
    expected = model(good)
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range in self"):
            compiled(bad)
        torch.testing.assert_close(compiled(good), expected)
    compiled(good).sum().backward()


CHECKS = """kernel picks(x: f32, i: f32, y: f32 out) axes k<{n}>
  phase
    %0 = load i[k] : f32
    %1 = cast %0 : i64
    %2 = lt %1, {n} : b1
    %3 = ge %0, 0.0 : b1
    %4 = check %2, %3 : b1
    %5 = check %3, True : b1
    %6 = and %4, %5 : b1
    %7 = load x[%1] if %6 else 0.0 : f32
    store y[k] = %7"""


@pytest.mark.parametrize("n", [5, 16, 37])
def test_a_segment_stops_at_the_launch_that_fails(n: int) -> None:
    kernel = parse_kernel(CHECKS.format(n=n))
    buffers = {b: Buffer(b, F32, (n,), (1,), "cpu", kind) for b, kind in
               (("x", "input"), ("i", "input"), ("j", "input"), ("y", "output"), ("z", "output"))}
    program = LoopProgram(("x", "i", "j"), buffers, (Launch(kernel, ("x", "i", "y")), Launch(kernel, ("y", "j", "z"))),
                          (Output("y"), Output("z")), "cpu")
    executable = load(program, Options(cache=False))
    x, up, down = torch.randn(n), torch.arange(n).float(), torch.arange(n).flip(0).float()
    y, z = executable(x, up, down)
    assert torch.equal(y, x) and torch.equal(z, x.flip(0))
    for wrong in (n, -1):
        bad = torch.where(torch.arange(n) == n - 1, float(wrong), up)
        for i, j in ((bad, down), (up, bad)):
            with pytest.raises(IndexError):
                executable(x, i, j)
        with pytest.raises(InternalError, match="a check fails"):
            run_kernel(kernel, [x, bad, torch.zeros(n)], {})
