"""The public interface on real captures; graphs run by the "eager" back end, so that nothing here depends on code generation."""
import copy
import functools
import pickle

import pytest
import torch

import fuseline

STRICT = {"strict": True}
eager = functools.partial(fuseline.compile, backend="eager", options=STRICT)


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    fuseline.reset()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, bias=None):
        y = self.body(x) * self.scale
        return y if bias is None else y + bias


X = torch.randn(4, 8)


def test_functions_decorators_and_methods():
    @fuseline.compile(backend="eager", options=STRICT)
    def f(x, k=2):
        """Doc."""
        return x * k

    class Scaler:
        def __init__(self, k):
            self.k = k

        @fuseline.compile
        def scale(self, x):
            return x * self.k

        def __call__(self, x):
            return x + self.k

    scaler = Scaler(3)
    assert f.__name__ == "f" and f.__doc__ == "Doc." and torch.equal(f(X), X * 2)
    assert torch.equal(scaler.scale(X), X * 3) and torch.equal(Scaler(7).scale(X), X * 7)
    assert torch.equal(eager(scaler)(X), X + 3) and torch.equal(eager(scaler.scale)(X), X * 3)
    assert torch.equal(eager(functools.partial(torch.add, alpha=2))(X, X), X * 3)


def test_a_compiled_module_is_its_class():
    model = Net()
    compiled = eager(model)
    assert isinstance(compiled, Net) and type(compiled).__name__ == "Net" and repr(compiled) == repr(model)
    assert list(compiled.state_dict()) == list(model.state_dict()) and compiled.body[0].weight is model.body[0].weight
    assert torch.equal(compiled(X), model(X)) and torch.equal(compiled.forward(X, bias=1.0), model(X, bias=1.0))
    assert compiled.eval() is compiled and not model.training
    compiled.note = "shared"
    assert model.note == "shared"


def test_changes_of_a_module_are_noticed():
    model = Net()
    compiled = eager(model)
    want = model.forward

    def same():
        return torch.equal(compiled(X), model(X))

    assert same()
    handle = model.body[0].register_forward_hook(lambda m, a, out: out * 2)
    assert same() and not torch.equal(compiled(X), model.scale * torch.relu(torch.nn.functional.linear(X, *model.body[0].parameters())))
    handle.remove()
    model.body[0].weight = torch.nn.Parameter(torch.ones(8, 8))
    assert same()
    model.body[1] = torch.nn.Tanh()
    assert same()
    with torch.no_grad():
        model.body[0].bias.fill_(3.0)
    assert same()
    model.scale = torch.tensor(5.0)
    assert same() and want is not None
    assert torch.equal(compiled.double()(X.double()), model(X.double()))


def test_copies_and_pickles_compile_anew():
    compiled = eager(Net())
    compiled(X)
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        before = fuseline.compile_count()
        assert isinstance(other, Net) and other.body[0].weight is not compiled.body[0].weight
        assert torch.equal(other(X), compiled(X)) and fuseline.compile_count() == before + 1


def test_compiling_what_is_compiled_already():
    f = eager(eager(lambda x: x + 1))
    model = eager(eager(Net()))
    assert torch.equal(f(X), X + 1) and torch.equal(model(X), model.forward(X))


def test_compiled_parts_are_inlined():
    inner, part = eager(lambda x: x * 2), eager(torch.nn.Linear(8, 8))
    outer = fuseline.compile(lambda x: part(inner(x)), backend="eager", options=STRICT, fullgraph=True)
    assert torch.equal(outer(X), part(X * 2))


def test_disable():
    seen = []

    @fuseline.disable
    def by_hand(x):
        seen.append(type(x))
        return x + 1

    def f(x):
        return by_hand(x * 2) * 3

    compiled = eager(f)
    assert torch.equal(compiled(X), f(X)) and set(seen) == {torch.Tensor}
    (reason,) = fuseline.explain(f)(X).breaks
    assert reason.kind == "disabled" and "by_hand" in reason.explanation
    g = eager(lambda x: fuseline.is_compiling())
    assert g(X) and fuseline.is_enabled()
    with fuseline.disable():
        assert not g(X) and not fuseline.is_enabled()
    model = Net()
    assert fuseline.compile(model, disable=True) is model


