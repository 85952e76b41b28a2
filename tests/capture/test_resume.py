"""Break and resume codes against the plain run: every instruction of a function is executed by a break code of its own, and
after each one the rest is also run in the resume code."""
import dis
import types

import pytest

from fuseline.capture.resume import Resumer
from fuseline.errors import NotSupported
from fuseline.ir.entry import Continue, drive
from fuseline.ir.region import FrameState


class Target:
    """Stands for a dispatcher: knows its resume code, runs it on demand."""

    def __init__(self, code, namespace):
        self.code, self.namespace = code, namespace

    def __call__(self, cells, *arguments):
        return types.FunctionType(self.code, self.namespace, self.code.co_name, None, cells or None)(*arguments)

    def frame(self, cells, *arguments):
        """The frame that the resume code would restore, read off its prologue."""
        names = dict(zip(self.code.co_varnames, arguments))
        stack = []
        for i in dis.get_instructions(self.code):
            if i.opname == "PUSH_NULL":
                stack.append(None)
            elif i.opname == "LOAD_FAST":
                stack.append(Box(names.pop(i.argval)))
            elif i.opname == "JUMP_FORWARD":
                offset = i.argval
                break
        boxed = {k: Box(v) for k, v in names.items() if k != "__first"}
        return FrameState(self.code, offset, stack, boxed, dict(zip(self.code.co_freevars, cells)), self.namespace)


class Box:
    """A value in the place of a recipe."""

    def __init__(self, value):
        self.value = value


def first_frame(function, arguments):
    """The frame of a call before its first instruction after RESUME."""
    code = function.__code__
    offset = next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME") + 2
    names = dict(zip(code.co_varnames, arguments))
    cells = {name: types.CellType(names.pop(name)) if name in names else types.CellType() for name in code.co_cellvars}
    cells |= dict(zip(code.co_freevars, function.__closure__ or ()))
    return FrameState(code, offset, [], {k: Box(v) for k, v in names.items()}, cells, function.__globals__)


def execute(resumer, frame):
    """Execute one instruction by a break code: a Continue, or the value that the frame returned."""
    suspended = resumer.factory(frame, False)
    cells = tuple(frame.cells[n] for n in suspended.cell_names)
    return suspended.call(cells, *(b.value for b in suspended.arguments(frame)))     # Box and Const both have a value


def outcome(call):
    try:
        return ("value", call())
    except Exception as error:
        return ("error", type(error), str(error))


def run_stepwise(function, arguments):
    resumer = Resumer(Target)
    frame = first_frame(function, arguments)
    for _ in range(3000):
        result = execute(resumer, frame)
        if type(result) is not Continue:
            return result
        frame = result.target.frame(*result.arguments)
    raise AssertionError("it does not end")


def run_resumed_after(function, arguments, steps):
    """Step so many instructions, then let the resume code run to the end."""
    resumer = Resumer(Target)
    frame = first_frame(function, arguments)
    for _ in range(steps):
        try:
            result = execute(resumer, frame)
        except NotSupported as refusal:
            assert "comprehension" in str(refusal)
            return function(*arguments)
        if type(result) is not Continue:
            return result
        frame = result.target.frame(*result.arguments)
    return drive(result)


def arithmetic(a, b):
    c = a + b * 2
    c -= 1
    return (c, -a, not b, a if b > 3 else c, a < b <= c)


def loop(n, items):
    total = 0
    for i in range(n):
        if i % 3 == 0:
            continue
        for j in items:
            total += i * j
            if total > 50:
                break
        else:
            total += 1
    while total > 10:
        total -= 7
    return total


def calls(x, y):
    def add(p, *rest, k=1, **more):
        return p + sum(rest) + k + len(more)

    text = "a,b".replace(",", ";").split(";")
    return add(x), add(x, y, k=3), add(*[x, y], **{"k": 2, "z": 4}), max(x, y, key=lambda v: -v), text, "".join(sorted(text))


def closure(x, y):
    z = 0

    def bump(by):
        nonlocal z
        z += by * x
        return z

    bump(y)
    bump(2)
    return z + bump(1) + x


