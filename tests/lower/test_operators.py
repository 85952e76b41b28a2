"""Every lowering against eager, run by the loop interpreter: dtypes, broadcasting, layouts, empty and 0-d tensors, NaN."""
from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import assert_same, run, widen
from torch.utils._pytree import tree_map

from fuseline import torch_internals
from fuseline.ir.kernels import Extern

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, I8, U8, B1 = torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool
FLOATS, INTEGERS = (F32, F64, F16, BF16), (I64, I32, I8, U8)
EVERY = (*FLOATS, *INTEGERS, B1)


def make(dtype: torch.dtype, *shape: int, seed: int = 0, special: bool = True) -> torch.Tensor:
    """Values over a wide range, with NaN, infinities and both zeros among the floats."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == B1:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        low = 0 if dtype == U8 else -7
        return torch.randint(low, 8, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=F64) * 3
    flat = x.reshape(-1)
    if special and flat.numel() > 8:
        for place, value in zip((0, 3, 4, 5, 7), (math.nan, math.inf, -math.inf, 0.0, -0.0)):
            flat[(place + 7 * seed) % flat.numel()] = value
    return x.to(dtype)


def exactly_supported(op: str, args: tuple, kwargs: dict) -> bool:
    """True if eager itself can do it."""
    try:
        torch_internals.operator(op)(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return False
    return True


def compare(op: str, args: tuple, kwargs: dict | None = None, *, native: bool = True, loose: float = 1.0) -> bool:
    """Run and compare one case; False if eager has no such operator for these types."""
    kwargs = kwargs or {}
    if not exactly_supported(op, args, kwargs):
        return False
    program, actual, expected = run(op, args, kwargs)
    what = f"{op}({', '.join(f'{a.dtype}{tuple(a.shape)}' if isinstance(a, torch.Tensor) else repr(a) for a in args)}, {kwargs})"
    exact: list = [None] * len(expected)
    if any(e.dtype in (F32, F16, BF16) for e in expected):
        wide = tree_map(widen, (args, kwargs))
        if exactly_supported(op, *wide):
            found = torch_internals.operator(op)(*wide[0], **wide[1])
            exact = [f.double() for f in (found if isinstance(found, (tuple, list)) else [found]) if f is not None]
    for a, e, x in zip(actual, expected, exact, strict=True):
        assert_same(a, e, what, loose=loose, exact=x if e.is_floating_point() else None)
    if native:
        foreign = [s.op for s in program.steps if isinstance(s, Extern) and s.op != "aten.empty_strided.default"]
        assert not foreign, f"{what} became a call of PyTorch: {'; '.join(map(str, program.verdicts))}"
    return True


_NAMES = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh "
    "acosh atanh sigmoid erf erfc neg bitwise_not floor ceil trunc round abs sign sgn relu square frac "
    "logical_not isnan isinf isposinf isneginf signbit nan_to_num logit gelu silu mish hardtanh relu6 "
    "hardswish hardsigmoid leaky_relu elu softplus hardshrink softshrink clone zeros_like ones_like"
)
UNARY = _NAMES.split()


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_unary_operators(dtype: torch.dtype) -> None:
    layouts = (make(dtype, 4, 6, seed=1).t(), make(dtype, 5, 8, seed=2)[1:4, ::2], make(dtype), make(dtype, 0, 3))
    tried = 0
    for name, x in itertools.product(UNARY, layouts):
        tried += compare(f"aten.{name}.default", (x,), loose=2)
    assert tried > 80


BINARY = [("add.Tensor", {}), ("add.Tensor", {"alpha": 2}), ("sub.Tensor", {}), ("sub.Tensor", {"alpha": 3}), ("rsub.Tensor", {}),
          ("mul.Tensor", {}), ("div.Tensor", {}), ("maximum.default", {}), ("minimum.default", {}), ("atan2.default", {}),
          ("fmax.default", {}), ("fmin.default", {}), ("hypot.default", {}), ("xlogy.Tensor", {}),
          ("logaddexp.default", {}), ("eq.Tensor", {}), ("ne.Tensor", {}), ("lt.Tensor", {}), ("le.Tensor", {}), ("gt.Tensor", {}),
          ("ge.Tensor", {}), ("bitwise_and.Tensor", {}), ("bitwise_or.Tensor", {}), ("bitwise_xor.Tensor", {}),
          ("logical_and.default", {}), ("logical_or.default", {}), ("logical_xor.default", {}), ("clamp_min.Tensor", {})]


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_binary_operators_promote_and_broadcast(dtype: torch.dtype) -> None:
    x = make(dtype, 4, 3, 2)
    tried = 0
    others = [make(dtype, 2, 3, 4, seed=3).permute(2, 1, 0), make(F32, seed=2), make(F16, 3, 1, seed=1), make(I64, 3, 1, seed=1),
              make(I64, seed=2), make(B1, 2, seed=3)]
    for (name, kwargs), y in itertools.product(BINARY, others):
        tried += compare(f"aten.{name}", (x, y), kwargs, loose=2)
    assert tried > 60


def test_integer_division_remainder_shift_and_power() -> None:
    for dtype in (I64, I32, I8, U8, F32, F64):
        x, y = make(dtype, 40, special=False), make(dtype, 40, seed=1, special=False)
        y[y == 0] = 3
        for name, kwargs in (("floor_divide.default", {}), ("remainder.Tensor", {}), ("fmod.Tensor", {}),
                             ("div.Tensor_mode", {"rounding_mode": "floor"}), ("div.Tensor_mode", {"rounding_mode": "trunc"})):
            assert compare(f"aten.{name}", (x, y), kwargs, native=dtype.is_floating_point)
        for number in (2, -3, 2.5):
            compare("aten.remainder.Scalar", (x, number), native=dtype != U8)
            compare("aten.fmod.Scalar", (x, number), native=dtype != U8)
        compare("aten.pow.Tensor_Tensor", (x, y.abs() if dtype.is_signed else y))
        for name in ("bitwise_left_shift", "bitwise_right_shift"):
            compare(f"aten.{name}.Tensor", (x, torch.randint(0, 6, (40,)).to(dtype)))
    assert compare("aten.copysign.Tensor", (make(F32, 40), make(F32, 40, seed=1)))
    for exponent in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.7, -3):
        for dtype in (F32, F64, F16, I64):
            if dtype != I64 or exponent >= 0:                # PyTorch raises for negative powers of integers
                compare("aten.pow.Tensor_Scalar", (make(dtype, 30), exponent), loose=2)
    compare("aten.pow.Scalar", (2.5, make(F32, 30)), loose=2)


def test_numbers_as_operands() -> None:
    for dtype, number in itertools.product(EVERY, (2, 0.3, True, -1.5, math.inf)):
        x = make(dtype, 6, 5)
        for name in ("add", "mul", "div", "sub", "eq", "lt", "ge"):
            if dtype in (U8, I8) and not isinstance(number, bool) and name in ("eq", "lt", "ge"):
                continue
            compare(f"aten.{name}.{'Tensor' if name in ('add', 'mul', 'div', 'sub') else 'Scalar'}", (x, number), native=False)
        compare("aten.clamp.default", (x, -1, number), native=False)
        compare("aten.where.ScalarOther", (make(B1, 6, 5), x, number), native=False)
        compare("aten.masked_fill.Scalar", (x, make(B1, 5), number), native=False)
    x = make(F32, 6, 5)
    assert compare("aten.clamp.Tensor", (x, make(F32, 5, seed=1), None))
    assert compare("aten.where.self", (make(B1, 5), x, make(F64)))
    for value in (1, 0.5):
        assert compare("aten.addcmul.default", (x, make(F32, 5), make(F32, 6, 1)), {"value": value})
        assert compare("aten.addcdiv.default", (x, make(F32, 5), make(F32, 6, 1)), {"value": value})
        assert compare("aten.lerp.Scalar", (x, make(F32, 5, seed=1), value))
    assert compare("aten.lerp.Tensor", (x, make(F32, 5, seed=1), torch.rand(6, 5)))


BACKWARD = [("gelu_backward", ()), ("silu_backward", ()), ("mish_backward", ()), ("hardtanh_backward", (-1.0, 1.0)),
            ("hardswish_backward", ()), ("leaky_relu_backward", (0.1, False)), ("softplus_backward", (1.5, 20)),
            ("threshold_backward", (0,)), ("hardshrink_backward", (0.5,)), ("softshrink_backward", (0.5,)), ("sigmoid_backward", ()),
            ("tanh_backward", ()), ("logit_backward", (0.1,)), ("hardsigmoid_backward", ())]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_derivatives_of_activations(dtype: torch.dtype) -> None:
    grad, x = make(dtype, 7, 5, special=False), make(dtype, 7, 5, seed=1, special=False)
    for name, settings in BACKWARD:
        if name == "hardsigmoid_backward" and dtype == F64:
            continue                                      # eager multiplies by 1/6 rounded to f32 there
        assert compare(f"aten.{name}.default", (grad, x, *settings), loose=2), name
    compare("aten.gelu_backward.default", (grad, x), {"approximate": "tanh"}, loose=2)
    compare("aten.gelu.default", (x,), {"approximate": "tanh"}, loose=2)
    for is_result in (False, True):
        compare("aten.elu_backward.default", (grad, 1.5, 1.1, 0.9, is_result, x.abs() if is_result else x), loose=2)


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_conversions(dtype: torch.dtype) -> None:
    x = make(dtype, 4, 5, special=False)
    for other in EVERY:
        if other == U8 and dtype != B1:
            x = x.abs()
        assert compare("aten._to_copy.default", (x.t(),), {"dtype": other})
    image = make(dtype, 2, 3, 4, 5, special=False)
    assert compare("aten.clone.default", (image,), {"memory_format": torch.channels_last})
    assert compare("aten.clone.default", (image.to(memory_format=torch.channels_last),), {"memory_format": torch.contiguous_format})


def test_rounding_to_half_is_seen_by_what_follows() -> None:
    from fuseline.ir import dtypes
    from fuseline.ir.graph import Graph, Node, TensorType
    from fuseline.ir.interp import run_program
    from fuseline.lower.lower import lower
    wide, half = (TensorType(d, (64,), (1,)) for d in (dtypes.F32, dtypes.BF16))
    x = Node("x", "input", type=wide)
    narrowed = Node("a", "aten._to_copy.default", (x,), (("dtype", dtypes.BF16),), half)
    widened = Node("b", "aten._to_copy.default", (narrowed,), (("dtype", dtypes.F32),), wide)
    value = torch.randn(64)
    program = lower(Graph((x,), (narrowed, widened), (widened,)))
    assert torch.equal(run_program(program, [value])[0], value.bfloat16().float())
    kernel = program.steps[0].kernel
    assert any(getattr(s, "op", "") == "round_bf16" for p in kernel.phases for s in p.body)


REDUCED = [(4, 3, 5), (6, 1, 2), ()]


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_reductions(dtype: torch.dtype) -> None:
    for shape, keepdim in itertools.product(REDUCED, (False, True)):
        x = make(dtype, *shape, special=False)
        if len(shape) == 3:
            x = x.transpose(0, 2)
        for dim in ([], [0], [-1], *([[0, 2]] if len(shape) > 2 else [])):
            for name in ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"):
                compare(f"aten.{name}", (x, dim, keepdim), loose=4)
            if dim:
                for name in ("var", "std", "var_mean"):
                    compare(f"aten.{name}.correction", (x, dim), {"correction": 1, "keepdim": keepdim}, loose=8)
                compare("aten.logsumexp.default", (x, dim, keepdim), loose=4, native=dtype.is_floating_point)
                for order in (2, 1, 0, math.inf, 3):
                    compare("aten.linalg_vector_norm.default", (x, order, dim, keepdim), loose=8)
                compare("aten.any.dims", (x, dim, keepdim), native=dtype != U8)
        for name in ("max.dim", "min.dim", "argmax.default", "argmin.default", "any.dim", "all.dim", "prod.dim_int"):
            compare(f"aten.{name}", (x, 0, keepdim), native=dtype not in (B1, U8), loose=8)
    x = make(dtype, 3, 4)
    for name in ("sum", "mean", "prod", "max", "min", "any", "all", "argmax"):
        compare(f"aten.{name}.default", (x,), native=dtype not in (B1, U8), loose=8)


def test_reductions_treat_nan_as_eager_does() -> None:
    x = torch.tensor([[1.0, math.nan, 3.0], [-math.inf, 2.0, 2.0], [math.nan, math.nan, 0.0]])
    for name in ("max.dim", "min.dim", "argmax.default", "amax.default", "sum.dim_IntList", "any.dim"):
        assert compare(f"aten.{name}", (x, 1 if name[0] != "s" else [1]))
    assert compare("aten.sum.dim_IntList", (torch.zeros(3, 0), [1]))
    assert compare("aten.mean.dim", (torch.zeros(3, 0), [1]))
    assert compare("aten.logsumexp.default", (torch.tensor([[-math.inf, -math.inf], [math.inf, 0.0]]), [1]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_and_normalizations(dtype: torch.dtype) -> None:
    x, grad = make(dtype, 5, 4, 6, special=False), make(dtype, 5, 4, 6, seed=1, special=False)
    for dim in (0, 1, -1):
        for name in ("_softmax", "_log_softmax"):
            assert compare(f"aten.{name}.default", (x, dim, False), loose=3)
            y = torch_internals.operator(f"aten.{name}.default")(x, dim, False)
            assert compare(f"aten.{name}_backward_data.default", (grad, y, dim, dtype), loose=8)
    weight, bias = make(dtype, 4, 6, seed=2, special=False), make(dtype, 4, 6, seed=3, special=False)
    assert compare("aten.native_layer_norm.default", (x, [4, 6], weight, bias, 1e-5), loose=8)
    _, mean, rstd = torch.native_layer_norm(x, [4, 6], weight, bias, 1e-5)
    if dtype in (F32, F64):                               # eager's half sums over rows are rounded at each step
        assert compare("aten.native_layer_norm_backward.default", (grad, x, [4, 6], mean, rstd, weight, bias, [True] * 3), loose=30)
    image = make(dtype, 2, 6, 3, 5, special=False)
    for w, b in ((weight[0], bias[0]), (None, None)):
        assert compare("aten.native_group_norm.default", (image, w, b, 2, 6, 15, 3, 1e-5), loose=10)


VIEWS = [("view.default", ([6, 20],)), ("permute.default", ([2, 0, 1],)), ("transpose.int", (0, -1)), ("expand.default", ([3, 4, 6, 5],)),
         ("slice.Tensor", (1, 1, 5, 2)), ("slice.Tensor", (2, -3, 2**62, 1)), ("select.int", (1, -2)), ("squeeze.default", ()),
         ("unsqueeze.default", (-2,)), ("diagonal.default", (1, 0, 2)), ("split.Tensor", (4, 1)),
         ("split_with_sizes.default", ([1, 2, 3], 1)),
         ("unbind.int", (1,)), ("unfold.default", (1, 3, 2)), ("alias.default", ()), ("_unsafe_view.default", ([24, 5],))]


def test_views_cost_nothing() -> None:
    x = make(F32, 4, 6, 5)
    for name, settings in VIEWS:
        program, actual, expected = run(f"aten.{name}", (x, *settings), {})
        assert not program.steps, name
        for a, e in zip(actual, expected, strict=True):
            assert_same(a, e, name)
    assert compare("aten.reshape.default", (x.transpose(0, 1), [8, 15]))


def test_data_movement() -> None:
    x, y = make(F32, 4, 6, 5), make(F16, 4, 2, 5)
    for op, args in [
        ("cat.default", ([x, y, x], 1)), ("cat.default", ([x, make(F32, 0), x], -1)), ("stack.default", ([x, x], 1)),
        ("cat.default", ([make(I64, 3), make(F32, 2)],)), ("repeat.default", (x, [2, 1, 3, 2])), ("flip.default", (x, [0, -1])),
        ("roll.default", (x, [2, -1], [0, 2])), ("roll.default", (x, [7])), ("constant_pad_nd.default", (x, [1, 2, -1, 3], 1.5)),
        ("reflection_pad2d.default", (x, [2, 3, 1, 2])), ("replication_pad2d.default", (x, [2, 3, 1, 2])),
        ("slice_scatter.default", (x, make(F32, 4, 2, 5), 1, 1, 5, 2)), ("select_scatter.default", (x, make(F32, 4, 5), 1, -2)),
        ("diagonal_scatter.default", (make(F32, 5, 7), make(F32, 5), 1)), ("diagonal_scatter.default", (make(F32, 5, 7), make(F32, 3), -2)),
        ("triu.default", (x, 1)), ("tril.default", (x, -1)), ("copy.default", (x, make(F64, 6, 1))),
        ("fill.Tensor", (x, torch.tensor(2.5))),
    ]:
        assert compare(f"aten.{op}", args), op


def test_creation() -> None:
    x = make(F32, 3, 4).t()
    for op, args, kwargs in [
        ("full.default", ([2, 3], 1.5), {}), ("full.default", ([2, 3], 7), {"dtype": I64}), ("full_like.default", (x, True), {"dtype": B1}),
        ("zeros.default", ([0, 3],), {}), ("ones.default", ([2],), {"dtype": F16}), ("new_zeros.default", (x, [2, 2]), {}),
        ("arange.default", (7,), {}), ("arange.start_step", (1, 20, 3), {"dtype": I32}), ("arange.start_step", (0.5, 3.0, 0.3), {}),
        ("eye.default", (3,), {}), ("eye.m", (3, 5), {"dtype": I64}), ("scalar_tensor.default", (2.5,), {}),
    ]:
        assert compare(f"aten.{op}", args, kwargs), op


def test_indexing() -> None:
    x, rows = make(F32, 6, 4, 5), torch.tensor([[0, -1, 3], [5, 2, 2]])
    weight = make(BF16, 10, 8)
    for op, args in [
        ("embedding.default", (weight, rows.abs())), ("index_select.default", (x, 1, torch.tensor([3, 0, 0]))),
        ("gather.default", (x, 1, torch.randint(0, 4, (6, 2, 5)))), ("index.Tensor", (x, [rows])), ("index.Tensor", (x, [None, rows % 4])),
        ("index.Tensor", (x, [rows, None, rows % 5])), ("index.Tensor", (x, [None, rows % 4, torch.tensor([[1], [-2]])])),
        ("scatter.value", (x, 1, torch.randint(0, 4, (6, 1, 5)), 2.0)), ("scatter.src", (x, 0, torch.tensor([[[1] * 5] * 4]), x)),
        ("scatter_add.default", (x, 1, torch.randint(0, 4, (6, 2, 5)), make(F32, 6, 2, 5, seed=1))),
    ]:
        assert compare(f"aten.{op}", args), op
    assert compare("aten.index_put.default", (x, [torch.tensor([1, 2])], make(F32, 2, 4, 5)), native=False)


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last), ids=str)
def test_pooling(layout: torch.memory_format) -> None:
    x = make(F32, 2, 3, 9, 8).to(memory_format=layout)
    clean = make(F32, 2, 3, 9, 8, special=False).to(memory_format=layout)
    for kernel, stride, padding, ceil in (([3, 3], [2, 2], [1, 1], False), ([2, 3], [2, 1], [0, 1], True), ([2, 2], [], [0, 0], False)):
        assert compare("aten.max_pool2d_with_indices.default", (x, kernel, stride, padding, [1, 1], ceil))
        out, places = torch.ops.aten.max_pool2d_with_indices(clean, kernel, stride, padding, [1, 1], ceil)
        grad = torch.randn_like(out)
        back = (grad, clean, kernel, stride, padding, [1, 1], ceil, places)
        assert compare("aten.max_pool2d_with_indices_backward.default", back, loose=4)
        for include in (True, False):
            for divisor in (None, 5):
                assert compare("aten.avg_pool2d.default", (clean, kernel, stride, padding, ceil, include, divisor), loose=2)
                assert compare("aten.avg_pool2d_backward.default", (grad, clean, kernel, stride, padding, ceil, include, divisor), loose=4)
    assert compare("aten.max_pool2d_with_indices.default", (x, [2, 2], [1, 1], [0, 0], [2, 3], False))
    assert compare("aten.max_pool2d_with_indices.default", (make(I64, 1, 2, 6, 6), [3, 3], [1, 1], [1, 1]))
    for size in ([3, 4], [2, 3], [1, 1]):
        compare("aten._adaptive_avg_pool2d.default", (clean, size), loose=2, native=size != [1, 1])
    assert compare("aten._adaptive_avg_pool2d_backward.default", (torch.randn(2, 3, 3, 4), clean))
    for size in ([18, 16], [14, 11], [5, 4]):
        assert compare("aten.upsample_nearest2d.default", (clean, size))


def test_a_refusal_is_a_call_with_a_reason() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    program, actual, expected = run("aten.mul.Tensor", (x, x), {})
    assert_same(actual[0], expected[0], "complex product")
    assert [s.op for s in program.steps] == ["aten.mul.Tensor"] and "c64" in program.verdicts[0].reason


def test_library_calls_write_into_placed_memory() -> None:
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    program, actual, expected = run("aten.mm.default", (a, b.t()), {})
    assert_same(actual[0], expected[0], "mm")
    assert program.steps[0].out_variant == "aten.mm.out"


def test_settings_out_of_the_ordinary() -> None:
    x = torch.rand(4, 5)
    assert compare("aten.logit.default", (x, 0.6))
    image = make(F32, 1, 1, 4, 4, special=False)
    assert compare("aten.avg_pool2d_backward.default", (torch.ones(1, 1, 2, 2), image, [2, 2], [], [0, 0], False, True, -2))


def lowered(*nodes: object, output: object, inputs: tuple = ()) -> object:
    from fuseline.ir.graph import Graph
    from fuseline.lower.lower import lower
    return lower(Graph(inputs, nodes, (output,)))            # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operators_on_half_types_round_each(dtype: torch.dtype) -> None:
    from fuseline.ir.graph import Node, TensorType
    from fuseline.ir.interp import run_program
    from fuseline.ir.target import cpu_target
    from fuseline.schedule.schedule import schedule
    type_ = TensorType(torch_internals.from_torch_dtype(dtype), (64,), (1,))
    x = Node("x", "input", type=type_)
    plus = Node("a", "aten.add.Tensor", (x, 1), type=type_)
    lost = Node("b", "aten.sub.Tensor", (plus, 1), type=type_)
    value = torch.rand(64, dtype=dtype)
    program = schedule(lowered(plus, lost, output=lost, inputs=(x,)), cpu_target(1))
    assert len(program.steps) == 1
    assert torch.equal(run_program(program, [value])[0], value + 1 - 1)


def test_negative_zero_makes_another_kernel() -> None:
    from fuseline.ir.graph import Node, TensorType
    type_ = TensorType(torch_internals.from_torch_dtype(F32), (4,), (1,))
    x = Node("x", "input", type=type_)
    kernels = []
    for number in (0.0, -0.0):
        y = Node("y", "aten.mul.Tensor", (x, number), type=type_)
        kernels.append(lowered(y, output=y, inputs=(x,)).steps[0].kernel)
    assert kernels[0] != kernels[1]


def test_shifts_by_numbers() -> None:
    for dtype, number in itertools.product((I64, I32, I8, U8), (0, 1, 3)):
        for name in ("bitwise_left_shift", "bitwise_right_shift"):
            assert compare(f"aten.{name}.Tensor_Scalar", (make(dtype, 40), number))


def test_integers_are_divided_by_numbers_in_kernels_and_by_tensors_where_zero_raises() -> None:
    x, y = make(I64, 40), make(I64, 40, seed=1, special=False)
    y[y == 0] = 3
    for name in ("floor_divide.default", "remainder.Tensor", "fmod.Tensor"):
        assert compare(f"aten.{name}", (x, y), native=False)
        program, _, _ = run(f"aten.{name}", (x, y), {})
        assert program.steps[0].op == f"aten.{name}"         # PyTorch's, which raises for a zero
    assert compare("aten.floor_divide.Scalar", (x, 3))


def test_lazy_negation_is_done_before_kernels_read() -> None:
    assert compare("aten._neg_view.default", (make(F32, 8),))
