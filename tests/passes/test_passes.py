"""Passes: text in, text out."""
from __future__ import annotations

import textwrap

from fuseline.ir.graph import Graph
from fuseline.ir.parse import parse_graph
from fuseline.passes.drop_unused import drop_unused
from fuseline.passes.fold_affine import fold_affine
from fuseline.passes.fuse_convolution import fuse_convolution
from fuseline.passes.layout import choose_layout
from fuseline.passes.merge_duplicates import merge_duplicates
from fuseline.passes.simplify import simplify


def assert_prints(graph: Graph, text: str) -> None:
    assert str(graph).strip() == textwrap.dedent(text).strip()


def test_simplify_removes_mul_by_one():
    graph = parse_graph("""
        graph(%x: f32[4, s0]):
          %t0: f32[4, s0] = aten.mul.Tensor(%x, 1)
          %t1: f32[4, s0] = aten.relu.default(%t0)
          return %t1""")
    assert_prints(drop_unused(simplify(graph)), """
        graph(%x: f32[4, s0]):
          %t1: f32[4, s0] = aten.relu.default(%x)
          return %t1""")


def test_simplify_keeps_a_product_that_changes_the_type():
    graph = parse_graph("""
        graph(%x: i64[4]):
          %t0: f32[4] = aten.mul.Tensor(%x, 1.0)
          %t1: f32[4] = aten.relu.default(%t0)
          return %t1""")
    assert str(simplify(graph)) == str(graph)


def test_simplify_keeps_adding_zero_because_of_negative_zero():
    graph = parse_graph("""
        graph(%x: f32[4]):
          %t0: f32[4] = aten.add.Tensor(%x, 0)
          %t1: f32[4] = aten.relu.default(%t0)
          return %t1""")
    assert str(simplify(graph)) == str(graph)


def test_duplicates_merge_but_not_random_draws_nor_two_outputs():
    graph = parse_graph("""
        graph(%x: f32[4]):
          %a: f32[4] = aten.exp.default(%x)
          %b: f32[4] = aten.exp.default(%x)
          %c: f32[4] = aten.mul.Tensor(%a, %b)
          %d: f32[4] = aten.mul.Tensor(%b, %a)
          %r: f32[4] = aten.rand_like.default(%x)
          %q: f32[4] = aten.rand_like.default(%x)
          return %c, %d, %r, %q""")
    assert_prints(drop_unused(merge_duplicates(graph)), """
        graph(%x: f32[4]):
          %a: f32[4] = aten.exp.default(%x)
          %c: f32[4] = aten.mul.Tensor(%a, %a)
          %d: f32[4] = aten.mul.Tensor(%a, %a)
          %r: f32[4] = aten.rand_like.default(%x)
          %q: f32[4] = aten.rand_like.default(%x)
          return %c, %d, %r, %q""")


CONV = "aten.convolution.default({x}, {w}, {b}, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)"


def test_batch_norm_in_inference_folds_into_the_convolution():
    graph = parse_graph(f"""
        graph(%x: f32[1, 8, 6, 6], %w: f32[8, 8, 3, 3] static, %mean: f32[8, 1, 1] static, %scale: f32[8, 1, 1] static):
          %c: f32[1, 8, 6, 6] = {CONV.format(x='%x', w='%w', b=None)}
          %s: f32[1, 8, 6, 6] = aten.sub.Tensor(%c, %mean)
          %m: f32[1, 8, 6, 6] = aten.mul.Tensor(%s, %scale)
          %r: f32[1, 8, 6, 6] = aten.relu.default(%m)
          return %r""")
    folded = fold_affine(graph)
    assert [n.op for n in folded.nodes if n.op.startswith("aten.sub") and n.type.rank == 4] == []
    conv = next(n for n in folded.nodes if n.op == "aten.convolution.default")
    assert conv.args[1].op == "aten.mul.Tensor" and conv.args[2].type.shape == (8,)
    assert folded.nodes[-1].args == (conv,)


def test_a_convolution_read_twice_is_not_folded():
    graph = parse_graph(f"""
        graph(%x: f32[1, 8, 6, 6], %w: f32[8, 8, 3, 3] static, %scale: f32[8, 1, 1] static):
          %c: f32[1, 8, 6, 6] = {CONV.format(x='%x', w='%w', b=None)}
          %m: f32[1, 8, 6, 6] = aten.mul.Tensor(%c, %scale)
          %r: f32[1, 8, 6, 6] = aten.add.Tensor(%m, %c)
          return %r""")
    assert str(fold_affine(graph)) == str(graph)


def test_residual_sum_and_relu_become_the_later_convolution_s_epilogue():
    graph = parse_graph(f"""
        graph(%x: f32[1, 8, 6, 6], %w: f32[8, 8, 3, 3] static, %v: f32[8, 8, 3, 3] static):
          %a: f32[1, 8, 6, 6] = {CONV.format(x='%x', w='%v', b=None)}
          %c: f32[1, 8, 6, 6] = {CONV.format(x='%x', w='%w', b=None)}
          %s: f32[1, 8, 6, 6] = aten.add.Tensor(%c, %a)
          %r: f32[1, 8, 6, 6] = aten.relu.default(%s)
          return %r""")
    ops = [n.op for n in fuse_convolution(graph, libraries={"onednn"}).nodes]
    assert ops.count("mkldnn._convolution_pointwise.default") == 1 and ops.count("mkldnn._convolution_pointwise.binary") == 1
    assert "aten.relu.default" not in ops and "aten.add.Tensor" not in ops
    assert str(fuse_convolution(graph, libraries=set())) == str(graph)


def test_layout_is_channels_last_inside_and_eager_s_outside():
    graph = parse_graph(f"""
        graph(%x: f32[2, 16, 6, 6], %w: f32[16, 16, 3, 3]):
          %c: f32[2, 16, 6, 6] = {CONV.format(x='%x', w='%w', b=None)}
          %r: f32[2, 16, 6, 6] = aten.relu.default(%c)
          return %r""")
    new = choose_layout(graph, lowered={"aten.relu.default", "aten.clone.default"}, pointwise={"aten.relu.default"}, wanted=None)
    relu = next(n for n in new.nodes if n.op == "aten.relu.default")
    assert relu.type.stride == (576, 1, 96, 16)
    assert new.outputs[0].type == graph.outputs[0].type and new.outputs[0].args == (relu,)


def test_layout_restores_what_an_unknown_operator_reads():
    graph = parse_graph(f"""
        graph(%x: f32[2, 16, 6, 6], %w: f32[16, 16, 3, 3]):
          %c: f32[2, 16, 6, 6] = {CONV.format(x='%x', w='%w', b=None)}
          %r: f32[2, 16, 6, 6] = aten.fft_like.default(%c)
          return %r""")
    new = choose_layout(graph, lowered=set(), pointwise=set(), wanted=None)
    unknown = next(n for n in new.nodes if n.op == "aten.fft_like.default")
    assert unknown.args[0].type == graph.nodes[0].type
