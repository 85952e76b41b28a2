"""Building one Kernel: typed scalar values, loads and stores through views, phases."""
from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fuseline.errors import InternalError, LoweringError
from fuseline.ir.dtypes import BF16, BOOL, F16, F32, F64, I64, DType
from fuseline.ir.expr import Expr, Sym, nonnegative, symbols
from fuseline.ir.graph import Size
from fuseline.ir.kernels import Axis, Bounds, Buffer, Index, Kernel, Launch, Load, Op, Param, Phase, Reduce, Stmt, Store, Value
from fuseline.ir.ops import OPS
from fuseline.lower.promotion import integer_range, round_number
from fuseline.lower.views import View

Number = int | float | bool

_ROUND = {F16: "round_f16", BF16: "round_bf16"}
# Operations whose result a half type holds if it holds their operands.
_EXACT = frozenset({"neg", "abs", "sign", "maximum", "minimum", "where", "floor", "ceil", "trunc", "round", "copysign"})
_COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_CLASSIFY = {"isnan": math.isnan, "isinf": math.isinf, "signbit": lambda x: math.copysign(1.0, x) < 0}


@dataclass(frozen=True, slots=True, eq=False)
class Val:
    """A scalar of the kernel body: the name of a statement, or a number. dtype is a compute type (never f16, bf16).

    Arithmetic operators want both sides of one dtype, or a Python number on one side. They emit statements.
    """

    kernel: KernelBuilder
    ref: Value
    dtype: DType

    def __add__(self, other: Val | Number) -> Val:
        return self.kernel.op("add", self, other)

    def __radd__(self, other: Number) -> Val:
        return self.kernel.op("add", other, self)

    def __sub__(self, other: Val | Number) -> Val:
        return self.kernel.op("sub", self, other)

    def __rsub__(self, other: Number) -> Val:
        return self.kernel.op("sub", other, self)

    def __mul__(self, other: Val | Number) -> Val:
        return self.kernel.op("mul", self, other)

    def __rmul__(self, other: Number) -> Val:
        return self.kernel.op("mul", other, self)

    def __truediv__(self, other: Val | Number) -> Val:
        return self.kernel.op("div", self, other)

    def __rtruediv__(self, other: Number) -> Val:
        return self.kernel.op("div", other, self)

    def __neg__(self) -> Val:
        return self.kernel.op("neg", self)

    def __and__(self, other: Val) -> Val:
        return self.kernel.op("and", self, other)

    def __or__(self, other: Val) -> Val:
        return self.kernel.op("or", self, other)

    def __invert__(self) -> Val:
        return self.kernel.op("not", self)

    def __lt__(self, other: Val | Number) -> Val:
        return self.kernel.op("lt", self, other)

    def __le__(self, other: Val | Number) -> Val:
        return self.kernel.op("le", self, other)

    def __gt__(self, other: Val | Number) -> Val:
        return self.kernel.op("gt", self, other)

    def __ge__(self, other: Val | Number) -> Val:
        return self.kernel.op("ge", self, other)

    def equals(self, other: Val | Number) -> Val:
        return self.kernel.op("eq", self, other)

    def differs(self, other: Val | Number) -> Val:
        return self.kernel.op("ne", self, other)


