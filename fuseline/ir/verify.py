"""The rules of Graph, Kernel and LoopProgram, checked. Each function returns nothing and raises VerifyError at a breach."""
from __future__ import annotations

from collections.abc import Iterator

from fuseline.errors import VerifyError
from fuseline.ir.dtypes import BF16, BOOL, F16, DType
from fuseline.ir.expr import Int, Sym, nonnegative, substitute, symbols
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType, Type, show_arg
from fuseline.ir.kernels import (
    Buffer,
    Extern,
    Index,
    Kernel,
    Launch,
    Load,
    LoopProgram,
    Op,
    Phase,
    Reduce,
    Stmt,
    Store,
)
from fuseline.ir.ops import OPS, REDUCTIONS
from fuseline.ir.print import show_extern, show_stmt
from fuseline.ir.steps import reads, writes

# ---------------------------------------------------------------- graphs


def verify_graph(graph: Graph, after: str = "") -> None:
    """Names are unique, nodes read only what is above them, shapes and strides match, size symbols come from inputs."""
    seen: dict[str, Node] = {}
    known: set[Sym] = set()
    for node in graph.inputs:
        known |= _type_symbols(node.type)
    for node in (*graph.inputs, *graph.nodes):
        where = f"after {after}: " if after else ""
        if node.name in seen:
            raise VerifyError(f"{where}the name %{node.name} is used twice", at=node.origin, node=node)
        for operand in node.operands:
            if seen.get(operand.name) is not operand:
                raise VerifyError(f"{where}%{operand.name} is read but is not a node above", at=node.origin, node=node)
        for t in _tensor_types(node.type):
            if len(t.shape) != len(t.stride):
                raise VerifyError(f"{where}{len(t.shape)} sizes and {len(t.stride)} strides", at=node.origin, node=node)
            if any(isinstance(s, int) and s < 0 for s in t.shape):
                raise VerifyError(f"{where}a negative size", at=node.origin, node=node)
        # A type may contain unbacked symbols that its own node defines; all others are sizes of inputs.
        if node.op != "input" and isinstance(node.type, ScalarType) and isinstance(node.type.expr, Sym):
            known.add(node.type.expr)
        unknown = _type_symbols(node.type) - known
        if unknown:
            names = ", ".join(sorted(s.name for s in unknown))
            raise VerifyError(f"{where}the size {names} is not the size of any input's axis", at=node.origin, node=node)
        seen[node.name] = node
    for output in graph.outputs:
        for node in _nodes(output):
            if seen.get(node.name) is not node:
                raise VerifyError(f"the output {show_arg(output)} is not a node of the graph")


def _nodes(arg: object) -> Iterator[Node]:
    if isinstance(arg, Node):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for a in arg:
            yield from _nodes(a)


def _tensor_types(type_: Type) -> Iterator[TensorType]:
    if isinstance(type_, TensorType):
        yield type_
    elif isinstance(type_, tuple):
        for t in type_:
            yield from _tensor_types(t)


def _type_symbols(type_: Type) -> set[Sym]:
    found: set[Sym] = set()
    if isinstance(type_, ScalarType) and type_.expr is not None:
        found |= symbols(type_.expr)
    for t in _tensor_types(type_):
        for size in (*t.shape, *t.stride):
            found |= symbols(size)
    return found


# ---------------------------------------------------------------- kernels

