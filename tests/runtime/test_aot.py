"""What autograd sees of a compiled graph: accumulation, hooks, second backward, gradients of gradients, saved tensors."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from fuseline.autodiff.partition import partition
from fuseline.runtime.aot import wrap
from fuseline.trace.trace import trace
from tests.trace.harness import as_graph, compiled, executable


def normal(*shape, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def test_inference_without_aliases_is_the_executable_itself():
    module = as_graph(lambda x: x * 2, 1)
    traced = trace(module, [torch.ones(3)])
    run = executable(traced.graph)
    assert wrap(traced, None, lambda graph: run, module) is run


def test_gradients_accumulate_and_backward_twice_raises_as_eager():
    x = normal(3, grad=True)
    _, run = compiled(lambda x: x.sin() * x, [x])
    for _ in range(2):
        run(x)[0].sum().backward()
    expected, = torch.autograd.grad((x.sin() * x).sum(), x)
    torch.testing.assert_close(x.grad, 2 * expected)
    y, = run(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=False)
    torch.testing.assert_close(x.grad, 4 * expected)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_hooks_on_inputs_and_results():
    x, log = normal(3, grad=True), []
    _, run = compiled(lambda x: x ** 2, [x])
    x.register_hook(lambda g: g * 2)
    x.register_post_accumulate_grad_hook(lambda t: log.append("leaf"))
    y, = run(x)
    y.register_hook(lambda g: log.append("result"))
    y.sum().backward()
    assert log == ["result", "leaf"]
    torch.testing.assert_close(x.grad, 4 * x.detach())


def test_double_backward():
    def fn(x, w):
        return (x.sin() * w ** 2).sum(), x[1:]
    x, w = normal(3, grad=True), normal(3, grad=True, seed=1)
    _, run = compiled(fn, [x, w])

    def second(call):
        a, b = call(x, w)
        first = torch.autograd.grad(a + (b ** 3).sum(), (x, w), create_graph=True)
        return first + torch.autograd.grad(sum((g ** 2).sum() for g in first), (x, w))
    torch.testing.assert_close(second(run), second(fn))


def test_double_backward_when_one_input_depends_on_another():
    _, run = compiled(lambda a, b: a * b * a, [normal(3, grad=True), normal(3, grad=True)])

    def second(call):
        x = normal(3, grad=True)
        y = call(x, x.exp())
        y = y[0] if isinstance(y, tuple) else y
        g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((g * g).sum(), x)
    torch.testing.assert_close(second(run), second(lambda a, b: a * b * a))


def test_written_input_with_history_between_uses():
    def run_with(call):
        leaf = normal(3, grad=True)
        x = leaf * 2
        y = call(x)
        y = y[0] if isinstance(y, (tuple, list)) else y
        (y.sum() + (x * 5).sum()).backward()
        return x.detach(), y.detach(), leaf.grad

    def fn(x):
        x.mul_(3)
        return x.sin()
    sample = normal(3, grad=True) * 2
    _, run = compiled(fn, [sample])
    torch.testing.assert_close(run_with(run), run_with(fn))


def test_result_written_before_backward_and_saved_output_checked():
    x = normal(3, grad=True)
    _, run = compiled(lambda x: x.sin() + 1, [x])
    y, = run(x)
    y.mul_(2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    big = normal(3, grad=True)
    _, run = compiled(lambda x: x.exp(), [big])
    y, = run(big)
    with torch.no_grad():
        big.add_(1)
        y.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_unused_and_missing_gradients():
    x, w = normal(3, grad=True), normal(3, grad=True, seed=1)
    _, run = compiled(lambda x, w: (x * 2, w.exp(), x > 0), [x, w])
    a, b, positive = run(x, w)
    assert not positive.requires_grad
    a.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
    assert w.grad is None or not w.grad.any()


def test_tangent_of_another_layout():
    x = normal(3, 4, grad=True)
    _, run = compiled(lambda x: x.exp().t(), [x])
    y, = run(x)
    y.sum().backward()                                           # an expanded gradient
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_autocast_around_the_call_casts_once():
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def fn(x, w):
        return (x @ w).exp() @ w
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, run = compiled(fn, [x, w])
        y, e = run(x, w)[0], fn(x, w)
    assert y.dtype == e.dtype == torch.bfloat16
    torch.testing.assert_close(y, e, rtol=0.05, atol=0.05)
    g, = torch.autograd.grad(y.float().sum(), w)
    expected, = torch.autograd.grad(e.float().sum(), w)
    torch.testing.assert_close(g, expected, rtol=0.1, atol=0.5)
    assert g.dtype == torch.float32


def test_buffers_are_written_once_and_nothing_leaks():
    buffer, w = torch.zeros(3), torch.ones(3, requires_grad=True)

    def fn(x, buffer, w):
        buffer.mul_(0.5).add_(x)
        return F.relu(x * w) + buffer
    _, run = compiled(fn, [torch.ones(3), buffer, w])
    version = buffer._version
    x = torch.ones(3)
    y, = run(x, buffer, w)
    assert buffer.tolist() == [1, 1, 1] and buffer._version == version + 1
    gone = weakref.ref(x)
    y.sum().backward()
    del x, y
    gc.collect()
    assert gone() is None


def test_backward_is_compiled_lazily_or_at_once():
    module = as_graph(lambda x: x * x, 1)
    x = normal(3, grad=True)
    traced = trace(module, [x])
    for lazy in (True, False):
        names = []

        def compile_graph(graph, names=names):
            names.append(graph.name)
            return executable(graph)
        run = wrap(traced, partition(traced), compile_graph, module, lazy_backward=lazy)
        assert names == (["forward"] if lazy else ["forward", "backward"])
        for _ in range(2):
            run(x)[0].sum().backward()
        assert names == ["forward", "backward"]
