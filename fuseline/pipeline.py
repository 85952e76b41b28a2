"""The one module that imports every stage: from a frame to a compiled entry, and from a torch-level graph to a callable."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fuseline import log, passes, torch_internals
from fuseline.autodiff.partition import partition
from fuseline.backends import find_backend
from fuseline.capture.assemble import assemble
from fuseline.capture.frame import FrameStart
from fuseline.capture.interpret import interpret
from fuseline.errors import GraphBreakError, NotSupported
from fuseline.ir.entry import CompiledEntry
from fuseline.ir.fetch import describe
from fuseline.ir.graph import Graph, ScalarType, TensorType
from fuseline.ir.kernels import Extern, Launch, LoopProgram
from fuseline.ir.print import show_program
from fuseline.ir.record import CompileRecord, GraphRecord, KernelRecord
from fuseline.ir.region import Broke, CompiledGraph, GraphInput, Guard, Region, Source
from fuseline.ir.target import target_of
from fuseline.ir.traced import Partitioned, Traced
from fuseline.lower.lower import lower, pointwise_operators, supported
from fuseline.options import Options
from fuseline.report.explain import fusion_text, verbose_text
from fuseline.runtime import aot, executor, triton_compile
from fuseline.runtime.numbers import fill_numbers
from fuseline.schedule.in_place import write_in_place
from fuseline.schedule.schedule import schedule
from fuseline.trace.trace import trace

Recorder = Callable[[CompileRecord], None]
_recorders: list[Recorder] = []
_count = 0
_count_lock = threading.Lock()


@contextmanager
def observe_compilations(recorder: Recorder) -> Iterator[None]:
    """Call recorder(record) for every region compiled in the block: what `explain` is made of."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


def compile_count() -> int:
    """Regions compiled in this process since its start or `reset_count`; regions without tensor operators do not count."""
    return _count


def reset_count() -> None:
    global _count
    with _count_lock:
        _count = 0


def compile_frame(start: FrameStart, options: Options, dynamic: frozenset, resume_factory: Callable | None = None,
                  recompile_reason: str = "") -> CompiledEntry:
    """Capture the program from `start` on and compile what was captured.

    Raises CannotCapture where the frame must run eagerly, GraphBreakError for a break under `fullgraph` or strict mode.
    """
    global _count
    record = CompileRecord(*function_of(start), recompile_reason=recompile_reason)
    with record.timed("capture"):
        region = interpret(start, options, dynamic)
    log.emit("capture", lambda: f"{record.function} ({record.where}): {type(region.end).__name__.lower()}, {len(region.guards)} guards, "
                                f"{len(region.effects)} effects")
    record.guards = tuple(_guard_text(g) for g in region.guards)
    if isinstance(region.end, Broke):
        record.graph_break = region.end.reason
        log.emit("breaks", lambda: f"{region.end.reason.where}: {region.end.reason.explanation}")       # type: ignore[union-attr]
        if options.fullgraph:
            raise break_error(region.end.reason)
    compiled, guards = None, region.guards
    if region.graph is not None:
        record.operators = sum(1 for n in region.graph.graph.nodes if n.op not in ("placeholder", "output", "get_attr"))
        record.torch_graph = torch_graph_text(region.graph)
        log.emit("graph", record.torch_graph)
        compiled, size_guards = compile_region_graph(region, options, record)
        guards = (*guards, *size_guards)
    with record.timed("assemble"):
        assembled = assemble(region, compiled, resume_factory)
    if region.graph is not None:
        with _count_lock:
            _count += 1
    log.emit("guards", lambda: "\n".join(_guard_text(g) for g in guards))
    log.emit("times", lambda: f"{record.function}: " + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in record.seconds.items()))
    for recorder in list(_recorders):
        recorder(record)
    if options.verbose:
        print(verbose_text(record), flush=True)
    return CompiledEntry(tuple(guards), assembled, record)


def function_of(start: FrameStart) -> tuple[str, str]:
    """What the user calls the function that a frame runs, and "file.py:12": for a module's own `__call__`, its forward."""
    code, name = start.code, start.code.co_qualname
    module = start.arguments.get("self")
    if isinstance(module, torch.nn.Module) and name in ("Module._wrapped_call_impl", "Module._call_impl"):
        code = getattr(type(module).forward, "__code__", code)
        name = f"{type(module).__name__}.forward"
    return name, f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


def break_error(reason: Any) -> GraphBreakError:
    """The error that stands for a graph break where none is allowed."""
    return GraphBreakError(reason, reason.explanation, at=reason.where, hint=reason.remedy)


