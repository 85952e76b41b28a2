"""Runs LoopPrograms on a CUDA device: generated straight-line Python around kernel launches and operator calls.

`load` starts compiling every kernel and returns at once; the first call waits for the machine code. A program with symbolic
sizes gets one plan (generated function, launch grids, constants) for each tuple of sizes met, all sharing their kernels.
"""
from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol

import torch

from fuseline.codegen.triton import compile as triton_codegen
from fuseline.codegen.triton.tiling import Chip
from fuseline.errors import InternalError
from fuseline.ir.expr import Expr, Sym, evaluate, symbols
from fuseline.ir.kernels import Buffer, Extern, Launch, LoopProgram, ViewOf
from fuseline.ir.steps import hoisted_inputs, hoisted_results, touches
from fuseline.log import emit as log
from fuseline.options import Options
from fuseline.runtime import externs, triton_compile
from fuseline.torch_internals import raw_stream_getter, to_torch_dtype

MAX_PLANS = 64                # sizes met of one program whose generated functions are kept, least recently used go first
ALIGNMENT = 16                # bytes: one vector access
_ADDRESS, _VERSION = methodcaller("data_ptr"), attrgetter("_version")


class Platform(Protocol):
    """A place where kernels run: a CUDA device, or in tests Triton's interpreter on the CPU."""

    device: torch.device
    chip: Chip

    def compile(self, source: Any, cache: bool = True) -> Future: ...
    def prepare(self, source: Any, binary: Any, grid: int, arguments: int) -> Callable[..., None]: ...
    def stream(self) -> int: ...


