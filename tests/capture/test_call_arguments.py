"""Arguments of torch functions that are classes: each program captured whole and compared with plain Python."""
import pytest
import torch

import fuseline

PROGRAMS = {
    "factories": lambda x: torch.zeros(2, dtype=int) + torch.full((2,), 3, dtype=float) + torch.tensor([1, 2], dtype=complex),
    "conversions": lambda x: (x.to(bool), x.to(int), x.new_zeros(3, dtype=bool), x.sum(dtype=float)),
    "legacy types": lambda x: (x.type(torch.DoubleTensor), x.type(torch.LongTensor), x.type("torch.IntTensor")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_classes_as_dtypes(name):
    function, x = PROGRAMS[name], torch.tensor([0.5, -1.5, 0.0])
    got = fuseline.compile(function, backend="eager", fullgraph=True, options={"strict": True})(x)
    for want, made in zip(*map(torch.utils._pytree.tree_leaves, (function(x), got)), strict=True):
        assert want.dtype == made.dtype and torch.equal(want, made)
