"""Small programs against eager PyTorch: values, strides, aliasing, mutation, gradients."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fuseline.errors import NotSupported
from tests.trace.harness import check, compiled


def normal(*shape, grad=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def fn_chain(x):
    y = x * 2
    v = y.view(2, 3)[1].unsqueeze(0).t()
    v.mul_(10)
    y[0] = v.sum()
    return y, v


def fn_reshape(x):
    y = x - 2
    y.reshape(-1)[0] = 50
    y.t().reshape(-1)[1] = 70
    y.t().flatten().add_(1000)
    return y


def fn_swap(x):
    y = x.clone()
    y[0], y[1] = y[1], y[0]
    z = x.clone()
    z[[0, 1]] = z[[1, 0]]
    return y, z


def fn_strided(x):
    y = x + 1
    torch.as_strided(y, (3,), (4,)).fill_(9)
    w = y.as_strided((2, 2), (3, 1), 1)
    w[0, 0] = -1
    return y, w * 2


def fn_strided_in_place(x):
    y = x * 3
    y.as_strided_((2, 2), (1, 2), 1)
    y[0, 1] = 7
    return y, y.exp()


def fn_items(x):
    x[0] = 1
    x[:, 1] = torch.tensor([5.0, 6, 7])
    x[x < 0] = 0
    x[[1, 2], [2, 3]] = 9
    x[..., -1] += 1
    x[None, 2:, ::2] = -3


def fn_loop(x):
    for i in range(1, x.shape[0]):
        x[i] = x[i - 1] * 2 + x[i]
    return x[-1]


def fn_split(x):
    y = x * 1
    a, b = y.split(2)
    c, d = y.unbind(1)[:2]
    b.mul_(3)
    d.add_(a.sum())
    y.chunk(2, 1)[1].zero_()
    return y, a, c


def fn_detach(x):
    y = x * 2
    d = y.detach()
    d.add_(1)
    return y, d, x.detach()


def fn_inplace_grad(x):
    y = x * 2
    y[0].mul_(3)
    y[1:] += x[:-1]
    y.clamp_(min=-1)
    return y.sigmoid_()


def fn_out(x):
    o = torch.empty(2, 3)
    torch.exp(x, out=o)
    torch.add(x, o, out=o)
    return o


def fn_scatter(x, i, src):
    a = x.clone().scatter_(0, i, src)
    b = x.clone().scatter_add_(0, i.clamp(max=1), src)
    c = x.scatter_reduce(0, i, src, "amax", include_self=False)
    x.put_(torch.tensor([-1, 0]), torch.tensor([7.0, 8.0]))
    return a, b, c


def fn_frozen(x):
    y = x * 7
    with torch.no_grad():
        frozen = x * 3
        v = x[1:]
        w = y[1:]
    return x * 2, x.detach() + 1, x.argmax(), x > 0, frozen, frozen * x, torch.ones(2), v, w


def fn_strides(x, img):
    t = x.t()
    return (t + 1, t.clone(), t @ x, torch.cat([t, t]), t.contiguous(), torch.relu(img), img.sum(1, keepdim=True) + img,
            torch.empty_like(t).zero_(), F.gelu(t), t.softmax(0))


def fn_foreach(a, b):
    torch._foreach_mul_([a, b], 2.0)
    torch._foreach_add_([a, b], [b, a], alpha=0.5)
    return a + b


def fn_geometry(x):
    y = x + 1
    y.t_()
    y.unsqueeze_(0)
    y[0, 0].mul_(2)
    y.transpose_(1, 2)
    y.squeeze_(0)
    y.swapdims_(0, 1)
    y[0].add_(1)
    return y


def fn_mixed(x, i):
    i.add_(x.long().sum())
    h = x.half()
    h += x
    return h, i


X = lambda *s, **k: normal(*s, **k)      # noqa: E731
PROGRAMS = {
    "two writes": (lambda x: (x.add_(1), x.mul_(2), x * 3)[2], X(3)),
    "view chain": (fn_chain, torch.arange(6.0)),
    "reshape": (fn_reshape, torch.zeros(2, 3)),
    "swap": (fn_swap, X(2, 3)),
    "as_strided": (fn_strided, torch.zeros(3, 3)),
    "as_strided_": (fn_strided_in_place, X(3, 2)),
    "as_strided_ with grad": (fn_strided_in_place, X(3, 2, grad=True)),
    "mean of channels-last": (lambda x: F.adaptive_avg_pool2d(x * 2, 1).flatten(1),
                              X(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "mean of channels-last, grad": (lambda x: F.adaptive_avg_pool2d(x * 2, 1),
                                    X(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()),
    "items": (fn_items, X(3, 4)),
    "loop": (fn_loop, torch.ones(4, 2)),
    "split": (fn_split, X(4, 4)),
    "detach": (fn_detach, X(3, grad=True)),
    "in place with grad": (fn_inplace_grad, X(4, grad=True)),
    "out=": (fn_out, X(2, 3)),
    "scatter": (fn_scatter, X(3, 2), torch.tensor([[0, 1], [2, 0]]), X(2, 2, seed=1)),
    "no grad parts": (fn_frozen, X(3, grad=True)),
    "strides": (fn_strides, X(3, 4), X(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "strides with grad": (fn_strides, X(3, 4, grad=True), X(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    "foreach": (fn_foreach, X(3), X(3, seed=1)),
    "geometry": (fn_geometry, X(2, 3)),
    "geometry with grad": (fn_geometry, X(2, 3, grad=True)),
    "mixed types": (fn_mixed, X(3), torch.zeros((), dtype=torch.int64)),
    "input returned twice": (lambda x: (x, x * 2, x), X(2)),
    "input returned twice, grad": (lambda x: (x, x * 2, x), X(2, grad=True)),
    "views of input": (lambda x: (x[1:], x.view(2, 2).t(), x + 1), torch.zeros(4)),
    "views of input, grad": (lambda x: (x[1], x.t(), x.reshape(-1)[::2], x * x), X(3, 2, grad=True)),
    "views share": (lambda x: (lambda y: (y[:2], y, y.view(2, 2)))(x * 2), torch.ones(4)),
    "views share, grad": (lambda x: (lambda y: (y[:2], y[1:], y.view(2, 2)))(x.exp()), X(4, grad=True)),
    "one view": (lambda x: (x * 2).t(), X(2, 3, grad=True)),
    "identities": (lambda x: [x * 1, x + 0, x - 0, x / 1, x ** 1, x + torch.zeros(3), x.clone()], torch.ones(3)),
    "duplicates": (lambda x: (lambda y: (y, y, y.clone()))(x * 2), X(3, grad=True)),
    "expand": (lambda x: (x.expand(3, 2), x.repeat(3, 1), x[None].expand(-1, 2) + 1, (x + 1).expand(3, 2)), X(2)),
    "swap inputs": (lambda x, y: (lambda t: (x.copy_(y), y.copy_(t)))(x.clone()) and None, X(3), X(3, seed=1)),
    "copy from input": (lambda x, y: x.copy_(y.t()) * 2, X(2, 3), X(3, 2)),
    "view of written": (lambda x: (x.mul_(2), x[1:])[1], X(3)),
    "write through history": (lambda x: (x.mul_(3), x.sin())[1], (X(3, grad=True), lambda leaf: leaf * 2)),
    "write through a view of history": (lambda x: (x[0].mul_(3), x.sin())[1], (X(3, grad=True), lambda leaf: leaf * 2)),
    "buffer gets gradient": (lambda b, w: (b.mul_(w), b.sum())[1], X(3), X(3, grad=True)),
    "constant tensors": (lambda x: x * torch.tensor([1.0, 2, 3]) + torch.tensor(2.0) + torch.tensor(3), X(3, grad=True)),
    "kinks": (lambda x, y: (x.abs(), x.relu(), x.max(), x.amax(), x.clamp(0, 1), x.norm(), torch.maximum(x, y), F.hardtanh(x)),
              torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)),
    "repeated index": (lambda x, i: (x[i], x.gather(0, i), x.index_select(0, i), F.embedding(i, x[:, None])),
                       X(4, grad=True), torch.tensor([1, 1, 3, 1])),
    "nothing": (lambda x: (None, 3, "a"), X(2)),
    "normalisation": (lambda x, w: (F.layer_norm(x, (6,), w) * x).softmax(-1), X(4, 6, grad=True), X(6, grad=True)),
    "group norm": (lambda x, w: F.group_norm(x, 2, w), X(2, 4, 5, grad=True), X(4, grad=True)),
    "cross entropy": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), X(5, 7, grad=True), torch.tensor([0, 6, 3, -100, 2])),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                  X(2, 3, 5, 4, grad=True), X(2, 3, 5, 4, grad=True, seed=1), X(2, 3, 5, 4, grad=True, seed=2)),
    "convolution and pooling": (lambda x, w: F.adaptive_avg_pool2d(F.max_pool2d(F.conv2d(x, w, padding=1).relu_(), 2), 1),
                                X(2, 3, 8, 8, grad=True), X(4, 3, 3, 3, grad=True)),
    "lots of activations": (lambda x: (F.silu(x), F.hardswish(x), F.gelu(x, approximate="tanh"), F.leaky_relu(x), F.elu(x),
                                       F.softplus(x), F.mish(x), x.tanh(), torch.log_softmax(x, 0)), X(6, grad=True)),
    "where and masks": (lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.5), X(6, grad=True)),
    "complex": (lambda x: torch.fft.rfft(x).abs(), X(6, grad=True)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_eager(name):
    fn, *inputs = PROGRAMS[name]
    check(fn, *inputs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 6)])
def test_batch_norm_equals_eager_with_running_statistics(shape, training):
    def fn(x, w, b, mean, var, n):
        if training:
            n.add_(1)
        return F.batch_norm(x, mean, var, w, b, training, 0.1)
    traced = check(fn, normal(*shape, grad=True, dtype=torch.float64), normal(3, grad=True, dtype=torch.float64),
                   normal(3, grad=True, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64),
                   torch.tensor(0), tol=1e-10)
    assert len(traced.mutations) == (3 if training else 0)


def test_dropout_is_a_comparison_and_its_mask_is_shared_with_backward():
    traced, run = compiled(lambda x: F.dropout(x, 0.25, training=True), [normal(1000, grad=True)])
    assert [n.op for n in traced.graph.nodes].count("aten.rand.default") == 1 and traced.random
    x = torch.ones(1000, requires_grad=True)
    y, = run(x)
    y.sum().backward()
    torch.testing.assert_close(y.detach(), x.grad)
    assert 0.65 < (y > 0).float().mean() < 0.85


def test_eager_random_keeps_the_stream():
    check(lambda x: (F.dropout(x, 0.5, training=True), torch.rand(3), torch.randn_like(x)), normal(50, grad=True), eager_random=True)


def test_inputs_that_share_memory_and_are_written_are_refused():
    base = torch.arange(8.0)
    with pytest.raises(NotSupported, match="share memory|shares memory"):
        compiled(lambda a, b: (a.add_(1), b * 2)[1], [base[:5], base[3:]])


def test_data_dependence_is_refused_with_a_reason():
    with pytest.raises(NotSupported):
        compiled(lambda x: x * x.sum().item(), [normal(3)])
    with pytest.raises(NotSupported):
        compiled(lambda x: x[x > 0], [normal(3)])


def test_leaf_written_with_grad_raises_as_eager():
    with pytest.raises(RuntimeError, match="leaf Variable"):
        compiled(lambda x: x.mul_(2), [normal(3, grad=True)])
