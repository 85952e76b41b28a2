"""Everything about CUDA on a real device: generated kernels, launches, graphs. Skipped where there is none."""
from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseline.ir import interp
from fuseline.options import Options

pytestmark = pytest.mark.gpu
HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
DEFAULT, GRAPHS = Options(), Options(mode="reduce-overhead")


def same(ours: Any, eager: Any, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance`, relative to the largest element."""
    assert ours.dtype == eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride(), (ours.stride(), eager.stride())
    scale = max(eager.double().abs().max().item(), 1e-3) if eager.numel() else 1.0
    difference = (ours.double() - eager.double()).abs().max().item() / scale if eager.numel() else 0.0
    assert difference <= tolerance, f"differs by {difference:.2e} of {scale:.2e}"


def test_kernels_compute_what_the_loop_interpreter_does() -> None:
    """All cases of the interpreter tests, compiled together and run on the device."""
    from fuseline.codegen.triton import compile as codegen
    from fuseline.codegen.triton.emit import Specialisation
    from fuseline.codegen.triton.tiling import blocks, choose, value
    from fuseline.runtime.cuda_executor import platform_of
    spec = importlib.util.spec_from_file_location("cases", HERE.parents[1] / "tests/codegen/triton/interpreted_kernels.py")
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    jobs: list[tuple] = []

    def collect(kernel: Any, buffers: Any, sizes: Any = None, tiling: Any = None, wide: bool = False, rtol: float = 1e-6,
                atol: float = 1e-6) -> None:
        jobs.append((kernel, [b.clone() for b in buffers], sizes or {}, tiling, wide, rtol, atol))

    cases.check = collect
    for op, dtype in cases.CASES:
        cases.test_every_operation(op, dtype)
    kinds = [cases.F16, cases.BF16, cases.F32, cases.F64, cases.I8, cases.U8, cases.I32, cases.I64, cases.BOOL]
    for source in kinds:
        for target in kinds:
            cases.test_conversions(source, target)
    for case in cases.REDUCTIONS:
        for tiling in cases.TILINGS:
            cases.test_every_reduction(*case, tiling)
    for wide in (False, True):
        cases.test_symbolic_sizes((16, 32), wide)
        cases.test_symbolic_sizes((3, 7), wide)
    for dtype in (cases.F32, cases.F16, cases.BF16):
        cases.test_values_of_earlier_phases_are_kept_or_computed_again(dtype)
    for test in (cases.test_gather_mask_and_scatter_add, cases.test_transpose_uses_square_tiles,
                 cases.test_index_values_divisions_and_negative_numerators, cases.test_a_single_point_and_no_axes,
                 cases.test_random_kernels):
        test()
    platform = platform_of("cuda:0")
    pending = []
    for kernel, buffers, sizes, tiling, wide, _, _ in jobs:
        values = [sizes[s.name] for s in kernel.sizes]
        tiling = tiling or choose(kernel, sizes)
        special = Specialisation((True,) * len(buffers), tuple(n % 16 == 0 for n in values), wide)
        x, y = (value(n, sizes) for n in blocks(kernel, tiling))
        source = codegen.source_of(kernel, tiling, special)
        pending.append((source, platform.compile(source), -(-x // tiling.x) * -(-y // max(tiling.y, 1)), values))
    wrong = []
    for (kernel, buffers, sizes, _, _, rtol, atol), (source, future, grid, values) in zip(jobs, pending):
        reference = [b.clone() for b in buffers]
        interp.run_kernel(kernel, reference, sizes)
        ours = [b.cuda() for b in buffers]
        launch = platform.prepare(source, future.result(), grid, len(buffers) + len(values))
        launch(platform.stream(), *(b.data_ptr() for b in ours), *values)
        for a, b in zip(ours, reference):
            f32 = b.dtype in (torch.float32, torch.float64)
            try:
                torch.testing.assert_close(a.cpu(), b, rtol=max(rtol, 4e-6 if f32 else rtol), atol=max(atol, 1e-6), equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{error}\n{source.text}")
    assert not wrong, f"{len(wrong)} of {len(jobs)} kernels\n" + "\n".join(wrong[:12])


def check(fn: Any, inputs: list, tolerance: float = 1e-5, options: Options = DEFAULT, kernels: int | None = None, calls: int = 1) -> Any:
    from cuda_programs import compiled
    run = compiled(fn, inputs, options=options, inference=not any(x.requires_grad for x in inputs))
    expected = fn(*inputs)
    for _ in range(calls):
        (ours,) = run(*inputs)
        same(ours, expected, tolerance)
    if kernels is not None:
        assert len(run.made[0][1].steps) == kernels
    return run


def test_pointwise_chain_is_one_kernel() -> None:
    def fn(x: Any, y: Any) -> Any:
        return F.gelu(x * 1.5 + y) * torch.sigmoid(y) + torch.tanh(x)
    for n in (1, 1000, 1 << 20, 64 << 20):
        check(fn, [torch.randn(n, device="cuda"), torch.randn(n, device="cuda")], kernels=1)
    base = torch.randn(1025, device="cuda")
    check(fn, [base[1:], base[:1024]])                        # an address that is no multiple of 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norm_softmax_is_one_kernel(dtype: torch.dtype) -> None:
    def fn(x: Any, w: Any, b: Any) -> Any:
        return torch.softmax(F.layer_norm(x, (x.shape[-1],), w, b) * 0.5, -1) * x
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for rows, columns in ((16384, 4096), (33, 100), (7, 20000)):
        inputs = [torch.randn(rows, columns, device="cuda", dtype=dtype), torch.randn(columns, device="cuda", dtype=dtype),
                  torch.randn(columns, device="cuda", dtype=dtype)]
        check(fn, inputs, tolerance, kernels=1 if columns == 4096 else None)


@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_training(channels_last: bool) -> None:
    from cuda_programs import compiled, of_module
    for shape in ((32, 64, 56, 56), (8, 48, 7, 7)):
        model = torch.nn.BatchNorm2d(shape[1]).cuda()
        x = torch.randn(shape, device="cuda")
        x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
        fn, held = of_module(model, lambda out: F.relu(out).square().mean())
        run = compiled(fn, [*held, x], [True] * len(held) + [False])
        state = [t.clone() for t in held]
        expected = fn(*held, x)
        grads = torch.autograd.grad(expected, [x, *model.parameters()])
        eager = [t.clone() for t in held]
        with torch.no_grad():
            for t, s in zip(held, state):
                t.copy_(s)
        (ours,) = run(*held, x)
        same(ours, expected)
        for a, b in zip(torch.autograd.grad(ours, [x, *model.parameters()]), grads):
            same(a, b, 1e-4)
        for a, b in zip(held, eager):
            same(a, b)


class Net(torch.nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16)
        self.first, self.second = torch.nn.Linear(16 * 64, 64), torch.nn.Linear(64, 10)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.second(self.dropout(F.gelu(self.first(F.max_pool2d(x, 2).flatten(1)))))


def test_training_with_cuda_graphs_is_as_without() -> None:
    from cuda_programs import compiled, of_module
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = Net().cuda()
    fn, held = of_module(model, F.cross_entropy)
    parameters = list(model.parameters())
    batches = [(torch.randn(16, 3, 16, 16, device="cuda"), torch.randint(0, 10, (16,), device="cuda")) for _ in range(8)]
    start = [t.detach().clone() for t in held]

    def train(step: Any) -> tuple[list, list]:
        with torch.no_grad():
            for t, s in zip(held, start):
                t.copy_(s)
        losses = []
        for number, (x, y) in enumerate(batches):
            loss = step(x, y)
            loss.backward()
            losses.append(loss.detach())                      # held over later replays
            if number % 2:                                    # gradients of two steps accumulate
                with torch.no_grad():
                    for p in parameters:
                        p -= 0.05 * p.grad
                        p.grad = None
        return losses, [t.detach().clone() for t in held]

    eager = train(lambda x, y: fn(*held, x, y))
    run = compiled(fn, [*held, *batches[0]], [True] * len(held) + [False] * 2, GRAPHS)
    ours = train(lambda x, y: run(*held, x, y)[0])
    for a, b in zip([*ours[0], *ours[1]], [*eager[0], *eager[1]]):
        same(a, b, 2e-3)
    forward, backward = (w for w, _ in run.made)
    assert forward.verdict and backward.verdict, (forward.verdict, backward.verdict)
    assert forward.replays >= 6 and backward.replays >= 2, (forward.replays, backward.replays)
    # Two forwards before their backwards.
    (a,), (b,) = run(*held, *batches[0]), run(*held, *batches[1])
    expected = torch.autograd.grad(fn(*held, *batches[0]), parameters)
    for g, e in zip(torch.autograd.grad(a, parameters), expected):
        same(g, e, 2e-3)
    assert b.item() == b.item()


def test_dropout_differs_between_replays() -> None:
    from cuda_programs import compiled, of_module
    model = Net(0.5).cuda()
    fn, held = of_module(model, lambda out: out.sum())
    x = torch.randn(16, 3, 16, 16, device="cuda")
    run = compiled(fn, [*held, x], [True] * len(held) + [False], GRAPHS)
    seen = set()
    for _ in range(6):
        (loss,) = run(*held, x)
        loss.backward()
        seen.add(round(loss.item(), 4))
        for p in model.parameters():
            p.grad = None
    assert len(seen) == 6
    assert run.made[0][0].replays > 2, run.made[0][0].verdict


def test_inference_with_cuda_graphs_notices_changed_parameters() -> None:
    from cuda_programs import compiled, of_module
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = Net().cuda().eval()
    fn, held = of_module(model, lambda out: out)
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.no_grad():
        run = compiled(fn, [*held, x], [True] * len(held) + [False], GRAPHS, inference=True)
        kept = []
        for k in range(6):
            if k == 4:
                model.norm.weight.mul_(1.5)
                model.conv.weight.mul_(0.5)
            x = torch.randn(4, 3, 16, 16, device="cuda")
            kept.append((run(*held, x)[0], fn(*held, x)))
    for ours, eager in kept:
        same(ours, eager, 1e-4)
    assert run.made[0][0].replays >= 3, run.made[0][0].verdict


def test_resnet18_training_matches_eager() -> None:
    torchvision = pytest.importorskip("torchvision")
    from cuda_programs import compiled, of_module
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = torchvision.models.resnet18().cuda()
    fn, held = of_module(model, F.cross_entropy)
    x, y = torch.randn(8, 3, 96, 96, device="cuda"), torch.randint(0, 1000, (8,), device="cuda")
    parameters = list(model.parameters())
    run = compiled(fn, [*held, x, y], [True] * len(held) + [False] * 2, GRAPHS)
    expected = fn(*held, x, y)
    grads = torch.autograd.grad(expected, parameters)
    for _ in range(4):
        (loss,) = run(*held, x, y)
        same(loss, expected, 1e-4)
        ours = torch.autograd.grad(loss, parameters)
        for a, b in zip(ours, grads):
            assert (a - b).norm() <= 2e-2 * b.norm() + 1e-5, ((a - b).norm() / b.norm()).item()
        del ours, loss, a
