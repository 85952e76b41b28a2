"""From a function to what runs it on the GPU, through every stage but capture: for tests and measurements."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fuseline import passes
from fuseline.autodiff.partition import partition
from fuseline.ir.target import target_of
from fuseline.lower.lower import lower, pointwise_operators, supported
from fuseline.options import Options
from fuseline.runtime import aot, cuda_executor
from fuseline.runtime.cudagraphs import GraphPool, wrap_executable
from fuseline.schedule.schedule import schedule
from fuseline.trace.trace import trace

DEFAULT = Options()


def as_graph(fn: Callable, count: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]

    def listed(*args: Any) -> list:
        result = fn(*args)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    call = graph.call_function(listed, tuple(inputs))
    call.meta["origin"] = "program.py:1"
    graph.output(call)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def compiled(fn: Callable, inputs: Sequence[Any], static: Sequence[bool] | None = None, options: Options = DEFAULT,
             inference: bool = False, channels_last: bool | None = None) -> Callable[..., tuple]:
    """A callable with fn's inputs that returns a tuple. `made` on it lists the executables and their programs."""
    module = as_graph(fn, len(inputs))
    traced = trace(module, inputs, static=static, keep=supported(), grad_enabled=not inference)
    context = passes.PassContext(supported(), pointwise_operators(), frozenset(["cudnn"]), not traced.joint, True, channels_last)
    traced = replace(traced, graph=passes.run(traced.graph, context))
    parts = partition(traced) if traced.joint else None
    device = next(x.device for x in inputs if isinstance(x, torch.Tensor))
    pool = GraphPool(device) if options.uses_cudagraphs else None
    made = []

    def compile_graph(graph: Any) -> Any:
        program = lower(graph, inference=not traced.joint)
        program = schedule(program, target_of(program.device))
        executable = cuda_executor.load(program, options)
        places = range(len(graph.outputs))
        forward = parts is not None and graph is parts.forward
        saved = frozenset(i for i in places if forward and i >= traced.num_forward)
        lend = frozenset(places) if parts is not None and not forward else frozenset()
        wrapped = wrap_executable(executable, program, options, pool, saved=saved, lend=lend)
        made.append((wrapped, program))
        return wrapped

    run = aot.wrap(traced, parts, compile_graph, module, lazy_backward=False)

    def call(*args: Any) -> tuple:
        return run(*args)

    call.made = made                                          # type: ignore[attr-defined]
    return call


def of_module(model: torch.nn.Module, loss: Callable) -> tuple[Callable, list[torch.Tensor]]:
    """fn(*parameters and buffers, x, *more) -> loss(model(x), *more), and the parameters and buffers."""
    held = [*model.named_parameters(), *model.named_buffers()]
    names = [n for n, _ in held]

    def fn(*args: Any) -> Any:
        values, rest = args[:len(names)], args[len(names):]
        return loss(torch.func.functional_call(model, dict(zip(names, values)), tuple(rest[:1])), *rest[1:])
    return fn, [t for _, t in held]
