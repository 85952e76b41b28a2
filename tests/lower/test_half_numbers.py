"""Numbers and tensors of other types in operators of half types: rounded to the half type, or not, as each operator of PyTorch's does."""
import torch
import torch.nn.functional as F

import fuseline


def operators(x, wide, count):
    a = x.abs() + 0.01
    return {
        "add": (x + 0.1, 0.7 - x, x - 0.3, torch.add(x, x, alpha=0.7), torch.rsub(x, 0.3, alpha=0.7), torch.add(x, 0.3, alpha=0.7)),
        "mul": (x * 0.1, x / 0.3, 0.3 / x, wide * x, x * wide, x / wide, wide / x),
        "0-d": (x + wide, wide - x, torch.atan2(x, wide), torch.hypot(x, wide)),
        "int": (x * count, x + count, x + 2049, x * 2049, x + 70000),
        "pow": (a ** 2.3, 1.3 ** x, x ** 3, x ** -2, x ** -1),
        "rem": (torch.remainder(x, 0.3), torch.remainder(1.1, x), torch.fmod(x, 0.3)),
        "log": (torch.xlogy(a, 1.3), torch.logit(x.sigmoid(), 0.1), torch.logit(x.sigmoid())),
        "shrink": (F.softshrink(x, 0.3), F.hardshrink(x, 0.1)),
        "wide": (F.leaky_relu(x, 0.1), F.elu(x, 0.3), F.softplus(x, 1.3), torch.lerp(x, x * 2, 0.3), torch.addcmul(x, x, a, value=0.3)),
    }


def test_numbers_are_rounded_as_in_eager():
    for dtype in (torch.float16, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(32, 64, generator=generator).to(dtype)
        count = torch.randint(0, 100_000, (32, 64), generator=generator)
        args = x, torch.tensor(0.3), count
        expected, found = operators(*args), fuseline.compile(operators, fullgraph=True)(*args)
        for name, results in expected.items():
            for i, (e, f) in enumerate(zip(results, found[name], strict=True)):
                assert torch.equal(e.nan_to_num(), f.nan_to_num()), (dtype, name, i)
