"""Compiled kernels against the loop interpreter (random kernels) and against torch (the kernels that networks are made of)."""
from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llvm_harness import run
from random_kernels import make

from fuseline.codegen.llvm.compile import compile_kernels, generate_ir
from fuseline.ir.interp import run_kernel
from fuseline.ir.kernels import Kernel
from fuseline.ir.parse import parse_kernel
from fuseline.ir.print import show_kernel

HALF = (torch.float16, torch.bfloat16)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 24))
def test_random_kernels_agree_with_the_interpreter(seed: int) -> None:
    case = make(seed)
    want, got = [t.clone() for t in case.buffers], [t.clone() for t in case.buffers]
    run_kernel(case.kernel, want, case.sizes)
    run(case.kernel, got, case.sizes)
    for k in case.outputs:
        rtol, atol = (3e-2, 1e-2) if want[k].dtype in HALF else (2e-4, 2e-5) if want[k].is_floating_point() else (0, 0)
        torch.testing.assert_close(got[k], want[k], equal_nan=True, rtol=rtol, atol=atol,
                                   msg=lambda m: f"{m}\nseed {seed}\n{show_kernel(case.kernel)}")


@pytest.mark.parametrize("length", [*range(1, 71), 127, 128, 129, 1000])
def test_every_tail_length_pointwise_and_reduced(length: int) -> None:
    """One kernel generic in its length serves all of them, so this compiles twice."""
    kernel = parse_kernel("""kernel tails(x: f32, y: f32, z: f32) sizes s0 axes i<3>
        phase j<s0>
          %0 = load x[s0*i + j] : f32
          %1 = reduce sum %0 : f32
          %2 = reduce max %0 : f32
        phase j<s0>
          %3 = sub %0, %2 : f32
          store y[s0*i + j] = %3
        phase
          store z[i] = %1""")
    x = torch.randn(3, length)
    y, z = torch.full((3 * length + 8,), 7.0), torch.full((8,), 7.0)
    run(kernel, [x, y, z], {"s0": length})
    torch.testing.assert_close(y[:3 * length].view(3, length), x - x.amax(1, keepdim=True), rtol=0, atol=0)
    torch.testing.assert_close(z[:3].double(), x.double().sum(1), rtol=1e-6, atol=1e-6)
    assert (y[3 * length:] == 7).all() and (z[3:] == 7).all()            # nothing beyond the end is written


def softmax(rows: str, columns: str, sizes: str = "") -> Kernel:
    return parse_kernel(f"""kernel softmax(x: f32, y: f32) {sizes} axes i<{rows}>
        phase j<{columns}>
          %0 = load x[{columns}*i + j] : f32
          %m = reduce max %0 : f32
        phase j<{columns}>
          %1 = sub %0, %m : f32
          %2 = exp %1 : f32
          %s = reduce sum %2 : f32
        phase j<{columns}>
          %3 = div %2, %s : f32
          store y[{columns}*i + j] = %3""")


@pytest.mark.parametrize(("rows", "columns", "dynamic"), [(7, 512, False), (5, 49, False), (3, 50257, False), (9, 100, True)])
def test_softmax(rows: int, columns: int, dynamic: bool) -> None:
    x = torch.randn(rows, columns) * 4
    x[0, 0] = float("-inf")
    y = torch.empty_like(x)
    kernel = softmax("s0", "s1", "sizes s0, s1") if dynamic else softmax(str(rows), str(columns))
    run(kernel, [x, y], {"s0": rows, "s1": columns})
    torch.testing.assert_close(y.double(), x.double().softmax(1), rtol=2e-6, atol=1e-12)


