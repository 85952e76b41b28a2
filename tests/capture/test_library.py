"""The standard library and NumPy inside compiled functions: captured whole, equal to eager, and guarded by value."""
import collections
import datetime
import functools
import itertools
import json
import operator
import os
import re
import textwrap
import types
import weakref

import numpy as np
import pytest
import torch

import fuseline

LAYER = re.compile(r"layer\.(\d+)")
CASES = []


def case(function):
    CASES.append(pytest.param(function, id=function.__name__))
    return function


def compiled(function, **options):
    return fuseline.compile(function, backend="eager", options={"strict": True}, **options)


@case
def text_of_sizes(x):
    return f"{x.shape} {x.shape!r:>25}", str(x.shape), f"{x.shape} {x.dtype}", ", ".join(str(n) for n in x.shape), str(x.size())


@case
def strings_and_patterns(x):
    found = LAYER.match("layer.12.weight")
    return (x * int(found.group(1)), re.sub(r"\d", "#", "a1b2"), [m.group() for m in re.finditer("a", "aba")], os.path.join("a", "b.c"),
            os.path.splitext("b.c"), textwrap.dedent("  a\n  b"), "hello".translate(str.maketrans("lo", "01")), found)


@case
def json_both_ways(x):
    return x + json.loads(json.dumps({"a": [1, None, 2.5]}))["a"][0], json.dumps({"b": 1, "a": (2, 3)}, sort_keys=True)


@case
def ordered_and_default_dicts(x):
    ordered, lists, counts = collections.OrderedDict(a=x, b=x + 1), collections.defaultdict(list, q=[x]), collections.Counter("abca")
    lists["w"].append(x * 2)
    return list(reversed(ordered)), dict(lists), list(counts), sorted(counts.elements()), dict(counts), list(
        itertools.chain.from_iterable("ab"))


@case
def numpy_numbers(x):
    return (x * float(np.sqrt(4)), x / np.sqrt(x.shape[-1]), x.view(np.prod(x.shape)), x + np.float32(2), np.int64(3) * x, np.log(10),
            np.ceil(2.5), np.dtype("float32").itemsize, np.linspace(0, 1, 3), x > np.float64(0.5))


@case
def methods_by_name(x):
    return operator.methodcaller("sum", 0)(x), operator.methodcaller("split", sep=",")("a,b"), operator.is_(x, x)


@case
def namespaces_and_proxies(x):
    return types.SimpleNamespace(a=x, b=2), types.MappingProxyType({"k": x}), bytearray(b"ab")


@case
def dates(x):
    return x * (datetime.date(2020, 1, 30) + datetime.timedelta(days=2)).month, datetime.timedelta(hours=1).total_seconds()


@pytest.mark.parametrize("function", CASES)
def test_is_captured_whole_and_equals_eager(function):
    x = torch.arange(6.0).reshape(2, 3)
    want, got = function(x), compiled(function, fullgraph=True)(x)
    for a, b in zip(want, got, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor | np.ndarray):
            assert a.dtype == b.dtype and (a == b).all()
        elif type(a) is not re.Match:
            assert repr(a) == repr(b)


def test_values_of_the_library_are_guarded():
    def scaled(x, by):
        return x * by
    target, x = compiled(scaled), torch.ones(2)
    for by in (np.float32(2), np.float32(3), np.int64(2), np.float64("nan"), np.float64("nan")):
        assert torch.equal(target(x, by).nan_to_num(7), scaled(x, by).nan_to_num(7))

    def day(x, date):
        return x * date.day
    target = compiled(day)
    assert [float(target(x, datetime.date(2020, 1, n))[0]) for n in (3, 4)] == [3.0, 4.0]


def test_state_that_only_c_code_sees_is_not_taken_for_constant():
    from decimal import Decimal

    def scaled(x, by):
        return x * float(by), by == 2
    target, x = compiled(scaled), torch.ones(2)
    for by in (Decimal("1.5"), Decimal("2"), np.array(4.0), np.array(5.0)):
        want, got = scaled(x, by), target(x, by)
        assert torch.equal(want[0], got[0]) and want[1] == got[1]

    def through_proxy(x, proxy):
        return x * proxy.k
    holder, target = types.FunctionType(scaled.__code__, {}), compiled(through_proxy)
    for holder.k in (2, 3):
        assert float(target(x, weakref.proxy(holder))[0]) == holder.k


def test_weak_references_are_followed():
    weights = [torch.ones(2), torch.zeros(2)]

    def same(x, references, weights):
        return x + sum(reference() is weight for reference, weight in zip(references, weights))
    target, x = compiled(same, fullgraph=True), torch.zeros(1)
    references = [weakref.ref(w) for w in weights]
    assert float(target(x, references, weights)) == 2
    assert float(target(x, references, [weights[0], weights[0].clone()])) == 1
    lstm = torch.nn.LSTM(3, 4)
    y = torch.randn(5, 2, 3)
    with torch.no_grad():
        assert torch.allclose(compiled(lstm, fullgraph=True)(y)[0], lstm(y)[0])