def verify_kernel(kernel: Kernel) -> None:
    """SSA, known names, types of operations, visibility of values across phases, no read of what the kernel has stored.

    A load after a store to the same param must have the store's index and mask (the code generator may forward it);
    any other would depend on the order of points.
    """
    def wrong(what: str, stmt: Stmt | None = None) -> VerifyError:
        return VerifyError(f"kernel {kernel.label}: {what}", node=None if stmt is None else show_stmt(stmt))

    params = {p.name: p for p in kernel.params}
    if len(params) != len(kernel.params):
        raise wrong("two params have one name")
    outer = [a.sym for a in kernel.axes]
    for phase in kernel.phases:
        names = outer + [a.sym for a in phase.axes]
        if len(set(names)) != len(names) or set(names) & set(kernel.sizes):
            raise wrong(f"axes and sizes need different names: {', '.join(s.name for s in names)}")
        for axis in (*kernel.axes, *phase.axes):
            if not symbols(axis.extent) <= set(kernel.sizes):
                raise wrong(f"the extent {axis.extent} of {axis.sym} is not made of the kernel's sizes")
            if axis.sym.extent != axis.extent:
                raise wrong(f"the symbol {axis.sym} has range {axis.sym.extent}, its axis {axis.extent}")
    dtypes: dict[str, DType] = {}
    scope: dict[str, tuple | None] = {}                    # name -> inner axes it varies over; None: of the outer point
    stored: dict[str, set[tuple[Int, str | None]]] = {}
    for phase in kernel.phases:
        visible = set(outer) | {a.sym for a in phase.axes} | set(kernel.sizes)

        def check_value(value: object, stmt: Stmt, phase: Phase = phase) -> None:
            if not isinstance(value, str):
                return
            if value not in dtypes:
                raise wrong(f"{value} is read before it is defined", stmt)
            if scope[value] is not None and scope[value] != phase.axes:
                raise wrong(f"{value} varies over inner axes that this phase does not have", stmt)

        def check_index(e: Int, stmt: Stmt, visible: set[Sym] = visible) -> None:
            for sym in symbols(e) - visible:
                if sym.name not in dtypes:
                    raise wrong(f"the index has the unknown symbol {sym}", stmt)
                check_value(sym.name, stmt)
                if not dtypes[sym.name].is_integer:
                    raise wrong(f"the index reads {sym}, which is not an integer", stmt)

        for stmt in phase.body:
            if isinstance(stmt, (Load, Store)):
                if stmt.buffer not in params:
                    raise wrong(f"{stmt.buffer} is not a param", stmt)
                check_index(stmt.index, stmt)
                if stmt.mask is not None:
                    check_value(stmt.mask, stmt)
                    if dtypes[stmt.mask] != BOOL:
                        raise wrong("the mask is not a b1", stmt)
            if isinstance(stmt, Load):
                if stmt.dtype.compute != params[stmt.buffer].dtype.compute:
                    raise wrong(f"a load from {params[stmt.buffer].dtype} gives {params[stmt.buffer].dtype.compute}", stmt)
                if stmt.buffer in stored and stored[stmt.buffer] != {(stmt.index, stmt.mask)}:
                    raise wrong("it reads what other points of the kernel may have stored", stmt)
                check_value(stmt.other, stmt)
            elif isinstance(stmt, Store):
                if not params[stmt.buffer].writes:
                    raise wrong(f"{stmt.buffer} is not marked as written", stmt)
                check_value(stmt.value, stmt)
                stored.setdefault(stmt.buffer, set()).add((stmt.index, stmt.mask))
            elif isinstance(stmt, Index):
                check_index(stmt.expr, stmt)
            elif isinstance(stmt, Op):
                for a in stmt.args:
                    check_value(a, stmt)
                _check_op(stmt, dtypes, wrong)
            elif isinstance(stmt, Reduce):
                if stmt.op not in REDUCTIONS:
                    raise wrong("unknown reduction", stmt)
                for a in stmt.args:
                    check_value(a, stmt)
                count = 3 if stmt.op == "welford_combine" else 1
                if len(stmt.args) != count or len(stmt.names) != (2 if stmt.op.startswith("welford") else 1):
                    raise wrong("wrong number of arguments or results", stmt)
            else:
                raise wrong(f"not a statement: {stmt!r}")
            new = stmt.names if isinstance(stmt, Reduce) else () if isinstance(stmt, Store) else (stmt.name,)
            for name in new:
                if name in dtypes:
                    raise wrong(f"{name} is defined twice", stmt)
                if stmt.dtype in (F16, BF16) and not isinstance(stmt, Load):   # type: ignore[union-attr]
                    raise wrong("values are of compute types; half types exist in memory only", stmt)
                dtypes[name] = stmt.dtype.compute          # type: ignore[union-attr]
                scope[name] = None if isinstance(stmt, Reduce) or not phase.axes else phase.axes