def handlers(x, y):
    log = []
    try:
        log.append(x // y)
    except ZeroDivisionError as e:
        log.append(str(e))
    finally:
        log.append("end")
    try:
        try:
            {}[x]
        finally:
            log.append("inner")
    except KeyError:
        log.append("key")
    return log


class Manager:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")
        return self.log

    def __exit__(self, kind, value, trace):
        self.log.append(kind.__name__ if kind else None)
        return kind is KeyError


def managers(x, y):
    log = []
    with Manager(log) as a, Manager(a):
        a.append(x)
    with Manager(log):
        {}[y]
    for i in range(2):
        with Manager(log):
            if i == x:
                return log, i
    return log


def containers(x, y):
    a, (b, *c) = x, (y, 1, 2, 3)
    d = {"k": a, **{"z": b}}
    d["n"] = [*c, a][1:3]
    del d["k"]
    s = {a, b} | {3}
    s.add(9)
    text = f"{a!r:>4}|{b}"
    squares = [i * i for i in c if i != a]
    table = {i: j for i, j in zip(c, squares)}
    return a in c, d, sorted(s), text, squares, table, a is b, (z := a + 1) + z


def cells_in_comprehensions(x, y):
    adders = [lambda v: v + i + x for i in range(y)]
    table = {k: (lambda: k)() for k in "ab"}
    x += 1
    return [f(1) for f in adders], table, [x + j for j in range(2) if j != y]


def unbound(x, y):
    if x:
        late = y
    try:
        return late
    except UnboundLocalError as e:
        return type(e).__name__


def matched(x, y):
    match (x, y):
        case (1, str() as s):
            return s
        case (int(a), int(b)) if a > b:
            return a - b
        case {"k": v}:
            return v
        case _:
            return None


class Base:
    def f(self, v):
        return v + 1


class Derived(Base):
    def f(self, v):
        return super().f(v) * 2

    def method(self, v):
        return self.f(v) + self.f(v + 1)

    def with_self_in_a_cell(self, v):
        later = lambda w: (self, w)  # noqa: E731
        return super().f(v), later(v)[1]


def raises(x, y):
    value = [x]
    if y:
        raise ValueError(f"no {value}")
    return value


def nested_with_loop(x, y):
    out = []
    for i in range(3):
        try:
            with Manager(out):
                if i == 1:
                    continue
                out.append(10 // (i - x))
        except ZeroDivisionError:
            out.append("zero")
    return out


CASES = [(arithmetic, (2, 5)), (loop, (7, [1, 2, 5])), (calls, (4, 9)), (closure, (3, 4)), (handlers, (4, 2)), (handlers, (4, 0)),
         (managers, (1, 2)), (containers, (2, 7)), (unbound, (1, 2)), (unbound, (0, 2)), (matched, (1, "s")), (matched, (9, 3)),
         (raises, (1, 0)), (raises, (1, 2)), (nested_with_loop, (2, 0)), (Derived.f, (Derived(), 3)), (Derived.method, (Derived(), 3)),
         (Derived.with_self_in_a_cell, (Derived(), 3))]
IN_CELLS = [(cells_in_comprehensions, (2, 3))]            # 3.12 refuses points within these comprehensions


@pytest.mark.parametrize("function, arguments", CASES, ids=lambda v: getattr(v, "__name__", None))
def test_each_instruction_executed_alone_gives_the_plain_result(function, arguments):
    assert outcome(lambda: run_stepwise(function, arguments)) == outcome(lambda: function(*arguments))


@pytest.mark.parametrize("function, arguments", CASES + IN_CELLS, ids=lambda v: getattr(v, "__name__", None))
def test_resuming_anywhere_gives_the_plain_result(function, arguments):
    plain = outcome(lambda: function(*arguments))
    for steps in range(1, 60, 7):
        assert outcome(lambda steps=steps: run_resumed_after(function, arguments, steps)) == plain


def test_resuming_behind_a_comprehension_with_cells():
    code = cells_in_comprehensions.__code__
    at = [i for i in dis.get_instructions(code) if i.starts_line and i.starts_line == code.co_firstlineno + 3]
    cells = {n: types.CellType({"x": 5, "y": 3}.get(n)) for n in code.co_cellvars}
    frame = FrameState(code, at[0].offset, [], {"y": Box(3), "adders": Box([]), "table": Box({})}, cells, globals())
    result = execute(Resumer(Target), frame)
    assert drive(result) == ([], {}, [6, 7])


def test_a_break_in_a_loop_comes_back_to_the_same_code():
    resumer = Resumer(Target)
    frame = first_frame(loop, (6, [1]))
    codes = []
    while True:
        result = execute(resumer, frame)
        if type(result) is not Continue:
            break
        codes.append(result.target.code)
        frame = result.target.frame(*result.arguments)
    layouts = {(c.co_varnames, len(c.co_code)) for c in codes}
    assert len(set(map(id, codes))) < 90 < len(codes)
    assert layouts


def outer_frame(x):
    total = []
    try:
        total.append(helper(x))
    except ValueError as e:
        total.append(str(e))
    return total


def helper(x):
    return x


def test_outer_frame_gets_the_inner_result_and_handles_its_exception():
    resumer = Resumer(Target)
    code = outer_frame.__code__
    instructions = [i for i in dis.get_instructions(code)]
    call = next(n for n, i in enumerate(instructions) if i.opname == "CALL" and instructions[n - 1].opname in ("PRECALL", "LOAD_FAST")
                and any(j.argval == "helper" for j in instructions[max(0, n - 4):n]))
    total = []
    below = [Box(total.append)] if False else [None, Box(total.append)]
    frame = FrameState(code, instructions[call + 1].offset, below, {"x": Box(3), "total": Box(total)}, {}, globals())
    suspended = resumer.factory(frame, True)
    arguments = [b.value for b in suspended.arguments(frame)]
    assert drive(suspended.call((), *arguments, lambda: 5)) == [5]

    def fails():
        raise ValueError("bad")

    del total[:]
    assert drive(suspended.call((), *arguments, fails)) == ["bad"]


def test_generators_are_refused():
    def gen():
        yield 1

    with pytest.raises(NotSupported):
        Resumer(Target).factory(FrameState(gen.__code__, 4, [], {}, {}, globals()), False)
