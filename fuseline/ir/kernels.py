"""The loop program that lower, schedule, codegen and runtime hand each other.

A LoopProgram is a list of steps over buffers. A step is a Kernel (loops of ours) or an Extern (a call of a PyTorch
operator). Lower makes one Kernel for each operator, as small as it can be; schedule merges kernels, orders the steps
and shares memory between buffers; codegen turns each Kernel into machine code; runtime runs the steps.

A Kernel is a nest with two levels. `axes` are the outer axes: their points are independent of each other and run in
any order, in parallel. For each point the phases run one after the other; a phase runs its body for every point of its
own inner axes (once, if it has none). What a Reduce accumulates over a phase's inner axes is a scalar of the outer
point that later phases read by name. A later phase with the same inner axes may also read a value that an earlier phase
computed per element; code generation then either keeps those values (registers, a row buffer in cache) or recomputes
them. So softmax over rows is: axes (i,), phases max over j; sum of exp over j; store over j.

  kernel softmax(x: f32, y: f32) axes i<4096>
    phase j<512>
      %0 = load x[512*i + j] : f32
      %m = reduce max %0 : f32
    phase j<512>
      %1 = sub %0, %m : f32
      %2 = exp %1 : f32
      %s = reduce sum %2 : f32
    phase j<512>
      %3 = div %2, %s : f32
      store y[512*i + j] = %3
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Union

from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Sym
from fuseline.ir.graph import Size

# ---------------------------------------------------------------- statements of a kernel body (SSA: each name once a kernel)

Value = Union[str, int, float, bool]       # the name of an earlier statement, or a number of the statement's type


def _equal(a: tuple, b: tuple) -> bool:
    """Equality of tuples of values and types in which 0.0 is not -0.0."""
    return a == b and not any(type(x) is float and x == 0.0 and math.copysign(1.0, x) != math.copysign(1.0, y) for x, y in zip(a, b))


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """name = buffer[index]; elements where `mask` (a bool value) is false are not read and are `other`.

    The index is in elements from the buffer's start. It may contain, besides axes and sizes, symbols named like an
    earlier integer value of the body ("indirect" loads: the symbol's name is the value's name).
    The value has the buffer's dtype's compute type: f16 and bf16 are widened to f32.
    """
    name: str
    buffer: str
    index: Size
    dtype: DType
    mask: str | None = None
    other: Value = 0

    def _key(self) -> tuple:
        return (self.name, self.buffer, self.index, self.dtype, self.mask, self.other)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Load) and _equal(self._key(), other._key())

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an Op "check" checks, for the message: an operator reads along an axis of `extent` at a place that data names.

    error   the class that PyTorch raises: "IndexError", "RuntimeError", or "either" where that depends on layouts or callers
    """
    operator: str
    axis: int
    extent: Size
    origin: str = ""
    error: str = "IndexError"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """name = op(args): one of `fuseline.ir.ops.OPS`. dtype is the result's; compute types only (no f16, bf16).

    bounds says what a "check" is about. It is for people: not part of the kernel's identity, nor of its text.
    """
    name: str
    op: str
    args: tuple[Value, ...]
    dtype: DType
    bounds: Bounds | None = field(default=None, repr=False)

    def _key(self) -> tuple:
        return (self.name, self.op, self.dtype, *self.args)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Op) and _equal(self._key(), other._key())

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Index:
    """name = the value of an index expression, as i64 (or another integer type)."""
    name: str
    expr: Size
    dtype: DType


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """buffer[index] = value, converted (rounded once) to the buffer's dtype. mode "add" accumulates (scatter)."""
    buffer: str
    index: Size
    value: Value
    mask: str | None = None
    mode: str = "set"

    def _key(self) -> tuple:
        return (self.buffer, self.index, self.value, self.mask, self.mode)

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Store) and _equal(self._key(), other._key())

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, slots=True)
class Reduce:
    """names = reduction of args over the inner axes of the phase.

    op      "sum" "prod" "max" "min" (NaN wins, as in torch) "any" "all": one arg, one name
            "argmax" "argmin": args (value,), names (position as i64,): the row-major position in the inner axes of the
            first extreme element (NaN counts as extreme, as in torch)
            "welford": args (value,), names (mean, m2): mean and sum of squared deviations
            "welford_combine": args (mean, m2, count), names (mean, m2): merges partial results
    dtype   of each result: the accumulator's type (f32 for half types, f64 for f64, i64 for integer sums)
    """
    names: tuple[str, ...]
    op: str
    args: tuple[Value, ...]
    dtype: DType


