"""torch.func, torch.autograd.grad, checkpoint and custom operators in compiled functions: as in eager, in one graph."""
import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fuseline
from fuseline import torch_internals
from fuseline.capture.errors import CannotCapture
from fuseline.errors import GraphBreakError

torch.manual_seed(0)
NET = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
HELD = {k: v.detach() for k, v in NET.named_parameters()}
MODELS = [torch.nn.Linear(4, 2) for _ in range(3)]
NORM = torch.nn.BatchNorm1d(4)


def cube(x):
    return x ** 2 * x.sum()


def loss(parameters, x, y):
    return (functional_call(NET, parameters, (x[None],)) - y).pow(2).sum()


def with_aux(w, x):
    y = (w * x).sin().sum()
    return y, {"y": y.detach() * 2}


def pulled_back(x, v):
    out, pull = vjp(cube, x)
    return out, pull(v)


def ensemble(x):
    parameters, buffers = stack_module_state(MODELS)
    return torch.vmap(lambda p, b, x: functional_call(MODELS[0], (p, b), (x,)), (0, 0, None))(parameters, buffers, x)


def inner_step(x):
    parameters = dict(NET.named_parameters())

    def objective(p):
        return functional_call(NET, p, (x,)).pow(2).mean()
    grads = grad(objective)(parameters)
    return objective({k: v - 0.1 * grads[k] for k, v in parameters.items()})


def gradient_penalty(x):
    g, = torch.autograd.grad(NET(x).sum(), x, create_graph=True)
    return (g.norm(2, dim=1) - 1).pow(2).mean()


def own_leaf(x):
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y.sin() * 2).sum(), y)[0] * x


CASES = {
    "grad": (lambda x: grad(lambda t: (t.sin() * t).sum())(x), [3]), "twice": (lambda x: grad(grad(lambda t: (t ** 3).sum()))(x[0]), [3]),
    "aux": (lambda w, x: grad_and_value(with_aux, has_aux=True)(w, x), [3, 3]),
    "argnums": (lambda x, y: grad(lambda a, b: (a * b.sin()).sum(), argnums=(0, 1))(x, y), [3, 3]),
    "vmap": (lambda x, y: torch.vmap(lambda u, v: (u @ v) * 2, in_dims=(0, None))(x, y), [(3, 4), 4]),
    "nested_vmap": (lambda x, y: torch.vmap(torch.vmap(torch.mul, in_dims=(0, None)), in_dims=(None, 0), out_dims=1)(x, y), [3, 4]),
    "vmap_of_dict": (lambda x: torch.vmap(lambda d: d["x"] + 1, in_dims=({"x": 1},))({"x": x}), [(3, 4)]),
    "chunked": (lambda x: torch.vmap(lambda t: t.sin().sum(), chunk_size=2)(x), [(3, 4)]),
    "vjp": (pulled_back, [3, 3]),
    "jvp": (lambda x, v: jvp(cube, (x,), (v,)), [3, 3]), "jacrev": (lambda x: jacrev(cube)(x), [3]),
    "jacfwd": (lambda x: jacfwd(cube)(x), [3]),
    "hessian": (lambda x: hessian(lambda t: cube(t).sum())(x), [3]),
    "functional_call": (lambda x: functional_call(NET, HELD, (x,)), [(2, 4)]),
    "per_sample": (lambda x, y: torch.vmap(grad(loss), in_dims=(None, 0, 0))(HELD, x, y), [(5, 4), 5]), "ensemble": (ensemble, [(2, 4)]),
    "inner_step": (inner_step, [(2, 4)]), "penalty": (gradient_penalty, [(2, 4)]), "own_leaf": (own_leaf, [3]),
    "jacobian": (lambda x: torch.autograd.functional.jacobian(lambda t: t ** 2, x) * x, [3]),
    "checkpoint": (lambda x: checkpoint(lambda t: NET(t).sin(), x, use_reentrant=False), [(2, 4)]),
    "reentrant": (lambda x: checkpoint(lambda t: NET(t).sin(), x, use_reentrant=True) * checkpoint(NET, x.detach(), use_reentrant=True),
                  [(2, 4)]),
    "sequential": (lambda x: checkpoint_sequential(NET, 2, x, use_reentrant=False), [(2, 4)]),
}


