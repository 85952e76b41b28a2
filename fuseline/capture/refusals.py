"""Calls that eager PyTorch refuses for the types of their operands, and fake tensors do not: Python makes them, and raises."""
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch

from fuseline import torch_internals

_SUBTRACTIONS = frozenset({"sub", "sub_", "isub", "rsub", "subtract", "subtract_", "_foreach_sub", "_foreach_sub_"})
_PRODUCTS = frozenset({"mul_", "imul", "multiply_"})
# Operators without kernels for booleans, for integers.
_NOT_OF_BOOLS = frozenset({"abs", "absolute", "relu", "relu_", "floor", "ceil", "trunc", "round", "argmax", "argmin", "dot", "mm", "bmm",
                           "matmul", "einsum", "var", "std", "var_mean", "std_mean", "lerp", "addcmul", "addcdiv", "max_pool1d",
                           "max_pool2d"})
_NOT_OF_INTEGERS = frozenset({"softmax", "log_softmax", "gelu", "silu", "softplus", "elu", "var", "std", "var_mean", "std_mean", "hypot",
                              "lerp", "frac", "logaddexp"})
# Operators whose tensors have one dtype (or it depends on the path which one the result has), unless autocast converts.
_OF_ONE_DTYPE = frozenset({"mm", "bmm", "mv", "dot", "vdot", "matmul", "__matmul__", "addmm", "addmv", "addr", "baddbmm", "addbmm",
                           "linear", "bilinear", "cross", "linalg_cross", "binary_cross_entropy", "huber_loss", "conv1d", "conv2d",
                           "conv3d"})
_NORMALIZATIONS = frozenset({"layer_norm", "batch_norm", "group_norm", "instance_norm"})


def refused(name: str, args: tuple, kwargs: dict) -> str:
    """Why eager mode raises for a call of an operator; empty if nothing is known."""
    operands = [a for a in (*args[:2], kwargs.get("other"), kwargs.get("input")) if a is not None]
    flat = [b for a in operands for b in (a if isinstance(a, (list, tuple)) else (a,))]
    tensors = [a for a in flat if isinstance(a, torch.Tensor)]
    if not tensors:
        return ""
    if name in _SUBTRACTIONS and any(isinstance(a, (bool, torch.SymBool)) or isinstance(a, torch.Tensor) and a.dtype == torch.bool
                                     for a in flat):
        return "booleans are not subtracted"
    if _partly_overlapping(name, args):
        return "some elements that are written are read elsewhere"
    if name in _PRODUCTS and isinstance(args[0], torch.Tensor) and len(flat) > 1 and isinstance(flat[1], (torch.Tensor, int, float)):
        found = torch.result_type(args[0], flat[1])
        if not torch.can_cast(found, args[0].dtype):
            return f"a result of type {found} cannot be cast to {args[0].dtype}"
    if (name in _OF_ONE_DTYPE or name in _NORMALIZATIONS) and _mixes_dtypes(
            name, [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]):
        return f"{name} of tensors of several dtypes"
    dtypes = {t.dtype for t in tensors}
    if name in _NOT_OF_BOOLS and dtypes == {torch.bool}:
        return f"{name} is not implemented for booleans"
    if name in _NOT_OF_INTEGERS and not any(d.is_floating_point or d.is_complex for d in dtypes) and kwargs.get("dtype") is None \
            and not any(isinstance(a, torch.dtype) for a in args):
        return f"{name} is not implemented for integers"
    return ""


def _mixes_dtypes(name: str, tensors: list[torch.Tensor]) -> bool:
    """Whether dtypes differ, but for half types that are normalised with f32 parameters on the CPU."""
    found, device = {t.dtype for t in tensors}, tensors[0].device.type
    if len(found) == 1 or torch.is_autocast_enabled(device):
        return False
    halves = name in _NORMALIZATIONS and device == "cpu" and tensors[0].dtype in (torch.float16, torch.bfloat16)
    return not (halves and found == {tensors[0].dtype, torch.float32})


def _partly_overlapping(name: str, args: tuple) -> bool:
    """Whether an in-place operator reads memory that it also writes, other than element by element."""
    if not name.endswith("_") or name.endswith("__") or not args or not isinstance(args[0], torch.Tensor):
        return False
    target = args[0]
    return any(_overlap_in_part(target, other) for other in args[1:] if isinstance(other, torch.Tensor))


def _overlap_in_part(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or torch_internals.storage_key(a) != torch_internals.storage_key(b):
        return False
    places = [(t.storage_offset(), *t.shape, *t.stride()) for t in (a, b)]
    if any(not isinstance(n, int) for place in places for n in place) or not all(map(torch_internals.is_dense, (a, b))):
        return False                                       # PyTorch does not look closer either
    same_range = a.storage_offset() == b.storage_offset() and a.numel() == b.numel() and a.element_size() == b.element_size()
    return torch_internals.memory_overlaps(a, b) and not (same_range and a.stride() == b.stride())


def demands(name: str, args: tuple, kwargs: dict) -> Iterator[tuple[Callable, str]]:
    """What eager mode asks of the values of operands and the operator's trace on fake tensors does not: (formula, message).

    formula(call) is a boolean tensor without axes, made by calls of call(function, *arguments).
    """
    if name == "one_hot" and args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu" and 0 not in args[0].shape \
            and not torch_internals.is_transformed(args[0]):
        x, classes = args[0], args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        if not isinstance(classes, int) or classes > 0:
            yield lambda call: call(operator.ge, call(torch.amin, x), 0), "Class values must be non-negative."
            yield lambda call: call(operator.lt, call(torch.amax, x), classes), "Class values must be smaller than num_classes."
