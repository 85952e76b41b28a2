"""Kernels and loop programs as text; `fuseline.ir.parse` reads it back. Graphs print themselves (`str(graph)`)."""
from __future__ import annotations

from fuseline.ir.expr import Expr, Sym, substitute, symbols
from fuseline.ir.graph import contiguous, show_arg
from fuseline.ir.kernels import (
    Axis,
    Buffer,
    Extern,
    Index,
    Kernel,
    Launch,
    Load,
    LoopProgram,
    Op,
    Output,
    Reduce,
    Ref,
    Stmt,
    Store,
    Value,
    ViewOf,
)


def show_kernel(kernel: Kernel, name: str | None = None, indent: str = "") -> str:
    """The kernel's text, as in the docstring of `fuseline.ir.kernels`. `name` stands in place of the label."""
    names = {n for p in kernel.phases for s in p.body for n in defined(s)}
    params = ", ".join(f"{p.name}: {p.dtype}" + (" out" if p.writes else "") for p in kernel.params)
    sizes = " sizes " + ", ".join(show_size(s) for s in kernel.sizes) if kernel.sizes else ""
    lines = [f"kernel {name or kernel.label}({params}){sizes}" + show_axes(kernel.axes, " axes ")]
    for phase in kernel.phases:
        lines.append("  phase" + show_axes(phase.axes, " "))
        lines += ["    " + show_stmt(s, names) for s in phase.body]
    return "\n".join(indent + line for line in lines)


def defined(stmt: Stmt) -> tuple[str, ...]:
    """The names that a statement defines."""
    if isinstance(stmt, Reduce):
        return stmt.names
    return () if isinstance(stmt, Store) else (stmt.name,)


def show_axes(axes: tuple[Axis, ...], head: str) -> str:
    return head + ", ".join(f"{a.sym.name}<{a.extent}>" for a in axes) if axes else ""


def show_size(sym: Sym) -> str:
    """A size symbol with its lower bound: `s0` alone means s0 >= 2."""
    return sym.name if sym.lo == 2 else f"{sym.name}>={sym.lo}"


def show_stmt(stmt: Stmt, values: set[str] | frozenset[str] = frozenset()) -> str:
    """One statement. `values`: names of values, which index expressions show as %name."""
    if isinstance(stmt, Load):
        mask = "" if stmt.mask is None else f" if {show_value(stmt.mask)} else {show_value(stmt.other)}"
        return f"{show_value(stmt.name)} = load {stmt.buffer}[{show_index(stmt.index, values)}]{mask} : {stmt.dtype}"
    if isinstance(stmt, Store):
        mask = "" if stmt.mask is None else f" if {show_value(stmt.mask)}"
        mode = "" if stmt.mode == "set" else f" {stmt.mode}"
        return f"store{mode} {stmt.buffer}[{show_index(stmt.index, values)}] = {show_value(stmt.value)}{mask}"
    if isinstance(stmt, Index):
        return f"{show_value(stmt.name)} = index {show_index(stmt.expr, values)} : {stmt.dtype}"
    args = ", ".join(show_value(a) for a in stmt.args)
    if isinstance(stmt, Reduce):
        return f"{', '.join(show_value(n) for n in stmt.names)} = reduce {stmt.op} {args} : {stmt.dtype}"
    if not isinstance(stmt, Op):
        raise TypeError(f"not a statement: {stmt!r}")
    return f"{show_value(stmt.name)} = {stmt.op} {args} : {stmt.dtype}"


def show_value(value: Value) -> str:
    if isinstance(value, str):
        return value if value.startswith("%") else f"%{value}"
    return repr(value)


def show_index(index: int | Expr, values: set[str] | frozenset[str]) -> str:
    plain = {s: Sym(f"%{s.name}", s.extent, s.lo) for s in symbols(index) if s.name in values and not s.name.startswith("%")}
    return str(substitute(index, plain) if plain else index)


def show_buffer(buffer: Buffer) -> str:
    sizes = ", ".join(map(str, buffer.shape))
    strides = "" if buffer.stride == contiguous(buffer.shape) else "; " + ", ".join(map(str, buffer.stride))
    flags = buffer.kind + (" static" if buffer.static else "") + (" opaque" if buffer.opaque else "")
    device = "" if buffer.device == "cpu" else f"@{buffer.device}"
    return f"{buffer.name}: {buffer.dtype}[{sizes}{strides}]{device} {flags}"


def show_extern_arg(arg: object) -> str:
    if isinstance(arg, Ref):
        return f"&{arg.buffer}"
    if isinstance(arg, ViewOf):
        return f"view(&{arg.buffer}, {_sizes(arg.shape)}, {_sizes(arg.stride)}, {arg.offset})"
    if isinstance(arg, (tuple, list)):
        return "[" + ", ".join(show_extern_arg(a) for a in arg) + "]"
    return show_arg(arg)


def _sizes(sizes: tuple) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def show_extern(step: Extern) -> str:
    args = [show_extern_arg(a) for a in step.args] + [f"{k}={show_extern_arg(v)}" for k, v in step.kwargs]
    outs = ", ".join("none" if o is None else f"&{o}" for o in step.outs)
    tail = (f" out {step.out_variant}" if step.out_variant else "") + (f" from {step.origin!r}" if step.origin else "")
    return f"extern {outs} = {step.op}({', '.join(args)}){tail}"


def show_output(output: Output) -> str:
    if isinstance(output.value, str):
        if output.shape is None:
            return f"&{output.value}"
        return f"view(&{output.value}, {_sizes(output.shape)}, {_sizes(output.stride or ())}, {output.offset})"
    return show_arg(output.value)


def show_program(program: LoopProgram) -> str:
    """The whole program: inputs, buffers, each distinct kernel once (k0, k1, ...), steps, outputs and memory plan."""
    lines = [f"program on {program.device}"]
    lines.append("  inputs " + ", ".join(show_size(i) if isinstance(i, Sym) else f"&{i}" for i in program.inputs))
    for buffer in program.buffers.values():
        at = f" at {program.plan[buffer.name]}" if buffer.name in program.plan else ""
        lines.append(f"  buffer {show_buffer(buffer)}{at}")
    names: dict[Kernel, str] = {}
    for step in (*program.hoisted, *program.steps):
        if isinstance(step, Launch) and step.kernel not in names:
            names[step.kernel] = f"k{len(names)}"
            lines.append(show_kernel(step.kernel, f"{names[step.kernel]} {step.kernel.label}", indent="  "))
    for head, steps in (("hoisted ", program.hoisted), ("", program.steps)):
        for step in steps:
            if isinstance(step, Launch):
                ops = f" ops {show_arg(step.ops)}" if step.ops else ""
                origins = f" from {show_arg(step.origins)}" if step.origins else ""
                lines.append(f"  {head}launch {names[step.kernel]}({', '.join(f'&{b}' for b in step.buffers)}){ops}{origins}")
            else:
                lines.append(f"  {head}{show_extern(step)}")
    if program.arena_bytes != 0:
        lines.append(f"  arena {program.arena_bytes}")
    lines.append("  return " + ", ".join(show_output(o) for o in program.outputs))
    return "\n".join(lines)
