"""Text in, text out: graphs, kernels and programs print as what parses to them; wrong text and wrong programs are refused."""
from __future__ import annotations

import math

import pytest
import torch

from fuseline.errors import InternalError, VerifyError
from fuseline.ir.expr import Sym
from fuseline.ir.interp import run_kernel, run_program
from fuseline.ir.parse import ParseError, parse_graph, parse_kernel, parse_program
from fuseline.ir.print import show_kernel, show_program
from fuseline.ir.verify import verify_graph, verify_kernel, verify_program

GRAPH = """\
graph(%x: f32[4, s0] static, %n: int=s1, %y: bf16[2, 3, 4; 1, 2, 6]@cuda:0):
  %t0: f32[4, s0; 1, 4] = aten.mul.Tensor(%x, -1, 'a b', [1, %x, 2*s0 + 1], alpha=None, dtype=f16)
  %t1: (f32[4], none, i64[]) = aten.foo.default(%t0, -1.5, inf, True, [])
  %t2: f32[4] = getitem(%t1, 0)
  return %t2, 3, None, s0 + s1"""

SOFTMAX = """\
kernel softmax(x: f32, y: f32 out) sizes s0 axes i<4>
  phase j<s0>
    %0 = load x[i*s0 + j] : f32
    %m = reduce max %0 : f32
  phase j<s0>
    %1 = sub %0, %m : f32
    %2 = exp %1 : f32
    %s = reduce sum %2 : f32
  phase j<s0>
    %3 = div %2, %s : f32
    store y[i*s0 + j] = %3"""

EVERYTHING = """\
kernel all(x: f16, k: i64, y: f32 out, z: i32 out) sizes s0, s1>=0 axes i<s0>, j<8>
  phase
    %0 = load k[8*i + j] : i64
    %1 = ge %0, 0 : b1
    %2 = load x[%0 + 1] if %1 else -inf : f32
    %3 = index (i % 3) + (j // 2) + max(j, s1) : i64
    %4 = where %1, %2, nan : f32
    %5 = mul %4, -0.0 : f32
    store add y[j] = %5 if %1
    %6, %7 = reduce welford %5 : f32
    %8 = cast True : i32
    store z[8*i + j] = %8"""

PROGRAM = """\
program on cpu
  inputs &x, s1>=0
  buffer x: f32[4, s0] input static
  buffer t: f32[4, s0] temp
  buffer u: f32[4, s0] temp at 128
  buffer w: other[1] temp opaque
  buffer y: f32[4, 4] output
  kernel k0 double(p0: f32, p1: f32 out) sizes s0 axes i<4*s0>
    phase
      %0 = load p0[i] : f32
      %1 = mul %0, 2.0 : f32
      store p1[i] = %1
  hoisted launch k0(&x, &t) ops ['aten.mul.Tensor'] from ['model.py:1']
  launch k0(&t, &u)
  extern &y = aten.mm.default(&t, view(&x, [s0, 4], [1, s0], 0)) out aten.mm.out from 'model.py:2'
  arena 16*s0 + 128
  return &y, view(&t, [4], [1], 2), s1, None"""


def test_graph_round_trip():
    graph = parse_graph(GRAPH)
    assert str(graph) == GRAPH
    verify_graph(graph)
    assert graph.inputs[0].static and graph.nodes[0].args[3][1] is graph.inputs[0]


@pytest.mark.parametrize("text", [SOFTMAX, EVERYTHING])
def test_kernel_round_trip(text: str):
    kernel = parse_kernel(text)
    assert show_kernel(kernel) == text
    assert show_kernel(parse_kernel("\n".join("      " + line for line in text.split("\n")))) == text


def test_program_round_trip_and_run():
    program = parse_program(PROGRAM)
    assert show_program(program) == PROGRAM
    assert parse_program(show_program(program)) == program
    verify_program(program)
    x = torch.randn(4, 7)
    y, t, size, nothing = run_program(program, [x, 5])
    torch.testing.assert_close(y, 2 * x @ x.T)
    torch.testing.assert_close(t, 2 * x.reshape(-1)[2:6])
    assert (size, nothing) == (5, None)


