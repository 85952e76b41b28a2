"""`make demo`: the two guide programs on whatever device there is, in one table."""
from __future__ import annotations

import resnet18_inference
import resnet50_training
import torch

from fuseline.report.measure import print_table

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"Running ResNet-18 inference and ResNet-50 training on {device}, eager and compiled; this takes about a minute.", flush=True)
    print_table([resnet18_inference.run(device), resnet50_training.run(device)])
