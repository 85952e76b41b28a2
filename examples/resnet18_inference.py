"""The inference guide's program with our import: a stock torchvision ResNet-18 serving single images, beside eager mode."""
from __future__ import annotations

import argparse

import torch
import torchvision

import fuseline
from fuseline.report.measure import Measurement, compare, print_table


def run(device: str, batch: int = 1, iterations: int = 50) -> Measurement:
    torch.manual_seed(0)
    model = torchvision.models.resnet18().to(device).eval()
    optimized_model = fuseline.compile(model, mode="reduce-overhead")
    inputs = torch.randn(batch, 3, 224, 224, device=device)

    def step(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return module(inputs)
    return compare(f"ResNet-18 inference, batch {batch}", lambda: step(model), lambda: step(optimized_model), device=device,
                   iterations=iterations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=50)
    arguments = parser.parse_args()
    print_table([run(arguments.device, arguments.batch, arguments.iterations)])
