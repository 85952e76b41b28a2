"""What lowering functions work with: the program built so far, and the registry of lowerings."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fuseline.errors import InternalError, LoweringError
from fuseline.ir.dtypes import BF16, BOOL, F16, DType
from fuseline.ir.expr import Expr
from fuseline.ir.graph import Node, Size, TensorType, contiguous
from fuseline.ir.kernels import Buffer, Extern, Step
from fuseline.lower.builder import KernelBuilder, Number, Val
from fuseline.lower.promotion import result_type, round_number
from fuseline.lower.views import RuntimeNumber, View, expand, reshape, storage_stride

Result = object                        # a View, a size, None, or a tuple of these
LoweringFunction = Callable[..., Result]

LOWERINGS: dict[str, LoweringFunction] = {}
POINTWISE: set[str] = set()            # operators whose result's element depends on the operands' elements at that place


# Operators whose lowering takes a float that is known at run time only (a RuntimeNumber) in place of a number.
TAKES_NUMBERS: set[str] = {
    "aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar", "aten.masked_fill.Scalar",
    "aten.clamp.default", "aten.full.default", "aten.full_like.default", "aten.fill.Scalar", "aten.new_full.default",
    "aten.scalar_tensor.default"}


def lowering(*names: str) -> Callable[[LoweringFunction], LoweringFunction]:
    """Register fn(context, *args, **kwargs) for operators. Tensor arguments come as Views, sizes as ints or Exprs."""
    def register(fn: LoweringFunction) -> LoweringFunction:
        for name in names:
            if name in LOWERINGS:
                raise InternalError(f"two lowerings of {name}")
            LOWERINGS[name] = fn
        return fn
    return register


def elementwise(*names: str, operands: int = 1, compute: str = "result", numbers: bool = False,
                wide: Sequence[str] = (), rounds: Sequence[str] = ()) -> Callable[[Callable[..., Val]], Callable[..., Val]]:
    """Register fn(kernel, *values, *params, **params) -> value for operators that broadcast their first `operands` arguments.

    compute  the type that operands are converted to: "result" (the result's), "promoted" (as torch.result_type has it;
             for comparisons), or "own" (none: each its own)
    numbers  fn takes values of the compute type for its params, too: floats that are known at run time only
    wide     devices on which PyTorch takes a number or a 0-d CPU tensor in the last place as f32 where the result is of a
             half type; all other operands of another type are rounded to the half type first
    rounds   devices on which PyTorch rounds the params to the half type, too
    """
    def register(fn: Callable[..., Val]) -> Callable[..., Val]:
        def lower(context: Context, *args: object, **kwargs: object) -> View:
            return context.elementwise(fn, args[:operands], compute, args[operands:], kwargs, numbers=numbers, wide=wide, rounds=rounds)
        lowering(*names)(lower)
        POINTWISE.update(names)
        TAKES_NUMBERS.update(names)
        return fn
    return register


@dataclass
class Context:
    """The program being built. `node` is the one that is being lowered, `used` which of its several results are read."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    node: Node | None = None
    used: frozenset[int] | None = None
    count: int = 0

    # -- types --------------------------------------------------------------------------------------------------
    @property
    def type(self) -> TensorType:
        """The type of the node's only result."""
        type_ = self.node.type if self.node else None
        if not isinstance(type_, TensorType):
            raise InternalError("the node has no single tensor result", node=self.node)
        return type_

    @property
    def types(self) -> tuple[object, ...]:
        """The types of the node's results."""
        type_ = self.node.type if self.node else None
        return type_ if isinstance(type_, tuple) else (type_,)

    # -- buffers ------------------------------------------------------------------------------------------------
    def buffer(self, dtype: DType, shape: Sequence[Size], stride: Sequence[Size] | None = None, device: str | None = None, *,
               opaque: bool = False) -> View:
        """A new temporary; row-major unless strides are given."""
        shape = tuple(shape)
        strides = contiguous(shape) if stride is None else tuple(stride)
        device = self.device() if device is None else device
        name = f"t{self.count}"
        self.count += 1
        self.buffers[name] = Buffer(name, dtype, shape, strides, device, opaque=opaque)
        return View(name, dtype, shape, strides, device)

    def device(self) -> str:
        first = next((t for t in self.types if isinstance(t, TensorType)), None)
        if first is None:
            raise InternalError("the node has no tensor result", node=self.node)
        return first.device

    def result(self, type_: object = None) -> View:
        """Memory for a result of the node, laid out as its type says; row-major where its strides overlap or leave gaps."""
        type_ = self.type if type_ is None else type_
        if not isinstance(type_, TensorType):
            raise InternalError(f"a result of type {type_}", node=self.node)
        return self.buffer(type_.dtype, type_.shape, storage_stride(type_.shape, type_.stride), type_.device)

    # -- kernels ------------------------------------------------------------------------------------------------
    def kernel(self) -> KernelBuilder:
        return KernelBuilder(self.buffers)

    def launch(self, kernel: KernelBuilder) -> None:
        if self.node is None:
            raise InternalError("no node is being lowered")
        name = self.node.op
        self.steps.append(kernel.launch(name.split(".")[1] if "." in name else name, name, self.node.origin))

    def nothing(self, out: View) -> View:
        """A result without elements: memory from PyTorch, no kernel."""
        kwargs = (("device", out.device), ("dtype", out.dtype))
        self.steps.append(Extern("aten.empty_strided.default", (out.shape, out.stride), kwargs, (out.buffer,)))
        return out

    def fill(self, out: View, value: Callable[[KernelBuilder, tuple[Size, ...]], Val]) -> View:
        """One kernel over out's axes that stores value(kernel, index) at each index."""
        if out.empty:
            return self.nothing(out)
        kernel = self.kernel()
        index = kernel.axes(out.shape)
        kernel.phase()
        kernel.store(out, index, value(kernel, index))
        self.launch(kernel)
        return out

    def elementwise(self, fn: Callable[..., Val], operands: Sequence[object], compute: str,
                    params: Sequence[object] = (), kwargs: dict | None = None, out: View | None = None, *,
                    numbers: bool = False, wide: Sequence[str] = (), rounds: Sequence[str] = ()) -> View:
        """Broadcast operands (Views, numbers, sizes), convert them, and store fn(kernel, *values, *params, **kwargs)."""
        from_params = (*params, *(kwargs or {}).values())
        if any(isinstance(p, (Expr, View)) or isinstance(p, RuntimeNumber) and not numbers for p in from_params):
            raise LoweringError("a setting that is known at run time only")
        out = self.result() if out is None else out
        kind: DType | None = None
        if compute == "result":
            kind = out.dtype.compute
        elif compute == "promoted":
            kind = result_type(operands)
        views = [expand(o, out.shape) if isinstance(o, View) else o for o in operands]
        device = out.device.partition(":")[0]
        halves = compute == "result" and out.dtype in (F16, BF16)
        half = [halves and getattr(o, "dtype", None) not in (out.dtype, BOOL)
                and not (i == len(operands) - 1 and device in wide and (not isinstance(o, View) or o.device == "cpu" and not o.rank))
                for i, o in enumerate(operands)]
        setting_type = out.dtype if halves and device in rounds else kind

        def value(kernel: KernelBuilder, index: tuple[Size, ...]) -> Val:
            kernel.half = out.dtype if halves else None
            values = [scalar(kernel, o, index, out.dtype if to_half else kind, to_half) for o, to_half in zip(views, half)]

            def setting(p: object) -> object:
                if isinstance(p, RuntimeNumber):
                    return scalar(kernel, p, index, setting_type)
                return round_number(p, setting_type) if type(p) is float and setting_type is not None else p
            return fn(kernel, *values, *map(setting, params), **{k: setting(v) for k, v in (kwargs or {}).items()})
        return self.fill(out, value)

    def copy(self, view: View, out: View) -> View:
        """out = view, converted to its dtype."""
        source = expand(view, out.shape)
        return self.fill(out, lambda k, i: k.cast(k.load(source, i), out.dtype, round_half=view.dtype != out.dtype))

    def contiguous(self, view: View, shape: Sequence[Size] | None = None) -> View:
        """The elements under another shape: a view where strides allow it, else a row-major copy."""
        shape = view.shape if shape is None else tuple(shape)
        seen = reshape(view, shape)
        if seen is not None:
            return seen
        copied = self.copy(view, self.buffer(view.dtype, view.shape, device=view.device))
        made = reshape(copied, shape)
        if made is None:
            raise LoweringError(f"reshape of {view.shape} to {shape}")
        return made


def scalar(kernel: KernelBuilder, operand: object, index: Sequence[Size], dtype: DType | None, round_half: bool = False) -> Val:
    """An operand's value at an index of the (broadcast) result, converted to dtype's compute type if one is given.

    round_half   a tensor of another type is rounded to dtype, where that is a half type
    """
    if isinstance(operand, View):
        value = kernel.load(operand, index)
        # Half values are kept as f32, so converting between a half type and its compute type is nothing.
        return kernel.cast(value, dtype, round_half=round_half) if dtype is not None else value
    if isinstance(operand, RuntimeNumber):
        if dtype is None or not dtype.is_float:
            raise LoweringError("a float that is known at run time only, as another type")
        return kernel.cast(kernel.load(operand.view, ()), dtype)
    if dtype is None:
        raise InternalError(f"number {operand} without a type")
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        operand = round_number(operand, dtype)
    if not isinstance(operand, (bool, int, float, Expr)):
        raise LoweringError(f"operand {operand!r}")
    return kernel.const(operand, dtype)


def as_number(value: object) -> Number:
    """A setting that must be a number at compile time."""
    if isinstance(value, (bool, int, float)):
        return value
    raise LoweringError(f"{value} is known at run time only")
