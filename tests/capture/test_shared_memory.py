"""Inputs that overlap in memory, one of them written: compiled as views of one input, guarded on where they lie."""
import pytest
import torch

import fuseline
from fuseline.pipeline import compile_count, reset_count


def write_both(a, b):
    a.add_(1)
    b.mul_(2)
    return a.sum(), b + a.sum(), b[..., 1:]


PAIRS = {
    "slices": lambda x: (x[:5], x[3:8]),
    "apart": lambda x: (x[:5], x[6:11]),
    "interleaved": lambda x: (x[::2], x[1::2]),
    "whole and part": lambda x: (x[3:8], x),
    "transposed": lambda x: (x.view(4, 6), x.view(4, 6).t()),
    "columns and rows": lambda x: (x.view(4, 6)[:, 1:3], x.view(4, 6)[1:3]),
    "detached": lambda x: (x[2:], x.detach()[1:]),
    "number": lambda x: (x[3], x[2:6]),
    "one object": lambda x: (x, x),
}


@pytest.mark.parametrize("name", PAIRS)
def test_overlapping_arguments_are_compiled(name):
    compiled = fuseline.compile(write_both, fullgraph=True)
    reset_count()
    for _ in range(2):
        mine, theirs = torch.arange(24.), torch.arange(24.)
        expected, found = write_both(*PAIRS[name](theirs)), compiled(*PAIRS[name](mine))
        torch.testing.assert_close((found, mine), (expected, theirs), rtol=0, atol=0)
        mine.zero_()
        assert found[2].abs().sum() == 0                   # it shows the argument's memory
    assert compile_count() == 1


def test_another_overlap_is_compiled_anew():
    compiled = fuseline.compile(write_both, fullgraph=True)
    for pair in (lambda x: (x[:5], x[8:13]), lambda x: (x[:5], x[3:8]), lambda x: (x[:5], x[2:7]), lambda x: (x[1:6], x[3:8])):
        mine, theirs = torch.arange(24.), torch.arange(24.)
        torch.testing.assert_close((compiled(*pair(mine)), mine), (write_both(*pair(theirs)), theirs), rtol=0, atol=0)
    apart = torch.arange(5.), torch.arange(5.)
    torch.testing.assert_close(compiled(*(x.clone() for x in apart)), write_both(*apart))


def test_what_cannot_be_views_of_one_input_runs_eagerly():
    for pair in (lambda x: (x[:5], x.view(torch.int32)[3:]), lambda x: (x.requires_grad_().detach()[:5], x[3:])):
        mine, theirs = torch.arange(24.), torch.arange(24.)
        fn = lambda a, b: (a.add_(1), b * 2)                                                    # noqa: E731
        torch.testing.assert_close((fuseline.compile(fn)(*pair(mine)), mine), (fn(*pair(theirs)), theirs))


def test_writes_that_read_themselves_raise_as_in_eager():
    x = torch.arange(9.)
    with pytest.raises(RuntimeError, match="single memory location"):
        fuseline.compile(lambda y: y[1:].add_(y[:-1]))(x)


def test_a_differentiable_write_leaves_the_other_tensors_of_the_memory_as_they_are():
    def program(a, b, x):
        a.mul_(x)
        return b + 1

    compiled = fuseline.compile(program, backend="eager")
    for needs in (False, True, False):
        for call in (program, compiled):
            a = torch.ones(3, 4)
            b, x = a.detach(), torch.full((3, 4), 2.0, requires_grad=needs)
            out = call(a, b, x)
            assert torch.equal(out, torch.full((3, 4), 3.0)) and a.requires_grad == needs and not b.requires_grad