class CudaPlatform:
    """A CUDA device by index."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.arch = 10 * properties.major + properties.minor
        self.chip = Chip(properties.multi_processor_count, self.arch)
        self.stream: Callable[[], int] = raw_stream_getter(index)
        self._loaded: dict[Any, Any] = {}

    def compile(self, source: Any, cache: bool = True) -> Future:
        return triton_compile.submit(source, self.arch, cache)

    def load(self, binary: triton_compile.Binary) -> Any:
        """The binary as a function on this device, which must be current."""
        from fuseline.codegen.triton.launcher import LoadedKernel
        key = (binary.name, binary.cubin)
        if key not in self._loaded:
            torch.cuda.current_blas_handle()                 # makes sure that the device has its context
            self._loaded[key] = LoadedKernel(binary.name, binary.cubin, binary.shared, binary.num_warps)
        return self._loaded[key]

    def prepare(self, source: Any, binary: Any, grid: int, arguments: int) -> Callable[..., None]:
        return self.load(binary).prepare(grid, arguments)


@functools.cache
def platform_of(device: str) -> CudaPlatform:
    """The platform of "cuda:1"; "cuda" is device 0."""
    return CudaPlatform(torch.device(device).index or 0)


def load(program: LoopProgram, options: Options, constants: Mapping[str, torch.Tensor] | None = None,
         platform: Platform | None = None) -> CudaExecutable:
    """An executable of the program: `executable(*inputs) -> tuple`, inputs and outputs as the program lists them.

    constants: values of the buffers of kind "constant". Kernels compile in the background; a kernel that cannot be compiled
    raises InternalError on the first call. Raises NotSupported for a kernel that has no Triton code.
    """
    if platform is None:
        triton_compile.start_workers()
        platform = platform_of(program.device)
    return CudaExecutable(program, options, dict(constants or {}), platform)


def _unfinished(*inputs: Any) -> tuple:
    raise InternalError("a plan runs before its kernels are ready")


@dataclass(slots=True)
class _Plan:
    """A generated function for one tuple of sizes. `finish` waits for the kernels and makes `run`."""
    finish: Callable[[], None] | None
    run: Callable[..., tuple] = _unfinished
    launches: int = 0
    text: str = ""
    namespace: dict[str, Any] = field(default_factory=dict)


class CudaExecutable:
    """See `load`. `generation` counts runs of the hoisted steps: what they computed may have moved when it changes."""

    def __init__(self, program: LoopProgram, options: Options, constants: dict[str, torch.Tensor], platform: Platform) -> None:
        self.program, self.options, self.constants, self.platform = program, options, constants, platform
        self.generation = 0
        self.hoisted: tuple[torch.Tensor, ...] = ()
        self._lock = threading.RLock()
        self._plans: OrderedDict[tuple, _Plan] = OrderedDict()
        self._size_getters = _size_getters(program)
        self._names = sorted(self._size_getters)
        self._hoist_names = hoisted_results(program)
        self._hoist_reads = hoisted_inputs(program)
        self._hoist_key: tuple | None = None
        self._hoist_plan: _Plan | None = None
        used = {b for s in program.steps if isinstance(s, Launch) for b in s.buffers}
        self._launch_inputs = tuple(i for i, name in enumerate(program.inputs) if name in used)
        self._is_cuda = platform.device.type == "cuda"
        if program.hoisted:
            self._hoist_plan = _build(self, {}, frozenset(range(len(program.inputs))), hoist=True)
        self._static: _Plan | None = None
        if not self._names:
            self._static = self._plan((), frozenset())

    # -- calls ------------------------------------------------------------------------------------------------
    def __call__(self, *inputs: Any) -> tuple:
        if self._is_cuda and torch.cuda.current_device() != self.platform.device.index:
            with torch.cuda.device(self.platform.device):
                return self._call(inputs)
        return self._call(inputs)

    def _call(self, inputs: tuple) -> tuple:
        plan = self._static
        if plan is None:
            plan = self._plan(self.sizes(inputs), frozenset())
        if plan.finish is not None:
            self._finish(plan)
        if self._hoist_plan is not None:
            self.refresh(inputs)
        return plan.run(*inputs)

    def sizes(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of the program's size symbols, in the order of their names."""
        return tuple(self._size_getters[n](inputs) for n in self._names)

    def misaligned(self, *inputs: Any) -> tuple:
        """The call with kernels that do not rely on the alignment of the inputs that lack it."""
        plan = self._plan(self.sizes(inputs), self.misaligned_inputs(inputs))
        if plan.finish is not None:
            self._finish(plan)
        return plan.run(*inputs)

    def misaligned_inputs(self, inputs: Sequence[Any]) -> frozenset[int]:
        return frozenset(i for i in self._launch_inputs if inputs[i].data_ptr() % ALIGNMENT)

    def refresh(self, inputs: Sequence[Any]) -> None:
        """Run the hoisted steps if a static input that they read is another tensor or has changed since they last ran."""
        read = [inputs[i] for i in self._hoist_reads]
        try:
            key = (*map(_ADDRESS, read), *map(_VERSION, read))
        except RuntimeError:                                  # inference tensors have no version, and nobody may write to them
            key = (*map(_ADDRESS, read), *(0 if x.is_inference() else x._version for x in read))
        if key != self._hoist_key:
            with self._lock:
                plan = self._hoist_plan
                if plan is None:
                    raise InternalError("a program without hoisted steps has nothing to refresh")
                if plan.finish is not None:
                    self._finish(plan)
                self.hoisted = plan.run(*inputs)
                self._hoist_key = key
                self.generation += 1

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Do now what the first call with such inputs would do before it runs: wait for kernels, run hoisted steps."""
        which = self.misaligned_inputs(inputs)
        for plan in {id(p): p for p in (self._plan(self.sizes(inputs), frozenset()), self._plan(self.sizes(inputs), which))}.values():
            if plan.finish is not None:
                self._finish(plan)
        if self._hoist_plan is not None:
            self.refresh(inputs)

    @property
    def launches(self) -> int:
        """Kernels and operators that one call runs, hoisted steps not counted."""
        return len(self.program.steps)

    def source(self) -> str:
        """The generated functions made so far, for the report."""
        return "\n".join(p.text for p in self._plans.values())

    # -- plans ------------------------------------------------------------------------------------------------
    def _plan(self, sizes: tuple[int, ...], misaligned: frozenset[int]) -> _Plan:
        key = (sizes, misaligned)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = _build(self, dict(zip(self._names, sizes)), misaligned)
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
            elif len(self._plans) > 1:
                self._plans.move_to_end(key)
            return plan

    def _finish(self, plan: _Plan) -> None:
        with self._lock:
            if plan.finish is not None:
                plan.finish()
                plan.finish = None


def _number_at(position: int, inputs: Sequence[Any]) -> int:
    return int(inputs[position])


def _extent_at(position: int, axis: int, inputs: Sequence[Any]) -> int:
    return inputs[position].shape[axis]


def _size_getters(program: LoopProgram) -> dict[str, Callable[[Sequence[Any]], int]]:
    """size symbol -> how its value is found among the inputs. Raises InternalError for one that no input has."""
    found: dict[str, Callable[[Sequence[Any]], int]] = {}
    for position, entry in enumerate(program.inputs):
        if isinstance(entry, Sym):
            found[entry.name] = partial(_number_at, position)
    for position, entry in enumerate(program.inputs):
        if isinstance(entry, Sym):
            continue
        for axis, size in enumerate(program.buffers[entry].shape):
            if isinstance(size, Sym):
                found.setdefault(size.name, partial(_extent_at, position, axis))
    needed = {s.name for b in program.buffers.values() for e in (*b.shape, *b.stride) if isinstance(e, Expr) for s in symbols(e)}
    missing = needed - set(found)
    if missing:
        raise InternalError(f"the sizes {', '.join(sorted(missing))} are no input's axis")
    return found


# ---------------------------------------------------------------- generating a plan

def relayout(tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """An operator's result as its buffer has it: copied where the operator chose other strides or a misaligned address."""
    tensor = externs.relayout(tensor, shape, stride)
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else torch.empty_strided(
        shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _build(executable: CudaExecutable, sizes: dict[str, int], misaligned: frozenset[int], hoist: bool = False) -> _Plan:
    return _Builder(executable, sizes, misaligned, hoist).build()


class _Builder:
    """Writes the function of one plan. Names in it: i3 the inputs, b_x the tensor of buffer x, p_x its address."""

    def __init__(self, executable: CudaExecutable, sizes: dict[str, int], misaligned: frozenset[int], hoist: bool) -> None:
        self.executable, self.program, self.platform = executable, executable.program, executable.platform
        self.sizes, self.misaligned, self.hoist = sizes, misaligned, hoist
        self.steps = self.program.hoisted if hoist else self.program.steps
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {
            "empty_strided": torch.empty_strided, "empty": torch.empty, "as_strided": torch.as_strided, "device": self.platform.device,
            "uint8": torch.uint8, "relayout": relayout, "stream_of": self.platform.stream, "misaligned": executable.misaligned,
            "E": executable}
        self.tensors: dict[str, str] = {}                     # buffer -> variable of its tensor
        self.addresses: dict[str, str] = {}                   # buffer -> variable of its address
        self.in_arena = {} if hoist else {n: self.number(o) for n, o in self.program.plan.items()}
        self.typed_arenas: dict[str, str] = {}
        self.launches: list[tuple[str, triton_codegen.Request]] = []
        self.unaligned_buffers: set[str] = set()

    def number(self, e: Any) -> int:
        return e if isinstance(e, int) else evaluate(e, self.sizes)

    def numbers(self, es: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self.number(e) for e in es)

    def variable(self, prefix: str, buffer: str) -> str:
        return f"{prefix}_" + "".join(c if c.isalnum() else "_" for c in buffer)

    def dtype(self, buffer: Buffer) -> str:
        name = f"dtype_{buffer.dtype.name}"
        self.namespace[name] = to_torch_dtype(buffer.dtype)
        return name

    # -- the whole --------------------------------------------------------------------------------------------
    def build(self) -> _Plan:
        program = self.program
        arguments = [f"i{n}" for n in range(len(program.inputs))]
        for position, name in enumerate(program.inputs):
            if isinstance(name, str):
                self.tensors[name] = f"i{position}"
        for name, tensor in self.executable.constants.items():
            self.tensors[name] = self.variable("b", name)
            self.namespace[self.tensors[name]] = tensor
        self.pointers_of_inputs()
        self.lines.append("stream = stream_of()")
        if not self.hoist and self.executable._hoist_names:
            names = [self.variable("b", n) for n in self.executable._hoist_names]
            self.lines.append(f"({', '.join(names)},) = E.hoisted")
            self.tensors.update(zip(self.executable._hoist_names, names))
        if self.in_arena:
            total = max(self.number(program.arena_bytes), 1)
            self.lines += [f"arena = empty({total}, dtype=uint8, device=device)", "base = arena.data_ptr()"]
        last = self.last_uses()
        for position, step in enumerate(self.steps):
            if isinstance(step, Launch):
                self.launch(step)
            else:
                self.extern(step)
            for name in sorted(last.get(position, ())):
                self.release(name)
        if self.hoist:
            self.lines.append("return (" + "".join(f"{self.tensor(n)}, " for n in self.executable._hoist_names) + ")")
        else:
            self.lines.append("return (" + "".join(f"{self.output(o)}, " for o in program.outputs) + ")")
        text = f"def run({', '.join(arguments)}):\n    " + "\n    ".join(self.lines) + "\n"
        requests = [r for _, r in self.launches]
        compiler = functools.partial(self.platform.compile, cache=self.executable.options.cache)
        pending = [(n, r, r.submit(compiler)) for n, r in self.launches]
        plan = _Plan(None, text=text, namespace=self.namespace, launches=len(requests))

        def finish() -> None:
            start = time.perf_counter()
            for name, request, futures in pending:
                self.namespace[name] = request.resolve(futures, self.platform)
            log("times", f"waited {time.perf_counter() - start:.2f} s for the code of {len(pending)} launches")
            exec(compile(text, f"<fuseline plan of {program.device}>", "exec"), self.namespace)
            plan.run = self.namespace["run"]
            log("code", text)

        plan.finish = finish
        return plan

    def pointers_of_inputs(self) -> None:
        """Fetch the addresses of inputs that kernels use; leave for the other plan if one that was aligned is not."""
        used = {b for s in self.steps if isinstance(s, Launch) for b in s.buffers}
        checked = []
        for position, name in enumerate(self.program.inputs):
            if isinstance(name, str) and name in used:
                self.addresses[name] = f"p{position}"
                self.lines.append(f"p{position} = i{position}.data_ptr()")
                if position in self.misaligned:
                    self.unaligned_buffers.add(name)
                else:
                    checked.append(f"p{position}")
        if checked:
            everything = ", ".join(f"i{n}" for n in range(len(self.program.inputs)))
            self.lines.append(f"if ({' | '.join(checked)}) & {ALIGNMENT - 1}:")
            self.lines.append(f"    return misaligned({everything})")

    def last_uses(self) -> dict[int, set[str]]:
        """step -> buffers that are not needed after it: fresh temps, whose memory goes back to the allocator."""
        kept = {o.value for o in self.program.outputs} | set(self.executable._hoist_names)
        last: dict[str, int] = {}
        for position, step in enumerate(self.steps):
            for name in touches(step):
                last[name] = position
        found: dict[int, set[str]] = {}
        for name, position in last.items():
            if name not in kept and self.program.buffers[name].kind == "temp" and name not in self.in_arena:
                found.setdefault(position, set()).add(name)
        return found

    def release(self, name: str) -> None:
        if name in self.tensors and self.tensors[name].startswith("b_"):
            self.lines.append(f"{self.tensors[name]} = None")

    # -- buffers ----------------------------------------------------------------------------------------------
    def tensor(self, name: str) -> str:
        """The variable that holds the buffer as a tensor; allocates it if it is new."""
        if name in self.tensors:
            return self.tensors[name]
        buffer = self.program.buffers[name]
        shape, stride = self.numbers(buffer.shape), self.numbers(buffer.stride)
        variable = self.tensors[name] = self.variable("b", name)
        dtype = self.dtype(buffer)
        if name in self.in_arena:
            arena = self.typed_arenas.get(buffer.dtype.name)
            if arena is None:
                arena = self.typed_arenas[buffer.dtype.name] = f"arena_{buffer.dtype.name}"
                self.lines.append(f"{arena} = arena[:{max(self.number(self.program.arena_bytes), 1) // 16 * 16}].view({dtype})")
            self.lines.append(f"{variable} = as_strided({arena}, {shape}, {stride}, {self.in_arena[name] // buffer.dtype.size})")
        elif self.hoist and name in self.executable._hoist_names:
            # Hoisted results keep their address when they are computed again.
            kept = torch.empty_strided(shape, stride, dtype=to_torch_dtype(buffer.dtype), device=self.platform.device)
            self.namespace[variable] = kept
        else:
            self.lines.append(f"{variable} = empty_strided({shape}, {stride}, dtype={dtype}, device=device)")
        return variable

    def address(self, name: str) -> str:
        if name in self.addresses:
            return self.addresses[name]
        if name in self.in_arena and name not in self.tensors:
            return f"base + {self.in_arena[name]}" if self.in_arena[name] else "base"
        if name in self.in_arena:
            return f"base + {self.in_arena[name]}"
        variable = self.variable("p", name)
        self.lines.append(f"{variable} = {self.tensor(name)}.data_ptr()")
        self.addresses[name] = variable
        return variable

    # -- steps ------------------------------------------------------------------------------------------------
    def launch(self, step: Launch) -> None:
        buffers = [self.program.buffers[b] for b in step.buffers]
        spans = [self.span(b) for b in buffers]
        aligned = tuple(b not in self.unaligned_buffers for b in step.buffers)
        request = triton_codegen.request(step.kernel, self.sizes, aligned, spans, self.platform.chip, self.executable.options.tunes)
        if request.grid == 0:
            for name in step.buffers:
                self.tensor(name)
            return
        name = f"k{len(self.launches)}"
        self.launches.append((name, request))
        arguments = [self.address(b) for b in step.buffers] + [str(n) for n in request.sizes]
        self.lines.append(f"{name}({', '.join(['stream', *arguments])})")

    def span(self, buffer: Buffer) -> int:
        """Elements from the buffer's first to one past its last."""
        shape, stride = self.numbers(buffer.shape), self.numbers(buffer.stride)
        return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))

    def extern(self, step: Extern) -> None:
        if step.out_variant is not None and None not in step.outs:
            self.lines.append(externs.call_source(step, self, out=True))
            return
        call = externs.call_source(step, self, out=False)
        variables = [self.variable("b", o) if o is not None else "_" for o in step.outs]
        returns = externs.operator_of(step.op)._schema.returns
        several = len(returns) > 1 or (bool(returns) and isinstance(returns[0].type, torch.ListType))
        self.lines.append(f"{', '.join(variables)}{',' if several and len(variables) == 1 else ''} = {call}" if variables else call)
        for out, variable in zip(step.outs, variables):
            if out is None:
                continue
            buffer = self.program.buffers[out]
            if out in self.program.inputs:
                # The step writes an input: its memory is the caller's.
                self.lines.append(f"{self.tensors[out]}.copy_({variable})")
                continue
            self.tensors[out] = variable
            self.addresses.pop(out, None)
            self.in_arena.pop(out, None)
            if not buffer.opaque:
                shape, stride = self.numbers(buffer.shape), self.numbers(buffer.stride)
                self.lines.append(f"if {variable} is not None and ({variable}.stride() != {stride} "
                                  f"or {variable}.data_ptr() & {ALIGNMENT - 1}):")
                self.lines.append(f"    {variable} = relayout({variable}, {shape}, {stride})")

    # -- what externs.Scope asks --------------------------------------------------------------------------------
    def view(self, view: ViewOf) -> str:
        base, offset = self.tensor(view.buffer), self.number(view.offset)
        shift = f"{base}.storage_offset() + {offset}" if offset else f"{base}.storage_offset()"
        return f"as_strided({base}, {self.numbers(view.shape)}, {self.numbers(view.stride)}, {shift})"

    def size(self, e: Any) -> str:
        return str(self.number(e))

    def constant(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def output(self, output: Any) -> str:
        value = output.value
        if isinstance(value, Expr):
            return str(self.number(value))
        if not isinstance(value, str):
            return self.constant(value)
        if output.shape is None:
            return self.tensor(value)
        return self.view(ViewOf(value, output.shape, output.stride, output.offset))
