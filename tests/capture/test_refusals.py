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


OUT_OF_BOUNDS = {
    "class too large": (lambda i, t: F.one_hot(i, 3), 3), "class negative": (lambda i, t: F.one_hot(i, num_classes=3) * 2, -1),
    "read that nobody uses": (lambda i, t: (t[i], i + 1)[1], 3), "embedding": (lambda i, t: (F.embedding(i, t), i + 1)[1], 3),
    "shape only": (lambda i, t: t * t[i].shape[0], 3), "gather": (lambda i, t: (t.gather(0, i[:, None]), i + 1)[1], 3)}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_indices_are_checked_as_in_eager(name):
    fn, wrong = OUT_OF_BOUNDS[name]
    compiled, table = fuseline.compile(fn, fullgraph=True), torch.ones(3, 2)
    inside, outside = torch.tensor([0, 1, 2]), torch.tensor([0, 1, wrong])
    torch.testing.assert_close(compiled(inside, table), fn(inside, table))
    with pytest.raises(Exception) as expected:
        fn(outside, table)
    with pytest.raises((type(expected.value), IndexError)):
        compiled(outside, table)
    torch.testing.assert_close(compiled(inside, table), fn(inside, table))