def test_layer_norm_with_affine_in_bf16() -> None:
    kernel = parse_kernel("""kernel layer_norm(x: bf16, w: bf16, b: bf16, y: bf16) axes i<12>
        phase j<768>
          %0 = load x[768*i + j] : f32
          %m, %v = reduce welford %0 : f32
        phase
          %a = mul %v, 0.0013020833333333333 : f32
          %e = add %a, 1e-05 : f32
          %r = rsqrt %e : f32
        phase j<768>
          %1 = sub %0, %m : f32
          %2 = mul %1, %r : f32
          %3 = load w[j] : f32
          %4 = load b[j] : f32
          %5 = mul %2, %3 : f32
          %6 = add %5, %4 : f32
          store y[768*i + j] = %6""")
    x, w, b = (torch.randn(*s).bfloat16() for s in ((12, 768), (768,), (768,)))
    y = torch.empty_like(x)
    run(kernel, [x, w, b, y])
    want = torch.nn.functional.layer_norm(x.double(), (768,), w.double(), b.double()).bfloat16()
    torch.testing.assert_close(y, want, rtol=8e-3, atol=1e-6)
    assert (y == want).float().mean() > 0.99                  # rounded once: nearly all are the nearest bf16


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", [(4, 24, 7, 7), (2, 3, 16, 18)])
def test_batch_norm_statistics(channels_last: bool, shape: tuple[int, ...]) -> None:
    n, c, h, w = shape
    index = f"{c * h * w}*n + {c * w}*y + {c}*x + c" if channels_last else f"{c * h * w}*n + {h * w}*c + {w}*y + x"
    kernel = parse_kernel(f"""kernel statistics(a: f32, mean: f32, var: f32) axes c<{c}>
        phase n<{n}>, y<{h}>, x<{w}>
          %0 = load a[{index}] : f32
          %m, %v = reduce welford %0 : f32
        phase
          %1 = div %v, {float(n * h * w)} : f32
          store mean[c] = %m
          store var[c] = %1""")
    a = torch.randn(shape) * 3 + 1000                         # a mean far from zero: cancellation would show
    memory = a.contiguous(memory_format=torch.channels_last) if channels_last else a
    mean, var = torch.empty(c), torch.empty(c)
    run(kernel, [memory, mean, var])
    exact_var, exact_mean = torch.var_mean(a.double(), (0, 2, 3), correction=0)
    torch.testing.assert_close(mean.double(), exact_mean, rtol=1e-7, atol=0)
    torch.testing.assert_close(var.double(), exact_var, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("outer", "inner"), [(37, 5000), (5000, 37), (1, 100000), (100, 100)])
@pytest.mark.parametrize("by_column", [False, True])
def test_sums_over_rows_and_columns_are_as_good_as_eager(outer: int, inner: int, by_column: bool) -> None:
    index = f"i + {outer}*j" if by_column else f"{inner}*i + j"
    kernel = parse_kernel(f"""kernel sums(x: f32, y: f32) axes i<{outer}>
        phase j<{inner}>
          %0 = load x[{index}] : f32
          %1 = reduce sum %0 : f32
        phase
          store y[i] = %1""")
    x = torch.rand(inner, outer) if by_column else torch.rand(outer, inner)
    y = torch.empty(outer)
    run(kernel, [x, y])
    exact = x.double().sum(0 if by_column else 1)
    eager = (x.sum(0 if by_column else 1).double() - exact).abs().max()
    assert (y.double() - exact).abs().max() <= max(eager, exact.abs().max() * 2.0 ** -24)


def test_argmax_takes_the_first_of_equals_and_nan_wins() -> None:
    kernel = parse_kernel("""kernel argmax(x: f32, y: i64, m: f32) axes i<4>
        phase j<9>, k<23>
          %0 = load x[207*i + 23*j + k] : f32
          %p = reduce argmax %0 : i64
          %m = reduce max %0 : f32
        phase
          store y[i] = %p
          store m[i] = %m""")
    x = torch.randint(0, 5, (4, 207)).float()
    x[2, 150], x[2, 60] = float("nan"), float("nan")
    x[3] = float("-inf")
    y, m = torch.empty(4, dtype=torch.int64), torch.empty(4)
    run(kernel, [x, y, m])
    assert y.tolist() == [int((x[0] == x[0].max()).nonzero()[0]), int((x[1] == x[1].max()).nonzero()[0]), 60, 0]
    torch.testing.assert_close(m, x.amax(1), equal_nan=True)


