"""A loop over a generator that waits inside a with: leaving the loop closes it at once, also where a graph break is in the loop."""
import torch

import fuseline


def halves(x):
    yield x
    with torch.no_grad():
        yield x / 2
    yield x / 4


def leaves_the_loop(x, items):
    for value in halves(x):
        items.append(value)
        if len(items) > 1:
            print(end="")
            break
    return x + 1


def test_leaving_a_loop_closes_its_generator():
    compiled = fuseline.compile(leaves_the_loop, backend="eager", options={"strict": True})
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert leaves_the_loop(x, []).requires_grad and torch.is_grad_enabled()
        assert compiled(x, []).requires_grad and torch.is_grad_enabled()