Stmt = Union[Load, Op, Index, Store, Reduce]


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable: `sym` runs over 0 <= sym < extent."""
    sym: Sym
    extent: Size


@dataclass(frozen=True, slots=True)
class Phase:
    axes: tuple[Axis, ...]
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """A buffer as a kernel sees it: its name there and its dtype; `writes` tells whether the kernel stores to it."""
    name: str
    dtype: DType
    writes: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """See the module's docstring. `sizes` are the size symbols it needs at run time, in order.

    Equal kernels compile once: two kernels of the same structure compare equal, whatever buffers they are applied to,
    since parameters are named p0, p1, ... in order of first use and values %0, %1, ... in order of definition.
    """
    params: tuple[Param, ...]
    sizes: tuple[Sym, ...]
    axes: tuple[Axis, ...]
    phases: tuple[Phase, ...]
    label: str = field(default="kernel", compare=False)    # for people: "fused_gelu_mul_add"


# ---------------------------------------------------------------- buffers and steps

@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory. shape and stride (elements) say how PyTorch sees it; kernels address it flat.

    kind    "input" | "output" | "temp" | "constant" (value fixed at compile time, held by the program)
    static  an input whose address persists between calls (a parameter, a module's buffer)
    opaque  made by an Extern and known only as a torch tensor (an mkldnn-packed weight, a result whose strides or
            size only the operator knows): kernels never address it
    """
    name: str
    dtype: DType
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    device: str
    kind: str = "temp"
    static: bool = False
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a kernel on buffers (one for each of its params, in order). `ops`: the operators fused in it, for the report."""
    kernel: Kernel
    buffers: tuple[str, ...]
    ops: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ViewOf:
    """As an Extern's argument: the buffer seen with another shape, stride and offset (elements)."""
    buffer: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """As an Extern's argument: the whole buffer. (A plain str argument is a string.)"""
    buffer: str


@dataclass(frozen=True, slots=True)
class Extern:
    """outs = op(*args, **kwargs), a call of a PyTorch operator ("aten.convolution.default").

    args hold Ref, ViewOf, numbers, Exprs, strings, None, DTypes and tuples of these. outs name the results in order
    (None for one nobody reads). `out_variant`: the operator's overload that writes into given memory ("aten.mm.out"),
    used where all outs are dense buffers that the planner placed; None: the operator allocates its results itself.
    """
    op: str
    args: tuple
    kwargs: tuple[tuple[str, object], ...]
    outs: tuple[str | None, ...]
    out_variant: str | None = None
    origin: str = ""


Step = Union[Launch, Extern]


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the program: a buffer (whole, or seen through shape/stride/offset), or a number or Expr, or None."""
    value: object
    shape: tuple[Size, ...] | None = None
    stride: tuple[Size, ...] | None = None
    offset: Size = 0


@dataclass(frozen=True)
class LoopProgram:
    """inputs: names of buffers, or size symbols / scalar inputs as `Sym`, in the graph's input order.

    `hoisted` are steps that depend on static inputs only: they run once, and again when a version of one changes
    (inference only; empty otherwise). `plan` (made by schedule) maps a temp buffer to (arena, offset in bytes).
    """
    inputs: tuple[str | Sym, ...]
    buffers: dict[str, Buffer]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    device: str
    hoisted: tuple[Step, ...] = ()
    arena_bytes: Size = 0
    plan: dict[str, Size] = field(default_factory=dict)
    verdicts: tuple = ()             # refusals (fusion, lowering to extern calls) for the report