def _check_op(stmt: Op, dtypes: dict[str, DType], wrong) -> None:
    op = OPS.get(stmt.op)
    if op is None:
        raise wrong("unknown operation", stmt)
    if len(stmt.args) != op.arity:
        raise wrong(f"{stmt.op} takes {op.arity} arguments", stmt)
    if stmt.op == "cast":
        return
    common = [dtypes[a] for a in (stmt.args[1:] if stmt.op == "where" else stmt.args) if isinstance(a, str)]
    if stmt.op == "where" and isinstance(stmt.args[0], str) and dtypes[stmt.args[0]] != BOOL:
        raise wrong("the condition of where is not a b1", stmt)
    if any(d != common[0] for d in common):
        raise wrong(f"arguments of several types: {', '.join(map(str, common))}", stmt)
    if op.result == "b1" and stmt.dtype != BOOL:
        raise wrong("a comparison gives b1", stmt)
    if op.result == "same" and common and stmt.dtype != common[0]:
        raise wrong(f"{stmt.op} of {common[0]} gives {common[0]}", stmt)
    if common:
        kind = "f" if common[0].is_float else "b" if common[0] == BOOL else "i"
        if kind not in op.kinds:
            raise wrong(f"{stmt.op} does not take {common[0]}", stmt)


# ---------------------------------------------------------------- programs

def storage_extent(buffer: Buffer) -> Int:
    """Elements from the first to one past the last, for a buffer of at least one element; 0 if a size is the number 0."""
    if any(isinstance(s, int) and s == 0 for s in buffer.shape):
        return 0
    total: Int = 1
    for size, stride in zip(buffer.shape, buffer.stride):
        total = total + (size - 1) * stride
    return total


def verify_program(program: LoopProgram) -> None:
    """Every kernel verifies; steps read only what inputs, constants or earlier steps gave; types of buffers and params
    agree; indices of unmasked accesses are not provably outside of their buffer; the memory plan's live ranges are disjoint.
    """
    available = {i for i in program.inputs if isinstance(i, str)}
    for name, buffer in program.buffers.items():
        if name != buffer.name:
            raise VerifyError(f"buffer {buffer.name} is filed under {name}")
        if buffer.kind not in ("input", "output", "temp", "constant"):
            raise VerifyError(f"buffer {name} has the unknown kind {buffer.kind}")
        if len(buffer.shape) != len(buffer.stride):
            raise VerifyError(f"buffer {name} has {len(buffer.shape)} sizes and {len(buffer.stride)} strides")
        if buffer.kind == "constant":
            available.add(name)
    unknown = available - set(program.buffers)
    if unknown:
        raise VerifyError(f"the inputs {', '.join(sorted(unknown))} are not buffers")
    checked: set[Kernel] = set()
    for step in (*program.hoisted, *program.steps):
        for name in (*reads(step), *writes(step)):
            if name not in program.buffers:
                raise VerifyError(f"a step uses {name}, which is not a buffer", node=_show(step))
        for name in reads(step):
            if name not in available and not (isinstance(step, Launch) and name in writes(step)):
                raise VerifyError(f"buffer {name} is read before a step writes it", node=_show(step))
        if isinstance(step, Launch):
            if len(step.buffers) != len(step.kernel.params):
                raise VerifyError(f"{len(step.buffers)} buffers for {len(step.kernel.params)} params", node=_show(step))
            for name, param in zip(step.buffers, step.kernel.params):
                buffer = program.buffers[name]
                if buffer.dtype != param.dtype:
                    raise VerifyError(f"buffer {name} is {buffer.dtype}, its param {param.name} {param.dtype}", node=_show(step))
                if buffer.opaque:
                    raise VerifyError(f"a kernel addresses the opaque buffer {name}", node=_show(step))
            written = [b for b, p in zip(step.buffers, step.kernel.params) if p.writes]
            if any(step.buffers.count(b) > 1 for b in written):
                raise VerifyError("a buffer that is written stands for two params", node=_show(step))
            if step.kernel not in checked:
                verify_kernel(step.kernel)
                checked.add(step.kernel)
            _check_ranges(step, program)
        available |= set(writes(step))
    for output in program.outputs:
        if isinstance(output.value, str) and output.value not in available:
            raise VerifyError(f"the output {output.value} is never written")
    _check_plan(program)


