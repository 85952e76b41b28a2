"""Settings of the process that a program asks for in Python are guarded, also where no tensor operator runs."""
import pytest
import torch

import fuseline


def grad_mode(x):
    return "grad" if torch.is_grad_enabled() else "none"


def inside(x):
    with torch.no_grad():
        if torch.is_grad_enabled():
            return "wrong"
    return torch.is_grad_enabled()


def others(x):
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), \
        torch.is_autocast_enabled("cpu"), torch.backends.cudnn.enabled


def changes():
    yield
    with torch.no_grad():
        yield
    with torch.autocast("cpu"):
        yield
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.enabled = False
    yield
    torch.backends.cudnn.enabled = True
    yield


@pytest.mark.parametrize("function", [grad_mode, inside, others])
def test_settings_are_guarded(function):
    compiled = fuseline.compile(function, backend="eager", options={"strict": True, "recompile_limit": 20})
    x = torch.ones(2)
    for _ in changes():
        assert compiled(x) == function(x)
        assert compiled(x) == function(x)
