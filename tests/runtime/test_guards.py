"""Guards as code against guards one by one; the word table against the full check under random changes; word kinds by experiment."""
import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuseline.ir.region import (
    Attr,
    Cell,
    CellOf,
    ClassDict,
    Global,
    Guard,
    InDict,
    Item,
    KeyAt,
    Local,
    TensorFacts,
    TypeOf,
)
from fuseline.runtime import modes
from fuseline.runtime.fast_check import FastCheck
from fuseline.runtime.guards import FullCheck, compile_check, exactly_equal, explain_failure, failures
from fuseline.runtime.words import WordTable, layout, native_differs


def facts(t, dynamic=()):
    def known(extents):
        return tuple(None if i in dynamic else n for i, n in enumerate(extents))
    return TensorFacts(type(t), t.dtype, t.device, known(t.shape), known(t.stride()), t.requires_grad, t.layout)


class Thing:
    kind = "thing"

    def __init__(self):
        self.x, self.items = 1, {"a": 1, "b": [1, 2]}


def captured(n):
    def inner():
        return n
    return inner


NAMESPACE = {"setting": 3}

# (guards over local `v`, a value that fits, values that do not)
CASES = {
    "type": ([Guard(Local("v"), "type", int)], 1, [True, 1.0, "1"]),
    "is": ([Guard(Local("v"), "is", None)], None, [0, False]),
    "equals int": ([Guard(Local("v"), "equals", 3)], 3, [4, 3.0, True, "3"]),
    "equals bool": ([Guard(Local("v"), "equals", True)], True, [1, False, 1.0]),
    "equals float": ([Guard(Local("v"), "equals", 0.0)], 0.0, [-0.0, 0, float("nan")]),
    "equals nan": ([Guard(Local("v"), "equals", float("nan"))], float("nan"), [0.0]),
    "equals tuple": ([Guard(Local("v"), "equals", (1, 2.5, "a"))], (1, 2.5, "a"), [(True, 2.5, "a"), (1, 2.5), [1, 2.5, "a"]]),
    "equals str": ([Guard(Local("v"), "equals", "it's")], "it's", ["its", None]),
    "dtype": ([Guard(Local("v"), "equals", torch.float32)], torch.float32, [torch.float64]),
    "length": ([Guard(Local("v"), "type", list), Guard(Local("v"), "length", 2)], [1, 2], [[1], (1, 2), [1, 2, 3]]),
    "empty": ([Guard(Local("v"), "type", dict), Guard(Local("v"), "length", 0)], {}, [{1: 2}, OrderedDict()]),
    "keys": ([Guard(Local("v"), "keys", ("a", "b"))], {"a": 1, "b": 2}, [{"b": 1, "a": 2}, {"a": 1}, {}]),
    "no_key": ([Guard(Local("v"), "no_key", "z")], {"a": 1}, [{"z": 1}]),
    "item": ([Guard(Item(Local("v"), 1), "equals", 5)], (1, 5), [(1, 6), (1,), [1], 3]),
    "dict item": ([Guard(Item(Local("v"), "k"), "is", None)], {"k": None}, [{"k": 1}, {}, {"q": None}]),
    "key at": ([Guard(KeyAt(Local("v"), 1), "equals", "b")], {"a": 1, "b": 2}, [{"b": 1, "a": 2}, {"a": 1}]),
    "attribute": ([Guard(Attr(Local("v"), "x"), "equals", 1)], Thing(), [3, None]),
    "class attribute": ([Guard(ClassDict(TypeOf(Local("v")), "kind"), "equals", "thing")], Thing(), [3]),
    "closure": ([Guard(CellOf(Local("v"), 0), "equals", 7)], captured(7), [captured(8), len]),
    "range": ([Guard(Local("v"), "range", (2, 9))], 5, [1, 10, True, 5.0]),
    "call": ([Guard(Local("v"), "call", callable)], len, [3]),
    "sizes": ([Guard(None, "sizes", "s0 % 4 == 0 and s0 < 2 * s1", "", (("s0", (Local("v"), 0)), ("s1", (Local("v"), 1))))],
              torch.ones(8, 5), [torch.ones(7, 5), torch.ones(8, 4), torch.ones(8)]),
    "tensor": ([Guard(Local("v"), "tensor", facts(torch.ones(2, 3)))], torch.zeros(2, 3),
               [torch.ones(2, 4), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64), torch.nn.Parameter(torch.ones(2, 3)),
                torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, device="meta"), torch.ones(6), None]),
    "dynamic tensor": ([Guard(Local("v"), "tensor", facts(torch.ones(4, 3), (0,)))], torch.zeros(9, 3), [torch.ones(9, 4), torch.ones(9)]),
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_and_interpreted_guards_agree(name):
    guards, fits, wrong = CASES[name]
    check = compile_check(guards, ["v"])
    assert check(fits, ()) == () and failures(guards, {"v": fits}, {}) == []
    for value in wrong:
        assert check(value, ()) is None, value
        assert explain_failure(guards, {"v": value}, {}), value


