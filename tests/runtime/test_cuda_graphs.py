"""The rules of CUDA graphs, with a recorder that works on the CPU: it keeps the work and runs it again into the same memory."""
from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseline.ir.dtypes import F32
from fuseline.ir.kernels import Buffer, Extern, LoopProgram, Output, Ref
from fuseline.options import Options
from fuseline.runtime import cudagraphs
from fuseline.runtime.cudagraphs import GraphedExecutable, GraphPool, wrap_executable

GRAPHS = Options(mode="reduce-overhead")


class ReplayRecorder:
    """Outputs keep their memory: a replay overwrites it, whoever looks."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def new_pool(self) -> Any:
        return object()

    def busy(self) -> bool:
        return False

    def join(self, last: Any) -> Any:
        return None

    def record(self, work: Callable[[], tuple], pool: Any) -> tuple[Callable[[], None], tuple]:
        if self.error is not None:
            raise self.error
        outputs = work()
        for out in outputs:
            out.fill_(float("nan"))

        def replay() -> None:
            for place, value in zip(outputs, work()):
                place.copy_(value)
        return replay, outputs


class Plain:
    """An executable of Python functions."""

    generation = 0
    hoisted: tuple = ()

    def __init__(self, function: Callable[..., tuple]) -> None:
        self.function = function

    def __call__(self, *inputs: Any) -> tuple:
        return tuple(self.function(*inputs))

    def sizes(self, inputs: tuple) -> tuple:
        return tuple(n for x in inputs for n in x.shape)

    def prepare(self, inputs: tuple) -> None:
        pass


def program(inputs: dict[str, bool], outputs: int) -> LoopProgram:
    """A program's signature: input -> whether it is static."""
    names = [*inputs, *(f"o{k}" for k in range(outputs))]
    buffers = {n: Buffer(n, F32, (4,), (1,), "cuda:0", "input" if n in inputs else "output", inputs.get(n, False)) for n in names}
    step = Extern("aten.relu.default", (Ref(names[0]),), (), tuple(f"o{k}" for k in range(outputs)))
    return LoopProgram(tuple(inputs), buffers, (step,), tuple(Output(f"o{k}") for k in range(outputs)), "cuda:0")


def graphed(function: Callable[..., tuple], inputs: dict[str, bool], outputs: int, pool: GraphPool | None = None,
            **how: Any) -> GraphedExecutable:
    pool = pool or GraphPool("cpu", ReplayRecorder())
    made = wrap_executable(Plain(function), program(inputs, outputs), GRAPHS, pool, **how)
    assert isinstance(made, GraphedExecutable)
    return made


def test_copied_outputs_survive_later_replays() -> None:
    run = graphed(lambda x, w: (x * w,), {"x": False, "w": True}, 1)
    w = torch.full((4,), 2.0)
    results = [run(torch.full((4,), float(k)), w)[0] for k in range(5)]
    assert [r.tolist() for r in results] == [[2.0 * k] * 4 for k in range(5)]
    assert (run.plain, run.replays, len(run.recordings)) == (1, 4, 1)
    w.mul_(2)                                                # used in place: seen without recording again
    assert run(torch.ones(4), w)[0].tolist() == [4.0] * 4
    assert len(run.recordings) == 1


def test_a_moved_parameter_is_recorded_again_a_few_times_only() -> None:
    run = graphed(lambda x, w: (x + w,), {"x": False, "w": True}, 1)
    for k in range(8):
        w = torch.full((4,), float(k))
        for _ in range(2):
            assert run(torch.zeros(4), w)[0].tolist() == [float(k)] * 4
    assert not run.verdict and "keeps changing" in run.verdict.reason


def test_lent_outputs_are_not_overwritten_while_held() -> None:
    run = graphed(lambda x: (x * 2, x * 3), {"x": False}, 2, lend=frozenset([0, 1]))
    for k in range(4):
        out = run(torch.full((4,), float(k)))
        assert out[0].tolist() == [2.0 * k] * 4 and out[1].tolist() == [3.0 * k] * 4
        del out
    assert (run.plain, run.replays) == (1, 3)
    held = run(torch.full((4,), 7.0))[0]                     # a gradient that accumulates
    later = [run(torch.full((4,), float(k)))[0] for k in range(3)]
    assert held.tolist() == [14.0] * 4 and [x[0].item() for x in later] == [0, 2, 4]
    assert run.plain == 4                                    # as long as it is held
    del held, later
    gc.collect()
    kept = [run(torch.full((4,), float(k))) for k in range(3)]
    assert [x[0][0].item() for x in kept] == [0, 2, 4] and [x[1][0].item() for x in kept] == [0, 3, 6]
    assert 0 in next(iter(run.recordings.values())).copied_out


