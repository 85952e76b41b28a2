"""What is fused, what is not and why, as text; and the memory plan."""
from __future__ import annotations

import pytest
import torch

from fuseline.ir.interp import run_program
from fuseline.ir.kernels import Launch, LoopProgram
from fuseline.ir.parse import parse_kernel, parse_program
from fuseline.ir.print import show_kernel
from fuseline.ir.target import H200, Target
from fuseline.ir.verify import verify_program
from fuseline.schedule.schedule import schedule

CPU = Target("cpu", 2, 512)

UNARY = """
  kernel {name}(p0: f32, p1: f32) axes i<{n}>, j<{m}>
    phase
      %0 = load p0[{m}*i + j] : f32
      %1 = {op} : f32
      store p1[{m}*i + j] = %1"""
SUM_ROWS = """
  kernel {name}(p0: f32, p1: f32) axes i<{n}>
    phase j<{m}>
      %0 = load p0[{m}*i + j] : f32
      %1 = reduce sum %0 : f32
    phase
      store p1[i] = %1"""
SUM_COLUMNS = """
  kernel {name}(p0: f32, p1: f32) axes j<{m}>
    phase i<{n}>
      %0 = load p0[{m}*i + j] : f32
      %1 = reduce sum %0 : f32
    phase
      store p1[j] = %1"""
DIVIDE = """
  kernel {name}(p0: f32, p1: f32, p2: f32) axes i<{n}>, j<{m}>
    phase
      %0 = load p0[{m}*i + j] : f32
      %1 = load p1[i] : f32
      %2 = div %0, %1 : f32
      store p2[{m}*i + j] = %2"""


def program(n: int, m: int, buffers: str, steps: str, returns: str, inputs: str = "&x") -> LoopProgram:
    """A program over f32[n, m] buffers; `buffers` has "name kind" or "name kind size", separated by commas."""
    lines = ["program on cpu", f"  inputs {inputs}"]
    for text in buffers.split(", "):
        name, kind, *shape = text.split(" ")
        lines.append(f"  buffer {name}: f32[{', '.join(shape) if shape else f'{n}, {m}'}] {kind}")
    made = parse_program("\n".join(lines) + steps.replace("{n}", str(n)).replace("{m}", str(m)) + f"\n  return {returns}")
    verify_program(made)
    return made


def unary(name: str, op: str) -> str:
    return UNARY.replace("{name}", name).replace("{op}", op)


