"""Compiled functions in several threads and processes, re-entered, copied, pickled, and after the death of what they guard."""
import copy
import gc
import io
import multiprocessing
import pickle
import threading
import weakref

import pytest
import torch
from concurrency_programs import Samples, in_child, normalise

import fuseline

STRICT = {"strict": True}


def in_threads(count, work):
    """Run work(number) in that many threads that start together; raises what they raise."""
    barrier, errors = threading.Barrier(count), []

    def run(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)
    if errors:
        raise errors[0]


def original(compiled):
    return compiled.__wrapped__


def test_first_and_later_calls_in_many_threads():
    @fuseline.compile(options=STRICT)
    def f(x, scale):
        y = torch.sin(x) * scale
        if scale > 2:
            y = y + x.sum(0)
        return y.relu() - x

    def work(number):
        for i in range(12):
            x = torch.randn(3 + (number + i) % 3, 5)
            scale = 1 + (number + i) % 3
            torch.testing.assert_close(f(x, scale), original(f)(x, scale))

    in_threads(6, work)


def test_threads_have_grad_modes_of_their_own():
    f = fuseline.compile(lambda x: (x * 2).sin(), options=STRICT)

    def work(number):
        x = torch.randn(8, requires_grad=True)
        for _ in range(10):
            with torch.set_grad_enabled(number % 2 == 0):
                y = f(x)
            assert y.requires_grad == (number % 2 == 0)
            if y.requires_grad:
                (grad,) = torch.autograd.grad(y.sum(), x)
                torch.testing.assert_close(grad, 2 * torch.cos(2 * x.detach()))

    in_threads(4, work)


def test_training_in_threads_on_modules_of_their_own():
    def work(number):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        fast = fuseline.compile(copy.deepcopy(model), options=STRICT)
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(number))
        for m in (model, fast):
            m(x).sum().backward()
        for p, q in zip(model.parameters(), fast.parameters()):
            torch.testing.assert_close(p.grad, q.grad)

    in_threads(4, work)


def test_calls_during_another_thread_s_capture():
    inside, go = threading.Event(), threading.Event()

    def backend(graph_module, example_inputs):
        inside.set()
        assert go.wait(60)
        return graph_module.forward

    slow = fuseline.compile(lambda x: x * 3, backend=backend)
    quick = fuseline.compile(lambda x: x.cos() + 1, options=STRICT)
    x, results = torch.randn(4), []
    quick(x)
    thread = threading.Thread(target=lambda: results.append(slow(x)))
    thread.start()
    assert inside.wait(60)
    count = fuseline.compile_count()
    torch.testing.assert_close(quick(x), x.cos() + 1)                     # an entry that is there
    y = torch.randn(3, 3)
    torch.testing.assert_close(quick(y), y.cos() + 1)                     # and one made while the other thread compiles
    assert fuseline.compile_count() == count + 1
    go.set()
    thread.join(60)
    torch.testing.assert_close(results[0], x * 3)


def test_reentered_by_recursion_hooks_and_back_ends():
    @fuseline.compile(options={"strict": True, "recompile_limit": 20})
    def fold(x, n):
        if n == 0:
            return x
        print(end="")                                                     # recursion across a graph break
        return fold(x * 0.5, n - 1) + x

    x = torch.randn(4)
    torch.testing.assert_close(fold(x, 3), x * (1 + 0.5 + 0.25 + 0.125))

    double = fuseline.compile(lambda g: g * 2, options=STRICT)
    y = torch.randn(4, requires_grad=True)
    y.register_hook(lambda g: double(g))                                  # called within a compiled function's backward pass
    fuseline.compile(lambda t: t.sin(), options=STRICT)(y).sum().backward()
    torch.testing.assert_close(y.grad, 2 * y.detach().cos())

    helper = fuseline.compile(lambda t: t + 1, options=STRICT)

    def backend(graph_module, example_inputs):
        helper(torch.zeros(2))                                            # a compiled function called while another is captured
        return graph_module.forward

    torch.testing.assert_close(fuseline.compile(lambda t: helper(t) * 2, backend=backend)(x), (x + 1) * 2)


def test_reset_while_other_threads_call():
    f = fuseline.compile(lambda x, k: x.exp() * k, options={"strict": True, "recompile_limit": 1000})
    stop = threading.Event()

    def work(number):
        if number == 0:
            for _ in range(5):
                fuseline.reset()
                stop.wait(0.05)
            stop.set()
            return
        x = torch.randn(5 + number)
        while not stop.is_set():
            torch.testing.assert_close(f(x, number), x.exp() * number)

    in_threads(3, work)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method):
    model = fuseline.compile(torch.nn.Linear(16, 4))
    want = [original(normalise)(torch.arange(40_000.0) * (i + 1) / 40_000) for i in range(8)]
    torch.testing.assert_close(normalise(torch.arange(40_000.0) / 40_000), want[0], rtol=1e-4, atol=1e-5)    # compiled before the fork
    data = Samples(model.eval().requires_grad_(False))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
    got = torch.cat(list(loader))
    torch.testing.assert_close(got, torch.stack([model(w[:16]) for w in want]), rtol=1e-4, atol=1e-5)


def test_spawned_processes_get_compiled_modules():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    model = fuseline.compile(torch.nn.Linear(16, 4).requires_grad_(False))
    child = context.Process(target=in_child, args=(queue, model))
    child.start()
    normal, linear = queue.get(timeout=100)
    child.join(60)
    x = torch.arange(16.0)
    torch.testing.assert_close(torch.tensor(normal), original(normalise)(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(linear), model(x))


class Holder(torch.nn.Module):
    """Holds a compiled function, a compiled part and its own compiled method."""

    def __init__(self):
        super().__init__()
        self.part = fuseline.compile(torch.nn.Linear(4, 4), options=STRICT)
        self.function = normalise
        self.forward = fuseline.compile(self.forward, options=STRICT)

    def forward(self, x):
        return self.function(self.part(x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_models_that_hold_compiled_functions_are_copied_and_pickled(how):
    model, x = Holder(), torch.randn(3, 4)
    want = model(x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    torch.testing.assert_close(other(x), want)
    with torch.no_grad():
        other.part.weight.zero_()
        other.part.bias.zero_()
    assert not other(x).any()
    torch.testing.assert_close(model(x), want)
    assert list(other.state_dict()) == list(model.state_dict())


def test_entries_whose_objects_died_are_dropped():
    f = fuseline.compile(lambda model, x: model(x) * 2, options={"strict": True, "recompile_limit": 4})
    died = []
    for _ in range(10):
        model = torch.nn.Linear(3, 3)
        x = torch.randn(2, 3)
        torch.testing.assert_close(f(model, x), model(x) * 2)
        died.append(weakref.ref(model))
        del model
        gc.collect()
    dispatcher = f._fuseline_dispatcher
    assert not dispatcher.eager_reason
    assert sum(r() is not None for r in died) <= 1
    assert len(dispatcher.entries) <= 2