def test_a_second_forward_before_the_first_backward_keeps_what_is_saved() -> None:
    pool = GraphPool("cpu", ReplayRecorder())
    forward = graphed(lambda x: (x.sum().reshape(1), x * 10), {"x": False}, 2, pool, saved=frozenset([1]))
    backward = graphed(lambda saved, g: (saved * g,), {"saved": False, "g": False}, 1, pool, lend=frozenset([0]))

    def step(k: float) -> float:
        loss, saved = forward(torch.full((4,), float(k)))
        (grad,) = backward(saved, torch.ones(4))
        return grad[0].item()
    assert [step(k) for k in range(5)] == [0, 10, 20, 30, 40]
    assert forward.replays == 4 and backward.replays >= 2
    replays = (forward.replays, backward.replays)
    assert next(iter(backward.recordings.values())).copied_in == (1,)     # the saved tensor is used where it lies
    _, first = forward(torch.full((4,), 1.0))
    _, second = forward(torch.full((4,), 2.0))
    assert backward(first, torch.ones(4))[0][0].item() == 10 and backward(second, torch.ones(4))[0][0].item() == 20
    assert forward.replays == replays[0] + 1 and forward.plain == 2
    del first, second
    assert [step(k) for k in (5, 6)] == [50, 60] and forward.plain == 2


def test_each_size_has_its_graph_up_to_a_bound() -> None:
    run = graphed(lambda x: (x + 1,), {"x": False}, 1)
    for n in range(1, cudagraphs.MAX_RECORDINGS + 4):
        for k in range(3):
            assert run(torch.full((n,), float(k)))[0].tolist() == [k + 1.0] * n
    assert len(run.recordings) == cudagraphs.MAX_RECORDINGS


@pytest.mark.parametrize("error", [RuntimeError("operation not permitted when stream is capturing"), torch.OutOfMemoryError("full")])
def test_what_cannot_be_recorded_runs_plainly(error: Exception) -> None:
    pool = GraphPool("cpu", ReplayRecorder())
    pool.recorder.error = error                              # type: ignore[attr-defined]
    run = graphed(lambda x: (x + 1,), {"x": False}, 1, pool)
    for k in range(3):
        assert run(torch.full((4,), float(k)))[0].tolist() == [k + 1.0] * 4
    assert not run.verdict and run.replays == 0


def test_refusals_have_reasons() -> None:
    few = program({"x": False}, 1)
    assert wrap_executable(len, few, Options(), GraphPool("cpu", ReplayRecorder())) is len
    sync = LoopProgram(few.inputs, few.buffers, (Extern("aten.nonzero.default", (Ref("x"),), (), ("o0",)),), few.outputs, "cuda:0")
    assert "aten.nonzero" in str(cudagraphs.recordable(sync))
    assert "cpu" in str(cudagraphs.recordable(LoopProgram(few.inputs, few.buffers, few.steps, few.outputs, "cpu")))


def test_overlapping_inputs_and_outputs_keep_their_strides() -> None:
    base = torch.arange(4.0)
    expanded, gaps = base[:1].expand(4), torch.arange(8.0)[::2]
    copies = cudagraphs.clone_all([expanded, gaps, base, base * 2])
    assert [c.stride() for c in copies] == [(0,), (2,), (1,), (1,)]
    assert all(torch.equal(a, b) for a, b in zip(copies, [expanded, gaps, base, base * 2]))
    fresh = [cudagraphs._fresh_like(t) for t in (expanded, gaps)]
    cudagraphs.copy_all(fresh, [expanded, gaps])
    assert torch.equal(fresh[0], expanded) and torch.equal(fresh[1], gaps) and fresh[0].stride() == (0,)
