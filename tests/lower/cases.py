"""One-node graphs from calls of torch operators: what the tables of these tests are run with."""
from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from fuseline import torch_internals
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType
from fuseline.ir.interp import run_program
from fuseline.ir.kernels import LoopProgram
from fuseline.ir.verify import verify_program
from fuseline.lower.lower import lower

FORMATS = {torch.contiguous_format: "contiguous", torch.preserve_format: "preserve",
           torch.channels_last: "channels_last", torch.channels_last_3d: "channels_last_3d"}


def tensor_type(t: torch.Tensor) -> TensorType:
    return TensorType(torch_internals.from_torch_dtype(t.dtype), tuple(t.shape), tuple(t.stride()), str(t.device))


def convert(arg: object, nodes: dict[int, Node]) -> object:
    """A torch-level argument as a Node's argument."""
    if isinstance(arg, torch.Tensor):
        return nodes[id(arg)]
    if isinstance(arg, (list, tuple)):
        return tuple(convert(a, nodes) for a in arg)
    if isinstance(arg, torch.dtype):
        return torch_internals.from_torch_dtype(arg)
    if isinstance(arg, torch.memory_format):
        return FORMATS[arg]
    return str(arg) if isinstance(arg, torch.device) else arg


def graph_of(op: str, args: tuple, kwargs: dict) -> tuple[Graph, list[torch.Tensor]]:
    """The graph of one operator's call, all its results as outputs, and its tensor inputs."""
    tensors: list[torch.Tensor] = []
    tree_map(lambda a: tensors.append(a) if isinstance(a, torch.Tensor) and all(a is not t for t in tensors) else None, (args, kwargs))
    inputs = [Node(f"x{i}", "input", type=tensor_type(t)) for i, t in enumerate(tensors)]
    nodes = {id(t): n for t, n in zip(tensors, inputs)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_kwargs = tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, (args, kwargs))
        result = torch_internals.operator(op)(*fake_args, **fake_kwargs)
    several = isinstance(result, (tuple, list))
    results = list(result) if several else [result]
    types = [None if r is None else tensor_type(r) if isinstance(r, torch.Tensor) else ScalarType(type(r).__name__) for r in results]
    node = Node("n", op, convert(args, nodes), tuple(sorted((k, convert(v, nodes)) for k, v in kwargs.items())),
                tuple(types) if several else types[0], "test.py:1")
    outs = [Node(f"g{i}", "getitem", (node, i), (), t) for i, t in enumerate(types) if t is not None] if several else [node]
    return Graph(tuple(inputs), (node, *(outs if several else ())), tuple(outs)), tensors


def run(op: str, args: tuple, kwargs: dict) -> tuple[LoopProgram, list[torch.Tensor], list[torch.Tensor]]:
    """(the program, its results under the loop interpreter, eager's results laid out as the graph's types say)."""
    graph, tensors = graph_of(op, args, kwargs)
    program = lower(graph)
    verify_program(program)
    expected = torch_internals.operator(op)(*args, **kwargs)
    expected = [e for e in (expected if isinstance(expected, (tuple, list)) else [expected]) if e is not None]
    # A few operators' fake results have other strides than the real ones: the graph's types are what lowering is bound to.
    laid_out = [e if isinstance(o.type, ScalarType) or o.type.stride == e.stride() else
                torch.empty_strided(o.type.shape, o.type.stride, dtype=e.dtype).copy_(e) for o, e in zip(graph.outputs, expected)]
    return program, list(run_program(program, tensors)), laid_out


BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-12}


def widen(arg: object) -> object:
    return arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str, *, loose: float = 1.0,
                exact: torch.Tensor | None = None) -> None:
    """Equal type, layout and values; floats within the tolerance of their dtype, NaN and infinities exactly.

    Where an element differs from eager's it must be at least as near to `exact` (eager's result in float64).
    """
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, f"{what}: {actual.dtype}{tuple(actual.shape)}"
    for size, a, b in zip(actual.shape, actual.stride(), expected.stride()):
        assert size <= 1 or a == b or actual.numel() == 0, f"{what}: strides {actual.stride()}, eager {expected.stride()}"
    if not actual.dtype.is_floating_point:
        assert torch.equal(actual, expected), f"{what}: {actual} against {expected}"
        return
    bound = BOUNDS[actual.dtype] * loose
    same = torch.isclose(actual, expected, rtol=bound, atol=bound, equal_nan=True)
    if exact is not None:
        near = (actual.double() - exact).abs() <= (expected.double() - exact).abs()
        as_exact = (actual.double() == exact.to(actual.dtype).double()) | (actual.isnan() & exact.isnan())
        same |= near | as_exact | torch.isclose(actual.double(), exact, rtol=bound, atol=bound)
    assert same.all(), f"{what}: {actual[~same][:5]} against {expected[~same][:5]}"
