"""Times the generated GPU kernels against copies of the same number of bytes, launches, and whole models. Run it on the GPU machine:

    PYTHONPATH=. python benchmarks/gpu_kernels.py [kernels] [tiles] [launch] [models]
"""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, "tests/runtime")
from cuda_programs import compiled, of_module  # noqa: E402

from fuseline.codegen.triton import compile as codegen  # noqa: E402
from fuseline.codegen.triton.emit import Specialisation  # noqa: E402
from fuseline.codegen.triton.tiling import Tiling, blocks, choose, value  # noqa: E402
from fuseline.ir.kernels import Launch  # noqa: E402
from fuseline.options import Options  # noqa: E402
from fuseline.runtime.cuda_executor import platform_of  # noqa: E402


def milliseconds(run: Callable[[], Any], repeat: int = 20) -> float:
    """Median time of one call on the device."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def wall(run: Callable[[], Any], repeat: int = 30) -> float:
    """Median wall time of one call, the device's work included, in ms."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def report(name: str, ms: float, nbytes: float) -> None:
    print(f"{name:58s} {ms:9.4f} ms {nbytes / ms / 1e9:7.3f} TB/s", flush=True)


def programs() -> dict[str, tuple[Callable, list, float]]:
    """name -> (function, inputs, bytes that it must move)."""
    n = 64 << 20
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    rows = torch.randn(16384, 4096, device="cuda")
    w, b = torch.randn(4096, device="cuda"), torch.randn(4096, device="cuda")
    image = torch.randn(32, 256, 56, 56, device="cuda").to(memory_format=torch.channels_last)
    return {
        "copy 64M": (lambda x: x.clone(), [x], 8 * n),
        "pointwise 64M": (lambda x, y: F.gelu(x * 1.5 + y) * torch.sigmoid(y) + torch.tanh(x), [x, y], 12 * n),
        "norm softmax 16384x4096": (lambda x, w, b: torch.softmax(F.layer_norm(x, (4096,), w, b) * 0.5, -1) * x, [rows, w, b], 8 * n),
        "sum rows 16384x4096": (lambda x: x.sum(1), [rows], 4 * n),
        "sum columns 16384x4096": (lambda x: x.sum(0), [rows], 4 * n),
        "sum all 64M": (lambda x: x.sum(), [x], 4 * n),
        "transpose 16384x4096": (lambda x: x.t().contiguous(), [rows], 8 * n),
        "bn statistics NHWC 32x256x56x56": (lambda x: torch.var_mean(x, (0, 2, 3)), [image], 4 * image.numel()),
        "bn statistics NCHW": (lambda x: torch.var_mean(x, (0, 2, 3)), [image.contiguous()], 4 * image.numel()),
    }


def time_kernels() -> None:
    for name, (fn, inputs, nbytes) in programs().items():
        run = compiled(fn, inputs, inference=True)
        report(f"fuseline {name} ({len(run.made[0][1].steps)} kernels)", milliseconds(lambda: run(*inputs)), nbytes)
        report(f"eager    {name}", milliseconds(lambda: fn(*inputs)), nbytes)


