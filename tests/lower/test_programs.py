"""Whole graphs: symbolic sizes, hoisting, outputs that are views, unused results, memory that views of PyTorch's keep alive."""
from __future__ import annotations

import torch
from cases import assert_same

from fuseline.ir import dtypes
from fuseline.ir.expr import Sym
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType, contiguous
from fuseline.ir.interp import run_program
from fuseline.ir.kernels import Extern, Launch
from fuseline.ir.verify import verify_program
from fuseline.lower import views
from fuseline.lower.lower import lower, pointwise_operators, supported


def tensor(*shape: object, dtype: dtypes.DType = dtypes.F32) -> TensorType:
    return TensorType(dtype, shape, contiguous(shape))          # type: ignore[arg-type]


def test_sizes_stay_symbols_from_views_to_kernels() -> None:
    s0, s1 = Sym("s0", None, 2), Sym("s1", None, 2)
    x = Node("x", "input", type=tensor(s0, s1, 4))
    w = Node("w", "input", type=tensor(4))
    flat = Node("a", "aten.view.default", (x, (s0 * s1, 4)), (), tensor(s0 * s1, 4))
    normal, mean, rstd = tensor(s0 * s1, 4), tensor(s0 * s1, 1), tensor(s0 * s1, 1)
    norm = Node("n", "aten.native_layer_norm.default", (flat, (4,), w, w, 1e-5), (), (normal, mean, rstd))
    item = Node("g", "getitem", (norm, 0), (), normal)
    back = Node("b", "aten.view.default", (item, (s0, s1, 4)), (), tensor(s0, s1, 4))
    cut = Node("c", "aten.slice.Tensor", (back, 1, 1, 2**63 - 1), (), TensorType(dtypes.F32, (s0, s1 - 1, 4), (4 * s1, 4, 1)))
    total = Node("m", "aten.mean.dim", (cut, (0, 1)), (), tensor(4))
    ramp = Node("r", "aten.arange.default", (s1,), (), tensor(s1, dtype=dtypes.I64))
    size = Node("z", "aten.mul.Tensor", (total, s0), (), tensor(4))
    program = lower(Graph((x, w), (flat, norm, item, back, cut, total, ramp, size), (size, cut, ramp, s0 + 1)))
    verify_program(program)
    assert all(isinstance(s, Launch) for s in program.steps)
    for shape in ((3, 5, 4), (2, 7, 4)):
        value, weight = torch.randn(shape), torch.randn(4)
        out, part, counted, plus = run_program(program, [value, weight])
        expected = torch.layer_norm(value, (4,), weight, weight)[:, 1:]
        assert_same(part, expected, "cut", loose=4)
        assert_same(out, expected.mean((0, 1)) * shape[0], "mean", loose=10)
        assert torch.equal(counted, torch.arange(shape[1])) and plus == shape[0] + 1


def test_what_depends_on_parameters_only_is_hoisted() -> None:
    w = Node("w", "input", type=tensor(4, 3), static=True)
    x = Node("x", "input", type=tensor(2, 3))
    scaled = Node("a", "aten.mul.Tensor", (w, 2.0), (), tensor(4, 3))
    packed = Node("b", "aten.convolution.default", (w,), (), tensor(4, 3))
    noise = Node("r", "aten.rand_like.default", (w,), (), tensor(4, 3))
    returned = Node("e", "aten.exp.default", (w,), (), tensor(4, 3))
    turned = Node("t", "aten.t.default", (scaled,), (), TensorType(dtypes.F32, (3, 4), (1, 3)))
    out = Node("o", "aten.mm.default", (x, turned), (), tensor(2, 4))
    graph = Graph((w, x), (scaled, packed, noise, returned, turned, out), (out, returned, noise))
    program = lower(graph, inference=True)
    assert [s.ops[0] if isinstance(s, Launch) else s.op for s in program.hoisted] == ["aten.mul.Tensor", "aten.convolution.default"]
    assert not lower(graph).hoisted


def test_outputs_keep_views_of_inputs_and_of_results() -> None:
    x = Node("x", "input", type=tensor(4, 6))
    turned = Node("t", "aten.t.default", (x,), (), TensorType(dtypes.F32, (6, 4), (1, 6)))
    double = Node("d", "aten.mul.Tensor", (turned, 2), (), TensorType(dtypes.F32, (6, 4), (1, 6)))
    row = Node("r", "aten.select.int", (double, 0, 2), (), TensorType(dtypes.F32, (4,), (6,)))
    program = lower(Graph((x,), (turned, double, row), (turned, row, double)))
    verify_program(program)
    value = torch.randn(4, 6)
    first, second, third = run_program(program, [value])
    assert first.data_ptr() == value.data_ptr() and second.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert_same(first, value.t(), "view of an input")
    assert_same(second, (value.t() * 2)[2], "view of a result")
    assert program.buffers[program.outputs[1].value].kind == "output"


