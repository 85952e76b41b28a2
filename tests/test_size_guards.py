"""Guards on sizes that the pipeline adds after the trace."""
from types import SimpleNamespace

import torch

import fuseline
from fuseline import pipeline
from fuseline.ir.region import Guard, Local


def test_a_number_that_is_no_graph_input_is_found_where_capture_read_it():
    traced = SimpleNamespace(guards=("s0 == s1 + 2",), symbols={"s0": ((0, 1),)})
    captured = [Guard(None, "sizes", "s1 >= 0", "", (("s1", (Local("n"), None)),))]
    (guard,) = pipeline.size_guards(traced, [Local("x")], captured)
    assert dict(guard.symbols) == {"s0": (Local("x"), 1), "s1": (Local("n"), None)}


def test_numbers_that_sum_to_a_size_change_together():
    def parts(x, y, n, m):
        a, b = x.split([n, m], 0)
        return torch.cat([a, b * 2], 0) + y

    compiled = fuseline.compile(parts, fullgraph=True, options={"strict": True})
    for n, m in ((3, 4), (5, 6), (7, 2), (4, 4)):
        x, y = torch.randn(n + m, 2), torch.randn(n + m, 2)
        assert torch.equal(compiled(x, y, n, m), parts(x, y, n, m))
