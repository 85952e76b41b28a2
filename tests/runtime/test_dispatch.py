"""Dispatch with hand-made regions: binding, entries, recompilation, sizes that become dynamic, falling back, threads."""
import threading

import pytest
import torch

from fuseline.capture.assemble import assemble
from fuseline.capture.frame import FrameStart
from fuseline.errors import GraphBreakError, InternalError, NotSupported, RecompileLimit
from fuseline.ir.entry import CompiledEntry, Continue, drive
from fuseline.ir.record import CompileRecord
from fuseline.ir.region import FromGraph, GraphInput, Guard, Local, Region, Returned, TensorFacts
from fuseline.options import Options
from fuseline.runtime import control
from fuseline.runtime.dispatch import DYNAMIC_ATTRIBUTE, Dispatcher, Program


class Compiler:
    """A compile_frame that guards each argument and makes a graph that calls the original."""

    def __init__(self, function, refuse=None, wrong_guards=False):
        self.function, self.refuse, self.wrong_guards = function, refuse, wrong_guards
        self.calls = []

    def __call__(self, start, options, dynamic, program, reason):
        self.calls.append((dict(start.arguments), dynamic, reason))
        if self.refuse is not None:
            raise self.refuse
        guards = [self.guard(name, value, dynamic) for name, value in start.arguments.items()]
        if self.wrong_guards:
            guards.append(Guard(Local(next(iter(start.arguments))), "is", object()))
        inputs = tuple(GraphInput(n, Local(n), None) for n in start.arguments)
        names = tuple(start.arguments)
        region = Region(start.code, object(), inputs, tuple(guards), (), Returned(FromGraph(0)))

        def graph(*values):
            return (("compiled", dict(zip(names, values))),)
        return CompiledEntry(tuple(guards), assemble(region, graph, None), CompileRecord(start.name, "test"))

    @staticmethod
    def guard(name, value, dynamic):
        if not isinstance(value, torch.Tensor):
            return Guard(Local(name), "range", (2, None)) if (Local(name), None) in dynamic else Guard(Local(name), "equals", value)
        shape = tuple(None if (Local(name), i) in dynamic else n for i, n in enumerate(value.shape))
        stride = tuple(None if any((Local(name), j) in dynamic for j in range(i + 1, value.dim())) else s
                       for i, s in enumerate(value.stride()))
        return Guard(Local(name), "tensor", TensorFacts(type(value), value.dtype, value.device, shape, stride, value.requires_grad))


def dispatch(function, compiler=None, **options):
    compiler = compiler or Compiler(function)
    program = Program(Options(**{"strict": True, **options}), compiler, FrameStart)
    dispatcher = Dispatcher(program, function.__code__, function.__globals__, function)
    stub = dispatcher.stub()
    stub.__qualname__ = function.__qualname__
    return stub, dispatcher, compiler


def sample(a, b=2, /, *rest, c, d=4, **more):
    return a, b, rest, c, d, more


@pytest.mark.parametrize("args, kwargs", [((1,), {"c": 3}), ((1, 5, 6, 7), {"c": 1, "d": 2, "z": 9, "a": 1}), ((1, 2), {"c": 0, "b": 3})])
def test_arguments_are_bound_as_python_binds_them(args, kwargs):
    stub, _, _ = dispatch(sample)
    kind, bound = stub(*args, **kwargs)
    assert kind == "compiled" and tuple(bound.values()) == (*sample(*args, **kwargs)[:2], *sample(*args, **kwargs)[3:5],
                                                           *sample(*args, **kwargs)[2:3], *sample(*args, **kwargs)[5:])
    with control.disabled():
        assert stub(*args, **kwargs) == sample(*args, **kwargs)


@pytest.mark.parametrize("args, kwargs", [((), {}), ((), {"c": 1}), ((1,), {}), ((1,), {"a": 2})])
def test_wrong_calls_complain_as_python_does(args, kwargs):
    stub, _, compiler = dispatch(sample)
    with pytest.raises(TypeError) as wanted:
        sample(*args, **kwargs)
    with pytest.raises(TypeError) as got:
        stub(*args, **kwargs)
    assert str(got.value) == str(wanted.value) and not compiler.calls


def test_defaults_are_those_of_the_moment():
    def f(x, k=1, *, m=2):
        return x, k, m
    stub, dispatcher, _ = dispatch(f)
    assert stub(0)[1] == {"x": 0, "k": 1, "m": 2}
    f.__defaults__, f.__kwdefaults__ = (5,), {"m": 6}
    assert stub(0)[1] == {"x": 0, "k": 5, "m": 6}
    assert dispatcher.recompile_reasons == ["argument k: was 1, now 5"]
    f.__defaults__ = None
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'k'"):
        stub(0)


def test_entries_are_reused_and_parameters_may_have_any_name():
    def f(_fl_switch, check):
        return _fl_switch, check
    stub, dispatcher, compiler = dispatch(f, dynamic=False)
    for value in (1, 2, 1, 2, 2, 1):
        assert stub(value, 0)[1]["_fl_switch"] == value
    assert len(compiler.calls) == len(dispatcher.entries) == 2


