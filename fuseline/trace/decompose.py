"""Which operators are traced as others: torch's table of core decompositions, and our own for batch norm and dropout.

Ours are written so that they fuse well and are at least as exact as PyTorch's kernels: statistics of half types in f32,
variance about the mean (not as a difference of squares), the affine part as one multiplication and one addition.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import NotSupported

aten = torch.ops.aten
Tensor = torch.Tensor

# Kept although torch's table takes them apart: library kernels do them better, or lower reads them as they are.
WHOLE = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "addmm", "addmv", "baddbmm", "bmm", "mm", "convolution", "convolution_backward", "t", "empty_like", "_unsafe_view",
    "detach", "alias", "lift_fresh", "embedding_dense_backward", "select_scatter", "slice_scatter", "diagonal_scatter", "copy",
    "upsample_bilinear2d",
    "index_add", "index_copy", "index_fill",                 # as index_put they would take negative indices, which PyTorch refuses
)


@cache
def table(eager_random: bool) -> dict[Any, Callable]:
    """operator -> decomposition. eager_random: random operators stay PyTorch's, with its stream of numbers."""
    found = {f: rule for f, rule in torch_internals.core_decompositions().items()
             if not (f._schema.is_mutable and f._schema.name.endswith("_"))
             and f._schema.name.removeprefix("aten::") not in WHOLE and not any(a.is_out for a in f._schema.arguments)}
    for name, rule in _OURS.items():
        packet, _, overload = name.partition(".")
        if hasattr(aten, packet) and overload in getattr(aten, packet).overloads():
            found[getattr(getattr(aten, packet), overload)] = rule
    for func in (aten.bernoulli.p, aten.bernoulli.default, aten.native_dropout.default):
        if eager_random:
            found.pop(func, None)
    return found


# ---------------------------------------------------------------- batch norm

def _wide(x: Tensor) -> Tensor:
    """Half types in f32; others as they are."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _column(v: Tensor, rank: int) -> Tensor:
    """A per-channel vector so that it broadcasts against [N, C, ...]."""
    return v.reshape([1, v.shape[0]] + [1] * (rank - 2)) if rank > 2 else v


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    wide = _wide(x)
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    y = (wide - _column(mean, x.dim())) * _column(scale, x.dim())
    if bias is not None:
        y = y + _column(bias.to(invstd.dtype), x.dim())
    return y.to(x.dtype)


def _count(x: Tensor) -> Any:
    """Elements per channel: an int or a SymInt."""
    n = x.shape[0]
    for size in x.shape[2:]:
        n = n * size
    return n


def _train(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
           momentum: float, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(y, mean, 1/std, new running mean, new running variance)"""
    if x.dim() < 2:
        raise NotSupported("batch norm of a tensor of rank 1")
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(_wide(x), dims, correction=0)
    invstd = torch.rsqrt(var + eps)
    n = _count(x)
    new_mean = None if running_mean is None else (mean * momentum + running_mean * (1 - momentum)).to(running_mean.dtype)
    if running_var is None:
        new_var = None
    else:
        unbiased = var * (n / (n - 1) if n > 1 else float("nan")) if isinstance(n, int) else var * n / (n - 1)
        new_var = (unbiased * momentum + running_var * (1 - momentum)).to(running_var.dtype)
    return _normalize(x, weight, bias, mean, invstd), mean, invstd, new_mean, new_var


def native_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                      running_var: Tensor | None, training: bool, momentum: float, eps: float) -> tuple:
    if training:
        y, mean, invstd, new_mean, new_var = _train(x, weight, bias, running_mean, running_var, momentum, eps)
        if new_mean is not None:
            running_mean.copy_(new_mean)                                                      # type: ignore[union-attr]
        if new_var is not None:
            running_var.copy_(new_var)                                                        # type: ignore[union-attr]
        return y, mean, invstd
    invstd = torch.rsqrt(_wide(running_var) + eps)                                            # type: ignore[arg-type]
    y = _normalize(x, weight, bias, _wide(running_mean), invstd)                              # type: ignore[arg-type]
    return y, x.new_empty([0], dtype=invstd.dtype), x.new_empty([0], dtype=invstd.dtype)


def batch_norm_functional(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
                          training: bool, momentum: float, eps: float) -> tuple:
    if training:
        y, mean, invstd, new_mean, new_var = _train(x, weight, bias, running_mean, running_var, momentum, eps)
        return y, mean, invstd, new_mean, new_var
    return (*native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps), running_mean, running_var)


