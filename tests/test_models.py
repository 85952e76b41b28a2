"""Real models, inference and training, against eager; where eager differs, at least about as near to float64 as eager is."""
from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

import fuseline

STRICT = {"strict": True}
SLACK = 2.0                    # a model's rounding errors are luck to within such a factor: eager's own vary as much between machines


class Logits(nn.Module):
    """A transformers model by its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)[0]


def vision(name: str, size: int, batch: int = 2, **kwargs: object) -> Callable:
    def make() -> tuple[nn.Module, tuple]:
        return getattr(torchvision.models, name)(num_classes=10, **kwargs), (torch.randn(batch, 3, size, size),)
    return make


def vit() -> tuple[nn.Module, tuple]:
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10), (torch.randn(2, 3, 32, 32),)


def bert() -> tuple[nn.Module, tuple]:
    from transformers import BertConfig, BertModel
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return Logits(BertModel(config)), (torch.randint(0, 99, (2, 12)),)


def gpt2() -> tuple[nn.Module, tuple]:
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=99, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, use_cache=False)
    return Logits(GPT2LMHeadModel(config)), (torch.randint(0, 99, (2, 12)),)


# ResNet-50's last batch norms need more than a few numbers a channel: of 8, their derivative amplifies rounding until single
# numbers cross the kink of a relu, and errors against float64 of eager itself vary a hundredfold with the seed.
MODELS = {
    "resnet18": vision("resnet18", 64), "resnet50": vision("resnet50", 96, batch=4),
    "mobilenet_v3_small": vision("mobilenet_v3_small", 64, dropout=0.0), "densenet121": vision("densenet121", 64),
    "vit": vit, "bert": bert, "gpt2": gpt2,
}


def build(name: str) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return MODELS[name]()


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def assert_near(name: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Within float32's tolerance of eager, or about as near to float64 as eager."""
    assert got.shape == eager.shape and got.dtype == eager.dtype and got.stride() == eager.stride(), name
    if torch.allclose(got, eager, rtol=2e-5, atol=2e-6):
        return
    scale = exact.norm().clamp_min(1e-12)
    ours, theirs = (float((x.double() - exact).norm() / scale) for x in (got, eager))
    assert ours <= SLACK * theirs + 1e-6, f"{name}: relative error {ours:.2e}, eager's {theirs:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_inference_equals_eager(name: str):
    model, inputs = build(name)
    model.eval()
    exact = copy.deepcopy(model).double()
    fast = fuseline.compile(model, fullgraph=True, options=STRICT)
    with torch.no_grad():
        eager, want = model(*inputs), exact(*map(double, inputs))
        for _ in range(2):
            assert_near("output", fast(*inputs), eager, want)


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_eager(name: str):
    model, inputs = build(name)
    model.train()
    exact, compiled = copy.deepcopy(model).double(), copy.deepcopy(model)
    fast = fuseline.compile(compiled, fullgraph=True, options=STRICT)

    def step(module: nn.Module, args: tuple) -> torch.Tensor:
        out = module(*args)
        loss = nn.functional.cross_entropy(out.flatten(0, -2), torch.arange(out[..., 0].numel()) % out.shape[-1])
        loss.backward()
        return loss.detach()
    for _ in range(2):                                    # gradients accumulate over the second step, statistics move on
        losses = [step(module, args) for module, args in ((fast, inputs), (model, inputs), (exact, tuple(map(double, inputs))))]
        assert_near("loss", *losses)
    for (key, ours), theirs, want in zip(compiled.named_parameters(), model.parameters(), exact.parameters()):
        assert (ours.grad is None) == (theirs.grad is None), key
        if ours.grad is not None:
            assert_near(f"gradient of {key}", ours.grad, theirs.grad, want.grad)
    for (key, ours), theirs, want in zip(compiled.named_buffers(), model.named_buffers(), exact.named_buffers()):
        if ours.is_floating_point():
            assert_near(f"buffer {key}", ours, theirs[1], want[1])
        else:
            assert torch.equal(ours, theirs[1]), key
