"""Kernels in Triton's interpreter against the loop interpreter: every operation and reduction, random kernels and tilings."""
from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuseline import torch_internals
from fuseline.codegen.triton.interpret import run
from fuseline.codegen.triton.tiling import Tiling, choose
from fuseline.ir import dtypes, interp
from fuseline.ir.dtypes import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8, DType
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Op, Param, Phase, Reduce, Store
from fuseline.ir.ops import OPS

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, -7.25, 100.0, -100.0, math.inf, -math.inf, math.nan, 1e-30, 2.5]


def floats(n: int, dtype: DType) -> torch.Tensor:
    torch.manual_seed(n)
    x = torch.randn(n, dtype=torch.float64) * 3
    x[:len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)[:n]
    return x.to(torch_internals.to_torch_dtype(dtype))


def integers(n: int, dtype: DType, low: int = -7) -> torch.Tensor:
    torch.manual_seed(n)
    if dtype is BOOL:
        return torch.randint(0, 2, (n,), dtype=torch.bool)
    x = torch.randint(0 if dtype.kind == "uint" else low, 9, (n,)).to(torch_internals.to_torch_dtype(dtype))
    return torch.where(x == 0, torch.ones_like(x), x) if low > 0 else x


def check(kernel: Kernel, buffers: list[torch.Tensor], sizes: dict[str, int] | None = None, tiling: Tiling | None = None,
          wide: bool = False, rtol: float = 1e-6, atol: float = 1e-6) -> str:
    """Run both ways on copies of the buffers and compare all of them. Returns the Triton source."""
    sizes = sizes or {}
    ours, reference = [b.clone() for b in buffers], [b.clone() for b in buffers]
    interp.run_kernel(kernel, reference, sizes)
    source = run(kernel, ours, [sizes[s.name] for s in kernel.sizes], tiling, wide)
    for a, b in zip(ours, reference):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{m}\n{source.text}")
    return source.text


def pointwise(op: str, dtype: DType, arity: int, result: DType, n: int = 37) -> Kernel:
    i = Sym("i", n)
    loads = tuple(Load(f"%{k}", f"p{k}", i, dtype) for k in range(arity))
    return Kernel((*(Param(f"p{k}", dtype) for k in range(arity)), Param("out", result, True)), (), (Axis(i, n),),
                  (Phase((), (*loads, Op("%r", op, tuple(f"%{k}" for k in range(arity)), result.compute), Store("out", i, "%r"))),))


KINDS = {"f": (F32, F64), "i": (I32, I64, U8), "b": (BOOL,)}
CASES = [(op.name, dtype) for op in OPS.values() if op.name not in ("where", "cast", "check") for kind in op.kinds for dtype in KINDS[kind]
         if not (op.name.startswith("round_") and dtype is not F32) and op.name != "round_bf16"      # Triton's interpreter truncates

         and not (op.name in ("neg", "signbit") and dtype is U8) and not (op.name == "fma" and dtype is F64)]


@pytest.mark.parametrize("op, dtype", CASES, ids=lambda x: str(x))
def test_every_operation(op: str, dtype: DType) -> None:
    spec = OPS[op]
    result = BOOL if spec.result == "b1" else dtype
    if dtype.is_float:
        args = [floats(37, dtype).roll(5 * k) for k in range(spec.arity)]
        if op in ("rem", "fmod", "floordiv"):               # what a division of or by infinity leaves is not specified
            args = [torch.where(a.isfinite() & (a.abs() > 1e-20), a, torch.ones_like(a) * 1.5) for a in args]
    else:
        args = [integers(37, dtype, 1 if k and op in ("floordiv", "truncdiv", "rem", "fmod", "shl", "shr", "pow") else -7).roll(k)
                for k in range(spec.arity)]
    tight = dict(rtol=1e-14, atol=1e-14) if dtype is F64 else dict(rtol=2e-6, atol=1e-7)
    check(pointwise(op, dtype, spec.arity, result), [*args, torch.zeros(37, dtype=torch_internals.to_torch_dtype(result))], **tight)


@pytest.mark.parametrize("source", [F16, BF16, F32, F64, I8, U8, I32, I64, BOOL], ids=str)
@pytest.mark.parametrize("target", [F16, BF16, F32, F64, I8, U8, I32, I64, BOOL], ids=str)
def test_conversions(source: DType, target: DType) -> None:
    x = torch.tensor([0, 1, 2, 3, 7, 100, 0, 5, 1.5, 2.25, 99.75]).to(torch_internals.to_torch_dtype(source))
    n = len(x)
    i = Sym("i", n)
    kernel = Kernel((Param("p0", source), Param("p1", target, True)), (), (Axis(i, n),), (Phase((), (
        Load("%0", "p0", i, source), Op("%1", "cast", ("%0",), target.compute), Store("p1", i, "%1"))),))
    loose = 1e-2 if target is BF16 else 1e-6                 # Triton's interpreter truncates to bfloat16 instead of rounding
    check(kernel, [x, torch.zeros(n, dtype=torch_internals.to_torch_dtype(target))], rtol=loose)