@pytest.mark.parametrize("text, problem", [
    ("kernel k(x: f33) axes i<4>", "expected a dtype"), ("kernel k(x: f32) axes i<4", "expected '>'"),
    ("graph(%x: f32[2]):\n  return %y", "not defined above"),
    ("graph(%x: f32[2]):\n  %x: f32[2] = a.b.c(%x)\n  return %x", "twice"),
    ("program on cpu\n  inputs &x\n  nonsense", "expected buffer"), ("kernel k(x: f32) $", "unexpected character"),
])
def test_wrong_text_is_refused(text: str, problem: str):
    parse = parse_graph if text.startswith("graph") else parse_program if text.startswith("program") else parse_kernel
    with pytest.raises(ParseError, match=problem):
        parse(text)


@pytest.mark.parametrize("body, problem", [
    ("%0 = add %1, 1.0 : f32", "before it is defined"),
    ("%0 = load p0[i] : f32\n%0 = load p0[i] : f32", "defined twice"),
    ("%0 = load p0[j] : f32", "unknown symbol j"),
    ("%0 = load p9[i] : f32", "not a param"),
    ("%0 = load p0[i] : f64", "a load from f32 gives f32"),
    ("%0 = load p0[i] : f32\n%1 = index i : i64\n%2 = add %0, %1 : f32", "several types"),
    ("%0 = load p0[i] : f32\n%1 = lt %0, 1.0 : f32", "a comparison gives b1"),
    ("%0 = load p0[i] : f32\n%1 = shl %0, 1 : f32", "does not take f32"),
    ("%0 = load p0[i] : f32\n%1 = load p0[i] if %0 else 0 : f32", "mask is not a b1"),
    ("%0 = load p0[i] : f32\n%1 = load p0[%0] : f32", "not an integer"),
    ("%0 = load p0[i] : f32\n%1 = nonsense %0 : f32", "unknown operation"),
    ("%0 = load p0[i] : f32\n%1 = add %0 : f32", "takes 2 arguments"),
    ("store p1[i] = 1.0\n%0 = load p1[0] : f32", "what other points"),
    ("%0 = load p0[i] : f32\n%1 = cast %0 : f16", "compute types"),
    ("phase j<3>\n%0 = load p0[j] : f32\nphase k<3>\n%1 = neg %0 : f32", "varies over inner axes"),
])
def test_wrong_kernels_are_refused(body: str, problem: str):
    head = "kernel k(p0: f32, p1: f32) axes i<4>\n" + ("" if body.startswith("phase") else "phase\n")
    with pytest.raises(VerifyError, match=problem):
        verify_kernel(parse_kernel(head + body))


def program_with(old: str, new: str) -> str:
    assert old in PROGRAM
    return PROGRAM.replace(old, new)


@pytest.mark.parametrize("text, problem", [
    (program_with("hoisted launch k0(&x, &t)", "launch k0(&t, &x)"), "read before"),
    (program_with("launch k0(&x, &t)", "launch k0(&x)"), "1 buffers for 2 params"),
    (program_with("t: f32[4", "t: f64[4"), "its param p1 f32"),
    (program_with("load p0[i]", "load p0[i + 1]"), "is outside of x"),
    (program_with("launch k0(&x, &t)", "launch k0(&x, &w)"), "opaque|param"),
    (program_with("return &y", "return &w"), "never written"),
    (program_with("launch k0(&x, &t)", "launch k0(&x, &q)"), "not a buffer"),
])
def test_wrong_programs_are_refused(text: str, problem: str):
    with pytest.raises(VerifyError, match=problem):
        verify_program(parse_program(text))


def test_overlapping_memory_plans_are_refused():
    text = """
program on cpu
  inputs &x
  buffer x: f32[16] input
  buffer a: f32[16] temp at 0
  buffer b: f32[16] temp at {at}
  buffer y: f32[16] output
  kernel k0 copy(p0: f32, p1: f32) axes i<16>
    phase
      %0 = load p0[i] : f32
      store p1[i] = %0
  launch k0(&x, &a)
  launch k0(&a, &b)
  launch k0(&b, &y)
  arena 128
  return &y"""
    verify_program(parse_program(text.format(at=64)))
    with pytest.raises(VerifyError, match="share memory"):
        verify_program(parse_program(text.format(at=32)))
    with pytest.raises(VerifyError, match="does not fit"):
        verify_program(parse_program(text.format(at=96)))
    with pytest.raises(VerifyError, match="persists"):
        verify_program(parse_program(text.format(at=64).replace("launch k0(&x, &a)", "hoisted launch k0(&x, &a)")))