def time_tiles() -> None:
    """Each kernel of the programs above under other tilings."""
    platform = platform_of("cuda:0")
    for name, (fn, inputs, nbytes) in programs().items():
        run = compiled(fn, inputs, inference=True)
        program = run.made[0][1]
        step = next(s for s in program.steps if isinstance(s, Launch))
        kernel = step.kernel
        default = choose(kernel)
        variants = {default}
        if default.y:
            shapes = ((32, 32, 4), (64, 64, 8), (64, 32, 8), (128, 32, 8), (32, 64, 4))
            variants |= {Tiling(a, b, x_axes=1, num_warps=w) for a, b, w in shapes}
        elif not any(p.axes for p in kernel.phases):
            sizes = ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 4), (4096, 8))
            variants |= {Tiling(a, x_axes=len(kernel.axes), num_warps=w) for a, w in sizes}
        elif default.persistent:
            variants |= {Tiling(default.x * m, x_axes=len(kernel.axes), persistent=True, num_warps=w) for m in (1, 2) for w in (4, 8, 16)}
        else:
            variants |= {Tiling(a, r=r, x_axes=len(kernel.axes), num_warps=w) for a in (1, 8, 16, 32, 64)
                         for r in (32, 64, 128, 256, 512, 2048) for w in (8, 16) if 1024 <= a * r <= 8192 and (default.x > 1) == (a > 1)}
        tensors = []
        for buffer in (program.buffers[b] for b in step.buffers):
            span = 1 + sum((s - 1) * t for s, t in zip(buffer.shape, buffer.stride))
            tensors.append(torch.randn(span, device="cuda"))
        todo = []
        for tiling in sorted(variants, key=str):
            source = codegen.source_of(kernel, tiling, Specialisation((True,) * len(tensors), ()))
            x, y = (value(n, {}) for n in blocks(kernel, tiling))
            todo.append((tiling, source, platform.compile(source), -(-x // tiling.x) * -(-y // max(1, tiling.y))))
        results = []
        for tiling, source, future, grid in todo:
            launch = platform.prepare(source, future.result(), grid, len(tensors))
            stream, addresses = platform.stream(), [t.data_ptr() for t in tensors]
            results.append((milliseconds(lambda: launch(stream, *addresses), 10), tiling, grid, platform.load(future.result()).registers))
        for ms, tiling, grid, registers in sorted(results, key=lambda r: r[0])[:4] + [r for r in results if r[1] == default]:
            mark = "*" if tiling == default else " "
            report(f"{mark} {name[:24]} x{tiling.x} y{tiling.y} r{tiling.r} w{tiling.num_warps} grid {grid} reg {registers}", ms, nbytes)


def time_launch() -> None:
    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")

    def fn(x: Any, y: Any) -> Any:
        return F.gelu(x * 1.5 + y) * torch.sigmoid(y) + torch.tanh(x)
    run = compiled(fn, [x, y], inference=True)
    executable = run.made[0][0]
    for name, call in (("tiny pointwise, executable", lambda: executable(x, y)), ("tiny pointwise, eager", lambda: fn(x, y)),
                       ("torch.empty_strided", lambda: torch.empty_strided((1024,), (1,), dtype=torch.float32, device="cuda"))):
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        print(f"{name:58s} {spent / 500 * 1e6:9.2f} us", flush=True)


def time_models() -> None:
    import torchvision
    for name, batch in (("resnet50", 32),):
        model = getattr(torchvision.models, name)().cuda()
        fn, held = of_module(model, F.cross_entropy)
        x, y = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (batch,), device="cuda")

        def step(run: Callable) -> None:
            loss = run(*held, x, y)
            (loss[0] if isinstance(loss, tuple) else loss).backward()
            for p in model.parameters():
                p.grad = None
        print(f"{name} train batch {batch}, forward and backward: eager {wall(lambda: step(fn), 10):.2f} ms", flush=True)
        for mode in ("default", "reduce-overhead"):
            start = time.perf_counter()
            run = compiled(fn, [*held, x, y], [True] * len(held) + [False] * 2, Options(mode=mode))
            traced = time.perf_counter()
            step(run)
            torch.cuda.synchronize()
            first = time.perf_counter()
            steady = wall(lambda: step(run), 10)
            print(f"  {mode}: stages {traced - start:.2f} s, first step {first - traced:.2f} s, steady {steady:.2f} ms; "
                  + ", ".join(f"{len(p.steps)} steps" for _, p in run.made), flush=True)
            if mode == "reduce-overhead":
                print("  ", [(w.replays, w.plain, str(w.verdict)) for w, _ in run.made if hasattr(w, "replays")], flush=True)
            else:
                profile(lambda: step(run))
    model = torchvision.models.resnet18().cuda().eval()
    fn, held = of_module(model, lambda out: out)
    x = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.no_grad():
        print(f"resnet18 infer batch 1: eager {wall(lambda: fn(*held, x)):.3f} ms", flush=True)
        for mode in ("default", "reduce-overhead"):
            start = time.perf_counter()
            run = compiled(fn, [*held, x], [True] * len(held) + [False], Options(mode=mode), inference=True)
            run(*held, x)
            torch.cuda.synchronize()
            print(f"  {mode}: first call {time.perf_counter() - start:.2f} s, steady {wall(lambda: run(*held, x)):.3f} ms, "
                  f"{len(run.made[0][1].steps)} steps", flush=True)


def profile(run: Callable[[], Any], rows: int = 22) -> None:
    """Where the device's time goes."""
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    total = sum(e.self_device_time_total for e in events)
    ours = sum(e.self_device_time_total for e in events if e.key.startswith("fl_"))
    print(f"  device time {total / 1e3:.3f} ms, of which generated kernels {ours / 1e3:.3f} ms", flush=True)
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:rows]:
        print(f"    {event.self_device_time_total / 1e3:8.3f} ms {event.count:4d} x {event.key[:90]}", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["kernels", "tiles", "launch", "models"]
    for part in wanted:
        {"kernels": time_kernels, "tiles": time_tiles, "launch": time_launch, "models": time_models}[part]()