def test_relations_between_sources():
    a, b = torch.ones(4), torch.ones(4)
    for kind, good, bad in (("same", (a, a), (a, b)), ("distinct", (a, b), (a, a)), ("no_overlap", (a[:2], a[2:]), (a[:3], a[2:])),
                            ("overlap", (a[:3], a[2:]), (a, b))):
        guards = [Guard(Local("x"), kind, Local("y"))]
        check = compile_check(guards, ["x", "y"])
        assert check(*good, ()) == () and not failures(guards, dict(zip("xy", good)), {})
        assert check(*bad, ()) is None and failures(guards, dict(zip("xy", bad)), {})


def test_closure_cells_globals_and_prefetch():
    cell = captured(4).__closure__[0]
    guards = [Guard(Cell("n"), "equals", 4), Guard(Global("setting", NAMESPACE), "equals", 3)]
    check = compile_check(guards, ["x"], ["n"], [Local("x"), Cell("n")])
    assert check("argument", (cell,)) == ("argument", 4)
    cell.cell_contents = 5
    assert check("argument", (cell,)) is None
    assert explain_failure(guards, {"x": 0}, {"n": cell}) == "n: was 4, now 5"


def test_modes_are_checked_first():
    guards = [Guard(Attr(Local("v"), "boom"), "is", None), Guard(None, "mode", ("grad", True))]
    check = compile_check(guards, ["v"])
    with torch.no_grad():
        assert check(3, ()) is None
        assert explain_failure(guards, {"v": 3}, {}) == "grad mode was True, now False"


@pytest.mark.parametrize("name, context", [
    ("grad", torch.no_grad), ("inference", torch.inference_mode), ("autocast", lambda: torch.autocast("cpu", torch.bfloat16)),
    ("default_device", lambda: torch.device("meta")), ("torch_function", lambda: torch.overrides.BaseTorchFunctionMode())])
def test_each_mode_is_noticed_both_ways(name, context):
    outside = compile_check([Guard(None, "mode", (name, modes.read(name)))], [])
    with context():
        inside = compile_check([Guard(None, "mode", (name, modes.read(name)))], [])
        assert outside(()) is None and inside(()) == ()
    assert outside(()) == () and inside(()) is None
    device_only = compile_check([Guard(None, "mode", ("torch_function", False))], [])
    with torch.device("meta"):
        assert device_only(()) == ()


def test_reading_a_defaultdict_does_not_grow_it():
    from collections import defaultdict
    d = defaultdict(list)
    assert compile_check([Guard(Item(Local("v"), "k"), "type", list)], ["v"])(d, ()) is None
    assert not d


def test_failure_texts_name_argument_axis_and_line():
    guard = Guard(Local("x"), "tensor", facts(torch.ones(2, 128)), "model.py:12")
    assert explain_failure([guard], {"x": torch.ones(2, 160)}, {}) == "argument x: size 1 was 128, now 160 (read at model.py:12)"


@given(st.recursive(st.one_of(st.integers(-2, 2), st.floats(width=16), st.booleans(), st.none(), st.text(max_size=1)),
                    lambda s: st.tuples(s, s) | st.lists(s, max_size=2), max_leaves=4))
@settings(max_examples=60, deadline=None)
def test_equal_means_same_types_and_bits(value):
    import copy
    assert exactly_equal(value, copy.deepcopy(value))
    assert compile_check([Guard(Local("v"), "equals", value)], ["v"])(copy.deepcopy(value), ()) == ()


# ---------------------------------------------------------------- words

def test_all_word_kinds_are_found_on_this_build():
    found = layout()
    assert found.dicts and found.types and found.cells and found.functions and found.tensors is not None


def module_guards(module, source):
    guards, tensors = [], []

    def visit(m, s):
        guards.append(Guard(s, "type", type(m)))
        guards.append(Guard(InDict(s, "training"), "equals", m.training))
        guards.append(Guard(s, "absent", "forward"))
        guards.append(Guard(ClassDict(TypeOf(s), "forward"), "is", type(m).__dict__["forward"]))
        guards.append(Guard(InDict(s, "_forward_hooks"), "length", 0))
        for name, p in m._parameters.items():
            place = Item(InDict(s, "_parameters"), name)
            guards.append(Guard(place, "tensor", facts(p)))
            tensors.append(place)
        guards.append(Guard(InDict(s, "_modules"), "keys", tuple(m._modules)))
        for name, child in m._modules.items():
            visit(child, Item(InDict(s, "_modules"), name))

    visit(module, source)
    return guards, tensors


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x))


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x):
        return self.two(self.one(x))