def run_both(before: LoopProgram, after: LoopProgram, *inputs: torch.Tensor) -> None:
    verify_program(after)
    for expected, got in zip(run_program(before, inputs), run_program(after, inputs)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def launches(p: LoopProgram) -> list[Launch]:
    return [s for s in p.steps if isinstance(s, Launch)]


def test_a_pointwise_chain_is_one_kernel_over_one_axis():
    before = program(8, 6, "x input, a temp, b temp, y output",
                     unary("k0 mul", "mul %0, 2.0") + unary("k1 tanh", "tanh %0") + unary("k2 neg", "neg %0") + """
  launch k0(&x, &a) ops ['aten.mul.Tensor'] from ['model.py:1']
  launch k1(&a, &b) ops ['aten.tanh.default'] from ['model.py:2']
  launch k2(&b, &y) ops ['aten.neg.default'] from ['model.py:2']""", "&y")
    after = schedule(before, CPU)
    run_both(before, after, torch.randn(8, 6))
    (launch,) = after.steps
    assert launch.ops == ("aten.mul.Tensor", "aten.tanh.default", "aten.neg.default")
    assert launch.origins == ("model.py:1", "model.py:2")
    assert show_kernel(launch.kernel) == """\
kernel fused_mul_tanh_neg(p0: f32, p1: f32 out) axes i0<48>
  phase
    %0 = load p0[i0] : f32
    %1 = mul %0, 2.0 : f32
    %2 = tanh %1 : f32
    %3 = neg %2 : f32
    store p1[i0] = %3"""
    assert set(after.buffers) == {"x", "y"} and not after.plan


def softmax_like(n: int, m: int) -> LoopProgram:
    return program(n, m, f"x input, e temp, s temp {n}, y output",
                   unary("k0 exp", "exp %0") + SUM_ROWS.replace("{name}", "k1 sum") + DIVIDE.replace("{name}", "k2 div") + """
  launch k0(&x, &e) ops ['aten.exp.default']
  launch k1(&e, &s) ops ['aten.sum.dim_IntList']
  launch k2(&e, &s, &y) ops ['aten.div.Tensor']""", "&y")


def test_a_row_program_is_one_kernel_of_phases():
    before = softmax_like(16, 32)
    after = schedule(before, CPU)
    run_both(before, after, torch.randn(16, 32))
    (launch,) = after.steps
    assert show_kernel(launch.kernel) == """\
kernel fused_exp_sum_div(p0: f32, p1: f32 out) axes i0<16>
  phase j0<32>
    %0 = load p0[32*i0 + j0] : f32
    %1 = exp %0 : f32
    %2 = reduce sum %1 : f32
  phase j0<32>
    %3 = div %1, %2 : f32
    store p1[32*i0 + j0] = %3"""


def test_long_rows_do_not_fit_a_block_of_a_gpu():
    short, long = schedule(softmax_like(1024, 8192), H200), schedule(softmax_like(1024, 32768), H200)
    assert len(short.steps) == 1 and len(long.steps) == 2
    assert any("does not fit one block" in v.reason for v in long.verdicts)
    assert len(schedule(softmax_like(1024, 32768), CPU).steps) == 1


def test_few_rows_do_not_occupy_the_cores():
    after = schedule(softmax_like(1, 1 << 20), CPU)
    assert any("do not occupy" in v.reason for v in after.verdicts)
    assert len(launches(after)) == 3                       # partial sums, their combination, the quotients


def test_rows_and_columns_stay_apart_and_share_nothing_but_the_input():
    before = program(16, 32, "x input, a temp, r output 16, c output 32",
                     unary("k0 mul", "mul %0, 2.0") + SUM_ROWS.replace("{name}", "k1 sum") + SUM_COLUMNS.replace("{name}", "k2 sum") + """
  launch k0(&x, &a) ops ['aten.mul.Tensor']
  launch k1(&a, &r) ops ['aten.sum.dim_IntList']
  launch k2(&a, &c) ops ['aten.sum.dim_IntList']""", "&r, &c")
    after = schedule(before, CPU)
    run_both(before, after, torch.randn(16, 32))
    assert len(after.steps) == 2 and "a" not in after.buffers        # the cheap product is computed twice
    assert any("rows are different" in v.reason for v in after.verdicts)


def test_reductions_of_one_buffer_share_a_phase():
    before = program(16, 32, "x input, r output 16, q temp, s output 16",
                     SUM_ROWS.replace("{name}", "k0 sum") + unary("k1 square", "mul %0, %0") + """
  launch k0(&x, &r) ops ['aten.sum.dim_IntList']
  launch k1(&x, &q) ops ['aten.square.default']
  launch k0(&q, &s) ops ['aten.sum.dim_IntList']""", "&r, &s")
    after = schedule(before, CPU)
    run_both(before, after, torch.randn(16, 32))
    (launch,) = after.steps
    assert [len(p.axes) for p in launch.kernel.phases] == [1, 0]


def test_a_channels_last_loop_ends_in_the_contiguous_axis():
    before = parse_program("""
program on cpu
  inputs &x, &b
  buffer x: f32[2, 3, 4, 5; 60, 1, 15, 3] input
  buffer b: f32[3] input
  buffer y: f32[2, 3, 4, 5; 60, 1, 15, 3] output
  kernel k0 add(p0: f32, p1: f32, p2: f32) axes n<2>, c<3>, h<4>, w<5>
    phase
      %0 = load p0[60*n + c + 15*h + 3*w] : f32
      %1 = load p1[c] : f32
      %2 = add %0, %1 : f32
      store p2[60*n + c + 15*h + 3*w] = %2
  launch k0(&x, &b, &y)
  return &y""")
    (launch,) = schedule(before, CPU).steps
    assert [str(a.extent) for a in launch.kernel.axes] == ["40", "3"]
    assert str(launch.kernel.phases[0].body[-1].index) == "3*i0 + i1"


def test_equal_structures_are_equal_kernels():
    before = program(8, 6, "x input, z input, a output, b output",
                     unary("k0 mul", "mul %0, 2.0") + unary("k1 exp", "mul %0, 2.0") + """
  extern &a = aten.relu.default(&x)
  launch k0(&x, &b)
  launch k1(&z, &a)""", "&a, &b", "&x, &z").steps
    assert before[1].kernel == before[2].kernel


def test_random_operators_keep_their_order():
    before = parse_program("""
program on cpu
  inputs &x
  buffer x: f32[8] input
  buffer a: f32[8] temp
  buffer b: f32[8] temp
  buffer c: f32[8] temp
  buffer y: f32[8] output
  kernel k0 add(p0: f32, p1: f32, p2: f32) axes i<8>
    phase
      %0 = load p0[i] : f32
      %1 = load p1[i] : f32
      %2 = add %0, %1 : f32
      store p2[i] = %2
  extern &a = aten.rand.default([8])
  extern &b = aten.rand.default([8])
  extern &c = aten.relu.default(&x)
  launch k0(&c, &b, &y)
  return &y""")
    after = schedule(before, CPU)
    assert [s.op for s in after.steps if not isinstance(s, Launch)] == ["aten.rand.default", "aten.rand.default", "aten.relu.default"]


@pytest.mark.parametrize("target", [CPU, H200], ids=["cpu", "h200"])
@pytest.mark.parametrize("op, length", [("sum", 1 << 16), ("max", (1 << 16) + 1), ("welford", 1 << 16), ("sum", 65537)])
def test_long_reductions_are_split(target: Target, op: str, length: int):
    results = "%1, %9" if op == "welford" else "%1"
    before = parse_program(f"""
program on cpu
  inputs &x
  buffer x: f32[1, {length}] input
  buffer y: f32[1] output
  kernel k0 reduce(p0: f32, p1: f32) axes i<1>
    phase j<{length}>
      %0 = load p0[{length}*i + j] : f32
      {results} = reduce {op} %0 : f32
    phase
      store p1[i] = %1
  launch k0(&x, &y)
  return &y""")
    after = schedule(before, target)
    assert len(after.steps) == 2
    assert after.steps[0].kernel.axes and not after.steps[1].kernel.axes
    run_both(before, after, torch.randn(1, length))


def test_temps_share_memory_only_when_their_lives_do_not_overlap():
    steps = "".join(f"\n  extern &{b} = aten.relu.default(&{a}) out aten.relu.out" for a, b in ("xa", "ab", "bc", "cy"))
    before = program(8, 8, "x input, a temp, b temp, c temp, y output", steps, "&y")
    after = schedule(before, CPU)
    run_both(before, after, torch.randn(8, 8))
    assert after.arena_bytes == 2 * 256 and after.plan["a"] == after.plan["c"] != after.plan["b"]
    assert all(offset % 64 == 0 for offset in after.plan.values())


def test_dead_steps_disappear_but_effects_stay():
    before = program(8, 8, "x input, a temp, b temp, y output", """
  extern &a = aten.relu.default(&x)
  extern &b = aten.rand.default([8, 8])
  extern &y = aten.neg.default(&x)""", "&y")
    assert [s.op for s in schedule(before, CPU).steps] == ["aten.rand.default", "aten.neg.default"]


def test_half_values_are_not_rounded_between_fused_kernels():
    before = parse_program("""
program on cpu
  inputs &x
  buffer x: f16[8] input
  buffer a: f16[8] temp
  buffer y: f16[8] output
  kernel k0 div(p0: f16, p1: f16) axes i<8>
    phase
      %0 = load p0[i] : f32
      %1 = div %0, 3.0 : f32
      store p1[i] = %1
  launch k0(&x, &a)
  launch k0(&a, &y)
  return &y""")
    (launch,) = schedule(before, CPU).steps
    assert "round" not in show_kernel(launch.kernel)
    assert launch.kernel == parse_kernel("""kernel k(p0: f16, p1: f16) axes i0<8>
    phase
      %0 = load p0[i0] : f32
      %1 = div %0, 3.0 : f32
      %2 = div %1, 3.0 : f32
      store p1[i0] = %2""")


def test_a_stored_value_of_another_type_is_converted():
    before = parse_program("""
program on cpu
  inputs &x
  buffer x: f64[8] input
  buffer a: f32[8] temp
  buffer y: f64[8] output
  kernel k0 copy(p0: f64, p1: f32) axes i<8>
    phase
      %0 = load p0[i] : f64
      store p1[i] = %0
  kernel k1 copy(p0: f32, p1: f64) axes i<8>
    phase
      %0 = load p0[i] : f32
      %1 = cast %0 : f64
      store p1[i] = %1
  launch k0(&x, &a)
  launch k1(&a, &y)
  return &y""")
    after = schedule(before, CPU)
    x = torch.randn(8, dtype=torch.float64)
    assert len(after.steps) == 1 and torch.equal(run_program(after, [x])[0], x.float().double())