def rows(r: int, c: int, op: str, dtype: DType, acc: DType, inner_contiguous: bool = True, symbolic: bool = False) -> Kernel:
    """Reduce the rows (or columns) of an r x c matrix."""
    sizes = (Sym("s0", None, 2), Sym("s1", None, 2)) if symbolic else ()
    m, n = sizes if symbolic else (r, c)
    i, j = Sym("i", m), Sym("j", n)
    index = n * i + j if inner_contiguous else m * j + i
    names = ("%a", "%b") if op.startswith("welford") else ("%a",)
    outs = [acc if op not in ("any", "all") else BOOL, acc][:len(names)]
    outs = [I64] if op.startswith("arg") else outs
    if op == "welford_combine":
        loads = tuple(Load(f"%{k}", f"p{k}", index, dtype) for k in range(3))
        loads = (*loads, Op("%c", "abs", ("%2",), dtype))
        args, count = ("%0", "%1", "%c"), 3
    else:
        loads, args, count = (Load("%0", "p0", index, dtype),), ("%0",), 1
    result = BOOL if op in ("any", "all") else I64 if op.startswith("arg") else acc
    return Kernel((*(Param(f"p{k}", dtype) for k in range(count)), *(Param(f"o{k}", d, True) for k, d in enumerate(outs))), sizes,
                  (Axis(i, m),), (Phase((Axis(j, n),), (*loads, Reduce(names, op, args, result))),
                                  Phase((), tuple(Store(f"o{k}", i, name) for k, name in enumerate(names)))), f"{op}_rows")


REDUCTIONS = [("sum", F32, F32), ("sum", F16, F32), ("sum", F64, F64), ("sum", I32, I64), ("sum", BOOL, I64), ("prod", F32, F32),
              ("max", F32, F32), ("min", F32, F32), ("max", I64, I64), ("min", U8, U8), ("max", BF16, F32), ("any", BOOL, BOOL),
              ("all", BOOL, BOOL), ("any", F32, BOOL), ("argmax", F32, I64), ("argmin", F32, I64), ("argmax", I32, I64),
              ("welford", F32, F32), ("welford", F64, F64), ("welford_combine", F32, F32)]
TILINGS = [None, Tiling(1, r=8, x_axes=1), Tiling(4, r=8, x_axes=1), Tiling(1, persistent=True, x_axes=1),
           Tiling(8, persistent=True, x_axes=1)]


@pytest.mark.parametrize("tiling", TILINGS, ids=["default", "loop1", "loop4", "whole1", "whole8"])
@pytest.mark.parametrize("op, dtype, acc", REDUCTIONS, ids=lambda x: str(x))
def test_every_reduction(op: str, dtype: DType, acc: DType, tiling: Tiling | None) -> None:
    r, c = 5, 21
    kernel = rows(r, c, op, dtype, acc, inner_contiguous=tiling is None or tiling.x == 1)
    count = 3 if op == "welford_combine" else 1
    inputs = []
    for k in range(count):
        if dtype.is_float:
            torch.manual_seed(k)
            x = torch.randn(r * c, dtype=torch.float64)
            if op in ("max", "argmax", "argmin"):
                x[3], x[30:52] = math.nan, -math.inf
            inputs.append(x.to(torch_internals.to_torch_dtype(dtype)))
        else:
            inputs.append(integers(r * c, dtype))
    outs = [torch.zeros(r, dtype=torch_internals.to_torch_dtype(p.dtype)) for p in kernel.params[count:]]
    check(kernel, [*inputs, *outs], tiling=tiling, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 32), (2, 40)])
@pytest.mark.parametrize("wide", [False, True])
def test_symbolic_sizes(shape: tuple[int, int], wide: bool) -> None:
    r, c = shape
    x = torch.randn(r * c)
    for inner in (True, False):
        kernel = rows(r, c, "sum", F32, F32, inner, symbolic=True)
        check(kernel, [x, torch.zeros(r)], {"s0": r, "s1": c}, wide=wide, atol=1e-5)


