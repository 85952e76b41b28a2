"""What the partition saves, recomputes and must not do twice; whole models through it against eager."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from fuseline.autodiff.max_flow import FlowNetwork
from fuseline.autodiff.partition import partition
from fuseline.lower.lower import supported
from tests.trace.harness import check, compiled


def ops(graph):
    return Counter(n.op.split(".")[1] for n in graph.nodes if n.op != "getitem")


def test_cheap_chain_is_recomputed_from_the_input():
    traced, _ = compiled(lambda x: ((x + 1) * 2).relu() * x.abs(), [torch.randn(4, 4, requires_grad=True)])
    parts = partition(traced)
    assert [s.op for s in parts.saved] == ["input"] and parts.saved_bytes == 0


def test_matmul_and_random_run_once():
    def fn(x, w):
        return F.dropout((x @ w).tanh(), 0.5, training=True) @ w
    traced, _ = compiled(fn, [torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)])
    parts = partition(traced)
    assert ops(parts.backward)["mm"] == 4 and ops(parts.backward)["rand"] == 0
    mask = [s for s in parts.saved if s.op != "input" and s.type.dtype.name == "b1"]
    assert len(mask) == 1                                 # one byte an element, not the four of the random number


def test_views_are_not_saved_but_their_base_is():
    traced, _ = compiled(lambda x, w: (x.t() @ w).t().exp(), [torch.randn(3, 4, requires_grad=True), torch.randn(3, 5, requires_grad=True)])
    for saved in partition(traced).saved:
        assert saved.op == "input" or saved.op.split(".")[1] not in ("t", "view", "permute")


def test_what_a_convolution_reads_twice_is_kept_in_memory():
    def fn(x, w):
        return F.conv2d(F.conv2d(x, w, padding=1).relu(), w, padding=1).sum()
    traced, _ = compiled(fn, [torch.randn(2, 3, 5, 5), torch.randn(3, 3, 3, 3, requires_grad=True)])
    assert Counter(s.op for s in partition(traced).saved)["aten.relu.default"] == 1


def test_relu_after_batch_norm_is_masked_by_what_it_was_given():
    def net(x, w, v, scale, shift):
        c = F.conv2d(x, w, padding=1)
        variance, mean = torch.var_mean(c, (0, 2, 3), keepdim=True)
        y = ((c - mean) * (variance + 1e-5).rsqrt() * scale.view(1, 8, 1, 1) + shift.view(1, 8, 1, 1)).relu()
        return F.conv2d(y, v, padding=1).relu().sum()
    shapes = [(4, 8, 16, 16), (8, 8, 3, 3), (8, 8, 3, 3), (8,), (8,)]
    inputs = [torch.randn(s, requires_grad=k > 0) for k, s in enumerate(shapes)]
    traced, _ = compiled(net, inputs, static=[False, True, True, True, True], keep=supported())
    backward = partition(traced).backward
    masks = [n.args[1].op for n in backward.nodes if n.op == "aten.threshold_backward.default"]
    assert sorted(masks) == ["aten.add.Tensor", "aten.relu.default"]      # the second follows a convolution
    check(net, *inputs, tol=1e-4, static=[False, True, True, True, True], keep=supported())


def test_max_flow_on_a_known_network():
    network = FlowNetwork(6)
    for tail, head, capacity in [(0, 1, 16), (0, 2, 13), (1, 2, 10), (2, 1, 4), (1, 3, 12), (3, 2, 9), (2, 4, 14), (4, 3, 7),
                                 (3, 5, 20), (4, 5, 4)]:
        network.edge(tail, head, capacity)
    value, near_source = network.minimum_cut(0, 5)
    assert value == 23 and near_source[0] and not near_source[5] and near_source[4] and not near_source[3]


def as_function(module):
    """(function of x and all parameters and buffers, these)."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = list(state)

    def fn(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values)), (x,))
    return fn, [v.detach().clone().requires_grad_(v.requires_grad) for v in state.values()]


def test_resnet18_training_equals_eager():
    from torchvision.models import resnet18
    torch.manual_seed(0)
    fn, state = as_function(resnet18(num_classes=10).double().train())
    check(fn, torch.randn(2, 3, 64, 64, dtype=torch.float64), *state, tol=1e-7)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer_equals_eager(training):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True).double().train(training)
    fn, state = as_function(layer)
    check(fn, torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True), *state, tol=1e-8, eager_random=True)


def test_lstm_equals_eager():
    torch.manual_seed(0)
    fn, state = as_function(torch.nn.LSTM(4, 5, 2, batch_first=True).double())
    check(lambda x, *s: fn(x, *s)[0], torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), *state, tol=1e-8)
