"""Assembled entries: values rebuilt with identity and cycles, effects in order, breaks that run and resume."""
import collections
import dis
import functools

import pytest

from fuseline.capture.assemble import assemble
from fuseline.capture.resume import Resumer
from fuseline.ir.entry import drive
from fuseline.ir.region import (
    Attr,
    Broke,
    Cell,
    CellObject,
    Const,
    Effect,
    FrameState,
    FromGraph,
    FromSource,
    GraphBreak,
    GraphInput,
    InDict,
    Item,
    Local,
    New,
    Raised,
    Region,
    Returned,
)
from fuseline.runtime.guards import compile_check

REASON = GraphBreak("print", "here", "prints", "do not")


def program(x, y):
    return x + y


def run(end, effects=(), inputs=(), graph=None, arguments=(1, 2), function=program, resumer=None):
    region = Region(function.__code__, graph, tuple(inputs), (), tuple(effects), end, "program")
    assembled = assemble(region, graph, resumer and resumer.factory)
    names = function.__code__.co_varnames[:len(arguments)]
    cells = function.__closure__ or ()
    prefetched = compile_check((), names, function.__code__.co_freevars, assembled.prefetch)(*arguments, cells)
    return drive(assembled.function(prefetched, *arguments, cells))


def x_is(*items):
    return [FromSource(Item(Local("x"), i)) for i in items]


class Node:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("a", "b")


class Stack(list):
    def append(self, item):
        raise AssertionError("the class's own methods are not run")

    __setitem__ = append


def test_graph_inputs_and_outputs():
    inputs = [GraphInput("a", Local("x"), None), GraphInput("w", Item(InDict(Local("y"), "table"), "w"), None, True)]
    holder = Node(0)
    holder.table = {"w": 5}
    assert run(Returned(FromGraph(1)), inputs=inputs, graph=lambda a, w: (a, a * w), arguments=(3, holder)) == 15


def test_new_objects_are_built_once_and_keep_identity():
    shared = New("list", [Const(1), FromSource(Local("x"))])
    value = run(Returned(New("tuple", [shared, shared, New("dict", [Const("k"), shared])])))
    assert value == ([1, 1], [1, 1], {"k": [1, 1]}) and value[0] is value[1] is value[2]["k"]


def test_every_kind_of_container():
    items = [Const(1), Const(2)]
    parts = [New("set", items), New("set"), New("frozenset", items), New("deque", items, extra=5),
             New("slice", [Const(0), Const(3), Const(None)]),
             New("range", [Const(0), Const(6), Const(2)]), New("dict", items, extra=collections.OrderedDict),
             New("dict", [Const(list), *items], extra=collections.defaultdict), New("iterator", [New("list", items)]),
             New("partial", [Const(pow), New("tuple", [Const(2)]), New("dict")]), New("method", [Const(list.append), New("list")]),
             New("call", [Const(complex), Const(1), Const(2)])]
    made = run(Returned(New("list", parts)))
    assert made[:6] == [{1, 2}, set(), frozenset((1, 2)), collections.deque([1, 2], 5), slice(0, 3, None), range(0, 6, 2)]
    assert made[3].maxlen == 5 and type(made[6]) is collections.OrderedDict and made[7]["new"] == [] and made[7][1] == 2
    assert list(made[8]) == [1, 2] and made[9](3) == 8 and isinstance(made[9], functools.partial) and made[11] == 1 + 2j


def test_cycles():
    ring = New("list", [Const(1)])
    ring.items.append(ring)
    made = run(Returned(ring))
    assert made[0] == 1 and made[1] is made
    node = New("instance", [Const(Node)])
    node.fields["value"] = New("dict", [Const("me"), node])
    made = run(Returned(node))
    assert type(made) is Node and made.value["me"] is made
    cell = New("cell")

    def recursive(n):
        return n and n + recursive(n - 1)

    function = New("function", [cell], {"defaults": Const((3,))}, (recursive.__code__, globals(), "recursive", "test.recursive"))
    cell.items.append(function)
    made = run(Returned(function))
    assert made(4) == 10 and made() == 6 and made.__qualname__ == "test.recursive"