def _show(step: Launch | Extern) -> str:
    return f"launch {step.kernel.label}({', '.join(step.buffers)})" if isinstance(step, Launch) else show_extern(step)


def _check_ranges(step: Launch, program: LoopProgram) -> None:
    """Refuse an unmasked index that is provably outside of its buffer when every axis is at its first or at its last point."""
    kernel = step.kernel
    bound = dict(zip((p.name for p in kernel.params), step.buffers))
    for phase in kernel.phases:
        axes = (*kernel.axes, *phase.axes)
        if any(isinstance(a.extent, int) and a.extent == 0 for a in axes):
            continue
        first = {a.sym: 0 for a in axes}
        last = {a.sym: a.extent - 1 for a in axes}
        for stmt in phase.body:
            if not isinstance(stmt, (Load, Store)) or stmt.mask is not None:
                continue
            extent = storage_extent(program.buffers[bound[stmt.buffer]])
            for corner in (first, last):
                at = substitute(stmt.index, corner)        # type: ignore[arg-type]
                if any(s not in kernel.sizes for s in symbols(at)):
                    continue                               # indirect: known at run time only
                if nonnegative(-1 - at) or nonnegative(at - extent):
                    raise VerifyError(f"kernel {kernel.label}: index {at} is outside of {bound[stmt.buffer]}, "
                                      f"which has {extent} elements", node=show_stmt(stmt))


def _check_plan(program: LoopProgram) -> None:
    """No two planned buffers overlap in memory while both are alive; none reaches past the arena. Symbolic plans are skipped."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, step in enumerate((*program.hoisted, *program.steps)):
        for name in (*reads(step), *writes(step)):
            first.setdefault(name, position)
            last[name] = position
    for output in program.outputs:
        if isinstance(output.value, str) and output.value in program.plan:
            raise VerifyError(f"the output {output.value} lies in the arena")
    for name in (n for step in program.hoisted for n in writes(step)):
        if name in program.plan:
            raise VerifyError(f"the result {name} of a hoisted step persists, yet lies in the arena")
    placed = []
    for name, offset in program.plan.items():
        buffer = program.buffers[name]
        if buffer.kind != "temp" or buffer.opaque:
            raise VerifyError(f"buffer {name} of kind {buffer.kind} lies in the arena")
        size = storage_extent(buffer) * buffer.dtype.size
        if not isinstance(offset, int) or not isinstance(size, int) or not isinstance(program.arena_bytes, int):
            continue
        if offset < 0 or offset + size > program.arena_bytes:
            raise VerifyError(f"buffer {name} at {offset} does not fit the arena of {program.arena_bytes} bytes")
        if name in first:
            placed.append((offset, offset + size, first[name], last[name], name))
    placed.sort()
    alive: list[tuple] = []
    for entry in placed:
        alive = [a for a in alive if a[1] > entry[0]]
        for other in alive:
            if other[0] < entry[1] and other[2] <= entry[3] and entry[2] <= other[3]:
                raise VerifyError(f"buffers {other[4]} and {entry[4]} share memory while both are alive")
        alive.append(entry)


__all__ = ["reads", "storage_extent", "verify_graph", "verify_kernel", "verify_program", "writes"]
