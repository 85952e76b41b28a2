"""Writes through as_strided: into memory of an arena, at offsets, with gaps, transposed, and what is refused."""
import pytest
import torch

import fuseline

VIEWS = {
    "transposed": ((6, 4), (1, 6), 0), "columns": ((4, 2), (6, 1), 1), "diagonal": ((3,), (7,), 2), "gaps": ((2, 3), (12, 2), 1),
    "one": ((1, 1), (5, 9), 23), "middle": ((2, 1, 3), (4, 99, 1), 8)}


@pytest.mark.parametrize("name", VIEWS)
def test_values_are_put_where_the_view_shows_them(name):
    size, stride, offset = VIEWS[name]

    def fn(x):
        y = x * 2 + x.sum()
        before = y.flip(0)
        torch.as_strided(y, size, stride, offset).fill_(y.sum() % 7)
        torch.as_strided(y, size, stride, offset).add_(before[0])
        torch.as_strided(x, size, stride, offset).mul_(y.mean())
        return y, before, y.view(4, 6).t() + 1

    mine, theirs = torch.arange(24.), torch.arange(24.)
    torch.testing.assert_close((fuseline.compile(fn, fullgraph=True)(mine), mine), (fn(theirs), theirs))


def test_elements_that_overlap_are_left_to_pytorch():
    def fn(x):
        y = x + 1
        torch.as_strided(y, (3, 2), (1, 1), 0)[0, 0] = 5
        return y
    torch.testing.assert_close(fuseline.compile(fn)(torch.arange(24.)), fn(torch.arange(24.)))


def test_inputs_in_the_middle_of_a_storage():
    def fn(x):
        torch.as_strided(x[1:], (2, 2), (3, 1)).add_(1)
        return x * 1
    mine, theirs = torch.arange(24.), torch.arange(24.)
    torch.testing.assert_close((fuseline.compile(fn, fullgraph=True)(mine[5:15]), mine), (fn(theirs[5:15]), theirs))
