"""A compiled graph that raises: what the program did before, its handlers and its exception come out as in eager mode."""
import contextlib

import pytest
import torch

import fuseline

SINGULAR, FINE = -torch.eye(3), torch.eye(3)


def handled(a, log):
    log.append("before")
    try:
        factor = torch.linalg.cholesky(a * 2)
    except RuntimeError as error:
        log.append(type(error).__name__)
        factor = a * 3
    return factor + 1


def unhandled(a, log):
    log.append(a.shape[0])
    with torch.no_grad():
        log.append("in")
        return torch.linalg.cholesky(a * 2)


def written_later(a, log):
    b = torch.linalg.cholesky(a)
    log.append(1)
    a.mul_(2)
    return a + b


def suppressed(a, log):
    with contextlib.suppress(RuntimeError):
        b = torch.linalg.cholesky(a)
        log.append("positive")
        return b
    return None


def refused_by_the_operator(a, log):
    log.pop()
    return True - a


def after_a_break(a, log):
    print(end="")
    log.append(float(a[0, 0]))
    return torch.linalg.cholesky(a + 0)


def outcome(function, a, log):
    try:
        result = function(a, log)
    except Exception as error:
        result = type(error)
    grad, _ = torch.is_grad_enabled(), torch.set_grad_enabled(True)
    return result, a, log, grad


@pytest.mark.parametrize("backend", ["eager", "fuseline"])
@pytest.mark.parametrize("function", [handled, unhandled, written_later, suppressed, refused_by_the_operator, after_a_break])
def test_a_graph_that_raises_leaves_what_eager_leaves(function, backend):
    compiled = fuseline.compile(function, backend=backend, options={"strict": True})
    for example in (FINE, SINGULAR, FINE, SINGULAR):
        want, got = outcome(function, example.clone(), [0]), outcome(compiled, example.clone(), [0])
        assert want[2:] == got[2:]
        torch.testing.assert_close(got[1], want[1])
        if isinstance(want[0], torch.Tensor):
            torch.testing.assert_close(got[0], want[0])
        else:
            assert want[0] == got[0]


def test_a_mistake_of_ours_in_a_graph_is_said(caplog):
    from fuseline.errors import InternalError

    def broken(graph_module, inputs):
        def run(*args):
            raise InternalError("a mistake")
        return run

    compiled = fuseline.compile(lambda x: x + 1, backend=broken, options={"strict": False})
    with caplog.at_level("WARNING", logger="fuseline"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert any("a mistake" in record.getMessage() for record in caplog.records)
