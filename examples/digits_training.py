"""A real job: a small convolutional net learns scikit-learn's handwritten digits, in eager mode and compiled.

Both runs see the same data in the same order from the same weights, with a last batch that is smaller, an evaluation pass
each epoch, a learning-rate schedule, dropout, and a checkpoint that is saved half-way and loaded again.
"""
from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fuseline


class DigitNet(nn.Module):
    """Three convolution blocks on 8x8 images, global pooling, ten classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [1, width, 2 * width, 2 * width]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.GELU()) for a, b in zip(widths, widths[1:]))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = F.max_pool2d(x, 2)
        return self.head(self.dropout(x.mean((2, 3))))


@dataclass(frozen=True)
class Result:
    accuracy: float
    seconds: float
    train_compilations: int
    eval_compilations: int


def load(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Training (1,438) and test (359) images, scaled to [0, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:359], order[359:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def run(compiled: bool, device: str, epochs: int, batch: int, width: int) -> Result:
    """Train and evaluate; seconds count everything from compiling to the last evaluation."""
    train_set, test_set = load()
    torch.manual_seed(1)
    model = DigitNet(width).to(device)
    start = time.perf_counter()
    train_compilations = eval_compilations = 0
    net = fuseline.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = DataLoader(train_set, batch, shuffle=True, generator=torch.Generator().manual_seed(2))
    accuracy = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(epochs):
            net.train()
            before = fuseline.compile_count()
            for images, labels in loader:                 # the last batch is smaller
                optimizer.zero_grad()
                loss = F.cross_entropy(net(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
            schedule.step()
            train_compilations += fuseline.compile_count() - before
            before = fuseline.compile_count()
            accuracy = evaluate(net, test_set, batch, device)
            eval_compilations += fuseline.compile_count() - before
            if epoch == epochs // 2:                      # as after an interruption: all state goes through the file
                checkpoint = Path(folder) / "digits.pt"
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, checkpoint)
                state = torch.load(checkpoint, weights_only=True)
                net.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
                schedule.load_state_dict(state["schedule"])
    return Result(accuracy, time.perf_counter() - start, train_compilations, eval_compilations)


def evaluate(net: nn.Module, test_set: TensorDataset, batch: int, device: str) -> float:
    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(test_set, batch):
            right += int((net(images.to(device)).argmax(1) == labels.to(device)).sum())
    return right / len(test_set)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    a = parser.parse_args()
    torch.ones(8, device=a.device).sum().item()           # the device is up before the clocks start
    rows = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        rows[name] = run(compiled, a.device, a.epochs, a.batch, a.width)
        r = rows[name]
        print(f"{name:9} accuracy {100 * r.accuracy:.2f}%   total {r.seconds:.2f} s   compilations: "
              f"{r.train_compilations} training, {r.eval_compilations} evaluation", flush=True)
    print(f"compiled / eager, compilation included: {rows['compiled'].seconds / rows['eager'].seconds:.2f}")


if __name__ == "__main__":
    main()
