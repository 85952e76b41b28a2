"""Runs LoopPrograms on the CPU: generated straight-line Python around native segments and operator calls.

`load` compiles every kernel, then writes one Python function for the program: bind sizes, allocate outputs, take an arena for
the temps, then the steps; consecutive kernels are one call of a native segment. What hoisted steps computed is kept and
computed again when the address or version of a static input that they read has changed.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuseline import log, torch_internals
from fuseline.codegen.llvm.compile import CompiledKernel, compile_kernels
from fuseline.errors import InternalError
from fuseline.ir.expr import Expr, Int, Sym, product, symbols
from fuseline.ir.kernels import Buffer, Extern, Launch, LoopProgram, Output, ViewOf
from fuseline.ir.steps import hoisted_inputs, hoisted_results, leaves, reads, touches, writes
from fuseline.options import Options
from fuseline.runtime import externs
from fuseline.runtime.bounds import Failures
from fuseline.runtime.cache import disk_cache
from fuseline.runtime.memory import WORTH_RECYCLING, Pool, results
from fuseline.runtime.native import NativeLaunch, Segment


def load(program: LoopProgram, options: Options, constants: Mapping[str, torch.Tensor] | None = None) -> Executable:
    """An executable of a CPU program: `executable(*inputs) -> tuple`, inputs and outputs as the program lists them.

    constants: values of the buffers of kind "constant". Inputs must have the shapes and strides of their buffers (guards see
    to that); any alignment will do. Raises NotSupported for a kernel with dtypes or operations that have no CPU code.
    """
    return Executable(program, options, dict(constants or {}))


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of a profiled call: the kernel's label or the operator's name, "kernel" or "operator", and its seconds."""

    name: str
    kind: str
    seconds: float
    ops: tuple[str, ...] = ()


class Executable:
    """See `load`. Safe to call from several threads at once."""

    def __init__(self, program: LoopProgram, options: Options, constants: dict[str, torch.Tensor]) -> None:
        self.program, self.options, self.constants = program, options, constants
        steps = (*program.hoisted, *program.steps)
        kernels = [s.kernel for s in steps if isinstance(s, Launch)]
        start = time.perf_counter()
        made = compile_kernels(kernels, cache=disk_cache() if options.cache else None) if kernels else []
        self.compile_seconds = time.perf_counter() - start
        self.compiled: dict[Any, CompiledKernel] = dict(zip(kernels, made, strict=True))
        self.pool = Pool()
        self.text = ""
        self.hoisted_names = hoisted_results(program)
        self._hoist_lock = threading.Lock()
        self.hoisted_state: tuple[Any, tuple] = (None, ())      # (key of the static inputs, values), replaced as one
        self.hoist_runs = 0
        self._hoist = _Writer(self, hoist=True).function() if program.hoisted else None
        self._profiled: Any = None
        # The generated function itself is the callable, without a Python frame in between.
        self.run = _Writer(self).function()

    def __call__(self, *inputs: Any) -> tuple:
        return self.run(*inputs)

    @property
    def launches(self) -> int:
        """Kernels and operators that one call runs, hoisted steps not counted."""
        return len(self.program.steps)

    def source(self) -> str:
        """The generated function, for the report."""
        return self.text

    def profile(self, *inputs: Any) -> tuple[tuple, list[StepTime]]:
        """(outputs, time of every step). Each kernel is a segment of its own here, so the sum exceeds a normal call's time."""
        if self._profiled is None:
            self._profiled = _Writer(self, profile=True).function()
        times: list[StepTime] = []
        return self._profiled(times, *inputs), times

    def renew_hoisted(self, key: Any, inputs: Sequence[Any]) -> tuple:
        """Run the hoisted steps for static inputs whose identity is `key`; returns their values."""
        if self._hoist is None:
            raise InternalError("the program has no hoisted steps")
        with self._hoist_lock:
            if self.hoisted_state[0] != key or key is None:
                self.hoisted_state = (key, self._hoist(*inputs))
                self.hoist_runs += 1
            return self.hoisted_state[1]