def compile_region_graph(region: Region, options: Options, record: CompileRecord) -> tuple[CompiledGraph, tuple[Guard, ...]]:
    """The compiled form of a region's graph by the chosen back end, and guards on sizes that it relies on."""
    assert region.graph is not None
    if options.backend != "fuseline":
        with record.timed("backend"):
            backend = find_backend(options.backend)
            return _flat(backend(region.graph, [i.example for i in region.inputs])), ()
    compiled, traced = compile_torch_graph(region.graph, region.inputs, region.shape_env, options, record)
    return compiled, () if traced is None else size_guards(traced, [i.source for i in region.inputs], region.guards)


def _flat(function: Callable) -> CompiledGraph:
    """Back ends may return a list, or a single value for a graph with one output."""
    def call(*inputs: Any) -> tuple:
        out = function(*inputs)
        return tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return call


def compile_torch_graph(graph_module: torch.fx.GraphModule, inputs: Sequence[GraphInput], shape_env: Any, options: Options,
                        record: CompileRecord) -> tuple[CompiledGraph, Traced | None]:
    """A callable that computes a torch-level graph through all our stages, and its trace.

    What trace refuses (NotSupported) runs as PyTorch operators, the reason in the record; then there is no trace.
    """
    if any(isinstance(i.example, torch.Tensor) and i.example.is_cuda for i in inputs):
        triton_compile.start_workers()                           # they import Triton while this process traces
    try:
        with record.timed("trace"):
            traced = trace(graph_module, [i.example for i in inputs], static=[i.static for i in inputs], shape_env=shape_env,
                           keep=supported(), grad_enabled=torch.is_grad_enabled(), eager_random=options.eager_random)
    except NotSupported as refusal:
        record.fallback = str(refusal)
        log.warn_once(f"trace {refusal}", f"a graph of {record.function} runs in eager PyTorch: {refusal}")
        return _flat(graph_module.forward), None
    inference = not traced.joint
    with record.timed("passes"):
        graph = passes.run(traced.graph, pass_context(traced.graph, inference, options))
    log.emit("aten", lambda: str(graph))
    traced = replace(traced, graph=graph)
    partitioned = None
    if traced.joint:
        with record.timed("partition"):
            partitioned = partition(traced)

    graph_pool = new_graph_pool(graph, options)
    mutations = plain_mutations(traced, partitioned)

    def compile_graph(part: Graph) -> Callable[..., tuple]:
        direction = "inference" if partitioned is None else "forward" if part is partitioned.forward else "backward"
        executable, program = compile_aten_graph(part, direction, options, record, inference=inference,
                                                 mutations=() if direction == "backward" else mutations)
        floats = tuple(i for i, n in enumerate(program.inputs) if isinstance(n, str) and not program.buffers[n].opaque
                       and isinstance(part.inputs[i].type, ScalarType))
        if graph_pool is None:
            return fill_numbers(executable, floats, program.device)
        from fuseline.runtime import cudagraphs
        outputs = range(len(part.outputs))
        saved = frozenset(i for i in outputs if direction == "forward" and i >= traced.num_forward)
        lend = frozenset(i for i in outputs if direction == "backward")
        graphed = cudagraphs.wrap_executable(executable, program, options, graph_pool, saved=saved, lend=lend)
        return fill_numbers(graphed, floats, program.device)
    # Kernels for a GPU compile in other processes: what is left of our own work goes on meanwhile.
    lazy_backward = not any(isinstance(i.example, torch.Tensor) and i.example.is_cuda for i in inputs)
    return aot.wrap(traced, partitioned, compile_graph, graph_module, lazy_backward=lazy_backward), traced


def compile_aten_graph(graph: Graph, direction: str, options: Options, record: CompileRecord, *,
                       inference: bool, mutations: Sequence[tuple[int, int]] = ()) -> tuple[Callable[..., tuple], LoopProgram]:
    """Lower, schedule and load one functional graph: what runs it, and the program that it runs.

    mutations: inputs that the graph may write in place, each with the output that is its new value (see `write_in_place`).
    """
    with record.timed("lower"):
        program = lower(graph, inference=inference and options.fold_constants)
    with record.timed("schedule"):
        program = schedule(program, target_of(program.device))
        if mutations and program.device.startswith("cuda"):
            program = write_in_place(program, mutations)
    log.emit("loops", lambda: show_program(program))
    with record.timed("codegen"):
        executable = load(program, options)
    record.graphs.append(graph_record(graph, program, direction))
    log.emit("fusion", lambda: fusion_text(record.graphs[-1]))
    log.emit("memory", lambda: f"{direction}: {len(program.plan)} temporaries share {program.arena_bytes} bytes")
    return executable, program


