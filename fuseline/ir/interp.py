"""The loop interpreter: runs kernels and loop programs on CPU tensors with PyTorch's own element operations.

It is the reference that code generators and the scheduler are tested against, so it is simple, strict and vectorised: a
value is one torch tensor over all points of the kernel's axes. It raises InternalError for whatever generated code would
be free to crash on: an index out of range, a read of a value that does not exist, a wrong number of buffers.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.dtypes import BOOL, DType
from fuseline.ir.expr import Div, Expr, Int, Max, Mod, Sym, evaluate
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
    Ref,
    Stmt,
    Store,
    Value,
    ViewOf,
)
from fuseline.ir.print import show_stmt


def _torch_dtype(dtype: DType) -> torch.dtype:
    return torch_internals.to_torch_dtype(dtype)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a strided tensor spans, as a tensor of one axis that shares it: what a kernel's index addresses."""
    if tensor.numel() == 0:
        return tensor.reshape(-1)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((extent,), (1,), tensor.storage_offset())


# ---------------------------------------------------------------- kernels

def run_kernel(kernel: Kernel, buffers: Sequence[torch.Tensor], sizes: Mapping[str, int] | None = None) -> None:
    """Run a kernel on one CPU tensor for each param (strided tensors are addressed flat); `sizes` gives size symbols."""
    if len(buffers) != len(kernel.params):
        raise InternalError(f"kernel {kernel.label} has {len(kernel.params)} params, got {len(buffers)} buffers")
    memory = {}
    for param, tensor in zip(kernel.params, buffers):
        if tensor.dtype != _torch_dtype(param.dtype):
            raise InternalError(f"kernel {kernel.label}: param {param.name} is {param.dtype}, got {tensor.dtype}")
        memory[param.name] = flat(tensor)
    _KernelRun(kernel, memory, dict(sizes or {})).run()


