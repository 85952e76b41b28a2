"""The training guide's program with our import: a stock torchvision ResNet-50, compiled, beside the same loop in eager mode."""
from __future__ import annotations

import argparse

import torch
import torchvision

import fuseline
from fuseline.report.measure import Measurement, compare, print_table


def make_step(compiled: bool, device: str, batch: int):
    """A training step that returns the loss, on a ResNet-50 that always starts from the same weights."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().to(device)
    if compiled:
        model = fuseline.compile(model, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    inputs = torch.randn(batch, 3, 224, 224, device=device)
    targets = torch.randint(0, 1000, (batch,), device=device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss
    return step


def run(device: str, batch: int | None = None, iterations: int | None = None) -> Measurement:
    batch = batch or (32 if device == "cuda" else 4)
    iterations = iterations or (50 if device == "cuda" else 10)
    return compare(f"ResNet-50 training, batch {batch}", make_step(False, device, batch), make_step(True, device, batch),
                   device=device, iterations=iterations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--iterations", type=int)
    arguments = parser.parse_args()
    print_table([run(arguments.device, arguments.batch, arguments.iterations)])
