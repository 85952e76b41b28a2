"""The CPU executor: programs against the interpreter and torch, arenas, hoisting, sizes, threads, the disk cache."""
from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from fuseline.ir.dtypes import F32
from fuseline.ir.expr import Int, Sym
from fuseline.ir.interp import run_program
from fuseline.ir.kernels import Buffer, Extern, Launch, LoopProgram, Output, Ref, ViewOf
from fuseline.ir.parse import parse_kernel
from fuseline.options import Options
from fuseline.runtime.executor import load

OPTIONS = Options(cache=False)
S0 = Sym("s0", None, 2)


def buffer(name: str, kind: str, *shape: Int, static: bool = False, opaque: bool = False) -> Buffer:
    stride: list[Int] = []
    step: Int = 1
    for n in reversed(shape):
        stride.append(step)
        step = step * n
    return Buffer(name, F32, shape, tuple(reversed(stride)), "cpu", kind, static, opaque)


def scale(factor: float, n: str, sizes: str = ""):
    return parse_kernel(f"""kernel scale(x: f32, y: f32) {sizes} axes i<{n}>
        phase
          %0 = load x[i] : f32
          %1 = mul %0, {factor} : f32
          store y[i] = %1""")


def two_layers(rows: Int, plan: bool = True) -> LoopProgram:
    """y = (2x @ w^2) * 3, with w^2 hoisted; also y transposed, as a view."""
    n = "32*s0" if isinstance(rows, Sym) else str(32 * rows)
    sizes = "sizes s0" if isinstance(rows, Sym) else ""
    square = parse_kernel("""kernel square(x: f32, y: f32) axes i<1024>
        phase
          %0 = load x[i] : f32
          %1 = mul %0, %0 : f32
          store y[i] = %1""")
    buffers = (buffer("x", "input", rows, 32), buffer("w", "input", 32, 32, static=True), buffer("w2", "temp", 32, 32),
               buffer("t0", "temp", rows, 32), buffer("t1", "temp", rows, 32), buffer("y", "output", rows, 32))
    steps = (Launch(scale(2.0, n, sizes), ("x", "t0")), Extern("aten.mm.default", (Ref("t0"), Ref("w2")), (), ("t1",), "aten.mm.out"),
             Launch(scale(3.0, n, sizes), ("t1", "y")))
    outputs = (Output("y"), Output("y", (32, rows), (1, 32), 0), Output(None), Output(rows))
    return LoopProgram(("x", "w"), {b.name: b for b in buffers}, steps, outputs, "cpu",
                       (Launch(square, ("w", "w2")),), rows * 256 if plan else 0, {"t0": 0, "t1": rows * 128} if plan else {})


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("symbolic", [True, False])
def test_a_program_with_kernels_operators_views_and_hoisting(symbolic: bool, plan: bool) -> None:
    program = two_layers(S0 if symbolic else 8, plan)
    run = load(program, OPTIONS)
    w = torch.randn(32, 32, requires_grad=True)
    for n in (8, 64, 8) if symbolic else (8, 8):
        x = torch.randn(n, 32)
        got, want = run(x, w), run_program(program, [x, w.detach()])
        for a, b in zip(got, want, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b)
            else:
                assert a == b
    assert not got[0].requires_grad
    assert run.hoist_runs == 1


def test_hoisted_steps_run_again_when_a_static_input_changes() -> None:
    run = load(two_layers(8), OPTIONS)
    x, w = torch.randn(8, 32), torch.randn(32, 32)

    def check() -> None:
        torch.testing.assert_close(run(x, w)[0], (2 * x) @ (w * w) * 3)

    check()
    w.add_(1)                                                # the version changes
    check()
    w = torch.randn(32, 32)                                  # another tensor
    check()
    w.data = torch.randn(32, 32)                             # other memory under the same tensor
    check()
    with torch.inference_mode():
        w = torch.randn(32, 32)                              # no version: must be computed on each call
    check()
    with torch.inference_mode():
        w.add_(1)
    check()