def test_unread_results_cost_no_kernel_body() -> None:
    x = Node("x", "input", type=tensor(1, 2, 8, 8))
    types = (tensor(1, 2, 4, 4), tensor(1, 2, 4, 4, dtype=dtypes.I64))
    pool = Node("p", "aten.max_pool2d_with_indices.default", (x, (2, 2)), (), types)
    item = Node("g", "getitem", (pool, 0), (), types[0])
    program = lower(Graph((x,), (pool, item), (item,)))
    verify_program(program)
    assert len(program.buffers) == 2 and len(program.steps[0].kernel.params) == 2


def test_memory_behind_a_view_of_pytorchs_is_not_shared() -> None:
    x = Node("x", "input", type=tensor(4, 2))
    double = Node("d", "aten.mul.Tensor", (x, 2), (), tensor(4, 2))
    paired = Node("c", "aten.view_as_complex.default", (double,), (), tensor(4, dtype=dtypes.C64))
    size = Node("a", "aten.abs.default", (paired,), (), tensor(4))
    program = lower(Graph((x,), (double, paired, size), (size,)))
    verify_program(program)
    assert [type(s) for s in program.steps] == [Launch, Extern, Extern]
    assert program.buffers[program.steps[0].buffers[-1]].kind == "output"
    value = torch.randn(4, 2)
    assert_same(run_program(program, [value])[0], torch.view_as_complex(value * 2).abs(), "absolute value")


def test_packed_weights_are_opaque() -> None:
    w = Node("w", "input", type=tensor(4, 3, 1, 1), static=True)
    packed = Node("p", "mkldnn._reorder_convolution_weight.default", (w, (0, 0), (1, 1), (1, 1), 1, (1, 3, 8, 8)), (), w.type)
    x = Node("x", "input", type=tensor(1, 3, 8, 8))
    conv = Node("c", "mkldnn._convolution_pointwise.default", (x, packed, None, (0, 0), (1, 1), (1, 1), 1, "none", (), ""), (),
                tensor(1, 4, 8, 8))
    relu = Node("r", "aten.relu.default", (conv,), (), conv.type)
    program = lower(Graph((w, x), (packed, conv, relu), (relu,)), inference=True)
    assert program.buffers[program.hoisted[0].outs[0]].opaque and not program.buffers[program.steps[0].outs[0]].opaque


def test_reshape_follows_strides_or_gives_up() -> None:
    n = Sym("s0", None, 2)
    view = views.View("b", dtypes.F32, (n, 3, 4), (24, 8, 2), "cpu", 5)
    assert views.reshape(view, (n, 12)) == views.View("b", dtypes.F32, (n, 12), (24, 2), "cpu", 5)
    assert views.reshape(view, (12 * n,)) == views.View("b", dtypes.F32, (12 * n,), (2,), "cpu", 5)
    assert views.reshape(view, (n, 1, 3, 2, 2)).stride[2:] == (8, 4, 2)
    assert views.reshape(views.permute(view, (0, 2, 1)), (n, 12)) is None
    for shape in ((4, 6), (2, 12), (24,), (2, 3, 4), (8, 1, 3), (3, 8)):
        x = torch.arange(48).as_strided((2, 3, 4), (24, 8, 2))
        mine = views.reshape(views.View("b", dtypes.I64, (2, 3, 4), (24, 8, 2), "cpu"), shape)
        assert mine is not None and torch.equal(torch.arange(48).as_strided(mine.shape, mine.stride), x.reshape(shape))


def test_tables_of_operators_are_consistent() -> None:
    assert pointwise_operators() <= supported()
    assert {"aten.add.Tensor", "aten._softmax.default", "aten.cat.default"} <= supported()
    assert "aten.mm.default" not in supported()


def test_a_float_known_at_run_time_only_is_memory_for_kernels_and_itself_for_pytorch() -> None:
    x, factor = Node("x", "input", type=tensor(3)), Node("f", "input", type=ScalarType("float"))
    scaled = Node("m", "aten.mul.Tensor", (x, factor), (), tensor(3))
    program = lower(Graph((x, factor), (scaled,), (scaled,)))
    assert program.inputs == ("x", "f") and [s.kernel.label for s in program.steps] == ["mul"] and not program.verdicts
    power = Node("p", "aten.pow.Tensor_Scalar", (scaled, factor), (), tensor(3))
    program = lower(Graph((x, factor), (scaled, power), (power,)))
    assert program.inputs == ("x", "f_number") and program.verdicts
    assert [getattr(s, "op", "kernel") for s in program.steps] == ["aten.full.default", "kernel", "aten.pow.Tensor_Scalar"]
    verify_program(program)
