"""Kernel (`ir/kernels.py`) -> Triton source text.

Each program of the grid handles one tile of outer points. A value is a tile whose shape is that of the tile dimensions it
depends on, with 1 elsewhere, so what depends on the outer point alone is loaded and computed once per point, not once per
element. Reductions accumulate element-wise over the loop and reduce across threads once, at its end.
"""
from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fuseline.codegen.triton import ops
from fuseline.codegen.triton.expressions import show
from fuseline.codegen.triton.tiling import Tiling, extent, names_read, next_power_of_2
from fuseline.errors import InternalError, NotSupported
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Expr, Int, Sym, symbols
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Op, Phase, Reduce, Stmt, Store

HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra.cuda import libdevice\n"


@dataclass(frozen=True, slots=True)
class Specialisation:
    """What the machine code may rely on of a call.

    aligned    for each param: its address is a multiple of 16
    divisible  for each size: it is a multiple of 16
    wide       some offset needs 64 bits
    """
    aligned: tuple[bool, ...]
    divisible: tuple[bool, ...]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class TritonSource:
    """Text of a module with one @triton.jit function, and how to compile it. Arguments: buffers' addresses, then sizes."""
    name: str
    text: str
    signature: tuple[tuple[str, str], ...]            # argument -> Triton type
    divisible: tuple[int, ...]                        # arguments that are multiples of 16
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Val:
    """A value of the kernel body as Triton text, and the tile dimensions ("y", "x", "r") that it varies over."""
    text: str
    dtype: DType
    dims: frozenset[str]


@dataclass(slots=True)
class Scope:
    """A block of source: what was computed in it is valid to its end."""
    indent: str
    lines: list[str] = field(default_factory=list)
    literals: dict[tuple[str, DType], str] = field(default_factory=dict)
    expressions: dict[Expr, tuple[str, tuple]] = field(default_factory=dict)    # text, and of the axes in it when it was made


def emit(kernel: Kernel, tiling: Tiling, special: Specialisation) -> TritonSource:
    """Source of a kernel. Raises NotSupported for what Triton has no code for (complex types, atomics on small integers)."""
    for param in kernel.params:
        ops.require(param.dtype, f"param {param.name} of {kernel.label}")
    return _Emitter(kernel, tiling, special).source()


