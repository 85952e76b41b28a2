"""Process state that compiled code relies on: what a "mode" guard's name stands for, and how generated code reads it.

Capture puts `Guard(None, "mode", (name, state))` with the state as `read(name)` gives it. A name such as "_get_cudnn_enabled" is a
function of torch or torch._C that tells a setting.
"""
from __future__ import annotations

from typing import Any

import torch

from fuseline import torch_internals

dispatch_keys = torch_internals.dispatch_keys

# name -> (reader, words for explanations)
_MODES = {
    "grad": (torch.is_grad_enabled, "grad mode"),
    "inference": (torch.is_inference_mode_enabled, "inference mode"),
    "autocast": (torch_internals.autocast_state, "autocast"),
    "default_dtype": (torch.get_default_dtype, "default dtype"),
    "default_device": (torch_internals.default_device, "default device"),
    "deterministic": (torch.are_deterministic_algorithms_enabled, "deterministic algorithms"),
    "torch_function": (torch_internals.user_modes_active, "active torch modes"),
    "functorch": (torch_internals.functorch_depth, "depth of torch.func transforms"),
    "num_threads": (torch.get_num_threads, "number of threads"),
}
# Conditions for the state that nearly every call has, where they are cheaper than reading the state: (name, state) -> text
_USUAL = {
    ("autocast", ()): "_any_autocast()",
    ("torch_function", False): "_function_modes() and _mode_torch_function() or _dispatch_modes()",
    ("functorch", 0): "_functorch() is not None",
    ("default_device", None): "_function_modes() and _mode_default_device() is not None",
}
NAMESPACE: dict[str, Any] = {f"_mode_{name}": reader for name, (reader, _) in _MODES.items()} | {
    "_dispatch_keys": dispatch_keys, "_any_autocast": torch_internals.any_autocast_enabled,
    "_function_modes": torch_internals.len_function_modes, "_dispatch_modes": torch_internals.len_dispatch_modes,
    "_functorch": torch_internals.functorch_interpreter}


NAMESPACE["_setting"] = torch_internals.setting


def _is_setting(name: str) -> bool:
    return name not in _MODES and name.startswith(("_get_", "get_", "are_", "is_"))


def _known(name: str) -> None:
    if name not in _MODES and not _is_setting(name):
        raise ValueError(f"unknown mode {name!r}; the modes are {', '.join(_MODES)}")


def read(name: str) -> Any:
    """The state of a mode now. Raises ValueError for an unknown name."""
    _known(name)
    return torch_internals.setting(name) if _is_setting(name) else _MODES[name][0]()


def describe(name: str) -> str:
    return f"torch.{name}()" if _is_setting(name) else _MODES[name][1]


def differs(name: str, state: Any, expected: str) -> str:
    """The condition, in generated code, under which the mode is not in this state; `expected` is an expression for the state."""
    _known(name)
    if _is_setting(name):
        return f"_setting({name!r}) != {expected}"
    usual = _USUAL.get((name, state)) if isinstance(state, (bool, int, tuple, type(None))) else None
    if usual is not None:
        return usual
    if expected in ("True", "False"):
        return f"{'not ' if expected == 'True' else ''}_mode_{name}()"
    return f"_mode_{name}() != {expected}"
