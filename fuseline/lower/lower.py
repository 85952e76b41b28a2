"""Graph -> LoopProgram: one small kernel, or a few, for each operator; the scheduler fuses them."""
from __future__ import annotations

from dataclasses import replace

from fuseline import torch_internals
from fuseline.errors import InternalError, LoweringError
from fuseline.ir.dtypes import F64
from fuseline.ir.expr import Expr, Sym, symbols
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType
from fuseline.ir.kernels import Buffer, Extern, Launch, LoopProgram, Output, Ref, Step, ViewOf
from fuseline.ir.verdict import Verdict
from fuseline.lower import activations, creation, extern, indexing, normalization, pointwise, pooling, reduction, shapes  # noqa: F401
from fuseline.lower.context import LOWERINGS, POINTWISE, TAKES_NUMBERS, Context
from fuseline.lower.views import RuntimeNumber, View


def supported() -> frozenset[str]:
    """The operators that become kernels of ours (or views): tracing keeps them whole."""
    return frozenset(LOWERINGS)


def pointwise_operators() -> frozenset[str]:
    """Those of `supported()` whose result's element depends on the operands' elements at the same place only."""
    return frozenset(POINTWISE)


def lower(graph: Graph, *, inference: bool = False) -> LoopProgram:
    """The loop program of a graph. Inputs and outputs keep their order.

    An operator without a lowering, or whose lowering refuses (LoweringError), becomes an Extern; a refusal is also a
    Verdict of the program. With `inference`, steps that depend on static inputs only go to `hoisted`.
    Raises InternalError for a graph that breaks the rules of its type.
    """
    context = Context()
    values: dict[Node, object] = {}
    verdicts: list[Verdict] = []
    device = next((t.device for n in (*graph.inputs, *graph.nodes) if isinstance(t := n.type, TensorType) and t.device != "cpu"), "cpu")
    inputs = tuple(_input(context, node, values, device) for node in graph.inputs)
    used = _used_results(graph)
    for node in graph.nodes:
        values[node] = _lower_node(context, node, values, used.get(node), verdicts)
    outputs = tuple(_output(context, out, values) for out in graph.outputs)
    inputs = tuple(_number_input(context, name) for name in inputs)
    hoisted, steps = _hoist(context) if inference else ((), tuple(context.steps))
    named = {name for step in context.steps for part in effects(step)[:2] for name in part}
    buffers = {name: b for name, b in context.buffers.items() if b.kind != "temp" or name in named}
    return LoopProgram(inputs, buffers, steps, outputs, _device(context), hoisted, verdicts=tuple(verdicts))


def _number_input(context: Context, name: str | Sym) -> str | Sym:
    """The input as the program has it: for a float that operators of PyTorch take, the float itself, from which kernels' memory is
    filled; for any other, 0-d memory that the caller fills."""
    number = RuntimeNumber.passed(name) if isinstance(name, str) else ""
    if number not in context.buffers:
        return name
    if any(name in part for step in context.steps for part in effects(step)[:2]):
        context.buffers[name] = replace(context.buffers[name], kind="temp")      # type: ignore[index]
        kwargs = (("device", context.buffers[name].device), ("dtype", F64))       # type: ignore[index]
        context.steps.insert(0, Extern("aten.full.default", ((), Ref(number)), kwargs, (name,)))         # type: ignore[arg-type]
    else:
        del context.buffers[name]                                                # type: ignore[arg-type]
    return number


def _input(context: Context, node: Node, values: dict[Node, object], device: str) -> str | Sym:
    if isinstance(node.type, ScalarType) and node.type.kind == "float":
        context.buffers[node.name] = Buffer(node.name, F64, (), (), device, "input")
        values[node] = RuntimeNumber(View(node.name, F64, (), (), device))
        return node.name
    if isinstance(node.type, ScalarType):
        sym = node.type.expr if isinstance(node.type.expr, Sym) else Sym(node.name)
        values[node] = sym if node.type.expr is None else node.type.expr
        return sym
    if not isinstance(node.type, TensorType):
        raise InternalError(f"input of type {node.type}", node=node)
    type_ = node.type
    name = node.name
    context.buffers[name] = Buffer(name, type_.dtype, type_.shape, type_.stride, type_.device, "input", node.static)
    values[node] = View(name, type_.dtype, type_.shape, type_.stride, type_.device)
    return name


