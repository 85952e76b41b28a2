"""Every f32 function of mathlib over the whole of f32, against f64: the bounds that `mathlib.ULP` states."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from llvm_harness import run

from fuseline.codegen.llvm import mathlib
from fuseline.ir.dtypes import F32, F64
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import Axis, Kernel, Load, Op, Param, Phase, Store

STRIDE = 1021                                                # a prime: every exponent and varied mantissas


def points() -> torch.Tensor:
    """Bit patterns over all of f32, and the neighbourhoods of points where functions change course."""
    swept = np.arange(0, 1 << 32, STRIDE, dtype=np.uint32)
    special = np.array([0.0, 0.5, 1.0, 2.0, 0.25, 0.6, 4.0, 10.0, np.pi / 2, np.pi, 2 * np.pi, 22.0, 88.72284, 103.97, 104.0,
                        87.33655, 150.0, 128.0, 127.0, 126.0, 9.2, 3.9192059, 10.05, 1e-3, 2.0 ** -14, 2.0 ** -10, 2.0 ** 28,
                        2.0 ** -126, 2.0 ** -149, 3.4028235e38, np.inf, 16367173 * 2.0 ** 72], dtype=np.float32).view(np.uint32)
    near = (special[:, None].astype(np.int64) + np.arange(-200, 201)).reshape(-1)
    near = near[(near >= 0) & (near < 1 << 31)].astype(np.uint32)
    bits = np.concatenate([swept, near, near | np.uint32(1 << 31), np.array([0x7FC00000, 0xFFC00000], dtype=np.uint32)])
    return torch.from_numpy(bits.view(np.float32).copy())


def kernel(name: str, arity: int, n: int, dtype=F32) -> Kernel:
    i = Sym("i", n)
    loads = tuple(Load(f"%{k}", f"p{k}", i, dtype) for k in range(arity))
    body = (*loads, Op("%r", name, tuple(f"%{k}" for k in range(arity)), dtype), Store("out", i, "%r"))
    params = (*(Param(f"p{k}", dtype) for k in range(arity)), Param("out", dtype, True))
    return Kernel(params, (), (Axis(i, n),), (Phase((), body),), name)


def ulps(got: torch.Tensor, exact: np.ndarray) -> np.ndarray:
    """Distance from the exact values in units of the last place of f32; 0 where both are NaN or the same infinity."""
    value = got.numpy().astype(np.float64)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(np.maximum(np.abs(exact), 2.0 ** -126)))
        unit = np.exp2(np.clip(exponent, -126, 127) - 23)
        # what rounds beyond the largest f32 is infinite there
        limit = np.float64(3.4028234663852886e38) + 2.0 ** 103
        exact = np.where(np.abs(exact) >= limit, np.copysign(np.inf, exact), exact)
        distance = np.abs(value - exact) / unit
    same = (value == exact) | (np.isnan(value) & np.isnan(exact))
    distance = np.where(same, 0.0, distance)
    # An infinity where the largest finite value is exact, or the other way round: the step between them is one unit.
    top = np.isinf(value) & (np.abs(exact) > 3.40282e38) & (np.sign(value) == np.sign(exact))
    beyond = np.sign(exact) * 2.0 ** 128
    return np.where(top & ~same, np.abs(beyond - np.where(np.isinf(exact), beyond, exact)) / 2.0 ** 104, distance)


def exact(name: str, x: torch.Tensor) -> np.ndarray:
    wide = x.to(torch.float64)
    functions = {"rsqrt": lambda v: 1 / torch.sqrt(v), "erf": torch.special.erf, "erfc": torch.special.erfc, "exp2": torch.exp2}
    if name in functions:
        return functions[name](wide).numpy()
    if name == "sigmoid":
        return torch.where(wide >= 0, 1 / (1 + torch.exp(-wide)), torch.exp(wide) / (1 + torch.exp(wide))).numpy()
    with np.errstate(all="ignore"):
        return getattr(np, {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
                            "atanh": "arctanh"}.get(name, name))(wide.numpy())


ONE = sorted(set(mathlib.ULP) - {"atan2", "pow"})


@pytest.mark.parametrize("name", ONE)
def test_f32_function_keeps_its_bound_over_the_whole_range(name: str) -> None:
    x = points()
    out = torch.empty_like(x)
    run(kernel(name, 1, x.numel()), [x, out])
    error = ulps(out, exact(name, x))
    worst = int(np.nanargmax(error))
    assert not np.isnan(error).any(), f"{name}: NaN on one side only, at {x[np.isnan(error)][:5]}"
    assert error[worst] <= mathlib.ULP[name], f"{name}({x[worst].item()!r}) = {out[worst].item()!r}, {error[worst]:.3f} ulp"


@pytest.mark.parametrize("name", ["sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "expm1", "log1p", "erf"])
def test_odd_functions_keep_the_sign_of_zero(name: str) -> None:
    x = torch.tensor([0.0, -0.0] * 20)
    out = torch.empty_like(x)
    run(kernel(name, 1, x.numel()), [x, out])
    assert torch.equal(torch.signbit(out), torch.signbit(x))
    assert (out == 0).all()


@pytest.mark.parametrize("name", ["pow", "atan2"])
def test_f32_function_of_two_arguments(name: str) -> None:
    g = torch.Generator().manual_seed(7)
    n = 1 << 20
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (2, n), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)
    near = torch.randn(2, n, generator=g) * torch.tensor([[8.0], [20.0]])
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40,
                            1e30, -1e30, 16777217.0, 2.5, -2.5])
    grid = torch.cartesian_prod(special, special).T
    a, b = torch.cat([bits, near, torch.stack([near[0].abs(), near[1]]), grid], 1).contiguous()
    out = torch.empty_like(a)
    run(kernel(name, 2, a.numel()), [a, b, out])
    with np.errstate(all="ignore"):
        wide = (np.power if name == "pow" else np.arctan2)(a.numpy().astype(np.float64), b.numpy().astype(np.float64))
    error = ulps(out, wide)
    assert not np.isnan(error).any(), (a[np.isnan(error)][:5], b[np.isnan(error)][:5])
    worst = int(error.argmax())
    found = f"{name}({a[worst].item()!r}, {b[worst].item()!r}) = {out[worst].item()!r}, {error[worst]:.3f} ulp"
    assert error[worst] <= mathlib.ULP[name], found
    zeros = wide == 0
    assert (np.signbit(wide) == np.signbit(out.numpy()))[zeros & (out.numpy() == 0)].all()


@pytest.mark.parametrize("name", sorted(set(mathlib.ULP)))
def test_f64_function_is_near_the_c_library(name: str) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan")], dtype=torch.float64)
    x = torch.cat([torch.randn(500, dtype=torch.float64) * 3, special])
    y = torch.flip(x, (0,)).contiguous()
    out = torch.empty_like(x)
    args = [x, y] if name in ("pow", "atan2") else [x]
    run(kernel(name, len(args), x.numel(), F64), [*args, out])
    want = getattr(torch, name, None) or getattr(torch.special, name)
    torch.testing.assert_close(out, want(*args), rtol=2e-15, atol=0, equal_nan=True)
