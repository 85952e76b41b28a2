"""Programs with tensors, captured, assembled and run with the graph executed eagerly, against plain Python."""
import copy
import functools
import inspect

import pytest
import torch
from simulate import Simulated

from fuseline.ir.region import Broke, Item, Local
from fuseline.options import Options


def check(function, *calls, dynamic=(), regions=None, fullgraph=True):
    simulated = Simulated(function, Options(fullgraph=fullgraph), frozenset(dynamic))
    for args in calls:
        wanted_args, args = copy.deepcopy(args), copy.deepcopy(args)
        want, got = function(*wanted_args), simulated(*args)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, ((want, wanted_args), (got, args)))):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(b, a)
            else:
                assert type(a) is type(b) and a == b
    if regions is not None:
        assert len(simulated.regions) == regions
    return simulated.regions


def sizes_in_arithmetic(x):
    n = x.shape[0]
    y = x.view(n * 2, -1) + n
    if n > 3:
        y = y * 2
    return y, n, x.numel(), (n + 1) // 2


def number_and_slices(x, n):
    return x * n + torch.arange(n).sum(), n * 2, x[:n]


def list_of_tensors(xs):
    return torch.cat(xs).sum(0) / len(xs), [x.shape for x in xs], f"{xs[0].dim()}"


def test_symbolic_sizes_and_numbers_need_no_new_region():
    check(sizes_in_arithmetic, *[(torch.randn(n, 4),) for n in (5, 7, 9)], dynamic=[(Local("x"), 0)], regions=1)
    check(sizes_in_arithmetic, *[(torch.randn(n, 4),) for n in (5, 3, 2)], dynamic=[(Local("x"), 0)], regions=2)
    check(number_and_slices, *[(torch.randn(20), n) for n in (5, 7, 9)], dynamic=[(Local("n"), None)], regions=1)
    check(list_of_tensors, *[([torch.randn(n, 4), torch.randn(2, 4)],) for n in (5, 7)], dynamic=[(Item(Local("xs"), 0), 0)], regions=1)


def test_module_with_hooks_buffers_and_counters():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
            self.norm, self.calls = torch.nn.BatchNorm1d(3), 0
            self.layers[1].register_forward_hook(lambda m, a, out: out * 2)

        def forward(self, x):
            self.calls += 1
            for layer in self.layers:
                x = torch.relu(layer(x))
            return self.norm(x) * self.calls
    net = Net()
    twin = copy.deepcopy(net)
    simulated, x = Simulated(net, Options(fullgraph=True)), torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(simulated(x), twin(x))
    assert net.calls == 2
    torch.testing.assert_close(net.state_dict(), twin.state_dict())


def test_grad_mode_is_part_of_the_graph_and_restored():
    def f(x):
        with torch.no_grad():
            y = x * 2
        return y.requires_grad, (x * y).sum().requires_grad
    (region,) = check(f, (torch.randn(2, requires_grad=True),))
    assert torch.is_grad_enabled()
    assert sum("set_grad_enabled" in str(n.target) for n in region.graph.graph.nodes) == 2


def test_break_in_nested_calls_keeps_lines_and_state():
    def inner(x):
        return x + 1 if x.sum() > 0 else x - 1

    def outer(x, log):
        log.append("before")
        y = inner(x * 2).tolist()
        log.append(len(y))
        return y, x * 3
    regions = check(outer, (torch.ones(2), []), (-torch.ones(2), []), fullgraph=False)
    kinds = [r.end.reason.kind for r in regions if isinstance(r.end, Broke)]
    assert kinds[:2] == ["data-dependent-branch", "item"]
    assert "inner" in regions[0].end.reason.where and len(regions[0].end.reason.stack) == 2


def test_an_escaping_exception_has_the_users_traceback():
    def inner(x):
        return x + {}["absent"]

    def outer(x):
        return inner(x * 2)
    with pytest.raises(KeyError) as caught:
        Simulated(outer)(torch.ones(2))
    assert [e.name for e in caught.traceback if e.name in ("inner", "outer")] == ["outer", "inner"]


class Chunked:
    def one(self, a, b=1, *, c=2):
        return a

    def many(*args):
        return 1


def wrapped(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call


@wrapped
def scaled(x, y, z=3):
    return x * z


CHUNKED = Chunked()


def inspects(x):
    chunked = CHUNKED
    counts = [len(inspect.signature(f).parameters) for f in (chunked.one, chunked.many, scaled)]
    default = inspect.signature(chunked.one).parameters["b"].default
    bound = inspect.signature(scaled).bind(1, 2).arguments
    return scaled(x, 1) + default, counts, list(inspect.signature(scaled).parameters), dict(bound), inspect.isfunction(scaled)


def test_signatures_are_known_and_guarded():
    (region,) = check(inspects, (torch.ones(3),), regions=1)
    assert any(guard.kind == "equals" and "__defaults__" in str(guard.source) for guard in region.guards)


class Config:
    scale = 3

    def __init__(self):
        self.sizes, self.names = [2, 3], {"a": (1, [2])}
        self.itself = self


class Slotted:
    __slots__ = ("a",)


CONFIG = Config()


def copies(x):
    deep, shallow = copy.deepcopy(CONFIG), copy.copy(CONFIG)
    deep.sizes.append(x.shape[0])
    deep.names["a"][1][0] = 9
    same = deep.itself is deep, shallow.itself is CONFIG, shallow.sizes is CONFIG.sizes, copy.deepcopy(Config) is Config
    return x * deep.sizes[-1] * deep.scale, deep.sizes, deep.names, CONFIG.sizes, CONFIG.names, same


def installed(name):
    return {"torch": 2}.get(name)


installed._dynamo_marked_constant = True        # as torch.compiler.assume_constant_result does


def asks_for_constants(x):
    return x + installed("torch"), installed("nothing")


def test_copies_of_plain_objects_and_functions_marked_constant():
    check(copies, (torch.ones(3),), (torch.ones(3),), regions=1)
    check(asks_for_constants, (torch.ones(3),), regions=1)
    regions = check(lambda x: (x + 1, hasattr(copy.copy(Slotted()), "a")), (torch.ones(2),), fullgraph=False)
    assert any(isinstance(region.end, Broke) for region in regions)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Untouched(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def test_autograd_functions_are_captured_where_no_gradient_is_wanted():
    with torch.no_grad():
        check(lambda x: Doubled.apply(x, 2) + 1, (torch.ones(3),), regions=1)
        check(lambda x: Untouched.apply(x) + 1, (torch.ones(3),), regions=1)