def differentiated(function, inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    results = tree_leaves(function(*inputs))
    wanted = [r.sum() * i for i, r in enumerate(results, 1) if r.requires_grad]
    NET.zero_grad()
    sum(wanted).backward()
    none = torch.zeros(())
    return [r.requires_grad for r in results], results, [none if x.grad is None else x.grad for x in (*inputs, *NET.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_transforms_are_captured_whole(name):
    function, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in shapes]
    compiled = fuseline.compile(lambda *args: function(*args), fullgraph=True, options={"strict": True})
    with torch.no_grad() if name not in ("penalty", "own_leaf", "jacobian") else torch.enable_grad():
        without = [x.clone().requires_grad_(torch.is_grad_enabled()) for x in inputs]
        torch.testing.assert_close(tree_leaves(compiled(*without)), tree_leaves(function(*without)))
    torch.testing.assert_close(differentiated(compiled, inputs), differentiated(function, inputs), rtol=1e-4, atol=1e-5)
    assert not torch_internals.functorch_depth()


def test_a_break_inside_a_transform_leaves_all_of_it_to_python():
    function = lambda x: torch.vmap(lambda t: t * len(str(x.sum().item())))(x) + grad(lambda t: print(end="") or (t * t).sum())(x)  # noqa: E731
    x = torch.ones(3, 2)
    torch.testing.assert_close(fuseline.compile(function, options={"strict": True})(x), function(x))
    with pytest.raises((GraphBreakError, CannotCapture)):
        fuseline.compile(function, fullgraph=True)(x)
    assert not torch_internals.functorch_depth()


def test_a_checkpoint_that_changes_buffers_runs_in_pytorch():
    def step(function):
        NORM.reset_running_stats()
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        function(x).sum().backward()
        return x.grad, NORM.running_mean.clone(), NORM.num_batches_tracked.clone()
    function = lambda x: checkpoint(lambda t: NORM(t).sin(), x, use_reentrant=False)  # noqa: E731
    torch.testing.assert_close(step(fuseline.compile(function)), step(function))


def test_results_of_leaves_made_inside_require_grad():
    def energy(x):
        y = x.detach().requires_grad_()
        e = (y * y).sum()
        return e, torch.autograd.grad(e, y, create_graph=True)[0], y
    for x in (torch.ones(3), torch.ones(3, requires_grad=True)):
        e, g, y = fuseline.compile(energy)(x)
        assert e.requires_grad and g.requires_grad and y.requires_grad
        (e + g.sum()).backward()
        torch.testing.assert_close(y.grad, torch.full((3,), 4.0))


@torch.library.custom_op("fuseline_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.from_numpy((x.detach() * k).numpy()).sin()


scaled_sine.register_fake(lambda x, k: torch.empty_like(x))


def _setup(ctx, inputs, output):
    x, ctx.k = inputs
    ctx.save_for_backward(x)


scaled_sine.register_autograd(lambda ctx, g: (g * (ctx.saved_tensors[0] * ctx.k).cos() * ctx.k, None), setup_context=_setup)


@torch.library.custom_op("fuseline_tests::add_one", mutates_args={"x"})
def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def test_custom_operators_are_nodes():
    def function(x):
        return scaled_sine(x * 2, 0.5) + torch.ops.fuseline_tests.scaled_sine(x, 2.0)
    x = [torch.randn(3)]
    compiled = fuseline.compile(function, fullgraph=True, options={"strict": True})
    torch.testing.assert_close(differentiated(compiled, x), differentiated(function, x))

    def writing(x):
        y = x * 2
        add_one(y)
        return y.sin()
    torch.testing.assert_close(fuseline.compile(writing, fullgraph=True)(x[0]), writing(x[0]))
