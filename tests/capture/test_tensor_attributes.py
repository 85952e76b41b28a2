"""Writes to attributes of tensors: gradients and the program's own names are part of the region; the rest is left to Python."""
import torch

import fuseline


def leaf(gradient=True):
    x = torch.arange(3.).requires_grad_()
    x.grad = torch.ones(3) if gradient else None
    return x


def check(fn, *makes, fullgraph=True):
    """The same result and the same gradient afterwards, for each argument, compiled and eager."""
    compiled = fuseline.compile(fn, fullgraph=fullgraph)
    for make in makes:
        mine, theirs = make(), make()
        torch.testing.assert_close(compiled(mine), fn(theirs), rtol=0, atol=0)
        assert (mine.grad is None) == (theirs.grad is None) and mine.requires_grad == theirs.requires_grad
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_gradients_are_assigned_and_read_back():
    def clear(x):
        before, x.grad = x.grad * 2, None
        return before, x.grad is None

    def replace(x):
        with torch.no_grad():
            x.grad = x * 2
            x.grad.mul_(3)
            return x.grad + 1

    def twice(x):
        x.grad = torch.ones_like(x)
        first = x.grad
        x.grad = first + x.grad
        return x.grad is first, x.grad * 1

    def zero(x):
        if x.grad is not None and x.grad.grad_fn is None:
            x.grad.requires_grad_(False)
            x.grad.zero_()
        return x * 2

    for fn in (clear, replace, twice, zero):
        check(fn, leaf, leaf)
    check(zero, leaf, lambda: leaf(gradient=False))


def test_gradients_are_there_where_a_region_ends():
    def fn(x):
        x.grad = x.detach() * 3
        print(end="")
        return x.grad + 1
    check(fn, leaf, leaf, fullgraph=False)


def test_modules_forget_gradients_in_one_region():
    def fn(module, x):
        module.zero_grad()
        return module(x)
    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    module(x).sum().backward()
    compiled = fuseline.compile(fn, fullgraph=True)
    torch.testing.assert_close(compiled(module, x), module(x))
    assert all(p.grad is None for p in module.parameters())


def test_flags_that_are_set_already_are_no_break():
    def fn(x):
        x.requires_grad = True
        return (x.requires_grad_() * 2).detach().requires_grad_(False)
    check(fn, leaf)


def test_what_python_refuses_raises_the_same():
    def fn(x):
        x.grad = torch.ones(7)
    for call in (fn, fuseline.compile(fn)):
        try:
            call(leaf())
        except RuntimeError as error:
            assert "grad" in str(error)
        else:
            raise AssertionError("no exception")