def test_the_entry_used_last_is_tried_first():
    stub, dispatcher, _ = dispatch(lambda s: s)
    checked = []
    for s in "abc":
        stub(s)
    for entry in dispatcher.entries:
        full = entry.full.best
        entry.full.best = lambda full=full, entry=entry: lambda *values: checked.append(entry) or full()(*values)
        entry.fast.prepare = lambda values: None
    used = {}
    for s in "abcaabbb":                                                  # from now on each check leaves a trace
        checked.clear()
        stub(s)
        first = dispatcher.entries[0]
        assert used.setdefault(s, first) is first
    assert checked == [used["b"]]                                         # the third call in a row asked one entry only
    assert dispatcher.entries[:2] == [used["b"], used["a"]]


def test_the_recompile_limit_is_said_once(caplog):
    stub, _, compiler = dispatch(lambda number: number, recompile_limit=2, dynamic=False)
    for i in range(8):
        stub(i)
    assert len(compiler.calls) == 2
    assert sum("recompile_limit" in r.getMessage() for r in caplog.records) == 1


def test_a_size_that_changes_becomes_dynamic_and_0_and_1_do_not():
    stub, dispatcher, compiler = dispatch(lambda x, n: (x, n))
    for shape, n in (((4, 3), 7), ((5, 3), 7), ((6, 3), 7), ((1, 3), 7), ((8, 3), 9), ((8, 3), 10)):
        stub(torch.ones(shape), n)
    axis = (Local("x"), 0)
    assert [c[1] for c in compiler.calls] == [frozenset(), {axis}, {axis, (Local("n"), None)}]
    assert dispatcher.recompile_reasons == ["argument x: size 0 was 4, now 5", "argument n: was 7, now 9"]


def test_dynamic_true_marks_and_false():
    stub, _, compiler = dispatch(lambda x: x, dynamic=True)
    stub(torch.ones(4, 1, 3))
    assert compiler.calls[0][1] == {(Local("x"), 0), (Local("x"), 2)}
    stub, _, compiler = dispatch(lambda x: x, dynamic=False)
    stub(torch.ones(4))
    stub(torch.ones(5))
    assert compiler.calls[1][1] == frozenset()
    stub, _, compiler = dispatch(lambda x: x)
    marked = torch.ones(4, 5)
    setattr(marked, DYNAMIC_ATTRIBUTE, {1})
    stub(marked)
    assert compiler.calls[0][1] == {(Local("x"), 1)}


def test_too_many_entries_run_eagerly_or_raise_under_fullgraph(caplog):
    stub, dispatcher, compiler = dispatch(lambda s: s, recompile_limit=2)
    assert [stub(s) for s in "abca"] == [("compiled", {"s": "a"}), ("compiled", {"s": "b"}), "c", ("compiled", {"s": "a"})]
    assert len(compiler.calls) == 2 and "limit" in dispatcher.eager_reason
    stub, _, _ = dispatch(lambda s: s, recompile_limit=1, fullgraph=True)
    stub("a")
    with pytest.raises(RecompileLimit, match="compiled 1 times"):
        stub("b")


def test_a_refused_frame_runs_eagerly_and_is_not_tried_again():
    def f(x):
        return "eager", x
    stub, dispatcher, compiler = dispatch(f, Compiler(f, NotSupported("generators", at="f.py:1")))
    assert [stub(1), stub(2)] == [("eager", 1), ("eager", 2)] and len(compiler.calls) == 1
    assert dispatcher.program.records[0].fallback == "f.py:1: generators"
    stub, _, _ = dispatch(f, Compiler(f, NotSupported("generators", at="f.py:1")), fullgraph=True)
    with pytest.raises(GraphBreakError, match="generators"):
        stub(1)


def test_our_own_errors_are_raised_if_strict_and_fall_back_otherwise():
    def f(x):
        return "eager", x
    stub, _, _ = dispatch(f, Compiler(f, ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        stub(1)
    stub, _, _ = dispatch(f, Compiler(f, ZeroDivisionError("bug")), strict=False)
    assert stub(1) == ("eager", 1)
    stub, _, _ = dispatch(f, Compiler(f, wrong_guards=True))
    with pytest.raises(InternalError, match="do not hold"):
        stub(1)


def test_while_capturing_the_original_runs():
    calls = []

    def f(x):
        calls.append(control.is_capturing())
        return x
    stub, _, _ = dispatch(f)
    with control.capturing():
        assert stub(3) == 3
    assert calls == [True] and not control.is_off()


def test_reset_forgets_entries():
    stub, dispatcher, compiler = dispatch(lambda x: x)
    stub(1)
    control.reset()
    stub(1)
    stub(2)
    assert [c[2] for c in compiler.calls] == ["", "", "argument x: was 1, now 2"]


def test_resume_codes_take_cells_and_hand_on_continues():
    def f(a, b):
        return a + b
    program = Program(Options(strict=True), Compiler(f), FrameStart)
    target = program.resume_dispatcher(f.__code__, globals())
    assert target((), 1, 2) == ("compiled", {"a": 1, "b": 2})
    depth = []

    def count(cells, n):
        depth.append(n)
        return Continue(count, ((), n - 1)) if n else "end"
    assert drive(Continue(count, ((), 5000))) == "end" and len(depth) == 5001


def test_threads_compile_once_and_never_mix_entries():
    stub, dispatcher, compiler = dispatch(lambda x, y: (x, y), dynamic=False)
    errors = []

    def work():
        for i in range(300):
            if stub(i % 3, 0)[1]["x"] != i % 3:
                errors.append(i)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors and len(compiler.calls) == 3
