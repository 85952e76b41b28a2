"""Breaks at any place: frames are suspended, one instruction is executed by Python, and the rest is interpreted anew.

There are no tensors here: `stop(x)` is the instruction that only Python can execute. What the interpreter makes is real.
"""
import contextlib
import types

import pytest
from plain_world import PlainWorld

from fuseline.capture.assemble import assemble, parameter_names
from fuseline.capture.errors import RestartCapture, break_here
from fuseline.capture.frame import FrameStart
from fuseline.capture.generators import Generator
from fuseline.capture.interpret import Interpreter
from fuseline.capture.process_state import ProcessState
from fuseline.capture.resume import Resumer
from fuseline.ir.entry import drive
from fuseline.ir.region import Broke, Const
from fuseline.options import Options


def stop(x):
    return x


class BreakingWorld(PlainWorld):
    def is_leaf(self, function):
        return function is stop

    def call(self, function, args, kwargs):
        if function is stop:
            raise break_here("stop", "stop is called")
        return super().call(function, args, kwargs)

    def recipe(self, value):
        return value.recipe(self) if isinstance(value, Generator) else Const(value)

    def finish(self, roots):
        return None, (), (), ()


class Runner:
    """Interprets each piece of code each time it is entered; `ends` tells how the regions ended."""

    def __init__(self):
        self.ends, self.resumer = [], Resumer(self.wrap)

    def wrap(self, code, namespace):
        return lambda cells, *values: self.run(code, namespace, cells, dict(zip(parameter_names(code), values)))

    def run(self, code, namespace, cells, arguments):
        start = FrameStart(code, namespace, None, tuple(cells), arguments)
        stops = {}
        while True:
            try:
                region = Interpreter(start, Options(), frozenset(), stops, ProcessState.now(), BreakingWorld).run_region()
                break
            except RestartCapture as again:
                assert not stops or again.step < min(stops)
                stops = {again.step: again.reason}
        self.ends.append(region.end)
        entry = assemble(region, None, self.resumer.factory)
        return entry.function((), *(arguments[n] for n in parameter_names(code)), tuple(cells))


def check(function, *args, breaks=None):
    want = function(*args)
    runner = Runner()
    code = function.__code__
    got = drive(runner.run(code, function.__globals__, function.__closure__ or (), dict(zip(parameter_names(code), args))))
    assert repr(got) == repr(want)
    broke = [e for e in runner.ends if isinstance(e, Broke)]
    if breaks is not None:
        assert len(broke) == breaks
    return broke


def test_break_in_straight_line_keeps_the_stack():
    def f(a):
        xs = [1, 2]
        return [*xs, a + stop(a) * 2, {"k": stop(3)}, f"{a}{stop(4)}"]
    check(f, 5, breaks=3)


def test_break_in_a_loop_resumes_with_the_iterator():
    def f(n):
        total = 0
        for i, x in enumerate([4, 5, 6][:n]):
            if x == 5:
                continue
            total = total + stop(x) * i
        else:
            total += 100
        return total
    check(f, 3, breaks=2)


def test_break_deep_inside_calls_keeps_the_callers():
    def level3(x):
        return x + 1 if stop(x) > 0 else x - 1

    def level2(x, k):
        total = 0
        for i in range(k):
            total = total + level3(x * i) * (i + 1)
        return total

    def f(x):
        return [1, x * 2 + level2(x, 3) * level2(-x, *[2]), {"k": level2(x, k=1)}]
    broke = check(f, 2, breaks=6)
    assert [len(b.frames) for b in broke] == [3, 2, 2, 3, 2, 3]      # the caller itself waits in Python when its callee resumes
    assert broke[0].reason.stack[-1].endswith("level3") and "level2" in broke[0].reason.stack[-2]


def test_cells_stay_shared_over_a_break():
    def f(a):
        count = a

        def bump():
            nonlocal count
            count = count + stop(1)
            return count
        first = bump()
        count *= 10
        return first, bump(), count, (lambda: count)()
    check(f, 3, breaks=2)


def test_dead_locals_are_not_carried_over():
    def f(a):
        dead = a + 1
        alive = dead * 2
        stop(a)
        return alive
    (broke,) = check(f, 1)
    assert set(broke.frames[0].locals) == {"alive"}


def test_break_in_a_generator_ends_before_the_generator():
    def numbers(n):
        for i in range(n):
            yield stop(i) * 2

    def f(n):
        before = n + 1
        return before, sum(numbers(n)), [x for x in numbers(2)]
    check(f, 3)


def test_break_in_a_callback_or_constructor_breaks_at_the_call():
    class Box:
        def __init__(self, x):
            self.x = stop(x)

    def f(n):
        return sorted([3, 1, 2], key=lambda v: -stop(v)), Box(n).x, Box(n + 1).x
    assert [len(b.frames) for b in check(f, 3)] == [1, 1, 1]


def test_break_inside_try_and_with():
    log = []

    class Manager:
        def __enter__(self):
            return 5

        def __exit__(self, *exc):
            log.append(exc[0])
            return True

    def f(n):
        del log[:]
        try:
            if stop(n) > 1:
                raise ValueError(n)
            log.append("ok")
        except ValueError as error:
            log.append(stop(error.args))
        finally:
            log.append("finally")
        with Manager() as m:
            m = stop(m) + 1
            {}[m]
        with contextlib.suppress(KeyError):
            m = stop(m) * 2
            {}[m]
        return m, list(log)
    check(f, 1)
    check(f, 2)


def test_an_exception_of_the_callee_meets_the_callers_handler():
    def callee(x):
        y = stop(x)
        raise KeyError(y)

    def f(x):
        try:
            return callee(x)
        except KeyError as error:
            return ("caught", error.args, stop(x))
    check(f, 7)


def test_a_loop_with_a_break_makes_no_new_code_each_time():
    def f(n):
        while n > 0:
            n = n - stop(1)
        return n
    runner = Runner()
    made = []
    wrap = runner.resumer._wrap
    runner.resumer._wrap = lambda code, namespace: made.append(code) or wrap(code, namespace)
    assert drive(runner.run(f.__code__, globals(), (), {"n": 50})) == 0
    assert len(made) <= 2


def test_state_functions_are_restored():
    assert isinstance(stop, types.FunctionType)
    with pytest.raises(KeyError):
        check(lambda x: {}[stop(x)], 1)