def test_mapping_proxies_from_outside_are_read_item_by_item():
    def total(proxy):
        return sum(v * 2 for v in proxy.values()), list(proxy), proxy.get("k"), "z" in proxy
    target = compiled(total, fullgraph=True)
    for entries in ({"k": torch.ones(2)}, {"k": torch.ones(2), "z": torch.ones(2)}):
        want, got = total(types.MappingProxyType(entries)), target(types.MappingProxyType(entries))
        assert torch.equal(want[0], got[0]) and want[1:2] == got[1:2] and got[2] is entries["k"] and want[3] == got[3]


def test_objects_made_in_c_are_left_to_python_where_the_region_ends():
    @functools.cache
    def fail(x):
        keys = sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: a - b))
        getter = operator.methodcaller("sum")
        print(end="")
        return getter(x), keys
    assert compiled(fail)(torch.ones(2))[1] == [1, 2, 3]


def test_weak_references_made_inside_refer_to_the_object_itself():
    class Hooked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x):
            handle = self.inner.register_forward_hook(lambda module, args, output: output * 3)
            y = self.inner(x)
            handle.remove()
            return y + self.inner(x)
    module = Hooked()
    target = compiled(module)
    assert [float(target(torch.ones(1))) for _ in range(4)] == [4.0] * 4 and not module.inner._forward_hooks


def test_objects_that_hold_their_arguments_hold_those_of_the_caller():
    def program(xs, d):
        xs.append(1)
        d["q"] = 4
        return functools.partial(max, xs), types.MappingProxyType(d), weakref.ref(program)
    xs, d = [], {"k": 1}
    held, proxy, reference = compiled(program, fullgraph=True)(xs, d)
    d["z"] = 2
    assert held.args[0] is xs and xs == [1] and proxy == {"k": 1, "q": 4, "z": 2} and reference() is program


def test_attributes_of_tensors_are_written_and_read():
    def program(x):
        y = x + 1
        y.tag, x.tag, x.kept = "new", 3, y
        return y, y.tag, y * x.tag, hasattr(x, "other"), x.kept
    x, target = torch.ones(2), compiled(program, fullgraph=True)
    for _ in range(2):
        y, tag, scaled, other, kept = target(x)
        assert y.tag == tag == "new" and x.kept is y is kept and x.tag == 3 and not other and scaled[0] == 6


def test_operators_of_objects_with_torch_function_are_left_to_python():
    class Wrapped:
        def __init__(self, value):
            self.value = value

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return function(*[a.value if isinstance(a, cls) else a for a in args], **(kwargs or {}))

    def program(x):
        y = x * 2
        return y + Wrapped(y), torch.add(Wrapped(y), 1)
    for a, b in zip(program(torch.ones(2)), compiled(program)(torch.ones(2))):
        assert torch.equal(a, b)


def test_views_of_dicts_follow_the_dict_over_a_break_and_from_outside():
    def program(d):
        keys, values, items = d.keys(), d.values(), d.items()
        d["b"] = d["a"] + 1
        print(end="")
        d["c"] = 3
        return list(keys), len(values), "c" in keys, [k for k, _ in items], list(values)[1], keys, {*keys} & d.keys()
    target = compiled(program)
    for _ in range(2):
        want, d = program({"a": torch.ones(2)}), {"a": torch.ones(2)}
        got = target(d)
        assert want[:4] == got[:4] and torch.equal(want[4], got[4]) and got[5].mapping == d and want[6] == got[6]

    def outside(keys, values):
        return [v * 2 for v in values], "b" in keys, len(keys)
    target = compiled(outside, fullgraph=True)
    for entries in ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, {"b": torch.ones(2), "a": torch.ones(2)}):
        want, got = outside(entries.keys(), entries.values()), target(entries.keys(), entries.values())
        assert want[1:] == got[1:] and all(map(torch.equal, want[0], got[0]))


def test_native_iterators_that_raise_or_need_values():
    def strict(x):
        try:
            for a, b in zip([1, 2], [x], strict=True):
                x = b + a
        except ValueError as error:
            return x, str(error)
    want, got = strict(torch.ones(2)), compiled(strict, fullgraph=True)(torch.ones(2))
    assert torch.equal(want[0], got[0]) and want[1] == got[1]

    def chosen(x):
        return [v for v in filter(lambda v: x.sum() > v, [1, 9, 2])], slice(1, 9).indices(5)
    assert compiled(chosen)(torch.ones(3)) == ([1, 2], (1, 5, 1))