def _other_class(m):
    m.one.a.__class__ = type("Linear", (torch.nn.Linear,), {})


def _patched(m):
    original = Block.forward
    Block.forward = lambda self, x: x
    return lambda: setattr(Block, "forward", original)


def _new_dict(m):
    m.two.__dict__ = dict(m.two.__dict__, training=not m.two.training)


CHANGES = [
    lambda m: m.eval(), lambda m: m.train(), lambda m: setattr(m.one, "training", not m.one.training),
    lambda m: m.one.a.weight.requires_grad_(not m.one.a.weight.requires_grad), lambda m: setattr(m.two.b.weight, "data", torch.ones(2, 3)),
    lambda m: setattr(m.two.b.weight, "data", torch.ones(3, 2)), lambda m: setattr(m.two, "b", torch.nn.Linear(3, 2)),
    lambda m: setattr(m.one, "forward", lambda x: x), lambda m: m.one.__dict__.pop("forward", None),
    lambda m: m.one.a.register_forward_hook(lambda *a: None), lambda m: m.one.a._forward_hooks.clear(),
    lambda m: m.one.a._forward_hooks.popitem() if m.one.a._forward_hooks else None, lambda m: m.double(), lambda m: m.float(),
    lambda m: m._modules.update(extra=torch.nn.ReLU()), lambda m: m._modules.pop("extra", None),
    lambda m: m.one.a.weight.data.add_(1), lambda m: setattr(m.one, "_modules", dict(m.one._modules)),
    lambda m: setattr(m.one.a, "weight", torch.nn.Parameter(torch.ones(3, 2))), _other_class, _patched, _new_dict,
]


@given(st.lists(st.integers(0, len(CHANGES) - 1), max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_words_and_guards_agree_under_random_changes(changes):
    model, x, undo = Outer(), torch.ones(1, 2), []
    guards, tensors = module_guards(model, Local("self"))
    guards.append(Guard(Local("x"), "tensor", facts(x)))
    names = ("self", "x")
    full = compile_check(guards, names, (), tensors)
    fast = FastCheck(guards, names, (), tensors, FullCheck(guards, names, (), tensors)).prepare((model, x, ()))
    try:
        for change in changes:
            revert = CHANGES[change](model)
            if change == CHANGES.index(_patched):
                undo.append(revert)
            want, got = full(model, x, ()), fast(model, x, ())
            assert (want is None) == (got is None), change
            assert want is None or all(a is b for a, b in zip(want, got))
    finally:
        for revert in reversed(undo):
            revert()


@given(st.lists(st.integers(0, 5), max_size=8))
@settings(max_examples=30, deadline=None)
def test_native_comparison_and_its_twin_agree(changes):
    things = [Thing() for _ in range(3)]
    table = WordTable()
    for t in things:
        table.add_dict(table.add_instance_dict(t))
        table.add_type_of(t)
        table.add_dict(t.items)
    table.seal()
    differs = native_differs()
    assert differs(table.pointer) == table.differs_in_python() == 0
    for c in changes:
        if c < 3:
            things[c].x += 1
        else:
            things[c - 3].items["c"] = c
        assert differs(table.pointer) == table.differs_in_python() > 0


def test_another_module_takes_the_full_check():
    first, second, x = Outer(), Outer(), torch.ones(1, 2)
    guards, tensors = module_guards(first, Local("self"))
    fast = FastCheck(guards, ("self",), (), tensors, FullCheck(guards, ("self",), (), tensors)).prepare((first, ()))
    assert fast(first, ())[0] is first.one.a.weight
    assert fast(second, ())[0] is second.one.a.weight
    assert fast(x, ()) is None


def test_a_module_that_dies_is_let_go():
    model = Outer()
    guards, tensors = module_guards(model, Local("self"))
    check = FastCheck(guards, ("self",), (), tensors, FullCheck(guards, ("self",), (), tensors)).prepare((model, ()))
    assert check(model, ()) is not None
    parameter = weakref.ref(model.one.a.weight)
    del model
    gc.collect()
    assert parameter() is None
    again = Outer()
    assert check(again, ())[0] is again.one.a.weight
