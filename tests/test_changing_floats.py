"""Python floats that change between calls: two compilations, numbers and types as in eager mode."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseline

FLOATS = (0.3, 1.7, -2.5, 0.1, 3.0, 1e-3, 7.25, 100.1, -0.7, 2.0)
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def compiled(function: Callable, **options: Any) -> Callable:
    return fuseline.compile(function, options={"strict": True}, **options)


def flat(result: Any) -> list:
    return [x for r in result for x in flat(r)] if isinstance(result, (tuple, list)) else [result]


def assert_same(expected: Any, found: Any) -> None:
    """Tensors nearly equal, of one type; numbers equal to the last bit, of one type."""
    assert len(flat(expected)) == len(flat(found))
    for a, b in zip(flat(expected), flat(found)):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=1e-5 if a.element_size() > 2 else 2e-2, atol=1e-6 if a.element_size() > 2 else 2e-2,
                                       equal_nan=True)
        else:
            assert type(a) is type(b) and repr(a) == repr(b)


def compilations(function: Callable, *inputs: torch.Tensor, floats: tuple = FLOATS) -> int:
    before, ours = fuseline.compile_count(), compiled(function)
    for k in floats:
        assert_same(function(*(x.clone() for x in inputs), k), ours(*(x.clone() for x in inputs), k))
    return fuseline.compile_count() - before


@pytest.mark.parametrize("x", [X, torch.arange(6), X.half(), X.bfloat16(), X.double(), X > 0, torch.tensor(2.5), torch.tensor(3)],
                         ids=lambda x: f"{x.dtype}-{x.dim()}".removeprefix("torch."))
def test_ten_floats_are_two_compilations_with_the_types_of_eager(x: torch.Tensor) -> None:
    assert compilations(lambda x, k: (x * k + k, k / (x + 1), x > k, x == k), x) == 2


PROGRAMS = {
    "python_arithmetic": lambda x, k: x * (k * 2 + 1) + max(k, 0.5) - min(k, 1.0, 2) * abs(k) + sum([k, 0.1, k]),
    "math": lambda x, k: x * math.exp(-k * k) + math.sin(k) / 3,
    "returned": lambda x, k: (x * k, k, [k * 2 + 0.1 + 0.2, {"k": -k}]),
    "alpha": lambda x, k: torch.add(x, x, alpha=k) + torch.sub(x, x * 2, alpha=k) + torch.addcmul(x, x, x, value=k),
    "library_and_kernel": lambda x, k: torch.addmm(x @ x.T, x, x.T, alpha=k, beta=k + 1) * k,
    "filled": lambda x, k: torch.full((3,), k) + x.new_full((3,), k) + torch.full_like(x[0, :3], k),
    "selected": lambda x, k: (torch.where(x > 0, x, k), x.masked_fill(x > 0, k), x.clamp(min=k), x.clamp(-0.2, k), torch.lerp(x, x * 2, k)),
    "in_place": lambda x, k: x.mul_(k).add_(x, alpha=k),
    "remainder": lambda x, k: (x % k, x // k),
    "integers": lambda x, k: (x * 2).long().fill_(k),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_take_a_float_that_changes(name: str) -> None:
    assert compilations(PROGRAMS[name], X) == 2


def test_a_branch_guards_the_comparison_only() -> None:
    assert compilations(lambda x, k: x * k if k > 0 and k != 3.0 else x - k, X) == 4       # constant, positive, negative, 3.0


def test_what_needs_the_value_is_guarded_by_it() -> None:
    assert compilations(lambda x, k: x.abs() ** k, X, floats=FLOATS[:4]) == 4
    assert compilations(lambda x, k: (x * 2, f"{k:.1f}", {k: 1}[k]), X, floats=FLOATS[:4]) == 4
    assert compilations(lambda x, k: torch.nn.functional.layer_norm(x, (8,), eps=k), X, floats=(1e-5, 1e-3, 1e-2)) == 3


def test_sizes_made_of_floats_and_functions_of_constants() -> None:
    small = (0.3, 1.7, 0.9, 0.1, 0.21)
    assert compilations(lambda x, k: torch.arange(0, k * 5, 0.25), X, floats=small) == 5
    assert compilations(lambda x, k: torch.nn.functional.interpolate(x[None, None], scale_factor=1 + k), X, floats=small) == 5
    positive = tuple(map(abs, FLOATS))
    assert compilations(lambda x, k: torch.xlogy(x, k) + torch.xlogy(k, x.abs()) + torch.xlogy(x, 0.3), X, floats=positive) == 2


def test_zeros_infinities_nan_ints_and_bools_stay_apart() -> None:
    special = (1.0, 0.0, 2.0, -0.0, math.nan, math.inf, 3, True, 2, False, -0.0, 0.0, math.nan, -math.inf, 1e308)
    ours = compiled(lambda x, k: (x * k, torch.copysign(x, k), k))
    for k in special * 2:
        for x in (torch.arange(3), torch.tensor([0.0, -1.0, 2.0])):
            assert_same((x * k, torch.copysign(x, k), k), ours(x, k))


def test_division_by_zero_raises_as_in_python() -> None:
    ours = compiled(lambda x, k: x * (1 / k))
    for k in (1.5, 2.5, 0.0, 3.5):
        if k:
            assert_same(X * (1 / k), ours(X, k))
        else:
            with pytest.raises(ZeroDivisionError):
                ours(X, k)


def test_gradients_through_a_float_that_changes() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, k: float) -> torch.Tensor:
        return ((x * k) @ w / (k + 5)).tanh().square().sum() * k

    before, ours = fuseline.compile_count(), compiled(loss)
    for k in FLOATS:
        found = []
        for function in (loss, ours):
            x, w = X.clone().requires_grad_(), X.T.clone().requires_grad_()
            value = function(x, w, k)
            value.backward()
            found.append((value.detach(), x.grad, w.grad))
        for a, b in zip(*found):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    assert fuseline.compile_count() - before == 2


class Scheduled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.settings = torch.nn.Linear(8, 4), 1.0, {"shift": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.settings["shift"]


def test_an_attribute_that_a_schedule_changes() -> None:
    model = Scheduled()
    before, ours = fuseline.compile_count(), compiled(model)
    for step in range(10):
        model.scale, model.settings["shift"] = 1 + step * 0.37, 0.5 / (step + 1)
        torch.testing.assert_close(ours(X), model(X))
    assert fuseline.compile_count() - before == 2


def test_numbers_made_of_symbolic_sizes() -> None:
    def scaled(x: torch.Tensor, k: float) -> torch.Tensor:
        return x * (k / x.shape[0]) + 1 / math.sqrt(x.shape[1])

    before, ours = fuseline.compile_count(), compiled(scaled, dynamic=True)
    for n in range(6):
        x = torch.randn(3 + n, 5 + n)
        assert_same(scaled(x, 0.3 + n), ours(x, 0.3 + n))
    assert fuseline.compile_count() - before == 1


def test_numbers_mixed_with_symbolic_ints_are_computed_in_doubles() -> None:
    def mixed(x: torch.Tensor, k: float, n: int) -> tuple:
        return x * (k % n) + min(n, k, 1.5), k * n, abs(-n) / 3, 0.1 * n + 0.2 + k, math.sqrt(abs(n - 3)), -0.0 * n, float(n)

    before, ours = fuseline.compile_count(), compiled(mixed)
    for step, k in enumerate(FLOATS):
        assert_same(mixed(X, k, step + 4), ours(X, k, step + 4))
    assert fuseline.compile_count() - before <= 4


def three_items(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    a = (x * 2).sum().item()
    y = x * a + 1
    b = y.mean().item()
    z = y / (abs(b) + 1)
    c = z.max().item()
    return z * c + b, a * b + c


def items_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        total = x.sum().item()
        x = x * (1 + total / 10) if total > 0 else x - total
    return x


@pytest.mark.parametrize(("function", "bound"), [(three_items, 7), (items_in_a_loop, 12)])
def test_items_with_twenty_values_stay_compiled(function: Callable, bound: int) -> None:
    before, ours = fuseline.compile_count(), compiled(function)
    for i in range(20):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i)) * (i + 1) / 10
        for a, b in zip(flat(function(x)), flat(ours(x))):
            torch.testing.assert_close(torch.as_tensor(b), torch.as_tensor(a), rtol=1e-4, atol=1e-4)
    count = fuseline.compile_count() - before
    assert count <= bound
    for i in range(5):
        ours(torch.randn(16, generator=torch.Generator().manual_seed(i)) / 10)
    assert fuseline.compile_count() - before == count
