"""Dynamic sizes: one trace runs for every size, and the guards tell what it relied on."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fuseline
from fuseline import torch_internals
from fuseline.autodiff.partition import partition
from fuseline.runtime.aot import wrap
from fuseline.trace.interpret import run_graph
from fuseline.trace.trace import trace
from tests.trace.harness import as_graph, is_pure


def compile_dynamic(fn, inputs, axes):
    env = torch_internals.new_shape_env()
    mode = torch_internals.new_fake_mode(env)
    fakes = [torch_internals.to_symbolic_fake(mode, x, frozenset(a), f"x{i}") if isinstance(x, torch.Tensor)
             else torch_internals.new_symbolic_int(env, x, f"x{i}") for i, (x, a) in enumerate(zip(inputs, axes))]
    module = as_graph(fn, len(inputs))
    traced = trace(module, fakes, shape_env=env, grad_enabled=torch.is_grad_enabled())
    is_pure(traced.graph)
    parts = partition(traced) if traced.joint else None
    return traced, parts, wrap(traced, parts, lambda g: lambda *a: run_graph(g, a), module)


def layers(x, w):
    y = F.layer_norm(x @ w, (6,))
    y = y.reshape(x.shape[0] * x.shape[1], 6) * x.shape[0]
    return F.gelu(y).mean(0), y.view(x.shape[0], -1)


def normal(*shape, grad=False):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("grad", [False, True])
def test_one_trace_serves_all_sizes(grad):
    w = normal(4, 6, grad=grad)
    traced, parts, run = compile_dynamic(layers, [normal(3, 5, 4), w], [(0, 1), ()])
    assert set(traced.symbols) == {"s0", "s1"} or len(traced.symbols) == 2
    for shape in [(3, 5, 4), (2, 7, 4), (9, 2, 4)]:
        x = normal(*shape)
        got, expected = run(x, w), layers(x, w)
        for g, e in zip(got, expected):
            torch.testing.assert_close(g, e)
            assert g.stride() == e.stride()
        if grad:
            ours, = torch.autograd.grad(sum((g * g).sum() for g in got), w)
            eager, = torch.autograd.grad(sum((e * e).sum() for e in expected), w)
            torch.testing.assert_close(ours, eager)


def test_backward_gets_sizes_that_no_saved_tensor_has():
    x = normal(5, 3, grad=True)
    traced, parts, run = compile_dynamic(lambda x: x.mean(), [x], [(0,)])
    assert len(parts.sizes) == 1 and parts.saved == ()
    for n in (5, 8):
        x = normal(n, 3, grad=True)
        run(x)[0].backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 1 / (3 * n)))


def test_batch_norm_with_a_dynamic_batch():
    def fn(x, w, b, mean, var):
        return F.batch_norm(x, mean, var, w, b, True, 0.1)
    stats = [torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    _, _, run = compile_dynamic(fn, [normal(4, 3, 5), normal(3, grad=True), normal(3), *stats], [(0,), (), (), (), ()])
    for n in (4, 6):
        x, w, b = normal(n, 3, 5), normal(3, grad=True), normal(3)
        mine, theirs = [s.clone() for s in stats], [s.clone() for s in stats]
        torch.testing.assert_close(run(x, w, b, *mine)[0], fn(x, w, b, *theirs))
        torch.testing.assert_close(mine, theirs)


def test_branches_on_sizes_become_guards():
    traced, _, run = compile_dynamic(lambda x: x * 2 if x.shape[0] > 3 else x, [normal(6, 2)], [(0,)])
    (symbol,) = traced.symbols
    assert any(eval(g, {symbol: 6}) and not eval(g, {symbol: 3}) for g in traced.guards), traced.guards


def test_equal_sizes_found_in_the_trace_are_put_in():
    traced, _, run = compile_dynamic(lambda x, y: (x + y, x.shape[0]), [normal(6, 2), normal(6, 2)], [(0,), (0,)])
    assert len({str(n.type) for n in traced.graph.inputs}) == 1
    x = normal(4, 2)
    got = run(x, x)
    torch.testing.assert_close(got[0], x + x)
    assert got[1] == 4


def test_a_symbolic_int_is_a_scalar_input_of_any_sign():
    x = normal(5, 3, grad=True)
    traced, _, run = compile_dynamic(lambda x, n: x * n + x.roll(1, 0)[0] ** 2, [x, 4], [(), ()])
    assert [str(n.type) for n in traced.graph.inputs][1].startswith("int=")
    for n in (4, -3, 0, 1):
        y, = run(x, n)
        torch.testing.assert_close(y, x * n + x.roll(1, 0)[0] ** 2)
        g, = torch.autograd.grad(y.sum(), x)
        e, = torch.autograd.grad((x * n + x.roll(1, 0)[0] ** 2).sum(), x)
        torch.testing.assert_close(g, e)


def test_views_of_inputs_with_symbolic_ends_are_rebuilt():
    x = normal(6, 3)
    _, _, run = compile_dynamic(lambda x: (x[: x.shape[0] // 2], x + 1), [x], [(0,)])
    for n in (6, 9):
        x = normal(n, 3)
        v, _ = run(x)
        assert v._base is x and v.shape == (n // 2, 3)


def test_sizes_found_equal_before_the_trace_keep_their_places():
    """Its guard names both: without a place for each, it could not be checked."""
    before = fuseline.compile_count()

    def loss(x, y):
        return F.cross_entropy(x, y)
    compiled = fuseline.compile(loss, dynamic=True, options={"strict": True})
    for rows in (3, 4, 7):
        x, y = torch.randn(rows, 5), torch.randint(0, 5, (rows,))
        torch.testing.assert_close(compiled(x, y), loss(x, y))
    assert fuseline.compile_count() == before + 1