def test_threads_that_call_at_once_do_not_share_an_arena() -> None:
    run = load(two_layers(64), OPTIONS)
    w = torch.randn(32, 32)
    wrong: list[float] = []

    def work(seed: int) -> None:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        want = (2 * x) @ (w * w) * 3
        for _ in range(50):
            difference = (run(x, w)[0] - want).abs().max().item()
            if difference > 1e-2:
                wrong.append(difference)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_result_in_the_arena_is_not_overwritten_by_the_next_call() -> None:
    """A temp that is returned, or seen through an operator's view of it, keeps its memory."""
    buffers = {b.name: b for b in (buffer("x", "input", 64), buffer("t", "temp", 64), buffer("v", "temp", 8, 8))}
    steps = (Launch(scale(2.0, "64"), ("x", "t")), Extern("aten.view.default", (Ref("t"), (8, 8)), (), ("v",)))
    program = LoopProgram(("x",), buffers, steps, (Output("v"),), "cpu", arena_bytes=256, plan={"t": 0})
    run = load(program, OPTIONS)
    x = torch.randn(64)
    (first,) = run(x)
    run(torch.zeros(64))
    assert torch.equal(first, (2 * x).view(8, 8))


def test_operator_results_get_the_strides_of_their_buffer_and_several_results_work() -> None:
    buffers = {b.name: b for b in (buffer("x", "input", 4, 6), buffer("v", "output", 4, 2), buffer("k", "output", 4, 2),
                                   buffer("c", "output", 6, 4))}
    buffers["k"] = dataclasses.replace(buffers["k"], opaque=True)
    steps = (Extern("aten.topk.default", (Ref("x"), 2), (("largest", False),), ("v", "k")),
             Extern("aten.clone.default", (ViewOf("x", (6, 4), (1, 6), 0),), (("memory_format", "preserve_format"),), ("c",)))
    run = load(LoopProgram(("x",), buffers, steps, (Output("v"), Output("k"), Output("c")), "cpu"), OPTIONS)
    x = torch.randn(4, 6)
    v, k, c = run(x)
    want = torch.topk(x, 2, largest=False)
    assert torch.equal(v, want.values) and torch.equal(k, want.indices)
    assert torch.equal(c, x.t()) and c.stride() == (4, 1)


def test_operators_run_as_traced_under_the_callers_autocast_and_grad_mode() -> None:
    run = load(two_layers(8), OPTIONS)
    x, w = torch.randn(8, 32), torch.randn(32, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(x, w)[0]
    torch.testing.assert_close(y, ((2 * x) @ (w * w) * 3).detach())
    assert y.dtype == torch.float32


def test_offsets_inputs_and_empty_tensors() -> None:
    program = LoopProgram(("x", S0), {b.name: b for b in (buffer("x", "input", S0), buffer("y", "output", S0))},
                          (Launch(scale(2.0, "s0", "sizes s0"), ("x", "y")),), (Output("y"),), "cpu")
    run = load(program, OPTIONS)
    base = torch.randn(100)
    assert torch.equal(run(base[3:20], 17)[0], base[3:20] * 2)      # misaligned, and the size given as a number
    assert run(torch.empty(0), 0)[0].shape == (0,)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_kernels_use_torchs_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        n = (1 << 20) + 13
        program = LoopProgram(("x",), {b.name: b for b in (buffer("x", "input", n), buffer("y", "output", n))},
                              (Launch(scale(2.0, str(n)), ("x", "y")),), (Output("y"),), "cpu")
        x = torch.randn(n)
        assert torch.equal(load(program, OPTIONS)(x)[0], x * 2)
    finally:
        torch.set_num_threads(before)


def test_a_profiled_call_gives_the_same_results_and_names_every_step() -> None:
    run = load(two_layers(8), OPTIONS)
    x, w = torch.randn(8, 32), torch.randn(32, 32)
    outputs, times = run.profile(x, w)
    torch.testing.assert_close(outputs[0], run(x, w)[0])
    assert [(t.name, t.kind) for t in times] == [("scale", "kernel"), ("aten.mm.default", "operator"), ("scale", "kernel")]


def test_consecutive_kernels_are_one_native_call() -> None:
    names = ("a", "b", "c")
    buffers = {b.name: b for b in (buffer("x", "input", 64), *(buffer(n, "temp", 64) for n in names), buffer("y", "output", 64))}
    chain = ("x", *names, "y")
    steps = tuple(Launch(scale(2.0, "64"), pair) for pair in zip(chain, chain[1:]))
    run = load(LoopProgram(("x",), buffers, steps, (Output("y"),), "cpu", arena_bytes=768, plan={"a": 0, "b": 256, "c": 512}), OPTIONS)
    x = torch.randn(64)
    assert torch.equal(run(x)[0], x * 16)
    assert run.source().count("threads)") == 1
