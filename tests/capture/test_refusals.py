"""What eager mode refuses for the types of operands raises the same exception through a compiled function."""
import pytest
import torch
import torch.nn.functional as F

import fuseline

REFUSED = {
    "number - booleans": lambda x, m, i: 1 - m, "booleans - number": lambda x, m, i: m - 1, "tensor - True": lambda x, m, i: x - True,
    "tensor - booleans": lambda x, m, i: x - m, "in place": lambda x, m, i: x.sub_(m), "cast": lambda x, m, i: i.mul_(0.5),
    "cast to bool": lambda x, m, i: m.mul_(2), "softmax": lambda x, m, i: i.softmax(0), "gelu": lambda x, m, i: F.gelu(i)}
ALLOWED = {
    "softmax with dtype": lambda x, m, i: F.softmax(i, 0, dtype=torch.float64), "floats": lambda x, m, i: (m.float() - 1, i - 1),
    "wider": lambda x, m, i: x.mul_(x.double()), "narrower": lambda x, m, i: x.mul_(i)}


def arguments():
    return torch.ones(2), torch.tensor([True, False]), torch.tensor([2, 3])


@pytest.mark.parametrize("name", REFUSED)
def test_eager_exception_is_raised(name):
    with pytest.raises(Exception) as expected:
        REFUSED[name](*arguments())
    with pytest.raises(type(expected.value)) as found:
        fuseline.compile(REFUSED[name])(*arguments())
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_eager_allows_is_captured(name):
    torch.testing.assert_close(fuseline.compile(ALLOWED[name], fullgraph=True)(*arguments()), ALLOWED[name](*arguments()))