def test_division_in_an_index_becomes_an_axis() -> None:
    """A pixel shuffle: the contiguous axis of both sides only shows once v is split."""
    kernel = parse_kernel("""kernel shuffle(x: f32, y: f32) axes v<2016>
        phase
          %0 = load x[(v // 48) * 48 + 16 * (v % 3) + (v // 3) % 16] : f32
          store y[v] = %0""")
    x, y = torch.randn(2016), torch.empty(2016)
    run(kernel, [x, y])
    assert torch.equal(y, x.view(42, 3, 16).transpose(1, 2).reshape(-1))


def test_scatter_add_and_masked_gather() -> None:
    kernel = parse_kernel("""kernel scatter(ids: i64, x: f32, y: f32) axes i<40>, j<19>
        phase
          %k = load ids[i] : i64
          %ok = ne %k, 3 : b1
          %0 = load x[19*i + j] if %ok else 0.0 : f32
          store add y[19*%k + j] = %0 if %ok""")
    ids, x, y = torch.randint(0, 6, (40,)), torch.randn(40, 19), torch.zeros(6, 19)
    run(kernel, [ids, x, y])
    want = torch.zeros(6, 19).index_add_(0, ids[ids != 3], x[ids != 3])
    torch.testing.assert_close(y, want)


def test_embedding_and_in_place_update() -> None:
    kernel = parse_kernel("""kernel embed(ids: i64, table: f16, y: f32 out) axes i<11>, j<33>
        phase
          %k = load ids[i] : i64
          %0 = load table[33*%k + j] : f32
          %1 = load y[33*i + j] : f32
          %2 = add %0, %1 : f32
          store y[33*i + j] = %2""")
    ids, table, y = torch.randint(0, 7, (11,)), torch.randn(7, 33).half(), torch.randn(11, 33)
    want = y + table[ids].float()
    run(kernel, [ids, table, y])
    torch.testing.assert_close(y, want, rtol=0, atol=0)


def test_a_row_read_before_it_is_overwritten_is_kept() -> None:
    """The last phase reads values that an earlier phase loaded from memory that has changed since."""
    kernel = parse_kernel("""kernel swap(x: f32 out, y: f32) axes i<5>
        phase j<70>
          %0 = load x[70*i + j] : f32
          store x[70*i + j] = 1.0
        phase j<70>
          %1 = add %0, 1.0 : f32
          store y[70*i + j] = %1""")
    x, y = torch.randn(5, 70), torch.empty(5, 70)
    want = x + 1
    run(kernel, [x, y])
    assert torch.equal(y, want) and (x == 1).all()


def test_integer_arithmetic_has_pythons_and_torchs_rules() -> None:
    kernel = parse_kernel("""kernel ints(a: i64, b: i64, q: i64, r: i64, t: i64, p: i64) axes i<400>
        phase
          %a = load a[i] : i64
          %b = load b[i] : i64
          %q = floordiv %a, %b : i64
          %r = rem %a, %b : i64
          %t = truncdiv %a, %b : i64
          %p = pow %a, 3 : i64
          store q[i] = %q
          store r[i] = %r
          store t[i] = %t
          store p[i] = %p""")
    g = torch.cartesian_prod(torch.arange(-10, 10), torch.tensor([*range(-10, 0), *range(1, 11)])).T.contiguous()
    a, b = g[0].clone(), g[1].clone()
    q, r, t, p = (torch.empty_like(a) for _ in range(4))
    run(kernel, [a, b, q, r, t, p])
    assert torch.equal(q, a // b) and torch.equal(r, a % b) and torch.equal(p, a ** 3)
    assert torch.equal(t, torch.div(a, b, rounding_mode="trunc"))


def test_equal_kernels_compile_once() -> None:
    a, b = compile_kernels([softmax("3", "17"), softmax("3", "17")])
    assert a is b


def test_pointwise_over_dense_axes_is_one_loop() -> None:
    ir = generate_ir([parse_kernel("""kernel add(x: f32, y: f32) axes i<64>, j<56>, k<56>
        phase
          %0 = load x[3136*i + 56*j + k] : f32
          %1 = add %0, 1.0 : f32
          store y[3136*i + 56*j + k] = %1""")])
    assert ir.count("phi i64") == 1
