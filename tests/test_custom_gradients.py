"""torch.autograd.Function in compiled functions: results, first and second gradients as in eager, in one graph."""
import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

import fuseline


class Reversed(Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g.neg() * ctx.strength, None


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Linear(Function):
    @staticmethod
    def forward(ctx, x, w, b=None):
        ctx.save_for_backward(x, w, b)
        out = x @ w.t()
        return out if b is None else out + b

    @staticmethod
    def backward(ctx, g):
        x, w, b = ctx.saved_tensors
        gx = g @ w if ctx.needs_input_grad[0] else None
        gw = g.t() @ x if ctx.needs_input_grad[1] else None
        return gx, gw, g.sum(0) if b is not None and ctx.needs_input_grad[2] else None


class Exp(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return g * y


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.cos() * 2


class Largest(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor, ctx.shape = factor, x.shape
        values, at = x.max(dim=1)
        ctx.mark_non_differentiable(at)
        ctx.save_for_backward(at)
        return values * factor, at, "text"

    @staticmethod
    def backward(ctx, g, g_at, g_text):
        assert g_text is None
        at, = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter_(1, at[:, None], g[:, None] * ctx.factor), None


class Nested(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Exp.apply(x) * 2

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return Exp.apply(x) * g * 7


class Recomputed(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x @ w).relu()

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            y = (x @ w).relu()
        return torch.autograd.grad(y, (x, w), g)


SCALE = torch.tensor([2.0, 3.0, 4.0])


class Global(Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE

    @staticmethod
    def backward(ctx, g):
        return g * SCALE * SCALE


class Setup(Function):
    @staticmethod
    def forward(x, s):
        return x * s, x + s

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.s = inputs
        ctx.save_for_backward(x, output[0])

    @staticmethod
    def backward(ctx, g, h):
        x, out = ctx.saved_tensors
        return g * ctx.s + h * out + x, None


class Swapped(Function):
    @staticmethod
    def forward(ctx, x, y):
        return y, x

    @staticmethod
    def backward(ctx, a, b):
        return b * 2, a * 3


class Mixed(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


def mixed_precision(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Mixed.apply(x, w).float()


def result_and_view(x):
    y = Global.apply(x)
    return y, y.view(1, 3), y * 2


def without_gradient(x):
    with torch.no_grad():
        y = Global.apply(x)
    return y + x


CASES = {
    "reversed": (lambda x: Reversed.apply(x * 2, 0.5) + 1, [3]), "reversed_input": (lambda x: Reversed.apply(x, 0.5), [3]),
    "identity": (lambda x: Identity.apply(x).sin(), [3]), "identity_result": (lambda x: Identity.apply(x * 1), [3]),
    "in_place": (lambda x: InPlace.apply(x * 3) + 1, [3]), "linear": (Linear.apply, [(4, 3), (2, 3), 2]),
    "exp": (lambda x: Exp.apply(Exp.apply(x * 0.1)).sum(), [3]), "largest": (lambda x: Largest.apply(x, 2.5), [(3, 4)]),
    "nested": (lambda x: Nested.apply(x), [3]), "recomputed": (lambda x, w: Recomputed.apply(x, w), [(2, 3), (3, 4)]),
    "global": (lambda x: Global.apply(x).mul_(2), [3]), "setup": (lambda x: Setup.apply(x, 3.0), [3]),
    "swapped": (lambda x, y: Swapped.apply(x, y), [3, 3]), "mixed_precision": (mixed_precision, [(4, 3), (3, 2)]),
    "result_and_view": (result_and_view, [3]), "without_gradient": (without_gradient, [3]), "once": (lambda x: Once.apply(x), [3]),
}
NOT_TWICE = {"once", "recomputed", "in_place"}


def differentiated(function, inputs, twice):
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = [r for r in tree_leaves(function(*inputs)) if isinstance(r, torch.Tensor)]
    wanted = [r for r in results if r.requires_grad]
    loss = sum((r * torch.arange(1, r.numel() + 1.0).view(r.shape)).sum() for r in wanted)
    grads = torch.autograd.grad(loss, inputs, create_graph=twice)
    again = [g.pow(2).sum() for g in grads if g.requires_grad]
    more = torch.autograd.grad(sum(again), inputs, allow_unused=True) if again else ()
    return [r.requires_grad for r in results], results, grads, [torch.zeros(()) if g is None else g for g in more]


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_eagers(name):
    function, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    for twice in (False, True)[:1 if name in NOT_TWICE else 2]:
        compiled = fuseline.compile(lambda *args: function(*args), fullgraph=True, options={"strict": True})
        torch.testing.assert_close(differentiated(compiled, inputs, twice), differentiated(function, inputs, twice))


def test_once_differentiable_is_differentiated_once():
    compiled = fuseline.compile(lambda x: Once.apply(x), fullgraph=True)
    x = torch.randn(3, requires_grad=True)
    g, = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        g.sum().backward()


def test_what_backward_changes_outside_breaks():
    seen = []

    class Counted(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append(1)
            return g * 2
    compiled = fuseline.compile(lambda x: Counted.apply(x) + 1)
    x = torch.ones(3, requires_grad=True)
    for calls in (1, 2):
        y = compiled(x)
        assert len(seen) == calls - 1
        y.sum().backward()
        assert len(seen) == calls
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))
