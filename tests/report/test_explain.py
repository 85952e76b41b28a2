"""The report's text, from records made by hand; measurements and verdicts."""
from __future__ import annotations

import math

import torch

from fuseline.ir.record import CompileRecord, GraphRecord, KernelRecord
from fuseline.ir.region import GraphBreak
from fuseline.report.explain import Explanation, explain_records, verbose_text
from fuseline.report.measure import Measurement, compare, print_table


def record() -> CompileRecord:
    graph = GraphRecord("forward", "cpu", "graph(): ...", 3, (KernelRecord("fused_mul_add", ("aten.mul.Tensor", "aten.add.Tensor")),) * 2,
                        ("aten.mm.default",), refusals=("no: too big (t3)",))
    reason = GraphBreak("print", "model.py:7 in f", "print() reaches outside the program", "call it outside",
                        ("main.py:3 in g", "model.py:7 in f"))
    return CompileRecord("f", "model.py:1", "mul = mul(x, 2)", 3, ("tensor: x",), reason, [graph], {"capture": 0.25}, "x: size 0 was 1")


def test_the_report_tells_what_was_done_and_why_not():
    text = explain_records([record()])
    for part in ("1 graph with 3 operators, 1 graph break, 2 kernel launches", "kernel fused_mul_add x2  <- mul.Tensor, add.Tensor",
                 "library aten.mm.default", "compiled because x: size 0 was 1", "model.py:7 in f: print() reaches outside",
                 "to avoid it: call it outside", "called from main.py:3 in g", "too big", "capture 0.25 s"):
        assert part in text, part


def test_nothing_compiled_is_said():
    assert "Nothing was compiled" in str(Explanation(()))


def test_verbose_prints_the_graph():
    assert "mul = mul(x, 2)" in verbose_text(record())


def test_verdicts():
    def made(eager: float, compiled: float) -> Measurement:
        return Measurement("m", "cpu", eager, compiled, 2.0, 0.0, 10)
    assert made(10, 5).pays_off_after == 400 and "2.00 times as fast" in made(10, 5).verdict
    assert math.isinf(made(5, 10).pays_off_after) and "SLOWER" in made(5, 10).verdict
    assert "gains nothing" in made(10, 10).verdict


def test_compare_and_table(capsys):
    x = torch.ones(4)
    measured = compare("add", lambda: x + 1, lambda: x + 1.5, device="cpu", iterations=3, warm_up=1)
    assert measured.largest_difference == 0.5 and measured.iterations == 3
    print_table([measured])
    assert "pays off after" in capsys.readouterr().out
