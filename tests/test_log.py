"""FUSELINE_LOG: every artifact that it offers is printed by the stage that makes it."""
from __future__ import annotations

import torch

import fuseline
from fuseline import log


def test_artifacts_of_a_compilation(monkeypatch, capsys):
    monkeypatch.setattr(log, "_ENABLED", frozenset(log.ARTIFACTS))
    fn = fuseline.compile(lambda x: (torch.softmax(x * 2 + 1, 1), x.sum().item()))
    fn(torch.randn(4, 8))
    lines = capsys.readouterr().err.splitlines()
    printed = {line.partition("]")[0].lstrip("[") for line in lines}
    assert printed >= {"capture", "graph", "aten", "breaks", "guards", "fusion", "loops", "memory", "times"}
    fused = [line for line in lines if line.startswith("[fusion] ") and " <- " in line]
    assert any("mul.Tensor" in line and "softmax" in line for line in fused), fused