def batch_norm_no_stats(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float) -> tuple:
    return native_batch_norm(x, weight, bias, None, None, training, momentum, eps)


def batch_norm_no_training(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
                           momentum: float, eps: float) -> tuple:
    return native_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)


def cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
                     training: bool, momentum: float, eps: float) -> tuple:
    y, mean, invstd = native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    return y, mean, invstd, x.new_empty([0], dtype=torch.uint8)


def miopen_batch_norm(*args: Any) -> tuple:
    return native_batch_norm(*args)


def batch_norm_with_update(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
                           momentum: float, eps: float) -> tuple:
    return cudnn_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)      # type: ignore[arg-type]


def batch_norm_no_update(x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
                         running_var: Tensor | None, momentum: float, eps: float) -> tuple:
    training = running_mean is None
    return cudnn_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)  # type: ignore[arg-type]


def native_batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None,
                               running_var: Tensor | None, save_mean: Tensor | None, save_invstd: Tensor | None, train: bool,
                               eps: float, mask: list[bool]) -> tuple:
    """With u = x - mean, r = 1/std: dbias = sum(g), dweight = r sum(g u),
    dx = r w (g - sum(g)/n - u r^2 sum(g u)/n), the last two terms only in training."""
    rank, dims = x.dim(), [0, *range(2, x.dim())]
    g = _wide(grad)
    if train:
        mean: Any = save_mean
        invstd: Any = save_invstd
    else:
        mean = _wide(running_mean)                                                            # type: ignore[arg-type]
        invstd = torch.rsqrt(_wide(running_var) + eps)                                        # type: ignore[arg-type]
    u = _wide(x) - _column(mean, rank)
    need_sums = train and mask[0]
    sum_g: Any = g.sum(dims) if need_sums or mask[2] else None
    sum_gu: Any = (g * u).sum(dims) if need_sums or mask[1] else None
    dx = dw = db = None
    if mask[0]:
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        if train:
            n = _count(x)
            shift, slope = sum_g / n, sum_gu / n * (invstd * invstd)
            dx = (g - _column(shift, rank) - u * _column(slope, rank)) * _column(scale, rank)
        else:
            dx = g * _column(scale, rank)
        dx = dx.to(x.dtype)
    if mask[1]:
        dw = sum_gu * invstd
        dw = dw.to(weight.dtype) if weight is not None else dw
    if mask[2]:
        db = sum_g.to(weight.dtype) if weight is not None else sum_g
    return dx, dw, db


def cudnn_batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                              save_mean: Tensor | None, save_var: Tensor | None, eps: float, reserve: Tensor) -> tuple:
    return native_batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_var, True, eps, [True] * 3)


def miopen_batch_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                               save_mean: Tensor | None, save_var: Tensor | None, eps: float) -> tuple:
    return native_batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_var, True, eps, [True] * 3)


def batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                        save_mean: Tensor | None, save_var: Tensor | None, update: bool, eps: float, mask: list[bool],
                        reserve: Tensor) -> tuple:
    return native_batch_norm_backward(grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask)


# ---------------------------------------------------------------- random

def bernoulli_p(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
    """A compare that fuses with its readers, of uniform numbers: P(rand < p) = p."""
    if generator is not None:
        return NotImplemented
    return (torch.rand(x.shape, dtype=torch.float32, device=x.device) < p).to(x.dtype)


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.rand(x.shape, dtype=torch.float32, device=x.device) >= p
    return x * mask * (1.0 / (1.0 - p)), mask


_OURS: dict[str, Callable] = {
    "native_batch_norm.default": native_batch_norm,
    "_native_batch_norm_legit.default": native_batch_norm,
    "_native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "_native_batch_norm_legit_functional.default": batch_norm_functional,
    "_native_batch_norm_legit_no_training.default": batch_norm_no_training,
    "cudnn_batch_norm.default": cudnn_batch_norm,
    "miopen_batch_norm.default": miopen_batch_norm,
    "_batch_norm_with_update.default": batch_norm_with_update,
    "_batch_norm_no_update.default": batch_norm_no_update,
    "native_batch_norm_backward.default": native_batch_norm_backward,
    "cudnn_batch_norm_backward.default": cudnn_batch_norm_backward,
    "miopen_batch_norm_backward.default": miopen_batch_norm_backward,
    "batch_norm_backward.default": batch_norm_backward,
    "bernoulli.p": bernoulli_p,
    "native_dropout.default": native_dropout,
}