def test_wrong_graphs_are_refused():
    with pytest.raises(VerifyError, match="not the size of any input"):
        verify_graph(parse_graph("graph(%x: f32[4]):\n  %t: f32[s0] = aten.foo.default(%x)\n  return %t"))
    with pytest.raises(VerifyError, match="strides"):
        verify_graph(parse_graph("graph(%x: f32[4, 4; 1]):\n  return %x"))


# ---------------------------------------------------------------- the interpreter

def test_softmax_runs():
    x, y = torch.randn(4, 9), torch.empty(4, 9)
    run_kernel(parse_kernel(SOFTMAX), [x, y], {"s0": 9})
    torch.testing.assert_close(y, x.softmax(-1))


@pytest.mark.parametrize("op, expected", [
    ("sum", lambda x: x.sum(1)), ("prod", lambda x: x.prod(1)), ("max", lambda x: x.amax(1)), ("min", lambda x: x.amin(1)),
])
def test_reductions(op: str, expected):
    x, y = torch.randn(5, 6, dtype=torch.float64), torch.empty(5, dtype=torch.float64)
    x[2, 3] = math.nan
    run_kernel(parse_kernel(f"""kernel k(p0: f64, p1: f64) axes i<5>
      phase j<2>, k<3>
        %0 = load p0[6*i + 3*j + k] : f64
        %1 = reduce {op} %0 : f64
      phase
        store p1[i] = %1"""), [x, y])
    torch.testing.assert_close(y, expected(x), equal_nan=True)


def test_positions_and_welford():
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, math.nan, 7.0]], dtype=torch.float64)
    position = torch.empty(2, dtype=torch.int64)
    mean, m2 = torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    run_kernel(parse_kernel("""kernel k(x: f64, a: i64, m: f64, v: f64) axes i<2>
      phase j<3>
        %0 = load x[3*i + j] : f64
        %1 = reduce argmax %0 : i64
        %2, %3 = reduce welford %0 : f64
      phase
        store a[i] = %1
        store m[i] = %2
        store v[i] = %3"""), [x, position, mean, m2])
    assert position.tolist() == [1, 1]
    torch.testing.assert_close(mean, x.mean(1), equal_nan=True)
    torch.testing.assert_close(m2, x.var(1) * 2, equal_nan=True)


def test_half_values_round_at_the_store_only():
    x = torch.tensor([1.0, 3.0], dtype=torch.float16)
    y = torch.empty(2, dtype=torch.float16)
    run_kernel(parse_kernel("""kernel k(x: f16, y: f16) axes i<2>
      phase
        %0 = load x[i] : f32
        %1 = div %0, 3.0 : f32
        %2 = mul %1, 3.0 : f32
        store y[i] = %2"""), [x, y])
    torch.testing.assert_close(y, x)


def test_masked_indirect_loads_and_accumulating_stores():
    index, x, y = torch.tensor([2, -1, 0, 2]), torch.tensor([1.0, 2.0, 4.0]), torch.zeros(3)
    run_kernel(parse_kernel("""kernel k(k: i64, x: f32, y: f32) axes i<4>
      phase
        %0 = load k[i] : i64
        %1 = ge %0, 0 : b1
        %2 = load x[%0] if %1 else 8.0 : f32
        store add y[%0] = %2 if %1"""), [index, x, y])
    assert y.tolist() == [1.0, 0.0, 8.0]


def test_an_index_out_of_range_is_an_error():
    kernel = parse_kernel("kernel k(x: f32, y: f32) axes i<4>\nphase\n%0 = load x[i + 1] : f32\nstore y[i] = %0")
    with pytest.raises(InternalError, match="out of range"):
        run_kernel(kernel, [torch.zeros(4), torch.zeros(4)])


def test_symbols_of_one_name_are_one():
    kernel = parse_kernel(SOFTMAX)
    assert kernel.sizes == (Sym("s0", None, 2),) and kernel.axes[0].sym == Sym("i")
