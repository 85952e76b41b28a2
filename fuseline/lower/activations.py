"""Activation functions and their derivatives, as PyTorch's own kernels define them."""
from __future__ import annotations

import math

from fuseline.errors import LoweringError
from fuseline.lower.builder import KernelBuilder, Val
from fuseline.lower.context import POINTWISE, Context, elementwise, lowering
from fuseline.lower.views import View

_SQRT_HALF = math.sqrt(0.5)
_TANH_BETA = math.sqrt(2.0 / math.pi)          # of gelu's tanh form
_TANH_KAPPA = 0.044715


@elementwise("aten.gelu.default")
def gelu(k: KernelBuilder, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        inner = (x + x * x * x * _TANH_KAPPA) * _TANH_BETA
        return x * 0.5 * (k.op("tanh", inner) + 1.0)
    return x * 0.5 * (k.op("erf", x * _SQRT_HALF) + 1.0)


@elementwise("aten.gelu_backward.default", operands=2)
def gelu_backward(k: KernelBuilder, grad: Val, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        squared = x * x
        t = k.op("tanh", (x + x * squared * _TANH_KAPPA) * _TANH_BETA)
        left = (t + 1.0) * 0.5
        right = x * 0.5 * (1.0 - t * t) * ((squared * (3.0 * _TANH_KAPPA) + 1.0) * _TANH_BETA)
        return grad * (left + right)
    cdf = (k.op("erf", x * _SQRT_HALF) + 1.0) * 0.5
    pdf = k.op("exp", x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return grad * (cdf + x * pdf)


@elementwise("aten.silu.default")
def silu(k: KernelBuilder, x: Val) -> Val:
    return x * k.op("sigmoid", x)


@elementwise("aten.silu_backward.default", operands=2)
def silu_backward(k: KernelBuilder, grad: Val, x: Val) -> Val:
    s = k.op("sigmoid", x)
    return grad * s * (x * (1.0 - s) + 1.0)


@elementwise("aten.mish.default")
def mish(k: KernelBuilder, x: Val) -> Val:
    return x * k.op("tanh", k.op("log1p", k.op("exp", x)))


@elementwise("aten.mish_backward.default", operands=2)
def mish_backward(k: KernelBuilder, grad: Val, x: Val) -> Val:
    t = k.op("tanh", k.op("log1p", k.op("exp", x)))
    return grad * (t + x * k.op("sigmoid", x) * (1.0 - t * t))


@elementwise("aten.sigmoid_backward.default", operands=2)
def sigmoid_backward(k: KernelBuilder, grad: Val, y: Val) -> Val:
    return grad * (1.0 - y) * y


@elementwise("aten.tanh_backward.default", operands=2)
def tanh_backward(k: KernelBuilder, grad: Val, y: Val) -> Val:
    return grad * (1.0 - y * y)


@elementwise("aten.logit_backward.default", operands=2)
def logit_backward(k: KernelBuilder, grad: Val, x: Val, eps: float | None = None) -> Val:
    low, high = (0.0, 1.0) if eps is None else (eps, 1.0 - eps)
    outside = (x < low) | (x > high)
    return k.where(outside, math.nan if eps is None else 0.0, grad / (x * (1.0 - x)))


# ---------------------------------------------------------------- piecewise

@elementwise("aten.hardtanh.default")
def hardtanh(k: KernelBuilder, x: Val, min_val: float = -1, max_val: float = 1) -> Val:
    return k.op("minimum", k.op("maximum", x, min_val), max_val)


@elementwise("aten.hardtanh_backward.default", operands=2)
def hardtanh_backward(k: KernelBuilder, grad: Val, x: Val, min_val: float = -1, max_val: float = 1) -> Val:
    return k.where((x <= min_val) | (x >= max_val), 0, grad)


@elementwise("aten.relu6.default")
def relu6(k: KernelBuilder, x: Val) -> Val:
    return k.op("minimum", k.op("maximum", x, 0), 6)


@elementwise("aten.hardswish.default")
def hardswish(k: KernelBuilder, x: Val) -> Val:
    return x * k.op("minimum", k.op("maximum", x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@elementwise("aten.hardswish_backward.default", operands=2)
def hardswish_backward(k: KernelBuilder, grad: Val, x: Val) -> Val:
    return k.where(x <= -3.0, 0.0, k.where(x < 3.0, grad * (x / 3.0 + 0.5), grad))


@elementwise("aten.hardsigmoid.default")
def hardsigmoid(k: KernelBuilder, x: Val) -> Val:
    return k.op("minimum", k.op("maximum", x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@elementwise("aten.hardsigmoid_backward.default", operands=2)
def hardsigmoid_backward(k: KernelBuilder, grad: Val, x: Val) -> Val:
    return k.where((x > -3.0) & (x < 3.0), grad * (1.0 / 6.0), 0.0)


@elementwise("aten.leaky_relu.default")
def leaky_relu(k: KernelBuilder, x: Val, negative_slope: float = 0.01) -> Val:
    return k.where(x > 0, x, x * negative_slope)


@elementwise("aten.leaky_relu_backward.default", operands=2)
def leaky_relu_backward(k: KernelBuilder, grad: Val, x: Val, negative_slope: float, self_is_result: bool = False) -> Val:
    return k.where(x > 0, grad, grad * negative_slope)


@elementwise("aten._prelu_kernel.default", operands=2)
def prelu(k: KernelBuilder, x: Val, weight: Val) -> Val:
    return k.where(x > 0, x, weight * x)


@elementwise("aten.elu.default")
def elu(k: KernelBuilder, x: Val, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Val:
    below = k.op("expm1", x if input_scale == 1 else x * input_scale) * (alpha * scale)
    return k.where(x < 0, below, x if scale == 1 else x * scale)


@lowering("aten.elu_backward.default")
def elu_backward(context: Context, grad: View, alpha: float, scale: float, input_scale: float, is_result: bool, x: View) -> View:
    def value(k: KernelBuilder, g: Val, v: Val) -> Val:
        below = (v + alpha * scale) if is_result else k.op("exp", v * input_scale) * (alpha * scale)
        return k.where(v <= 0, g * input_scale * below, g * scale)
    return context.elementwise(value, (grad, x), "result")


@elementwise("aten.softplus.default")
def softplus(k: KernelBuilder, x: Val, beta: float = 1, threshold: float = 20) -> Val:
    scaled = x if beta == 1 else x * beta
    soft = k.op("log1p", k.op("exp", scaled))
    return k.where(scaled > threshold, x, soft if beta == 1 else soft / beta)


@elementwise("aten.softplus_backward.default", operands=2)
def softplus_backward(k: KernelBuilder, grad: Val, x: Val, beta: float, threshold: float) -> Val:
    scaled = x if beta == 1 else x * beta
    z = k.op("exp", scaled)
    return k.where(scaled > threshold, grad, grad * z / (z + 1.0))


@elementwise("aten.threshold.default")
def threshold(k: KernelBuilder, x: Val, threshold: float, value: float) -> Val:
    return k.where(x <= threshold, value, x)


@elementwise("aten.threshold_backward.default", operands=2)
def threshold_backward(k: KernelBuilder, grad: Val, x: Val, threshold: float) -> Val:
    return k.where(x <= threshold, 0, grad)


@elementwise("aten.hardshrink.default", rounds=("cpu", "cuda"))
def hardshrink(k: KernelBuilder, x: Val, lambd: float = 0.5) -> Val:
    return k.where((x >= -lambd) & (x <= lambd), 0, x)


@elementwise("aten.softshrink.default", rounds=("cpu", "cuda"))
def softshrink(k: KernelBuilder, x: Val, lambd: float = 0.5) -> Val:
    return k.where(x > lambd, x - lambd, k.where(x < -lambd, x + lambd, x * 0.0))


@elementwise("aten.hardshrink_backward.default", "aten.softshrink_backward.default", operands=2)
def shrink_backward(k: KernelBuilder, grad: Val, x: Val, lambd: float) -> Val:
    return k.where((x >= -lambd) & (x <= lambd), 0, grad)


@lowering("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(context: Context, x: View) -> tuple:
    """(log(sigmoid(x)), exp(-|x|) for the backward, of which CUDA keeps nothing)."""
    first, second = context.types
    if not x.dtype.is_float:
        raise LoweringError("log_sigmoid of integers")

    def logarithm(k: KernelBuilder, v: Val) -> Val:
        return k.op("minimum", v, 0.0) - k.op("log1p", k.op("exp", -k.op("abs", v)))
    out = context.elementwise(logarithm, (x,), "result", out=context.result(first))
    buffer = context.result(second)
    return out, context.elementwise(lambda k, v: k.op("exp", -k.op("abs", v)), (x,), "result", out=buffer)


@lowering("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(context: Context, grad: View, x: View, buffer: View) -> View:
    def value(k: KernelBuilder, g: Val, v: Val) -> Val:
        z = k.op("exp", -k.op("abs", v))
        below = z / (z + 1.0)
        return g * k.where(v < 0, 1.0 - below, below)
    return context.elementwise(value, (grad, x), "result")


POINTWISE.update(("aten.elu_backward.default", "aten.log_sigmoid_backward.default"))