def normalise(r: int, c: int, dtype: DType) -> Kernel:
    """Layer norm, then softmax of it: three kinds of reduction in one kernel."""
    i, j = Sym("i", r), Sym("j", c)
    inner, at = (Axis(j, c),), c * i + j
    return Kernel((Param("p0", dtype), Param("p1", F32), Param("p2", dtype, True)), (), (Axis(i, r),), (
        Phase(inner, (Load("%x", "p0", at, dtype), Reduce(("%mean", "%m2"), "welford", ("%x",), F32))),
        Phase((), (Op("%v", "div", ("%m2", float(c)), F32), Op("%e", "add", ("%v", 1e-5), F32), Op("%s", "rsqrt", ("%e",), F32))),
        Phase(inner, (Op("%d", "sub", ("%x", "%mean"), F32), Op("%n", "mul", ("%d", "%s"), F32), Load("%w", "p1", j, F32),
                      Op("%y", "mul", ("%n", "%w"), F32), Reduce(("%top",), "max", ("%y",), F32))),
        Phase(inner, (Op("%q", "sub", ("%y", "%top"), F32), Op("%z", "exp", ("%q",), F32), Reduce(("%t",), "sum", ("%z",), F32))),
        Phase(inner, (Op("%o", "div", ("%z", "%t"), F32), Store("p2", at, "%o")))), "norm_softmax")


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_values_of_earlier_phases_are_kept_or_computed_again(dtype: DType) -> None:
    torch.manual_seed(0)
    t = torch_internals.to_torch_dtype(dtype)
    buffers = [torch.randn(6, 50).to(t).reshape(-1), torch.randn(50), torch.zeros(300, dtype=t)]
    tolerance = dict(rtol=1e-5, atol=1e-6) if dtype is F32 else dict(rtol=1e-2, atol=1e-3)
    for tiling in TILINGS:
        check(normalise(6, 50, dtype), buffers, tiling=tiling, **tolerance)


def test_gather_mask_and_scatter_add() -> None:
    i, j = Sym("i", 6), Sym("j", 5)
    table, chosen = torch.randn(9 * 5), torch.tensor([3, -1, 0, 8, 3, 20])
    kernel = Kernel((Param("ids", I64), Param("table", F32), Param("out", F32, True), Param("sums", F32, True)), (),
                    (Axis(i, 6), Axis(j, 5)), (Phase((), (
                        Load("%id", "ids", i, I64), Op("%neg", "lt", ("%id", 0), BOOL), Op("%up", "add", ("%id", 9), I64),
                        Op("%w", "where", ("%neg", "%up", "%id"), I64), Op("%ok", "lt", ("%w", 9), BOOL),
                        Load("%v", "table", 5 * Sym("%w") + j, F32, "%ok", 7.5), Store("out", 5 * i + j, "%v"),
                        Store("sums", j, "%v", "%ok", "add"))),), "gather")
    check(kernel, [chosen, table, torch.zeros(30), torch.zeros(5)], atol=1e-5)


def test_transpose_uses_square_tiles() -> None:
    m, n = 40, 50
    i, j = Sym("i", m), Sym("j", n)
    kernel = Kernel((Param("a", F32), Param("b", F32), Param("o", F32, True)), (), (Axis(i, m), Axis(j, n)), (Phase((), (
        Load("%a", "a", n * i + j, F32), Load("%b", "b", m * j + i, F32), Op("%c", "add", ("%a", "%b"), F32),
        Store("o", n * i + j, "%c"))),), "transpose")
    assert choose(kernel).y in (32, 64)
    check(kernel, [torch.randn(m * n), torch.randn(m * n), torch.zeros(m * n)])