class KernelBuilder:
    """Collects one kernel. Call axes() once, then any number of phase(...); a body outside a phase call is one without axes."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self._buffers = buffers
        self._params: dict[str, Param] = {}               # buffer name -> its parameter
        self._axes: list[Axis] = []
        self._phases: list[tuple[tuple[Axis, ...], list[Stmt]]] = []
        self._seen: dict[object, Val] = {}                # value numbering within the current phase
        self._half: dict[str, DType] = {}                 # value name -> the half type that holds it exactly
        self._count = 0
        self._inner = 0
        self._device: str | None = None
        self.half: DType | None = None                    # the type of the result that is being computed, if that is a half type

    @property
    def device(self) -> str | None:
        """Where the buffers are that the kernel addresses so far."""
        return self._device

    # -- structure ----------------------------------------------------------------------------------------------
    def axes(self, shape: Sequence[Size]) -> tuple[Size, ...]:
        """Outer loop variables over a shape; 0 stands for the one of an axis of extent 1."""
        index: list[Size] = []
        for size in shape:
            if size == 1:
                index.append(0)
                continue
            sym = Sym(f"i{len(self._axes)}", size)
            self._axes.append(Axis(sym, size))
            index.append(sym)
        return tuple(index)

    def phase(self, shape: Sequence[Size] = ()) -> tuple[Size, ...]:
        """Begin a phase with inner axes over a shape and return their variables."""
        inner: list[Axis] = []
        index: list[Size] = []
        for size in shape:
            if size == 1:
                index.append(0)
                continue
            sym = Sym(f"r{self._inner}", size)
            self._inner += 1
            inner.append(Axis(sym, size))
            index.append(sym)
        self._phases.append((tuple(inner), []))
        self._seen.clear()
        return tuple(index)

    def _emit(self, stmt: Stmt) -> None:
        if not self._phases:
            self.phase()
        self._phases[-1][1].append(stmt)

    def _name(self) -> str:
        self._count += 1
        return f"%{self._count - 1}"

    def _param(self, view: View, writes: bool) -> str:
        buffer = self._buffers[view.buffer]
        if buffer.opaque:
            raise LoweringError(f"{view.buffer} is known to PyTorch's operators only")
        if buffer.dtype.kind in ("complex", "opaque"):
            raise LoweringError(f"no kernels for elements of type {buffer.dtype}")
        if self._device is None:
            self._device = view.device
        elif self._device != view.device:
            raise LoweringError(f"operands on {self._device} and {view.device}")
        held = self._params.get(view.buffer)
        if held is None or (writes and not held.writes):
            held = Param(held.name if held else f"p{len(self._params)}", buffer.dtype, writes)
            self._params[view.buffer] = held
        return held.name

    # -- statements ---------------------------------------------------------------------------------------------
    def load(self, view: View, index: Sequence[Size], mask: Val | None = None, other: Number = 0) -> Val:
        """The element at an index, widened to its compute type; `other` where the mask is false."""
        param = self._param(view, False)
        dtype = view.dtype.compute
        if mask is not None and isinstance(mask.ref, bool):
            if not mask.ref:
                return self.const(other, dtype)
            mask = None
        place = view.at(index)
        key = ("load", param, place, mask.ref if mask else None, repr(other))
        found = self._seen.get(key)
        if found is None:
            name = self._name()
            self._emit(Load(name, param, place, view.dtype, mask.ref if mask else None, other))  # type: ignore[arg-type]
            found = self._seen[key] = Val(self, name, dtype)
            if view.dtype in _ROUND and (mask is None or _holds(other, view.dtype)):
                self._half[name] = view.dtype
        return found

    def store(self, view: View, index: Sequence[Size], value: Val) -> None:
        """Store a value, converted to the view's dtype.

        To a half type it is rounded here and not only in memory: readers that are fused with this kernel then see what
        readers of the memory would, as in eager mode.
        """
        value = self.cast(value, view.dtype)
        self._emit(Store(self._param(view, True), view.at(index), value.ref))

    def op(self, name: str, *args: Val | Number, dtype: DType | None = None, bounds: Bounds | None = None) -> Val:
        """Emit an operation. Operands must agree in dtype: a mismatch is a bug of the lowering."""
        row = OPS[name]
        typed = [a for a in (args[1:] if name == "where" else args) if isinstance(a, Val)]
        if name != "cast" and typed and any(a.dtype != typed[0].dtype for a in typed):
            raise InternalError(f"{name} of {', '.join(str(a.dtype) for a in typed)}")
        if typed:
            kind = {"float": "f", "int": "i", "uint": "i", "bool": "b"}[typed[0].dtype.kind]
            if kind not in row.kinds:
                raise InternalError(f"{name} of {typed[0].dtype}")
        operand = typed[0].dtype if typed else dtype
        if operand is None:
            raise InternalError(f"{name} of numbers only")
        result = dtype if row.result == "given" or dtype is not None else BOOL if row.result == "b1" else operand
        if result is None:
            raise InternalError(f"{name} needs a dtype")
        refs = tuple(a.ref if isinstance(a, Val) else _number(a, BOOL if name == "where" and i == 0 else operand)
                     for i, a in enumerate(args))
        numbers = tuple(r for r in refs if not isinstance(r, str))
        if name in _COMPARE and len(numbers) == len(refs):
            return Val(self, _COMPARE[name](*(_as_f32(r) if operand == F32 else r for r in numbers)), BOOL)
        if name in _CLASSIFY and numbers:
            return Val(self, _CLASSIFY[name](_as_f32(numbers[0]) if operand == F32 else float(numbers[0])), BOOL)
        key = (name, tuple((type(r), repr(r)) for r in refs), operand, result)
        found = self._seen.get(key)
        if found is None:
            made = self._name()
            self._emit(Op(made, name, refs, result, bounds))
            found = self._seen[key] = Val(self, made, result)
            if name in _EXACT and operand == F32:
                self._half.update((made, half) for half in _ROUND if all(self._fits(r, half) for r in refs[name == "where":]))
        return found

    def _fits(self, ref: Value, half: DType) -> bool:
        """True if the half type is known to hold the value exactly."""
        return self._half.get(ref) == half if isinstance(ref, str) else _holds(ref, half)

    def where(self, condition: Val, a: Val | Number, b: Val | Number, dtype: DType | None = None) -> Val:
        if isinstance(condition.ref, bool):
            chosen = a if condition.ref else b
            if isinstance(chosen, Val):
                return chosen
            typed = next((x.dtype for x in (a, b) if isinstance(x, Val)), dtype)
            return self.const(chosen, typed) if typed is not None else self.const(chosen, F32)
        if not isinstance(a, Val) and not isinstance(b, Val):
            if dtype is None:
                raise InternalError("where of two numbers needs a dtype")
            return self.op("where", condition, self.const(a, dtype), self.const(b, dtype))
        return self.op("where", condition, a, b)

    def index(self, expr: Size, dtype: DType = I64) -> Val:
        """The value of an index expression."""
        if isinstance(expr, int):
            return self.cast(Val(self, expr, I64), dtype)
        found = self._seen.get(("index", expr))
        if found is None:
            name = self._name()
            self._emit(Index(name, expr, I64))
            found = self._seen[("index", expr)] = Val(self, name, I64)
        return self.cast(found, dtype)

    def const(self, x: Number | Expr, dtype: DType) -> Val:
        """A number (or the value of a size) as the compute type of dtype."""
        if isinstance(x, Expr):
            return self.index(x, dtype)
        return Val(self, _number(x, dtype.compute), dtype.compute)

    def cast(self, value: Val, dtype: DType, *, round_half: bool = True) -> Val:
        """Convert as torch does; to f16 and bf16 the value is rounded to them and kept as f32."""
        source, target = value.dtype, dtype.compute
        if isinstance(value.ref, (bool, int, float)):
            if source != target:
                value = self.const(value.ref, target)
        elif source == target:
            pass
        elif target == BOOL:
            value = self.op("ne", value, 0)
        elif source.is_float and target.kind == "uint" and target.size < 8:
            value = self.op("cast", self.op("cast", value, dtype=I64), dtype=target)      # as c10::convert does
        else:
            value = self.op("cast", value, dtype=target)
        if round_half and dtype in _ROUND and not self._fits(value.ref, dtype):
            value = self.op(_ROUND[dtype], value, dtype=F32)
            self._half[str(value.ref)] = dtype
        return value

    def rounded(self, value: Val) -> Val:
        """A step of a formula that PyTorch computes in the half type of the result, each step rounded; value itself for other types."""
        return value if self.half is None else self.cast(value, self.half)

    def both(self, a: Val | None, b: Val | None) -> Val | None:
        """The conjunction of two conditions; None means true."""
        if a is None or b is None:
            return a if b is None else b
        return a & b

    def within(self, index: Size, extent: Size) -> Val | None:
        """0 <= index < extent as a condition, without what the ranges prove; None if always true."""
        low = None if nonnegative(index) else self.index(index) >= 0
        high = None if nonnegative(extent - 1 - index) else self.index(index) < self.index(extent)
        return self.both(low, high)

    def indirect(self, value: Val, extent: Size, bounds: Bounds | None = None) -> tuple[Size, Val | None]:
        """(index, mask) to address an axis with an i64 value of the body; the mask keeps reads within the extent.

        bounds: a value outside of the extent is the user's error and is reported, where kernels can.
        """
        value = self.cast(value, I64)
        if isinstance(value.ref, int):
            return int(value.ref), None
        mask = (value >= 0) & (value < self.index(extent))
        if bounds is not None and self._device == "cpu":
            # CUDA's kernels report nothing: eager's device-side assert would make the context unusable. The mask protects memory.
            mask = self.op("check", mask, True, bounds=bounds)
        return Sym(str(value.ref), extent), mask

    def reduce(self, op: str, *args: Val, dtype: DType) -> Val:
        """Reduce over the current phase's axes (sum, max, argmax, ...); over none, that is the value itself."""
        if not self._phases[-1][0]:
            return self.const(0, dtype) if op in ("argmax", "argmin") else args[0]
        name = self._name()
        self._emit(Reduce((name,), op, tuple(a.ref for a in args), dtype))
        return Val(self, name, dtype)

    def welford(self, value: Val) -> tuple[Val, Val]:
        """(mean, sum of squared deviations) over the current phase's axes."""
        if not self._phases[-1][0]:
            return value, value - value                       # not 0: the deviation of NaN is NaN
        names = (self._name(), self._name())
        self._emit(Reduce(names, "welford", (value.ref,), value.dtype))
        return Val(self, names[0], value.dtype), Val(self, names[1], value.dtype)

    # -- result -------------------------------------------------------------------------------------------------
    def launch(self, label: str, op: str, origin: str) -> Launch:
        phases = tuple(Phase(axes, tuple(body)) for axes, body in self._phases if body)
        kernel = Kernel(tuple(self._params.values()), self._sizes(phases), tuple(self._axes), phases, label)
        return Launch(kernel, tuple(self._params), (op,), (origin,) if origin else ())

    def _sizes(self, phases: tuple[Phase, ...]) -> tuple[Sym, ...]:
        found: set[Sym] = set()
        for axis in (*self._axes, *(a for p in phases for a in p.axes)):
            found |= symbols(axis.extent)
        for stmt in (s for p in phases for s in p.body):
            if isinstance(stmt, (Load, Store)):
                found |= symbols(stmt.index)
            elif isinstance(stmt, Index):
                found |= symbols(stmt.expr)
        return tuple(sorted((s for s in found if s.extent is None), key=lambda s: s.name))


def _number(x: Number, dtype: DType) -> Number:
    """A Python number as a value of dtype; LoweringError if it does not fit an integer type."""
    if dtype == BOOL:
        return bool(x)
    if dtype in (F32, F64):
        return float(x)
    if isinstance(x, float) and (x != x or x in (float("inf"), float("-inf"))):
        raise LoweringError(f"{x} as {dtype}")
    low, high = integer_range(dtype)
    if not low <= int(x) <= high:
        raise LoweringError(f"{x} does not fit {dtype}")
    return int(x)


def _holds(x: Number, half: DType) -> bool:
    """True if a half type holds the number exactly."""
    return x != x or round_number(float(x), half) == x


def _as_f32(x: Number) -> float:
    """A number as kernels that compute in f32 have it."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
