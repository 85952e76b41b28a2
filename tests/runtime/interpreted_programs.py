"""Whole programs through the CUDA executor with Triton's interpreter as the device.

Run by tests/codegen/triton/test_triton_interpreted.py.
"""
from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseline import passes
from fuseline.autodiff.partition import partition
from fuseline.ir import dtypes
from fuseline.ir.dtypes import F32
from fuseline.ir.expr import Sym
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType
from fuseline.ir.kernels import Axis, Buffer, Extern, Kernel, Launch, Load, LoopProgram, Op, Output, Param, Phase, Ref, Store
from fuseline.ir.target import H200
from fuseline.ir.verify import verify_program
from fuseline.lower.lower import lower, pointwise_operators, supported
from fuseline.options import Options
from fuseline.pipeline import plain_mutations
from fuseline.runtime import aot
from fuseline.runtime.cuda_executor import CudaExecutable, load
from fuseline.runtime.cudagraphs import recordable
from fuseline.runtime.numbers import fill_numbers
from fuseline.schedule.in_place import write_in_place
from fuseline.schedule.schedule import schedule
from fuseline.torch_internals import to_torch_dtype
from fuseline.trace.trace import trace

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from cuda_programs import as_graph, of_module  # noqa: E402
from interpreter_platform import InterpreterPlatform  # noqa: E402


def compiled(fn: Callable, inputs: list, static: list | None = None, inference: bool = False) -> tuple[Callable, list[CudaExecutable]]:
    module = as_graph(fn, len(inputs))
    traced = trace(module, inputs, static=static, keep=supported(), grad_enabled=not inference)
    context = passes.PassContext(supported(), pointwise_operators(), frozenset(), not traced.joint, True, None)
    traced = replace(traced, graph=passes.run(traced.graph, context))
    made: list[CudaExecutable] = []
    parts = partition(traced) if traced.joint else None

    def compile_graph(graph: Any) -> Any:
        program = schedule(lower(graph, inference=not traced.joint), H200)
        if parts is None or graph is parts.forward:
            program = write_in_place(program, plain_mutations(traced, parts))
            verify_program(program)
        made.append(load(program, Options(), platform=InterpreterPlatform()))
        return made[-1]
    return aot.wrap(traced, parts, compile_graph, module, lazy_backward=False), made


def test_pointwise_and_rows() -> None:
    x, y = torch.randn(6, 40), torch.randn(6, 40)

    def fn(x: Any, y: Any) -> Any:
        z = F.gelu(x * 1.5 + y) * torch.sigmoid(y) + torch.tanh(x)
        return torch.softmax(F.layer_norm(z, (40,)) * 0.5, -1) * x
    run, made = compiled(fn, [x, y], inference=True)
    torch.testing.assert_close(run(x, y)[0], fn(x, y), rtol=1e-5, atol=1e-6)
    assert len(made[0].program.steps) == 1


@pytest.mark.parametrize("dtype", [dtypes.F16, dtypes.F32, dtypes.I32])
def test_a_float_that_changes(dtype: dtypes.DType) -> None:
    given, made = TensorType(dtype, (6, 40), (40, 1)), TensorType(F32 if dtype == dtypes.I32 else dtype, (6, 40), (40, 1))
    x, k = Node("x", "input", type=given), Node("k", "input", type=ScalarType("float"))
    scaled = Node("a", "aten.mul.Tensor", (x, k), (), made)
    larger = Node("b", "aten.gt.Scalar", (x, k), (), TensorType(dtypes.BOOL, (6, 40), (40, 1)))
    power = Node("c", "aten.pow.Tensor_Scalar", (scaled, k), (), made)
    for nodes in ((scaled, larger), (scaled, larger, power)):
        program = schedule(lower(Graph((x, k), nodes, nodes), inference=True), H200)
        verify_program(program)
        run: Callable = load(program, Options(), platform=InterpreterPlatform())
        if power not in nodes:
            run = fill_numbers(run, (1,), "cpu")
        for value in (0.3, 2.5):
            data = (torch.randn(6, 40).abs() * 3).to(to_torch_dtype(dtype))
            expected = (data * value, data > value, (data * value) ** value)
            for a, b in zip(expected, run(data, value)):
                torch.testing.assert_close(b, a, rtol=2e-3, atol=2e-3)
    if dtype == F32:
        assert "may change" in str(recordable(replace(program, device="cuda:0")))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