class _KernelRun:
    def __init__(self, kernel: Kernel, memory: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
        self.kernel, self.memory, self.sizes = kernel, memory, sizes
        self.outer = tuple(evaluate(a.extent, sizes) for a in kernel.axes)
        self.values: dict[str, torch.Tensor] = {}
        self.rank_of: dict[str, int] = {}              # name -> number of inner axes its value has

    def run(self) -> None:
        if any(n == 0 for n in self.outer):
            return
        for phase in self.kernel.phases:
            self.run_phase(phase)

    def run_phase(self, phase: Phase) -> None:
        inner = tuple(evaluate(a.extent, self.sizes) for a in phase.axes)
        self.shape, self.inner = self.outer + inner, len(inner)
        self.grid: dict[str, torch.Tensor | int] = dict(self.sizes)
        for position, (axis, extent) in enumerate(zip((*self.kernel.axes, *phase.axes), self.shape)):
            view = [1] * len(self.shape)
            view[position] = extent
            self.grid[axis.sym.name] = torch.arange(extent, dtype=torch.int64).reshape(view)
        for stmt in phase.body:
            try:
                self.run_stmt(stmt)
            except InternalError:
                raise
            except Exception as error:
                what = f"kernel {self.kernel.label}: {type(error).__name__}: {error}"
                raise InternalError(what, node=show_stmt(stmt)) from error

    def define(self, name: str, value: torch.Tensor, rank: int) -> None:
        if name in self.values:
            raise InternalError(f"kernel {self.kernel.label}: {name} is defined twice")
        self.values[name], self.rank_of[name] = value, rank

    def value(self, name: str) -> torch.Tensor:
        """An earlier value, shaped to broadcast over the present phase's points."""
        if name not in self.values:
            raise InternalError(f"kernel {self.kernel.label}: {name} is read before it is defined")
        value, rank = self.values[name], self.rank_of[name]
        if rank == self.inner:
            return value
        if rank != 0:
            raise InternalError(f"kernel {self.kernel.label}: {name} has {rank} inner axes, read in a phase with {self.inner}")
        return value.reshape(value.shape + (1,) * self.inner) if value.ndim else value

    def index(self, e: Int) -> torch.Tensor | int:
        return _evaluate(e, self.symbol)

    def symbol(self, sym: Sym) -> torch.Tensor | int:
        if sym.name in self.grid:
            return self.grid[sym.name]
        return self.value(sym.name).to(torch.int64)

    def operand(self, value: Value, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(value, str):
            return self.value(value)
        return torch.tensor(value, dtype=dtype)

    def address(self, stmt: Load | Store, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(index, mask) over all points; raises if an index that is not masked is outside of memory."""
        index = torch.as_tensor(self.index(stmt.index), dtype=torch.int64)
        mask = None if stmt.mask is None else self.value(stmt.mask)
        wrong = (index < 0) | (index >= memory.numel())
        if mask is not None:
            wrong = wrong & mask
            index = torch.where(mask, index, 0)
        if 0 not in self.shape and bool(wrong.any()):
            raise InternalError(f"kernel {self.kernel.label}: index out of range of {memory.numel()} elements",
                                node=show_stmt(stmt))
        return index, mask

    def run_stmt(self, stmt: Stmt) -> None:
        if isinstance(stmt, Load):
            memory = self.memory[stmt.buffer]
            index, mask = self.address(stmt, memory)
            if memory.numel() == 0:                        # every element is masked, or there are no points
                memory = torch.zeros(1, dtype=memory.dtype)
                index = torch.zeros_like(index)
            loaded = memory[index].to(_torch_dtype(stmt.dtype.compute))
            if mask is not None:
                loaded = torch.where(mask, loaded, self.operand(stmt.other, loaded.dtype).to(loaded.dtype))
            self.define(stmt.name, loaded, self.inner)
        elif isinstance(stmt, Index):
            e = torch.as_tensor(self.index(stmt.expr), dtype=torch.int64)
            self.define(stmt.name, e.to(_torch_dtype(stmt.dtype)), self.inner)
        elif isinstance(stmt, Op):
            self.define(stmt.name, self.operation(stmt), self.inner)
        elif isinstance(stmt, Store):
            self.store(stmt)
        else:
            self.reduce(stmt)

    def operation(self, stmt: Op) -> torch.Tensor:
        result = _torch_dtype(stmt.dtype)
        args = list(stmt.args)
        if stmt.op == "cast":
            return self.operand(args[0], torch.float64 if isinstance(args[0], float) else torch.int64).to(result)
        if stmt.op == "where":
            condition = self.operand(args[0], torch.bool)
            return torch.where(condition, self.operand(args[1], result), self.operand(args[2], result))
        named = [self.value(a).dtype for a in args if isinstance(a, str)]
        common = named[0] if named else result
        if any(d != common for d in named):
            raise InternalError(f"kernel {self.kernel.label}: arguments of several types {named}", node=show_stmt(stmt))
        if stmt.op not in _OPS and stmt.op != "check":
            raise InternalError(f"kernel {self.kernel.label}: unknown operation", node=show_stmt(stmt))
        if stmt.op == "check":
            holds, active = (self.operand(a, common) for a in args)
            if 0 not in self.shape and bool((active & ~holds).any()):
                raise InternalError(f"kernel {self.kernel.label}: a check fails: {stmt.bounds}", node=show_stmt(stmt))
            return holds
        value = _OPS[stmt.op](*(self.operand(a, common) for a in args))
        if value.dtype != result:
            raise InternalError(f"kernel {self.kernel.label}: {stmt.op} of {common} gives {value.dtype}", node=show_stmt(stmt))
        return value

    def store(self, stmt: Store) -> None:
        memory = self.memory[stmt.buffer]
        index, mask = self.address(stmt, memory)
        value = self.operand(stmt.value, memory.dtype).to(memory.dtype).expand(self.shape)
        index = index.expand(self.shape)
        if mask is not None:
            mask = mask.expand(self.shape)
            index, value = index[mask], value[mask]
        if index.numel() == 0:
            return
        if stmt.mode == "set":
            memory[index.reshape(-1)] = value.reshape(-1)
        elif stmt.mode == "add":
            memory.index_put_((index.reshape(-1),), value.reshape(-1), accumulate=True)
        else:
            raise InternalError(f"kernel {self.kernel.label}: unknown store mode {stmt.mode}", node=show_stmt(stmt))

    def reduce(self, stmt: Reduce) -> None:
        outer = self.outer
        dtype = _torch_dtype(stmt.dtype)
        keep = stmt.op in ("argmax", "argmin", "any", "all", "max", "min")
        args = []
        for a in stmt.args:
            value = self.operand(a, dtype)
            value = value.expand(self.shape).reshape(*outer, -1) if 0 not in self.shape else value.new_zeros((*outer, 0))
            args.append(value if keep else value.to(dtype))
        results = _reduce(stmt.op, args, dtype)
        if len(results) != len(stmt.names):
            raise InternalError(f"kernel {self.kernel.label}: {stmt.op} has {len(results)} results", node=show_stmt(stmt))
        for name, result in zip(stmt.names, results):
            self.define(name, result.to(dtype), 0)


def _reduce(op: str, args: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Reduce the last axis of each argument."""
    x = args[0]
    if op == "sum":
        return (x.sum(-1, dtype=dtype),)
    if op == "prod":
        return (x.prod(-1, dtype=dtype),)
    if op in ("any", "all"):
        return ((x != 0).any(-1) if op == "any" else (x != 0).all(-1),)
    if op in ("max", "min"):
        if x.shape[-1] == 0:
            return (torch.full(x.shape[:-1], _identity(op, x.dtype), dtype=x.dtype),)
        return (x.amax(-1) if op == "max" else x.amin(-1),)
    if op in ("argmax", "argmin"):
        if x.shape[-1] == 0:
            return (torch.zeros(x.shape[:-1], dtype=torch.int64),)
        x = x.to(torch.int8) if x.dtype == torch.bool else x
        return (x.argmax(-1) if op == "argmax" else x.argmin(-1),)
    if op == "welford":
        n = x.shape[-1]
        mean = x.mean(-1) if n else torch.zeros(x.shape[:-1], dtype=x.dtype)
        return mean, ((x - mean.unsqueeze(-1)) ** 2).sum(-1)
    if op == "welford_combine":
        mean, m2, count = args
        total = count.sum(-1)
        combined = (mean * count).sum(-1) / torch.where(total == 0, torch.ones_like(total), total)
        return combined, m2.sum(-1) + (count * (mean - combined.unsqueeze(-1)) ** 2).sum(-1)
    raise InternalError(f"unknown reduction {op}")


def _identity(op: str, dtype: torch.dtype) -> int | float | bool:
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _evaluate(e: Int, symbol: Callable[[Sym], torch.Tensor | int]) -> torch.Tensor | int:
    """An index expression with tensors for symbols."""
    if isinstance(e, int):
        return e
    total: torch.Tensor | int = 0
    for monomial, coefficient in e.terms:
        term: torch.Tensor | int = coefficient
        for atom in monomial:
            term = term * _atom(atom, symbol)
        total = total + term
    return total


def _atom(atom: Expr, symbol: Callable[[Sym], torch.Tensor | int]) -> torch.Tensor | int:
    if isinstance(atom, Sym):
        return symbol(atom)
    if isinstance(atom, Div):
        a, b = _evaluate(atom.numerator, symbol), _evaluate(atom.denominator, symbol)
        return torch.div(a, b, rounding_mode="floor") if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a // b
    if isinstance(atom, Mod):
        a, b = _evaluate(atom.numerator, symbol), _evaluate(atom.denominator, symbol)
        return torch.remainder(torch.as_tensor(a), b) if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a % b
    if isinstance(atom, Max):
        a, b = _evaluate(atom.a, symbol), _evaluate(atom.b, symbol)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))
        return max(a, b)
    raise InternalError(f"unknown atom {atom!r}")


def _round_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c rounded once: f64 holds an f32 product exactly (f64 itself is rounded twice here)."""
    return (a.double() * b.double() + c.double()).to(a.dtype)


_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": torch.true_divide,
    "fma": _fma,
    "floordiv": torch.floor_divide, "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "rem": torch.remainder, "fmod": torch.fmod, "neg": torch.neg, "abs": torch.abs, "sign": torch.sign,
    "maximum": torch.maximum, "minimum": torch.minimum,
    "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "round_f16": _round_to(torch.float16), "round_bf16": _round_to(torch.bfloat16),
    "reciprocal": torch.reciprocal, "pow": torch.pow, "atan2": torch.atan2, "copysign": torch.copysign,
    "round": torch.round, "signbit": torch.signbit, "isnan": torch.isnan, "isinf": torch.isinf,
    **{name: getattr(torch, name) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan",
        "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "floor", "ceil", "trunc")},
}


# ---------------------------------------------------------------- programs

def run_program(program: LoopProgram, inputs: Sequence[Any], constants: Mapping[str, torch.Tensor] | None = None,
                use_plan: bool = True) -> tuple:
    """The program's outputs for `inputs` (CPU tensors, and ints for size symbols), hoisted steps included.

    Fresh buffers are filled with NaN or large numbers, so that a read of what was never written shows. With use_plan,
    temp buffers lie in one arena at the offsets of `program.plan`, so that a wrong plan shows too.
    """
    sizes: dict[str, int] = {}
    tensors: dict[str, torch.Tensor] = dict(constants or {})
    if len(inputs) != len(program.inputs):
        raise InternalError(f"the program has {len(program.inputs)} inputs, got {len(inputs)}")
    keys: tuple[Any, ...] = program.inputs
    for key, value in zip(keys, inputs):
        if isinstance(key, Sym):
            sizes[key.name] = value
            continue
        tensors[key] = value
        for size, actual in zip(program.buffers[key].shape, value.shape):
            if isinstance(size, Sym):
                sizes.setdefault(size.name, actual)
    for key, value in zip(keys, inputs):
        if not isinstance(key, Sym):
            shape = tuple(evaluate(s, sizes) for s in program.buffers[key].shape)
            if shape != tuple(value.shape):
                raise InternalError(f"input {key} has shape {tuple(value.shape)}, expected {shape}")
    arena = torch.full((evaluate(program.arena_bytes, sizes),), 0xFB, dtype=torch.uint8) if use_plan and program.plan else None

    def allocate(name: str) -> torch.Tensor:
        if name not in tensors:
            tensors[name] = _allocate(program.buffers[name], sizes, arena, program.plan.get(name))
        return tensors[name]
    for step in (*program.hoisted, *program.steps):
        if isinstance(step, Launch):
            run_kernel(step.kernel, [allocate(b) for b in step.buffers], sizes)
        else:
            for name, result in zip(step.outs, _call(step, tensors, sizes)):
                if name is None:
                    continue
                buffer = program.buffers[name]
                if buffer.opaque:
                    tensors[name] = result
                else:
                    allocate(name).copy_(result)
    return tuple(_output(o, tensors, sizes) for o in program.outputs)


def _allocate(buffer: Buffer, sizes: Mapping[str, int], arena: torch.Tensor | None, offset: Int | None) -> torch.Tensor:
    shape = [evaluate(s, sizes) for s in buffer.shape]
    stride = [evaluate(s, sizes) for s in buffer.stride]
    dtype = _torch_dtype(buffer.dtype)
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))
    if arena is not None and offset is not None:
        at = evaluate(offset, sizes)
        if at + extent * buffer.dtype.size > arena.numel():
            raise InternalError(f"buffer {buffer.name} at {at} does not fit the arena of {arena.numel()} bytes")
        memory = arena[at:at + extent * buffer.dtype.size].view(dtype)
    else:
        memory = torch.empty(extent, dtype=dtype)
        if buffer.dtype == BOOL:
            memory.fill_(True)
        else:
            memory.fill_(math.nan if dtype.is_floating_point or dtype.is_complex else 99)
    return memory.as_strided(shape, stride)


def _call(step: Extern, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> tuple:
    namespace, name, overload = step.op.split(".")
    operation = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    results = operation(*(_argument(a, tensors, sizes) for a in step.args),
                        **{k: _argument(v, tensors, sizes) for k, v in step.kwargs})
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


_MEMORY_FORMATS = {"contiguous_format": torch.contiguous_format, "channels_last": torch.channels_last,
                   "channels_last_3d": torch.channels_last_3d, "preserve_format": torch.preserve_format}


def _argument(arg: object, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> object:
    if isinstance(arg, Ref):
        return tensors[arg.buffer]
    if isinstance(arg, ViewOf):
        base = tensors[arg.buffer]
        return base.as_strided([evaluate(s, sizes) for s in arg.shape], [evaluate(s, sizes) for s in arg.stride],
                               base.storage_offset() + evaluate(arg.offset, sizes))
    if isinstance(arg, (tuple, list)):
        return [_argument(a, tensors, sizes) for a in arg]
    if isinstance(arg, Expr):
        return evaluate(arg, sizes)
    if isinstance(arg, DType):
        return _torch_dtype(arg)
    if isinstance(arg, str):
        return _MEMORY_FORMATS.get(arg, arg)
    return arg


def _output(output: object, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> object:
    value = output.value                                   # type: ignore[attr-defined]
    if isinstance(value, Expr):
        return evaluate(value, sizes)
    if not isinstance(value, str):
        return value
    if output.shape is None:                               # type: ignore[attr-defined]
        return tensors[value]
    return _argument(ViewOf(value, output.shape, output.stride, output.offset), tensors, sizes)   # type: ignore[attr-defined]
