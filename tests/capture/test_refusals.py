"""Operands that eager PyTorch refuses and fake tensors do not: a compiled call raises, too."""
import pytest
import torch
from torch.nn import functional as F

import fuseline

CALLS = {
    "mv": lambda a, b: a @ b[0],
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b),
    "layer_norm": lambda a, b: F.layer_norm(a, (3,), b[0]),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[1].abs()),
    "group_norm": lambda a, b: F.group_norm(a, 1, b[0]),
    "cross": lambda a, b: torch.linalg.cross(a, b),
    "cross_entropy": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "huber": lambda a, b: F.huber_loss(a, b),
}


def outcome(call, *args):
    try:
        return call(*args)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", CALLS)
def test_mixed_dtypes(name):
    call = CALLS[name]
    compiled = fuseline.compile(call, options={"strict": True})
    a = torch.rand(3, 3)
    for b in (a + 1, a.double(), (a * 3).long(), a.bfloat16()):
        for args in ((a, b), (b, a)):
            want, got = outcome(call, *args), outcome(compiled, *args)
            if isinstance(want, str):
                assert want == got
            else:
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