def plain_mutations(traced: Traced, partitioned: Partitioned | None) -> tuple[tuple[int, int], ...]:
    """The mutations (input, output) of which autograd need not know: no gradient flows through, backward reads neither value."""
    saved = set() if partitioned is None else set(partitioned.saved)
    inputs = traced.graph.inputs if partitioned is None else partitioned.forward.inputs
    return tuple((m.input, m.output) for m in traced.mutations
                 if not m.differentiable and m.output not in traced.tangents and inputs[m.input] not in saved)


def new_graph_pool(graph: Graph, options: Options) -> Any:
    """Memory shared by the CUDA graphs of a function's forward and backward; None where none are wanted."""
    device = next((n.type.device for n in (*graph.inputs, *graph.nodes) if isinstance(n.type, TensorType) and n.type.device != "cpu"), None)
    if device is None or not options.uses_cudagraphs:
        return None
    from fuseline.runtime import cudagraphs
    return cudagraphs.GraphPool(device)


def load(program: LoopProgram, options: Options) -> Callable[..., tuple]:
    """Machine code for the program's device."""
    if program.device.startswith("cuda"):
        from fuseline.runtime import cuda_executor  # triton is there only with CUDA builds of torch
        return cuda_executor.load(program, options)
    return executor.load(program, options)


def pass_context(graph: Graph, inference: bool, options: Options) -> passes.PassContext:
    devices = {n.type.device for n in (*graph.inputs, *graph.nodes) if isinstance(n.type, TensorType)}
    libraries = set()
    if any(d.startswith("cuda") for d in devices) and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled:
        libraries.add("cudnn")
    if "cpu" in devices and torch_internals.has_onednn_convolution():
        libraries.add("onednn")
    return passes.PassContext(supported(), pointwise_operators(), frozenset(libraries), inference, options.fold_constants,
                              options.channels_last)


def size_guards(traced: Traced, sources: Sequence[Source], captured: Sequence[Guard]) -> tuple[Guard, ...]:
    """Relations between sizes that the trace relies on, over the places where the sizes are found.

    captured   the guards of capture: they know the places of numbers that are no input of the graph
    """
    if not traced.guards and all(len(places) == 1 for places in traced.symbols.values()):
        return ()
    known = {name: place for guard in captured if guard.kind == "sizes" for name, place in guard.symbols}
    symbols = tuple((known | {name: (sources[places[0][0]], places[0][1]) for name, places in traced.symbols.items()}).items())
    texts = list(traced.guards)
    extra: list[tuple[str, tuple]] = []
    for name, places in traced.symbols.items():
        for number, (index, axis) in enumerate(places[1:], 1):
            alias = f"{name}_{number}"
            extra.append((alias, (sources[index], axis)))
            texts.append(f"{name} == {alias}")
    return tuple(Guard(None, "sizes", text, "", (*symbols, *extra)) for text in texts)


def graph_record(graph: Graph, program: LoopProgram, direction: str) -> GraphRecord:
    kernels = tuple(KernelRecord(s.kernel.label, s.ops, s.origins) for s in program.steps if isinstance(s, Launch))
    externs = tuple(s.op for s in program.steps if isinstance(s, Extern))
    size = program.arena_bytes if isinstance(program.arena_bytes, int) else None
    operators = sum(1 for n in graph.nodes if n.op != "getitem")
    return GraphRecord(direction, program.device, str(graph), operators, kernels, externs, len(program.hoisted),
                       tuple(str(v) for v in program.verdicts if not v), size)


def torch_graph_text(graph_module: torch.fx.GraphModule) -> str:
    """The torch-level graph, one operator a line, with the user's line of each."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        lines.append(f"{node.name} = {target}({args})".ljust(60) + f"  # {node.meta.get('origin', '')}")
    return "\n".join(lines)


def _guard_text(guard: Guard) -> str:
    where = "" if guard.source is None else f"{source_text(guard.source)} "
    value = getattr(guard.value, "__name__", None) or str(guard.value)
    return f"{guard.kind}: {where}{value if len(value) < 100 else value[:97] + '...'}" + (f"   # {guard.why}" if guard.why else "")


def source_text(source: Any) -> str:
    """A source as the user would write it."""
    kind = type(source).__name__
    if kind in ("Local", "Cell", "Global", "Builtin"):
        return source.name
    if kind in ("Attr", "InDict", "ClassDict"):
        return f"{source_text(source.base)}.{source.name}"
    if kind == "Item":
        return f"{source_text(source.base)}[{source.key!r}]"
    if kind == "TypeOf":
        return f"type({source_text(source.base)})"
    if kind == "KeyAt":
        return f"list({source_text(source.base)})[{source.index}]"
    if kind == "Computed":
        return describe(source)
    if kind == "CellOf":
        return f"{source_text(source.function)}.closure[{source.index}]"
    return f"<{kind}>"