class _Emitter:
    def __init__(self, kernel: Kernel, tiling: Tiling, special: Specialisation) -> None:
        self.kernel, self.tiling, self.special = kernel, tiling, special
        self.params = {p.name: p for p in kernel.params}
        self.index_type = "tl.int64" if special.wide else "tl.int32"
        self.reduces = any(p.axes for p in kernel.phases)
        self.rank = [d for d, there in (("y", tiling.y > 1), ("x", tiling.x > 1), ("r", self.reduces)) if there]
        self.scopes = [Scope("    ")]
        self.values: dict[str, Val] = {}
        self.counter = 0
        self.axis_text: dict[str, str] = {}                    # outer axes' symbols, and sizes
        self.axis_dims: dict[str, frozenset[str]] = {}
        self.r_dims: frozenset[str] = frozenset()
        self.masks: dict[str, str] = {}                        # tile dimension -> text of its bounds check, where needed
        self.r_block = 0
        self.flat_r = ""
        self.r_total: Int = 0
        self.dtypes = value_types(kernel)
        self.defined: dict[str, tuple[Stmt, int]] = {}         # per-element value -> statement, phase number
        self.stored_in: dict[str, int] = {}                    # param -> the phase that first stores to it
        for number, phase in enumerate(kernel.phases):
            for stmt in phase.body:
                if isinstance(stmt, Store):
                    self.stored_in.setdefault(stmt.buffer, number)

    # -- text -------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.scopes[-1].lines.append(self.scopes[-1].indent + text)

    def fresh(self, text: str, prefix: str = "t") -> str:
        name = f"{prefix}{self.counter}"
        self.counter += 1
        self.line(f"{name} = {text}")
        return name

    def push(self) -> None:
        self.scopes.append(Scope(self.scopes[-1].indent + "    "))

    def pop(self) -> None:
        inner = self.scopes.pop()
        self.scopes[-1].lines.extend(inner.lines)

    def suffix(self, dim: str) -> str:
        """Index that makes a one-dimensional tile of `dim` broadcast in the whole tile."""
        if len(self.rank) == 1:
            return ""
        return "[" + ", ".join(":" if d == dim else "None" for d in self.rank) + "]"

    def shape(self) -> str:
        sizes = {"y": str(self.tiling.y), "x": str(self.tiling.x), "r": str(self.r_block)}
        return "[" + ", ".join(sizes[d] for d in self.rank) + "]"

    # -- the kernel -------------------------------------------------------------------------------------------
    def source(self) -> TritonSource:
        self.outer()
        for number, phase in enumerate(self.kernel.phases):
            if number and any(self.stored_in.get(s.buffer, number) < number for s in phase.body if isinstance(s, Load)):
                self.line("tl.debug_barrier()")                # what other threads of the block stored is loaded below
            if not phase.axes:
                self.r_dims = frozenset()
                self.statements(phase.body, number)
            elif self.tiling.persistent:
                self.persistent(phase, number)
            else:
                self.loop(phase, number)
        body = "\n".join(self.scopes[0].lines)
        name = "fl_" + (re.sub(r"\W+", "_", self.kernel.label).strip("_") or "kernel")[:80]
        sizes = [(_size_name(s), "i64" if self.special.wide else "i32") for s in self.kernel.sizes]
        signature = [(_param_name(p.name), ops.POINTER_TYPE[p.dtype]) for p in self.kernel.params] + sizes
        head = f"@triton.jit\ndef {name}({', '.join(n for n, _ in signature)}):\n"
        aligned = [i for i, ok in enumerate((*self.special.aligned, *self.special.divisible)) if ok]
        text = HEADER + ops.helpers_for(body) + "\n" + head + body + "\n"
        return TritonSource(name, text, tuple(signature), tuple(aligned), self.tiling.num_warps, self.tiling.num_stages)

    def outer(self) -> None:
        """The tile's place in the grid, and the outer axes' indices in it."""
        for size in self.kernel.sizes:
            self.axis_text[size.name] = _size_name(size)
        t, axes = self.tiling, self.kernel.axes
        if not axes:
            return
        self.line("pid = tl.program_id(0)" + (".to(tl.int64)" if self.special.wide else ""))
        if t.y:
            x_axes, y_axes = axes[-t.x_axes:], axes[:-t.x_axes]
            across = self.expression(-(-extent(x_axes) // t.x))
            self.flat("y", y_axes, t.y, f"(pid // {across})")
            self.flat("x", x_axes, t.x, f"(pid % {across})")
        else:
            self.flat("x", axes, t.x, "pid")

    def flat(self, dim: str, axes: tuple[Axis, ...], block: int, place: str) -> None:
        total = extent(axes)
        if block > 1:
            self.line(f"{dim}_index = {place} * {block} + tl.arange(0, {block}){self.suffix(dim)}")
            if not (isinstance(total, int) and total % block == 0):
                self.line(f"{dim}_mask = {dim}_index < {self.expression(total)}")
                self.masks[dim] = f"{dim}_mask"
        else:
            self.line(f"{dim}_index = {place}")
        self.split(dim, axes, f"{dim}_index", frozenset([dim]) if block > 1 else frozenset())

    def split(self, dim: str, axes: tuple[Axis, ...], index: str, dims: frozenset[str]) -> None:
        """Name each axis's index out of the flat one."""
        step: Int = 1
        for axis in reversed(axes):
            text = index
            if not (isinstance(step, int) and step == 1):
                text = f"({text} // {self.expression(step)})"
            if axis is not axes[0]:
                text = f"({text} % {self.expression(axis.extent)})"
            self.axis_text[axis.sym.name] = text if text == index else self.fresh(text, f"{dim}_")
            self.axis_dims[axis.sym.name] = dims
            step = step * axis.extent

    def r_index(self, phase: Phase, block: int, start: str) -> None:
        self.r_block = block
        total = extent(phase.axes)
        self.masks.pop("r", None)
        name = self.fresh(f"{start}tl.arange(0, {block}){self.suffix('r')}", "r_index")
        if not (isinstance(total, int) and (total % block == 0)):
            self.masks["r"] = self.fresh(f"{name} < {self.expression(total)}", "r_mask")
        self.split("r", phase.axes, name, frozenset(["r"]))
        self.r_dims = frozenset(["r"])
        self.flat_r, self.r_total = name, total

    def persistent(self, phase: Phase, number: int) -> None:
        total = extent(phase.axes)
        if not isinstance(total, int):
            raise InternalError(f"a persistent kernel with the symbolic extent {total}")
        self.r_index(phase, next_power_of_2(max(total, 1)), "")
        self.statements(phase.body, number)

    def loop(self, phase: Phase, number: int) -> None:
        total = extent(phase.axes)
        block = self.tiling.r
        body = [*self.recomputed(phase, number), *phase.body]
        before = self.invariant(body, phase)
        self.r_block = block
        self.r_dims = frozenset()
        for stmt in body:
            if not isinstance(stmt, (Store, Reduce)) and stmt.name in before:
                self.statement(stmt, number)
        reductions = {stmt.names: self.accumulators(stmt) for stmt in body if isinstance(stmt, Reduce)}
        saved = dict(self.values)
        offset = f"r_start{number}"
        self.line(f"for {offset} in range(0, {self.expression(total)}, {block}):")
        self.push()
        start = f"tl.cast({offset}, {self.index_type}) + " if self.special.wide else f"{offset} + "
        self.r_index(phase, block, start)
        for stmt in body:
            if isinstance(stmt, Reduce):
                self.accumulate(stmt, reductions[stmt.names], offset)
            elif isinstance(stmt, Store) or stmt.name not in before:
                self.statement(stmt, number)
        self.pop()
        self.values = saved
        self.masks.pop("r", None)
        for stmt in phase.body:
            if isinstance(stmt, Reduce):
                self.finish(stmt, reductions[stmt.names])
            elif not isinstance(stmt, Store) and stmt.name not in before:
                self.defined.setdefault(stmt.name, (stmt, number))

    def recomputed(self, phase: Phase, number: int) -> list[Stmt]:
        """The statements of earlier phases whose per-element values this phase reads, in order."""
        wanted: dict[str, Stmt] = {}

        def visit(name: str) -> None:
            if name in wanted or name not in self.defined:
                return
            stmt, made_in = self.defined[name]
            if isinstance(stmt, Load) and made_in <= self.stored_in.get(stmt.buffer, number) < number:
                raise NotSupported(f"{self.kernel.label}: {stmt.buffer} is loaded, overwritten and needed again")
            for operand in _operands(stmt):
                visit(operand)
            wanted[name] = stmt

        for stmt in phase.body:
            for operand in _operands(stmt):
                visit(operand)
        return list(wanted.values())

    def invariant(self, body: list[Stmt], phase: Phase) -> set[str]:
        """Names of the statements of a loop that do not depend on the inner axes: computed once, before it."""
        inner = {a.sym.name for a in phase.axes}
        varying: set[str] = set()
        found: set[str] = set()
        for stmt in body:
            if isinstance(stmt, (Store, Reduce)):
                continue
            index = stmt.index if isinstance(stmt, Load) else stmt.expr if isinstance(stmt, Index) else 0
            names = {s.name for s in symbols(index)} | set(names_read(stmt))
            moves = isinstance(stmt, Load) and stmt.buffer in self.stored_in
            if names & inner or names & varying or moves:
                varying.add(stmt.name)
            else:
                found.add(stmt.name)
        return found

    # -- statements -------------------------------------------------------------------------------------------
    def statements(self, body: Iterable[Stmt], number: int) -> None:
        for stmt in body:
            if isinstance(stmt, Reduce):
                self.reduce_tile(stmt)
            else:
                self.statement(stmt, number)

    def statement(self, stmt: Stmt, number: int) -> None:
        if isinstance(stmt, Load):
            self.values[stmt.name] = self.load(stmt)
        elif isinstance(stmt, Op):
            self.values[stmt.name] = self.op(stmt)
        elif isinstance(stmt, Index):
            ops.require(stmt.dtype, "an index value")
            text, dims = self.index(stmt.expr)
            self.values[stmt.name] = Val(self.fresh(f"tl.cast({text}, {ops.TRITON_TYPE[stmt.dtype]})"), stmt.dtype, dims)
        elif isinstance(stmt, Store):
            self.store(stmt)
        else:
            raise InternalError(f"statement {stmt!r} of {self.kernel.label}")

    def value(self, arg: str | int | float, dtype: DType) -> Val:
        if isinstance(arg, str):
            if arg not in self.values:
                raise InternalError(f"{self.kernel.label} reads {arg} before it is defined")
            return self.values[arg]
        key = (repr(arg), dtype)
        for scope in self.scopes:
            if key in scope.literals:
                return Val(scope.literals[key], dtype, frozenset())
        text = self.fresh(ops.literal(arg, dtype), "c")
        self.scopes[-1].literals[key] = text
        return Val(text, dtype, frozenset())

    def mask(self, dims: frozenset[str], extra: str | None) -> str | None:
        parts = [self.masks[d] for d in self.rank if d in dims and d in self.masks]
        if extra is not None:
            parts.append(self.values[extra].text)
        return " & ".join(parts) if parts else None

    def load(self, stmt: Load) -> Val:
        param = self.params[stmt.buffer]
        text, dims = self.index(stmt.index)
        if stmt.mask is not None and not self.values[stmt.mask].dims <= dims:
            dims = dims | self.values[stmt.mask].dims
            text = self.spread(text, dims)
        mask = self.mask(dims, stmt.mask)
        address = f"{_param_name(stmt.buffer)} + {text}"
        loaded = f"tl.load({address}, mask={mask}, other=0)" if mask else f"tl.load({address})"
        dtype = param.dtype.compute
        if param.dtype is dtypes.BOOL:
            loaded = f"({loaded} != 0)"
        elif dtype is not param.dtype:
            loaded = f"{loaded}.to({ops.TRITON_TYPE[dtype]})"
        name = self.fresh(loaded)
        if stmt.mask is not None and (isinstance(stmt.other, str) or bool(stmt.other)):
            other = self.value(stmt.other, dtype)
            dims = dims | other.dims
            name = self.fresh(f"tl.where({self.values[stmt.mask].text}, {name}, {other.text})")
        return Val(name, dtype, dims)

    def spread(self, text: str, dims: frozenset[str]) -> str:
        """Offsets with the shape of a tile over `dims`, where a mask or a stored value varies more than the index does."""
        return f"({text} + tl.zeros({self.part_shape(dims)}, {self.index_type}))"

    def store(self, stmt: Store) -> None:
        param = self.params[stmt.buffer]
        text, dims = self.index(stmt.index)
        value = self.value(stmt.value, param.dtype.compute)
        every = dims | value.dims | (self.values[stmt.mask].dims if stmt.mask else frozenset())
        stored = ops.cast(value.text, value.dtype, param.dtype)
        if param.dtype is dtypes.BOOL:
            stored = f"{value.text if value.dtype is dtypes.BOOL else stored}.to(tl.uint8)"
        if stmt.mode == "add":
            every = frozenset(self.rank) - (frozenset() if self.r_dims else frozenset(["r"]))
        if every != dims:
            # One store per point of the tile: the address gets the shape that value and mask have.
            text = self.spread(text, every)
        mask = self.mask(every, stmt.mask)
        masked = f", mask={mask}" if mask else ""
        pointer = f"{_param_name(stmt.buffer)} + {text}"
        if stmt.mode == "set":
            self.line(f"tl.store({pointer}, {stored}{masked})")
        elif stmt.mode == "add":
            if param.dtype in (dtypes.I8, dtypes.U8, dtypes.I16, dtypes.U16, dtypes.BOOL):
                raise NotSupported(f"atomic add to {param.dtype}")
            if every:
                stored = f"tl.broadcast_to({stored}, {self.part_shape(every)})"
            self.line(f"tl.atomic_add({pointer}, {stored}{masked}, sem=\"relaxed\")")
        else:
            raise NotSupported(f"a store with mode {stmt.mode!r}")

    def part_shape(self, dims: frozenset[str]) -> str:
        sizes = {"y": self.tiling.y, "x": self.tiling.x, "r": self.r_block}
        return "[" + ", ".join(str(sizes[d]) if d in dims else "1" for d in self.rank) + "]"

    def op(self, stmt: Op) -> Val:
        ops.require(stmt.dtype, f"{stmt.op} in {self.kernel.label}")
        named = [self.values[a].dtype for a in stmt.args if isinstance(a, str) and a in self.values]
        if stmt.op == "cast":
            source = named[0] if named else (dtypes.F64 if isinstance(stmt.args[0], float) else dtypes.I64)
            arg = self.value(stmt.args[0], source)
            return Val(self.fresh(ops.cast(arg.text, source, stmt.dtype)), stmt.dtype, arg.dims)
        if stmt.op == "where":
            kinds = [dtypes.BOOL, stmt.dtype, stmt.dtype]
        else:
            common = named[0] if named else stmt.dtype
            kinds = [common] * len(stmt.args)
        args = [self.value(a, kind) for a, kind in zip(stmt.args, kinds)]
        text = ops.TEXT[stmt.op](kinds[-1], *(a.text for a in args))
        dims = frozenset().union(*(a.dims for a in args)) if args else frozenset()
        return Val(self.fresh(text), stmt.dtype, dims)

    # -- index expressions ------------------------------------------------------------------------------------
    def index(self, expr: Int) -> tuple[str, frozenset[str]]:
        """(text, tile dimensions it varies over) of an index expression."""
        dims: frozenset[str] = frozenset()
        for sym in symbols(expr):
            if sym.name in self.axis_dims:
                dims |= self.axis_dims[sym.name]
            elif sym.name in self.values:
                dims |= self.values[sym.name].dims
        return self.expression(expr), dims

    def expression(self, expr: Int) -> str:
        if isinstance(expr, int):
            return str(expr)
        for scope in self.scopes:
            if expr in scope.expressions and all(s.name not in self.values for s in symbols(expr)):
                stamp = tuple(self.axis_text.get(s.name) for s in sorted(symbols(expr), key=str))
                text, then = scope.expressions[expr]
                if then == stamp:
                    return text
        text = show(expr, self.symbol)
        if not isinstance(expr, Sym):
            text = self.fresh(text, "i")
            stamp = tuple(self.axis_text.get(s.name) for s in sorted(symbols(expr), key=str))
            self.scopes[-1].expressions[expr] = (text, stamp)
        return text

    def symbol(self, sym: Sym) -> str:
        if sym.name in self.axis_text:
            return self.axis_text[sym.name]
        if sym.name in self.values:                            # an indirect index
            value = self.values[sym.name]
            return f"{value.text}.to({self.index_type})"
        raise InternalError(f"{self.kernel.label}: index symbol {sym} is neither axis, size nor value")

    # -- reductions -------------------------------------------------------------------------------------------
    def whole(self, arg: Val) -> str:
        """The value as a full tile."""
        return arg.text if arg.dims == frozenset(self.rank) else f"tl.broadcast_to({arg.text}, {self.shape()})"

    def axis(self) -> int:
        return len(self.rank) - 1

    def across(self, text: str) -> str:
        """Gives the result of a reduction the tile's rank again."""
        return f"({text})[:, None]" if len(self.rank) == 2 else text

    def outer_dims(self) -> frozenset[str]:
        return frozenset(self.rank) - {"r"}

    def bind(self, name: str, text: str, dtype: DType) -> None:
        self.values[name] = Val(self.fresh(self.across(text)), dtype, self.outer_dims())

    def kept(self, text: str, identity: str) -> str:
        """`text` where the inner point exists, else the reduction's identity."""
        return f"tl.where({self.masks['r']}, {text}, {identity})" if "r" in self.masks else text

    def operand(self, stmt: Reduce, place: int = 0) -> str:
        target = self.accumulator(stmt)
        name = stmt.args[place]
        arg = self.value(name, self.dtypes[name] if isinstance(name, str) else target)
        text = self.whole(arg)
        if stmt.op in ("any", "all"):
            text = text if arg.dtype is dtypes.BOOL else f"({text} != 0)"
            return f"{text}.to(tl.int32)"
        return ops.cast(text, arg.dtype, target)

    def accumulator(self, stmt: Reduce) -> DType:
        """The type that a reduction accumulates in; argmax compares its operand in the operand's own type."""
        dtype = stmt.dtype
        if stmt.op in ("argmax", "argmin"):
            dtype = self.dtypes[stmt.args[0]] if isinstance(stmt.args[0], str) else dtypes.F64
        return dtypes.I32 if stmt.op in ("any", "all") or dtype is dtypes.BOOL else dtype

    def reduce_tile(self, stmt: Reduce) -> None:
        """A reduction in a persistent kernel: all elements of the row are in the tile."""
        axis = self.axis()
        if stmt.op == "welford":
            # Two passes over registers: the mean first, so that no digits cancel.
            x = self.fresh(self.operand(stmt))
            if not isinstance(self.r_total, int):
                raise InternalError(f"{self.kernel.label}: a persistent tile of a row of {self.r_total} elements")
            count = ops.literal(max(1, self.r_total), stmt.dtype)
            total = self.fresh(self.across(f"tl.sum({self.kept(x, '0.0')}, {axis})"))
            mean = self.fresh(ops.TEXT["div"](stmt.dtype, total, count))
            delta = self.fresh(self.kept(f"{x} - {mean}", "0.0"))
            self.values[stmt.names[0]] = Val(mean, stmt.dtype, self.outer_dims())
            self.bind(stmt.names[1], f"tl.sum({delta} * {delta}, {axis})", stmt.dtype)
            return
        if stmt.op == "welford_combine":
            mean, m2, count = (self.fresh(self.kept(self.operand(stmt, i), "0.0")) for i in range(3))
            total = self.fresh(self.across(f"tl.sum({count}, {axis})"))
            safe = self.fresh(f"tl.where({total} == 0, {total} + 1, {total})")
            weighted = self.fresh(self.across(f"tl.sum({mean} * {count}, {axis})"))
            centre = self.fresh(ops.TEXT["div"](stmt.dtype, weighted, safe))
            delta = self.fresh(self.kept(f"{mean} - {centre}", "0.0"))
            self.values[stmt.names[0]] = Val(centre, stmt.dtype, self.outer_dims())
            self.bind(stmt.names[1], f"tl.sum({m2} + {delta} * {delta} * {count}, {axis})", stmt.dtype)
            return
        if stmt.op in ("argmax", "argmin"):
            value = self.fresh(self.kept(self.operand(stmt), self.identity(stmt)))
            best = self.fresh(f"tl.reduce(({value}, {self.fresh(self.places())}), {axis}, _{stmt.op})")
            self.bind(stmt.names[0], f"{best}[1].to(tl.int64)", dtypes.I64)
            return
        value = self.fresh(self.kept(self.operand(stmt), self.identity(stmt)))
        self.bind(stmt.names[0], self.collapse(stmt, value), _result(stmt))

    def places(self) -> str:
        """Each element's position in the row. One outside of the row loses even against one that equals the identity."""
        inside = self.kept(self.flat_r, "2147483647")
        return f"tl.broadcast_to({inside}, {self.shape()}).to({self.index_type})"

    def identity(self, stmt: Reduce) -> str:
        dtype = self.accumulator(stmt)
        lowest, highest = _limits(dtype)
        number = {"sum": 0, "prod": 1, "any": 0, "all": 1, "max": lowest, "argmax": lowest, "min": highest,
                  "argmin": highest, "welford": 0, "welford_combine": 0}[stmt.op]
        return ops.literal(number, dtype)

    def collapse(self, stmt: Reduce, value: str) -> str:
        axis = self.axis()
        if stmt.op == "sum":
            return f"tl.sum({value}, {axis})"
        if stmt.op == "any":
            return f"tl.max({value}, {axis}) != 0"
        if stmt.op == "all":
            return f"tl.min({value}, {axis}) != 0"
        if stmt.op == "prod":
            return f"tl.reduce({value}, {axis}, _mul)"
        if stmt.op in ("max", "min"):
            if stmt.dtype.is_float:
                return f"tl.reduce({value}, {axis}, _{stmt.op}_nan)"
            if stmt.dtype is dtypes.BOOL:
                return f"tl.{stmt.op}({value}, {axis}) != 0"
            return f"tl.{stmt.op}({value}, {axis})"
        raise InternalError(f"reduction {stmt.op!r}")

    def accumulators(self, stmt: Reduce) -> tuple[str, ...]:
        dtype = ops.TRITON_TYPE[self.accumulator(stmt)]
        shape = self.shape()
        if stmt.op in ("welford", "welford_combine"):
            return tuple(self.fresh(f"tl.zeros({shape}, {dtype})", "acc") for _ in range(3))
        number = re.sub(r"^tl\.full\(\[\], (.*), [\w.]+\)$", r"\1", self.identity(stmt))
        value = self.fresh(f"tl.full({shape}, {number}, {dtype})", "acc")
        if stmt.op in ("argmax", "argmin"):
            return value, self.fresh(f"tl.full({shape}, 2147483647, {self.index_type})", "acc")
        return (value,)

    def accumulate(self, stmt: Reduce, accs: tuple[str, ...], offset: str) -> None:
        mask = self.masks.get("r")

        def update(acc: str, new: str) -> None:
            self.line(f"{acc} = tl.where({mask}, {new}, {acc})" if mask else f"{acc} = {new}")

        if stmt.op == "welford":
            mean, m2, count = accs
            x = self.fresh(self.operand(stmt))
            # Every lane that is not masked has seen as many elements as the loop has made steps.
            step = self.fresh(f"tl.cast({offset} // {self.r_block} + 1, {ops.TRITON_TYPE[stmt.dtype]})")
            share = self.fresh(f"1.0 / {step}")
            delta = self.fresh(f"{x} - {mean}")
            moved = self.fresh(f"{mean} + {delta} * {share}")
            update(m2, f"{m2} + {delta} * ({x} - {moved})")
            update(mean, moved)
            update(count, f"tl.zeros({self.shape()}, {ops.TRITON_TYPE[stmt.dtype]}) + {step}")
        elif stmt.op == "welford_combine":
            parts = [self.fresh(self.operand(stmt, i)) for i in range(3)]
            merged = self.fresh(f"_welford({', '.join((*accs, *parts))})")
            for place, acc in enumerate(accs):
                update(acc, f"{merged}[{place}]")
        elif stmt.op in ("argmax", "argmin"):
            value, position = accs
            x = self.fresh(self.kept(self.operand(stmt), self.identity(stmt)))
            where = self.fresh(self.places())
            best = self.fresh(f"_{stmt.op}({value}, {position}, {x}, {where})")
            self.line(f"{value} = {best}[0]")
            self.line(f"{position} = {best}[1]")
        else:
            x = self.operand(stmt)
            (acc,) = accs
            if stmt.op in ("max", "min"):
                new = ops.TEXT[stmt.op + "imum"](self.accumulator(stmt), acc, x)
            else:
                new = f"{acc} {dict(sum='+', prod='*', any='|', all='&')[stmt.op]} {x}"
            update(acc, new)

    def finish(self, stmt: Reduce, accs: tuple[str, ...]) -> None:
        axis = self.axis()
        if stmt.op in ("welford", "welford_combine"):
            result = self.fresh(f"tl.reduce(({', '.join(accs)}), {axis}, _welford)")
            self.bind(stmt.names[0], f"{result}[0]", stmt.dtype)
            self.bind(stmt.names[1], f"{result}[1]", stmt.dtype)
        elif stmt.op in ("argmax", "argmin"):
            result = self.fresh(f"tl.reduce(({', '.join(accs)}), {axis}, _{stmt.op})")
            self.bind(stmt.names[0], f"{result}[1].to(tl.int64)", dtypes.I64)
        else:
            self.bind(stmt.names[0], self.collapse(stmt, accs[0]), _result(stmt))


def value_types(kernel: Kernel) -> dict[str, DType]:
    """name of each value of the kernel -> its type."""
    params = {p.name: p.dtype for p in kernel.params}
    found: dict[str, DType] = {}
    for phase in kernel.phases:
        for stmt in phase.body:
            if isinstance(stmt, Load):
                found[stmt.name] = params[stmt.buffer].compute
            elif isinstance(stmt, Reduce):
                position = stmt.op in ("argmax", "argmin")
                found.update((name, dtypes.I64 if position else _result(stmt)) for name in stmt.names)
            elif not isinstance(stmt, Store):
                found[stmt.name] = stmt.dtype
    return found


def _operands(stmt: Stmt) -> list[str]:
    names = list(names_read(stmt))
    index = stmt.index if isinstance(stmt, (Load, Store)) else stmt.expr if isinstance(stmt, Index) else 0
    return names + [s.name for s in symbols(index)]


def _result(stmt: Reduce) -> DType:
    return dtypes.BOOL if stmt.op in ("any", "all") else stmt.dtype


def _limits(dtype: DType) -> tuple[float, float]:
    if dtype.is_float:
        return float("-inf"), float("inf")
    bits = 8 * dtype.size
    return (0, 2 ** bits - 1) if dtype.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _param_name(name: str) -> str:
    return "a_" + re.sub(r"\W", "_", name)


def _size_name(sym: Sym) -> str:
    return "n_" + re.sub(r"\W", "_", sym.name)