def test_index_values_divisions_and_negative_numerators() -> None:
    n = 45
    i = Sym("i", n)
    kernel = Kernel((Param("a", F32), Param("o", I64, True), Param("q", F32, True)), (), (Axis(i, n),), (Phase((), (
        Index("%k", (i - 7) // 4 + (i - 20) % 6, I64), Store("o", i, "%k"),
        Load("%a", "a", (i // 9) + 5 * (i % 9), F32), Store("q", n - 1 - i, "%a"))),), "index")
    check(kernel, [torch.randn(n), torch.zeros(n, dtype=torch.int64), torch.zeros(n)])


def test_a_single_point_and_no_axes() -> None:
    kernel = Kernel((Param("a", F32), Param("o", F32, True)), (), (), (Phase((), (
        Load("%a", "a", 0, F32), Op("%b", "exp", ("%a",), F32), Store("o", 0, "%b"))),))
    check(kernel, [torch.randn(1), torch.zeros(1)])
    j = Sym("j", 300)
    whole = Kernel((Param("a", F32), Param("o", F32, True)), (), (), (
        Phase((Axis(j, 300),), (Load("%a", "a", j, F32), Reduce(("%s",), "sum", ("%a",), F32))), Phase((), (Store("o", 0, "%s"),))))
    check(whole, [torch.randn(300), torch.zeros(1)], atol=1e-4)
    check(whole, [torch.randn(300), torch.zeros(1)], tiling=Tiling(1, r=64), atol=1e-4)


@st.composite
def kernels(draw: st.DrawFn) -> tuple[Kernel, list[torch.Tensor], dict[str, int], Tiling | None]:
    """A random kernel of a few phases over a strided, broadcast or permuted view of its inputs."""
    r, c = draw(st.integers(1, 9)), draw(st.integers(1, 33))
    symbolic = draw(st.booleans()) and r > 1 and c > 1
    sizes = (Sym("s0", None, 2), Sym("s1", None, 2)) if symbolic else ()
    m, n = sizes if symbolic else (r, c)
    i, j = Sym("i", m), Sym("j", n)
    indices = {"row": n * i + j, "column": m * j + i, "by_row": i, "by_column": j, "reversed": n * i + (n - 1 - j)}
    inner = draw(st.booleans())
    axes, inner_axes = ((Axis(i, m),), (Axis(j, n),)) if inner else ((Axis(i, m), Axis(j, n)), ())
    dtypes_drawn = [draw(st.sampled_from([F32, F16, F64])) for _ in range(2)]
    params = [Param(f"p{k}", d) for k, d in enumerate(dtypes_drawn)]
    buffers = [torch.randn(r * c).to(torch_internals.to_torch_dtype(d)) for d in dtypes_drawn]
    phases, counter = [], 0
    per_element: list[str] = []
    per_point: list[str] = []
    for _ in range(draw(st.integers(1, 3)) if inner else 1):
        body: list = []
        for k, d in enumerate(dtypes_drawn):
            name = f"%l{counter}"
            counter += 1
            body.append(Load(name, f"p{k}", indices[draw(st.sampled_from(sorted(indices)))], d))
            value = name
            if d.compute is not F32:
                value = f"%w{counter}"
                body.append(Op(value, "cast", (name,), F32))
            per_element.append(value)
        for _ in range(draw(st.integers(1, 3))):
            name = f"%v{counter}"
            counter += 1
            op = draw(st.sampled_from(["add", "mul", "maximum", "sub", "sigmoid", "abs", "where"]))
            a, b = (draw(st.sampled_from(per_element + per_point)) for _ in range(2))
            if op == "where":
                body += [Op(name + "c", "lt", (a, 0.25), BOOL), Op(name, op, (name + "c", a, b), F32)]
            else:
                body.append(Op(name, op, (a, b)[:OPS[op].arity], F32))
            per_element.append(name)
        if inner and draw(st.booleans()):
            op = draw(st.sampled_from(["sum", "max", "min", "welford"]))
            names = (f"%r{counter}", f"%q{counter}")[:2 if op == "welford" else 1]
            counter += 1
            body.append(Reduce(names, op, (draw(st.sampled_from(per_element)),), F32))
            phases.append(Phase(inner_axes, tuple(body)))
            per_point += names
            continue
        out = f"o{counter}"
        counter += 1
        params.append(Param(out, F32, True))
        buffers.append(torch.zeros(r * c))
        body.append(Store(out, indices[draw(st.sampled_from(["row", "column"]))], per_element[-1]))
        phases.append(Phase(inner_axes, tuple(body)))
    if per_point:
        params.append(Param("last", F32, True))
        buffers.append(torch.zeros(r))
        phases.append(Phase((), (Store("last", i, per_point[-1]),)))
    kernel = Kernel(tuple(params), sizes, axes, tuple(phases), "random")
    choices = [None, Tiling(2, r=16, x_axes=len(axes)), Tiling(1, r=4, x_axes=len(axes))]
    if inner and not symbolic:
        choices.append(Tiling(4, persistent=True, x_axes=len(axes)))
    if not inner:
        choices = [None, Tiling(32, x_axes=2), Tiling(16, 16, x_axes=1)]
    return kernel, buffers, ({"s0": r, "s1": c} if symbolic else {}), draw(st.sampled_from(choices))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(kernels())
def test_random_kernels(drawn: tuple) -> None:
    kernel, buffers, sizes, tiling = drawn
    check(kernel, buffers, sizes, tiling, rtol=1e-4, atol=1e-4)


assert dtypes.ALL