@pytest.mark.parametrize("channels_last", [False, True])
def test_training_a_small_net(channels_last: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    fn, held = of_module(model, F.cross_entropy)
    x, y = torch.randn(3, 2, 6, 6), torch.tensor([0, 4, 2])
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    start = [t.detach().clone() for t in held]
    run, made = compiled(fn, [*held, x, y], [True] * len(held) + [False] * 2)
    expected = fn(*held, x, y)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    after = [t.detach().clone() for t in held]
    with torch.no_grad():
        for t, s in zip(held, start):
            t.copy_(s)
    versions = [t._version for t in model.buffers()]
    (loss,) = run(*held, x, y)
    torch.testing.assert_close(loss, expected)
    assert sum(o.value is None for o in made[0].program.outputs) == 3          # the buffers of batch norm, written in place
    assert [t._version for t in model.buffers()] == [v + 1 for v in versions]
    for a, b in zip(torch.autograd.grad(loss, list(model.parameters())), grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(held, after):
        torch.testing.assert_close(a, b)


def scale(n: Any, factor: float) -> Kernel:
    i = Sym("i", n)
    return Kernel((Param("p0", F32), Param("p1", F32, True)), (n,) if isinstance(n, Sym) else (), (Axis(i, n),), (Phase((), (
        Load("%0", "p0", i, F32), Op("%1", "mul", ("%0", factor), F32), Store("p1", i, "%1"))),), "scale")


def test_hoisted_steps_run_again_when_what_they_read_changes() -> None:
    def buffer(name: str, kind: str = "temp", static: bool = False) -> Buffer:
        return Buffer(name, F32, (40,), (1,), "cuda:0", kind, static)
    buffers = {b.name: b for b in (buffer("x", "input"), buffer("w", "input", True), buffer("h"), buffer("t"), buffer("u"),
                                   buffer("o", "output"))}
    buffers["g"] = buffer("g")                               # needed by hoisted steps only
    program = LoopProgram(("x", "w"), buffers, (
        Launch(scale(40, 2.0), ("x", "t")), Extern("aten.add.Tensor", (Ref("t"), Ref("h")), (), ("u",), "aten.add.out"),
        Launch(scale(40, 3.0), ("u", "o"))), (Output("o"), Output("o", (20,), (2,), 1), Output(7), Output("x")), "cuda:0",
        hoisted=(Launch(scale(40, 2.0), ("w", "g")), Launch(scale(40, 5.0), ("g", "h"))), arena_bytes=384, plan={"t": 0, "u": 192})
    run = load(program, Options(), platform=InterpreterPlatform())
    x, w = torch.randn(40), torch.randn(40)

    def check(x: torch.Tensor) -> None:
        expected = (x * 2 + w * 10) * 3
        out, odd, number, same = run(x, w)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(odd, expected[1::2])
        assert number == 7 and same is x
    check(x)
    check(x)
    assert run.generation == 1
    w.mul_(2)
    check(x)
    assert run.generation == 2
    check(torch.randn(41)[1:])                               # an address that is no multiple of 16: another plan
    assert len(run._plans) == 2


def test_one_program_serves_every_size() -> None:
    s = Sym("s0", None, 2)
    buffers = {"x": Buffer("x", F32, (s,), (1,), "cuda:0", "input"), "t": Buffer("t", F32, (s,), (1,), "cuda:0"),
               "o": Buffer("o", F32, (s,), (1,), "cuda:0", "output")}
    program = LoopProgram(("x",), buffers, (Launch(scale(s, 2.0), ("x", "t")), Launch(scale(s, 5.0), ("t", "o"))),
                          (Output("o"), Output(s + 1)), "cuda:0")
    run = load(program, Options(), platform=InterpreterPlatform())
    for n in (2, 3, 16, 100, 3, 1000):
        x = torch.randn(n)
        out, size = run(x)
        torch.testing.assert_close(out, x * 10)
        assert size == n + 1
