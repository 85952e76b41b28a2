"""Call overhead and capture time against torch.compile with its "eager" back end, in one process and one run.

  python benchmarks/capture.py [--out benchmarks/results]

overhead   seconds of a compiled call less those of the plain call, where the graph is run by a function that returns kept
           results at once: what is left is the guards and the dispatch. Medians of interleaved rounds.
capture    seconds of the first call less those of the plain call, likewise: bytecode to graph to guards, nothing is lowered.
"""
from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import fuseline  # noqa: E402
from benchmarks.anchors import device_name, versions  # noqa: E402

Factory = Callable[[], tuple[Callable, tuple]]


def two_tensors() -> tuple[Callable, tuple]:
    return (lambda x, y: x + y), (torch.ones(4), torch.ones(4))


def resnet50() -> tuple[Callable, tuple]:
    import torchvision
    return torchvision.models.resnet50().eval(), (torch.randn(1, 3, 32, 32),)


def transformer() -> tuple[Callable, tuple]:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).eval(), (torch.randn(1, 8, 64),)


def bert12() -> tuple[Callable, tuple]:
    from transformers import BertConfig, BertModel
    config = BertConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=12, intermediate_size=128, vocab_size=100)
    model = BertModel(config).eval()
    return (lambda ids: model(ids).last_hidden_state), (torch.randint(0, 100, (1, 16)),)


OVERHEAD: dict[str, Factory] = {"two_tensors": two_tensors, "resnet50": resnet50, "transformer_24": transformer}
CAPTURE: dict[str, Factory] = {"resnet50": resnet50, "bert_12": bert12}


def keep_results(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable:
    """A back end whose program computes its results once and then hands out the same."""
    kept: list[Any] = []

    def run(*args: Any) -> Any:
        if not kept:
            kept.append(graph_module.forward(*args))
        return kept[0]
    return run


def run_graph(graph_module: torch.fx.GraphModule, inputs: Any) -> Callable:
    return graph_module.forward


def engines(backend: Callable) -> dict[str, Callable[[Callable], Callable]]:
    def ours(fn: Callable) -> Callable:
        return fuseline.compile(fn, backend=backend)

    def theirs(fn: Callable) -> Callable:
        return torch.compile(fn, backend=backend)
    return {"fuseline": ours, "torch": theirs}


def seconds_a_call(fn: Callable, args: tuple, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        fn(*args)
    return (time.perf_counter() - start) / calls


def measure_overhead(make: Factory, rounds: int = 40, calls: int = 200) -> dict[str, float]:
    """Microseconds of a call, by engine. Both engines' rounds take turns."""
    fn, args = make()
    compiled = {name: wrap(fn) for name, wrap in engines(keep_results).items()}
    for c in compiled.values():
        for _ in range(50):
            c(*args)
    times: dict[str, list[float]] = {name: [] for name in compiled}
    gc.disable()
    for _ in range(rounds):
        for name, c in compiled.items():
            times[name].append(seconds_a_call(c, args, calls))
    gc.enable()
    return {name: round(statistics.median(t) * 1e6, 2) for name, t in times.items()}


def measure_capture(make: Factory, rounds: int = 5) -> dict[str, float]:
    """Seconds of a first call less those of a plain one, by engine: the median of `rounds`, the first, which warms up, left out."""
    times: dict[str, list[float]] = {"fuseline": [], "torch": []}
    for _ in range(rounds + 1):
        for name, wrap in engines(run_graph).items():
            fuseline.reset()
            torch.compiler.reset()
            fn, args = make()
            fn(*args)
            plain = min(seconds_a_call(fn, args, 1) for _ in range(3))
            times[name].append(seconds_a_call(wrap(fn), args, 1) - plain)
    return {name: round(statistics.median(t[1:]), 4) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results"))
    a = parser.parse_args()
    rows = []
    with torch.no_grad():
        for name, make in OVERHEAD.items():
            found = measure_overhead(make)
            rows.append({"what": "overhead", "workload": name, "unit": "us", **found,
                         "ratio": round(found["fuseline"] / found["torch"], 3)})
            print(json.dumps(rows[-1]), flush=True)
        for name, make in CAPTURE.items():
            found = measure_capture(make)
            rows.append({"what": "capture", "workload": name, "unit": "s", **found,
                         "ratio": round(found["fuseline"] / found["torch"], 3)})
            print(json.dumps(rows[-1]), flush=True)
    result = {"what": "capture", "date": datetime.date.today().isoformat(), "device": device_name(), "kind": "cpu",
              "versions": versions(), "rows": rows}
    Path(a.out).mkdir(parents=True, exist_ok=True)
    path = Path(a.out) / "cpu-capture.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
