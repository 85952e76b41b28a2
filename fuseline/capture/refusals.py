"""Calls that eager PyTorch refuses for the types of their operands, and fake tensors do not: Python makes them, and raises."""
from __future__ import annotations

import torch

_SUBTRACTIONS = frozenset({"sub", "sub_", "isub", "rsub", "subtract", "subtract_", "_foreach_sub", "_foreach_sub_"})
_PRODUCTS = frozenset({"mul_", "imul", "multiply_"})
# Operators without kernels for booleans, for integers.
_NOT_OF_BOOLS = frozenset({"abs", "absolute", "relu", "relu_", "floor", "ceil", "trunc", "round", "argmax", "argmin", "dot", "mm", "bmm",
                           "matmul", "einsum", "var", "std", "var_mean", "std_mean", "lerp", "addcmul", "addcdiv", "max_pool1d",
                           "max_pool2d"})
_NOT_OF_INTEGERS = frozenset({"softmax", "log_softmax", "gelu", "silu", "softplus", "elu", "var", "std", "var_mean", "std_mean", "hypot",
                              "lerp", "frac", "logaddexp"})


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
    if name in _PRODUCTS and isinstance(args[0], torch.Tensor) and len(flat) > 1 and isinstance(flat[1], (torch.Tensor, int, float)):
        found = torch.result_type(args[0], flat[1])
        if not torch.can_cast(found, args[0].dtype):
            return f"a result of type {found} cannot be cast to {args[0].dtype}"
    dtypes = {t.dtype for t in tensors}
    if name in _NOT_OF_BOOLS and dtypes == {torch.bool}:
        return f"{name} is not implemented for booleans"
    if name in _NOT_OF_INTEGERS and not any(d.is_floating_point or d.is_complex for d in dtypes) and kwargs.get("dtype") is None \
            and not any(isinstance(a, torch.dtype) for a in args):
        return f"{name} is not implemented for integers"
    return ""