def test_breaks_explained_and_refused():
    def f(x):
        y = x * 2
        print("hello")
        return y + y.sum().item()

    explanation = fuseline.explain(f)(X)
    assert explanation.graph_count == 3 and {"print"} < {b.kind for b in explanation.breaks}
    with pytest.raises(fuseline.GraphBreakError, match="print"):
        fuseline.compile(f, backend="eager", fullgraph=True)(X)
    compiled = eager(f)
    compiled(X)
    fuseline.set_strict_mode(True)
    try:
        with pytest.raises(fuseline.GraphBreakError):
            compiled(X)
    finally:
        fuseline.set_strict_mode(False)
    assert torch.equal(eager(f)(X), f(X))


def test_a_long_loop_with_breaks_does_not_nest(capsys):
    def f(x, n):
        for _ in range(n):
            x = x + 1
            if x.sum() < -1e9:
                return x * 0
        return x
    assert torch.allclose(eager(f)(X, 1200), X + 1200, atol=1e-2)


def test_breaks_in_nested_calls_meet_the_callers_handlers():
    def inner(x, fail):
        y = x * 2
        print(end="")
        if fail:
            raise ValueError("inner")
        return y + 1

    def outer(x, fail):
        try:
            return inner(x, fail) * 3, "fine"
        except ValueError as error:
            return x - 1, str(error)

    compiled = eager(outer)
    for fail in (False, True, False):
        got, want = compiled(X, fail), outer(X, fail)
        assert torch.equal(got[0], want[0]) and got[1] == want[1]


def test_wrong_names_list_the_right_ones():
    with pytest.raises(ValueError, match="'max-autotune'"):
        fuseline.compile(Net(), mode="fast")
    with pytest.raises(ValueError, match="'fuseline'"):
        fuseline.compile(Net(), backend="nope")
    with pytest.raises(ValueError, match="'recompile_limit'"):
        fuseline.compile(Net(), options={"nope": 1})
    with pytest.raises(TypeError):
        fuseline.compile(3)
    with pytest.raises(IndexError):
        fuseline.mark_dynamic(X, 2)
    with pytest.raises(AttributeError):
        fuseline.nothing  # noqa: B018


def test_backends_get_the_graph_and_example_inputs():
    seen = []

    def backend(graph_module, example_inputs):
        seen.append((graph_module, len(example_inputs)))
        return graph_module.forward

    fuseline.register_backend("seen", backend)
    assert {"eager", "fuseline", "seen"} <= set(fuseline.list_backends())
    compiled = fuseline.compile(lambda x, y: x * y, backend="seen", options=STRICT)
    assert torch.equal(compiled(X, X + 1), X * (X + 1)) and seen[0][1] == 2 and isinstance(seen[0][0], torch.fx.GraphModule)


def test_recompile_reasons_name_the_argument_and_size():
    f = eager(lambda x: x * 2)
    f(torch.ones(3, 128))
    f(torch.ones(3, 160))
    assert fuseline.recompile_reasons(f)[0].startswith("argument x: size 1 was 128, now 160")
    assert fuseline.compile_count() == 2


def test_a_growing_cache_is_compiled_for_its_absence_once_for_a_size_and_once_for_any():
    """The call that is compiled anew is compared with the entry for a cache, not with the one for None."""
    step = eager(lambda x, cache=None: x * 2 if cache is None else torch.cat([cache[0], x * cache[1].sum()], 1))
    cache = step(torch.ones(2, 3))
    for n in range(5):
        x = torch.ones(2, 3 if n == 0 else 1)[:, -1:]
        cache = step(x, (cache, cache + 1))
    assert fuseline.compile_count() <= 3