def version_of(tensor: torch.Tensor) -> object:
    """The tensor's version counter; inference tensors have none, and compare unequal to everything: recomputed on each call."""
    return object() if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------- the generated function

class _Writer:
    """Writes one function: the program's (`hoist` False) or its hoisted steps'. `profile`: every step is timed.

    Names in the text: i3 inputs, n_s0 sizes, b4 tensors, p4 addresses, c5 constants, arena and its address `base`.
    """

    def __init__(self, executable: Executable, *, hoist: bool = False, profile: bool = False) -> None:
        self.executable, self.program = executable, executable.program
        self.hoist, self.profiled = hoist, profile
        self.steps = self.program.hoisted if hoist else self.program.steps
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {
            "E": executable, "pool": executable.pool, "empty": torch.empty, "empty_strided": torch.empty_strided,
            "as_strided": torch.as_strided, "relayout": externs.relayout, "get_num_threads": torch.get_num_threads,
            "clock": time.perf_counter, "StepTime": StepTime, "is_grad_enabled": torch.is_grad_enabled, "version_of": version_of,
            "any_autocast": torch_internals.any_autocast_enabled,
            "recycled": results.tensor}
        self.known: dict[int, str] = {}                      # id of a constant -> its name
        self.tensors: dict[str, str] = {}                    # buffer -> variable of its tensor
        self.addresses: dict[str, str] = {}                  # buffer -> variable of its address
        self.variables: dict[str, str] = {}
        self.pending: list[Launch] = []                      # launches not yet written, to become one segment
        self.done: list[str] = []                            # buffers to let go once the pending launches are written
        allocating = {o for s in self.steps if isinstance(s, Extern) and s.out_variant is None for o in s.outs if o is not None}
        hoisted = {n for s in self.program.hoisted for n in writes(s)}
        self.in_arena = {n: o for n, o in self.program.plan.items() if n not in allocating and n not in hoisted} if not hoist else {}
        self.uses_threads = any(isinstance(s, Launch) for s in self.steps)

    # -- names --------------------------------------------------------------------------------------------------
    def constant(self, value: Any) -> str:
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"c{len(self.known)}"
            self.namespace[name] = value                     # the namespace keeps it alive, so its id stays its own
        return name

    def dtype(self, buffer: Buffer) -> str:
        return self.constant(torch_internals.to_torch_dtype(buffer.dtype))

    def variable(self, buffer: str) -> str:
        if buffer not in self.variables:
            self.variables[buffer] = f"b{len(self.variables)}"
        return self.variables[buffer]

    def size(self, e: Int) -> str:
        return externs.size_source(e, lambda s: f"n_{s.name}")

    def sizes(self, es: Sequence[Int]) -> str:
        return "(" + "".join(f"{self.size(e)}, " for e in es) + ")"

    # -- the whole ----------------------------------------------------------------------------------------------
    def function(self) -> Any:
        program = self.program
        arguments = [f"i{k}" for k in range(len(program.inputs))]
        for k, entry in enumerate(program.inputs):
            if isinstance(entry, str):
                self.tensors[entry] = f"i{k}"
        for name, tensor in self.executable.constants.items():
            self.tensors[name] = self.constant(tensor)
        self.bind_sizes()
        if not self.hoist and program.hoisted:
            self.bind_hoisted()
        keep_arena = self.takes_arena()
        if self.uses_threads:
            self.lines.append("threads = get_num_threads()")
        last = self.last_uses()
        for k, step in enumerate(self.steps):
            if isinstance(step, Launch):
                for name in step.buffers:
                    self.ensure(name)
                self.pending.append(step)
                if self.profiled:
                    self.flush()
            else:
                self.flush()
                self.extern(step)
            self.done += last.get(k, ())
        self.flush()
        if self.hoist:
            result = "".join(f"{self.tensor(n)}, " for n in self.executable.hoisted_names)
        else:
            result = "".join(f"{self.output(o)}, " for o in program.outputs)
        if keep_arena:
            self.lines.append(f"result = ({result})")
            self.lines.append("pool.put(arena)")
            result = "result"
        else:
            result = f"({result})"
        self.lines.append(f"return {result}")
        if self.profiled:
            arguments.insert(0, "times")
        # Operators of PyTorch see the grad and autocast modes of the caller; the program has both settled already.
        if any(isinstance(s, Extern) for s in self.steps):
            call = f"run({', '.join(arguments)})"
            self.namespace.update(no_grad=torch.no_grad, no_autocast=torch_internals.disable_autocast)
            head = ["if is_grad_enabled():", "    with no_grad():", f"        return {call}",
                    "if any_autocast():", "    with no_autocast():", f"        return inner({', '.join(arguments)})"]
            body = "\n    ".join(self.lines)
            text = (f"def run({', '.join(arguments)}):\n    " + "\n    ".join(head) + f"\n    return inner({', '.join(arguments)})\n\n"
                    f"def inner({', '.join(arguments)}):\n    {body}\n")
        else:
            text = f"def run({', '.join(arguments)}):\n    " + "\n    ".join(self.lines) + "\n"
        exec(compile(text, "<fuseline program>", "exec"), self.namespace)
        log.emit("code", text)
        if not self.hoist and not self.profiled:
            self.executable.text = text
        return self.namespace["run"]

    def bind_sizes(self) -> None:
        needed = {s.name for s in self._symbols()}
        found: set[str] = set()
        for k, entry in enumerate(self.program.inputs):
            if isinstance(entry, Sym) and entry.name in needed:
                self.lines.append(f"n_{entry.name} = i{k}")
                found.add(entry.name)
        for k, entry in enumerate(self.program.inputs):
            if isinstance(entry, Sym):
                continue
            for axis, e in enumerate(self.program.buffers[entry].shape):   # type: ignore[index]
                if isinstance(e, Sym) and e.name in needed and e.name not in found:
                    self.lines.append(f"n_{e.name} = i{k}.shape[{axis}]")
                    found.add(e.name)
        if needed - found:
            raise InternalError(f"the sizes {', '.join(sorted(needed - found))} are no input's axis")

    def _symbols(self) -> set[Sym]:
        found: set[Sym] = set()

        def add(*es: Int) -> None:
            for e in es:
                found.update(symbols(e))

        program = self.program
        touched = {n for s in self.steps for n in touches(s)}
        for name in touched | {o.value for o in program.outputs if isinstance(o.value, str)}:
            buffer = program.buffers[name]
            if buffer.kind != "input":
                add(*buffer.shape, *buffer.stride)
        for step in self.steps:
            if isinstance(step, Launch):
                add(*step.kernel.sizes, *Failures([step.kernel]).sizes())
                continue
            for a in leaves((step.args, tuple(v for _, v in step.kwargs))):
                if isinstance(a, ViewOf):
                    add(*a.shape, *a.stride, a.offset)
                elif isinstance(a, Expr):
                    add(a)
        if not self.hoist:
            add(program.arena_bytes, *self.in_arena.values())
            for o in program.outputs:
                add(*(o.shape or ()), *(o.stride or ()), o.offset)
                if isinstance(o.value, Expr):
                    add(o.value)
        return found

    def bind_hoisted(self) -> None:
        program = self.program
        static = [f"i{k}" for k in hoisted_inputs(program)]
        key = "".join(f"{i}.data_ptr(), {i}._version, " for i in static)
        slow = "".join(f"{i}.data_ptr(), version_of({i}), " for i in static)
        everything = ", ".join(f"i{k}" for k in range(len(program.inputs)))
        self.lines += ["try:", f"    key = ({key})", "except RuntimeError:", f"    key = ({slow})", "state = E.hoisted_state",
                       f"hoisted = state[1] if state[0] == key else E.renew_hoisted(key, ({everything}, ))"]
        names = [self.variable(n) for n in self.executable.hoisted_names]
        if names:
            self.lines.append(f"({', '.join(names)}, ) = hoisted")
        self.tensors.update(zip(self.executable.hoisted_names, names, strict=True))

    def takes_arena(self) -> bool:
        """Write the line that gets an arena; True if it goes back to the pool, as no result can lie in it."""
        if not self.in_arena or not any(n in self.in_arena for s in self.steps for n in touches(s)):
            return False
        shown = {o.value for o in self.program.outputs if isinstance(o.value, str)}
        aliasing: set[str] = set(self.in_arena)
        for step in self.steps:
            if isinstance(step, Extern) and externs.result_may_alias(step) and aliasing & set(reads(step)):
                aliasing |= set(writes(step))
        keep = not shown & aliasing
        take = "pool.take" if keep else self.constant(_new_arena)
        self.lines += [f"arena = {take}({self.size(self.program.arena_bytes)})", "base = arena.base"]
        return keep

    def last_uses(self) -> dict[int, list[str]]:
        """step -> buffers outside of the arena that nothing needs after it: their memory goes back to PyTorch's allocator."""
        kept = {o.value for o in self.program.outputs} | set(self.executable.hoisted_names)
        last: dict[str, int] = {}
        for k, step in enumerate(self.steps):
            for name in touches(step):
                last[name] = k
        found: dict[int, list[str]] = {}
        for name, k in last.items():
            temp = self.program.buffers[name].kind == "temp" and name not in self.in_arena
            if temp and name not in kept and k + 1 < len(self.steps):
                found.setdefault(k, []).append(name)
        return found

    # -- buffers ------------------------------------------------------------------------------------------------
    def ensure(self, name: str) -> None:
        """Make sure that the buffer has memory."""
        if name not in self.tensors and name not in self.in_arena:
            self.allocate(name)

    def allocate(self, name: str) -> str:
        buffer = self.program.buffers[name]
        if buffer.kind in ("input", "constant"):
            hint = "pass its tensor in `constants`" if buffer.kind == "constant" else ""
            raise InternalError(f"{buffer.kind} {name} has no value", hint=hint)
        variable = self.tensors[name] = self.variable(name)
        layout = f"{self.sizes(buffer.shape)}, {self.sizes(buffer.stride)}"
        elements = product(buffer.shape)
        if not isinstance(elements, int) or elements * buffer.dtype.size >= WORTH_RECYCLING:
            self.lines.append(f"{variable} = recycled({layout}, {self.dtype(buffer)})")
        else:
            self.lines.append(f"{variable} = empty_strided({layout}, dtype={self.dtype(buffer)})")
        return variable

    def tensor(self, name: str) -> str:
        if name in self.tensors:
            return self.tensors[name]
        if name not in self.in_arena:
            return self.allocate(name)
        buffer = self.program.buffers[name]
        variable = self.tensors[name] = self.variable(name)
        self.lines.append(f"{variable} = arena.tensor({self.size(self.in_arena[name])}, {self.dtype(buffer)}, "
                          f"{self.sizes(buffer.shape)}, {self.sizes(buffer.stride)})")
        return variable

    def view(self, view: ViewOf) -> str:
        buffer = self.program.buffers[view.buffer]
        if view.buffer in self.in_arena and not symbols_of(view):
            at, offset = self.in_arena[view.buffer], view.offset * buffer.dtype.size
            return f"arena.tensor({self.size(at + offset)}, {self.dtype(buffer)}, {self.sizes(view.shape)}, {self.sizes(view.stride)})"
        return self.strided(self.tensor(view.buffer), view.shape, view.stride, view.offset)

    def strided(self, tensor: str, shape: Sequence[Int], stride: Sequence[Int], offset: Int) -> str:
        """The tensor's memory seen otherwise; offsets count from its own first element."""
        own = f"{tensor}.storage_offset()" if tensor.startswith(("i", "b")) else ""
        at = " + ".join(filter(None, [own, self.size(offset) if offset != 0 else ""])) or "0"
        return f"as_strided({tensor}, {self.sizes(shape)}, {self.sizes(stride)}, {at})"

    # -- steps --------------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Write the pending launches as one call of a native segment."""
        if self.pending:
            self.segment()
        self.lines += [f"{self.tensors[n]} = None" for n in self.done if self.tensors.get(n, "").startswith("b")]
        self.done = []

    def segment(self) -> None:
        launches, self.pending = self.pending, []
        arguments: list[str] = []
        place: dict[str, int] = {}

        def argument(source: str) -> int:
            if source not in place:
                place[source] = len(arguments)
                arguments.append(source)
            return place[source]

        native = []
        for step in launches:
            made = self.executable.compiled[step.kernel]
            buffers = []
            for name in step.buffers:
                if name in self.in_arena:
                    offset = self.in_arena[name]
                    buffers.append((argument("base"), offset) if isinstance(offset, int) else (argument(f"base + {self.size(offset)}"), 0))
                else:
                    buffers.append((argument(f"{self.tensor(name)}.data_ptr()"), 0))
            sizes = tuple(argument(self.size(s)) for s in step.kernel.sizes)
            if isinstance(made.units, int) and isinstance(made.cost, int):
                native.append(NativeLaunch(made.address, tuple(buffers), sizes, made.units, made.cost))
            else:
                units, cost = argument(self.size(made.units)), argument(self.size(made.cost))
                native.append(NativeLaunch(made.address, tuple(buffers), sizes, ("arg", units), ("arg", cost)))
        segment = Segment(len(arguments), native)
        self.namespace[f"segment{id(segment)}"] = segment    # keeps the words of the description alive
        call = f"{self.constant(segment.call)}({''.join(f'{a}, ' for a in arguments)}threads)"
        failures = Failures([step.kernel for step in launches])
        if failures:
            call = f"failed = {call}"
        if self.profiled:
            (step,) = launches
            self.timed(call, step.kernel.label, "kernel", step.ops)
        else:
            self.lines.append(call)
        if failures:
            values = ", ".join(f"{s.name!r}: {self.size(s)}" for s in failures.sizes())
            self.lines += ["if failed is not None:", f"    raise {self.constant(failures)}.error(failed, {{{values}}})"]

    def extern(self, step: Extern) -> None:
        use_out = step.out_variant is not None
        call = externs.call_source(step, self, out=use_out)
        if use_out:
            self.timed(call, step.op, "operator", ())
            return
        names = [self.variable(o) if o is not None else "_" for o in step.outs]
        several = len(externs.operator_of(step.op)._schema.returns) != 1
        listed = "[" in str(externs.operator_of(step.op)._schema.returns[0].type) if not several and step.outs else False
        if several or listed or len(names) > 1:
            self.timed(f"({', '.join(names)}, ) = {call}" if names else call, step.op, "operator", ())
        else:
            self.timed(f"{names[0]} = {call}" if names else call, step.op, "operator", ())
        for name, variable in zip(step.outs, names, strict=True):
            if name is None:
                continue
            self.tensors[name] = variable
            buffer = self.program.buffers[name]
            if not buffer.opaque:
                # The operator chose the strides; kernels and the caller rely on the buffer's. (None: a result left undefined.)
                self.lines += [f"if {variable} is not None and ({variable}.stride() != {self.sizes(buffer.stride)} "
                               f"or {variable}.shape != {self.sizes(buffer.shape)}):",
                               f"    {variable} = relayout({variable}, {self.sizes(buffer.shape)}, {self.sizes(buffer.stride)})"]

    def timed(self, statement: str, name: str, kind: str, ops: tuple[str, ...]) -> None:
        if not self.profiled:
            self.lines.append(statement)
            return
        self.lines += ["start = clock()", statement, f"times.append(StepTime({name!r}, {kind!r}, clock() - start, {ops!r}))"]

    def output(self, output: Output) -> str:
        value = output.value
        if not isinstance(value, str):
            if isinstance(value, Expr):
                return self.size(value)
            return repr(value) if value is None or isinstance(value, (int, bool)) else self.constant(value)
        if output.shape is None or output.stride is None:
            return self.tensor(value)
        return self.strided(self.tensor(value), output.shape, output.stride, output.offset)


def symbols_of(view: ViewOf) -> bool:
    return any(symbols(e) for e in (*view.shape, *view.stride, view.offset))


def _new_arena(nbytes: int) -> Any:
    """An arena that is not reused: some result lies in it."""
    return Pool().take(nbytes)