def test_instances_with_slots_and_builtin_contents():
    made = run(Returned(New("instance", [Const(Slotted)], {"a": Const(1)})))
    assert made.a == 1 and not hasattr(made, "b")
    made = run(Returned(New("instance", [Const(Stack)], {"name": Const("s")}, New("list", [Const(1), Const(2)]))))
    assert type(made) is Stack and list(made) == [1, 2] and made.name == "s"


def test_effects_are_replayed_in_order_on_the_state_at_entry():
    node, items = Node(1), [1, 2]
    first = FromSource(Item(Local("y"), 0))
    effects = [Effect("setattr", FromSource(Local("x")), "value", (first,)),
               Effect("setitem", FromSource(Local("y")), "", (Const(0), Const("changed"))),
               Effect("setattr", FromSource(Local("x")), "again", (first,)),
               Effect("call", None, "", (Const(items.append), Const(3))),
               Effect("setglobal", None, "_made_global", (Const(9),), globals())]
    result = run(Returned(first), effects, arguments=(node, items))
    assert (result, node.value, node.again, items, _made_global) == (1, 1, 1, ["changed", 2, 3], 9)  # noqa: F821
    run(Returned(Const(None)), [Effect("setglobal", None, "_made_global", (), globals()),
                                Effect("delattr", FromSource(Local("x")), "value"),
                                Effect("replace", FromSource(Local("y")), "", (New("list", [Const(7)]),)),
                                Effect("delitem", FromSource(Local("y")), "", (Const(0),))], arguments=(node, items))
    assert "_made_global" not in globals() and not hasattr(node, "value") and items == []


def test_replacing_contents_keeps_the_object_and_passes_its_methods_by():
    for target, new in ((Stack([1]), New("list", [Const(5)])), ({1: 2}, New("dict", [Const("b"), Const(1), Const("a"), Const(2)])),
                        ({1}, New("set", [Const(4)])), (collections.deque([1], 3), New("deque", [Const(4)])),
                        (collections.OrderedDict(a=1), New("dict", [Const("z"), Const(1), Const("y"), Const(2)]))):
        run(Returned(Const(None)), [Effect("replace", FromSource(Local("x")), "", (new,))], arguments=(target, 0))
        assert list(target) == list(run(Returned(new)))


def test_closure_cells():
    count = 0

    def counter(x):
        return count + x

    effects = [Effect("setcell", FromSource(CellObject("count")), "", (Const(5),))]
    assert run(Returned(FromSource(Cell("count"))), effects, arguments=(1,), function=counter) == 0 and count == 5


def test_raised():
    error = ValueError("bad")
    with pytest.raises(ValueError, match="bad") as caught:
        run(Raised(Const(error)), [Effect("setitem", FromSource(Local("y")), "", (Const(0), Const(1)))], arguments=(1, [0]))
    assert caught.value is error


def broken(x, y):
    total = y
    for i in range(x):
        total = total + i
    return [total, len(y)]


def test_a_break_executes_the_instruction_and_resumes():
    code = broken.__code__
    call = next(i for i in dis.get_instructions(code) if i.opname == "CALL" and i.offset > 60)
    resumed = []

    def wrap(resume_code, namespace):
        import types

        def target(cells, *values):
            resumed.append(values)
            return types.FunctionType(resume_code, namespace)(*values)
        return target

    stack = [FromGraph(0), None, Const(len), FromSource(Local("y"))]
    frame = FrameState(code, call.offset, stack, {"y": FromSource(Local("y"))}, {}, globals())
    end = Broke([frame], REASON)
    assert run(end, graph=lambda: ("graph",), arguments=(2, "abc"), function=broken, resumer=Resumer(wrap)) == ["graph", 3]
    assert resumed == [("abc", "graph", 3)]


def test_attribute_sources_of_modules_are_prefetched():
    holder = Node(Node(4))
    inputs = [GraphInput("w", Attr(Attr(Local("x"), "value"), "value"), None, True)]
    assert run(Returned(FromGraph(0)), inputs=inputs, graph=lambda w: (w,), arguments=(holder, 0)) == 4