def _used_results(graph: Graph) -> dict[Node, frozenset[int]]:
    """For nodes with several results: those that are read."""
    used: dict[Node, set[int]] = {}
    whole: set[Node] = {o for o in graph.outputs if isinstance(o, Node)}
    for node in graph.nodes:
        if node.op == "getitem":
            used.setdefault(node.args[0], set()).add(node.args[1])
        else:
            whole.update(o for o in node.operands if isinstance(o.type, tuple))
    return {n: frozenset(range(len(n.type)) if n in whole else used.get(n, ())) for n in graph.nodes if isinstance(n.type, tuple)}


def _lower_node(context: Context, node: Node, values: dict[Node, object], used: frozenset[int] | None,
                verdicts: list[Verdict]) -> object:
    if node.op == "getitem":
        return values[node.args[0]][node.args[1]]                   # type: ignore[index]
    if isinstance(node.type, ScalarType) and node.type.expr is not None:
        return node.type.expr
    context.node, context.used = node, used
    lowering = LOWERINGS.get(node.op)
    if lowering is not None:
        steps, buffers, count = len(context.steps), len(context.buffers), context.count
        try:
            args = tuple(_argument(a, values) for a in node.args)
            kwargs = {k: _argument(v, values) for k, v in node.kwargs}
            if node.op not in TAKES_NUMBERS and any(isinstance(a, RuntimeNumber) for a in (*args, *kwargs.values())):
                raise LoweringError("a number that is known at run time only")
            return lowering(context, *args, **kwargs)
        except LoweringError as refusal:
            verdicts.append(Verdict.no(refusal.what, f"{node.op} at {node.origin}" if node.origin else node.op))
            del context.steps[steps:]
            for name in list(context.buffers)[buffers:]:
                del context.buffers[name]
            context.count = count
    return extern.call(context, node, values)


def _argument(arg: object, values: dict[Node, object]) -> object:
    if isinstance(arg, Node):
        if isinstance(arg.type, ScalarType) and arg.type.expr is None and not isinstance(values[arg], RuntimeNumber):
            raise LoweringError("a number that is known at run time only")
        return values[arg]
    if isinstance(arg, (tuple, list)):
        return tuple(_argument(a, values) for a in arg)
    return arg


def _output(context: Context, out: object, values: dict[Node, object]) -> Output:
    if not isinstance(out, Node):
        return Output(out)
    value = values[out]
    if isinstance(value, RuntimeNumber):                      # what backward needs of it, the caller has
        return Output(None)
    if not isinstance(value, View):
        return Output(value)
    buffer = context.buffers[value.buffer]
    if buffer.kind == "temp":
        context.buffers[value.buffer] = replace(buffer, kind="output")
    if buffer.opaque or (value.offset == 0 and value.shape == buffer.shape and value.stride == buffer.stride):
        return Output(value.buffer)
    return Output(value.buffer, value.shape, value.stride, value.offset)


def _device(context: Context) -> str:
    """Where the program runs: the accelerator, if any buffer is there."""
    return next((b.device for b in context.buffers.values() if b.device != "cpu"), "cpu")


# ---------------------------------------------------------------- hoisting

def _hoist(context: Context) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """(hoisted, the rest): a step is hoisted if all it reads is static and its results are nobody's but ours."""
    static = {b.name for b in context.buffers.values() if b.static}
    hoisted, rest = [], []
    for step in context.steps:
        reads, writes, sizes = effects(step)
        ours = all(context.buffers[w].kind == "temp" for w in writes)
        repeatable = not isinstance(step, Extern) or not torch_internals.is_effectful(step.op)
        if reads and reads <= static and ours and not sizes and repeatable:
            static |= writes
            hoisted.append(step)
        else:
            rest.append(step)
    return tuple(hoisted), tuple(rest)


def effects(step: Step) -> tuple[set[str], set[str], bool]:
    """(buffers read, buffers written, whether run-time sizes matter)."""
    if isinstance(step, Launch):
        pairs = list(zip(step.kernel.params, step.buffers))
        return {b for p, b in pairs if not p.writes}, {b for p, b in pairs if p.writes}, bool(step.kernel.sizes)
    reads: set[str] = set()
    sizes = _collect((step.args, tuple(v for _, v in step.kwargs)), reads)
    return reads, {o for o in step.outs if o is not None}, sizes


def _collect(arg: object, reads: set[str]) -> bool:
    """Gather the buffers that an Extern's argument names; True if it has a run-time size."""
    if isinstance(arg, Ref):
        reads.add(arg.buffer)
    elif isinstance(arg, ViewOf):
        reads.add(arg.buffer)
        return any(symbols(e) for e in (*arg.shape, *arg.stride, arg.offset))
    elif isinstance(arg, Expr):
        return True
    elif isinstance(arg, tuple):
        return any([_collect(a, reads) for a in arg])
    return False
