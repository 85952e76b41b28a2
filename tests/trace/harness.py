"""Runs a function eagerly and through trace, partition and the runtime wrapper, graphs being run by PyTorch's operators."""
from __future__ import annotations

import copy
from typing import Any

import torch

from fuseline.autodiff.partition import partition
from fuseline.ir.graph import Graph, Node, TensorType
from fuseline.ir.traced import Traced
from fuseline.runtime.aot import wrap
from fuseline.trace.interpret import run_graph
from fuseline.trace.trace import trace


def as_graph(fn: Any, count: int) -> torch.fx.GraphModule:
    """A torch-level graph of one call of fn."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(count)]
    call = graph.call_function(_listed(fn), tuple(inputs))
    call.meta["origin"] = "program.py:1"
    graph.output(call)
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _listed(fn: Any) -> Any:
    def listed(*args: Any) -> list:
        result = fn(*args)
        return list(result) if isinstance(result, (tuple, list)) else [result]
    return listed


def is_pure(graph: Graph) -> None:
    """Every operand is defined before, and no operator writes."""
    known = set(graph.inputs)
    for node in graph.nodes:
        assert all(o in known for o in node.operands), node
        known.add(node)
        if node.op != "getitem":
            namespace, name, overload = node.op.split(".")
            assert not getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema.is_mutable, node
    assert all(o in known for o in graph.outputs if isinstance(o, Node))


def executable(graph: Graph, outputs_checked: list | None = None) -> Any:
    """What the real pipeline's executables do: outputs have the type's strides."""
    def run(*inputs: Any) -> tuple:
        values = run_graph(graph, inputs)
        for node, value in zip(graph.outputs, values):
            if isinstance(node, Node) and isinstance(node.type, TensorType) and all(isinstance(s, int) for s in node.type.stride):
                expected = torch.empty_strided(node.type.shape, node.type.stride, device="meta").stride()
                assert value.stride() == expected or value.numel() <= 1, (node, value.stride())
        return values
    return run


def compiled(fn: Any, inputs: Any, **options: Any) -> tuple[Traced, Any]:
    module = as_graph(fn, len(inputs))
    traced = trace(module, inputs, grad_enabled=torch.is_grad_enabled(), **options)
    is_pure(traced.graph)
    parts = partition(traced) if traced.joint else None
    if parts:
        is_pure(parts.forward)
        is_pure(parts.backward)
    return traced, wrap(traced, parts, executable, module)


def _sharing(tensors: list) -> list:
    """Which share memory and which are one object, as numbers of the first such tensor."""
    keys = [t.untyped_storage().data_ptr() if isinstance(t, torch.Tensor) and t.numel() else i for i, t in enumerate(tensors)]
    ids = [id(t) if isinstance(t, torch.Tensor) else i for i, t in enumerate(tensors)]
    return [(keys.index(k), ids.index(i)) for k, i in zip(keys, ids)]


def check(fn: Any, *inputs: Any, tol: float = 1e-5, backward: bool = True, **options: Any) -> Traced:
    """Compare everything a caller can see; inputs may be lambdas making a non-leaf of a leaf: (leaf, lambda leaf: leaf * 2)."""
    runs = []
    traced = None
    for compile_it in (False, True):
        torch.manual_seed(0)
        leaves = [copy.deepcopy(x[0]) if isinstance(x, tuple) else copy.deepcopy(x) for x in inputs]
        args = [x[1](leaf) if isinstance(x, tuple) else leaf for x, leaf in zip(inputs, leaves)]
        call = as_graph(fn, len(args))
        if compile_it:
            traced, call = compiled(fn, args, **options)
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        outputs = list(call(*args))
        record: dict[str, Any] = {"values": [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs],
                                  "sharing": _sharing([*args, *outputs]),
                                  "inputs": [a.detach().clone() for a in args if isinstance(a, torch.Tensor)],
                                  "written": [a._version > 0 for a in args if isinstance(a, torch.Tensor)]}
        record["facts"] = [(o.requires_grad, o.is_leaf, o.stride() if o.numel() > 1 else (), o.dtype, o.shape)
                           for o in outputs if isinstance(o, torch.Tensor)]
        differentiable = [o for o in outputs if isinstance(o, torch.Tensor) and o.grad_fn is not None]
        if backward and differentiable:
            weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).reshape(o.shape) for o in differentiable]
            record["grads"] = torch.autograd.grad(differentiable, wanted, weights, allow_unused=True)
        runs.append(record)
    eager, ours = runs
    assert ours["facts"] == eager["facts"]
    assert ours["sharing"] == eager["sharing"]
    assert ours["written"] == eager["written"]
    for name in ("values", "inputs", "grads"):
        for e, o in zip(eager.get(name, ()), ours.get(name, ()), strict=True):
            assert isinstance(e, torch.Tensor) == isinstance(o, torch.Tensor), name
            if isinstance(e, torch.Tensor):
                torch.testing.assert_close(o, e, rtol=tol, atol=tol, equal_nan=True)
            else:
                assert type(e) is type(o) and e == o
    return traced
