"""Programs of plain Python around a tensor, compiled without kernels: result, exception, prints and mutations are eager's."""
import collections
import contextlib
import io
import os

import pytest
import torch

import fuseline

CASES, BREAKING = [], []


def whole(function):
    """Must be captured without a break."""
    CASES.append(pytest.param(function, id=function.__name__))
    return function


def breaking(function):
    """May break: must resume with the same outcome."""
    BREAKING.append(pytest.param(function, id=function.__name__))
    return function


def outcome(function):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            result = function(torch.arange(6.0).reshape(2, 3))
        except Exception as error:
            result = type(error), str(error)
    return plain(result), printed.getvalue()


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, BaseException):
        return type(value).__name__, plain(value.args), plain(value.__cause__), plain(value.__context__), plain(vars(value))
    if isinstance(value, (list, tuple)):
        return type(value), *map(plain, value)
    if isinstance(value, dict):
        return type(value), *map(plain, value.items())
    if isinstance(value, (int, float, str, type(None), type)):
        return type(value), value
    return type(value).__name__, plain(vars(value))


def check(program, **options):
    eager, compiled = program(), fuseline.compile(program(), backend="eager", options={"strict": True}, **options)
    for _ in range(2):
        assert outcome(compiled) == outcome(eager)


@pytest.mark.parametrize("program", CASES)
def test_captured_whole(program):
    check(program, fullgraph=True)


@pytest.mark.parametrize("program", BREAKING)
def test_resumes_after_breaks(program):
    check(program)


def show(value):
    print(value)
    return value


# ---------------------------------------------------------------- operators and special methods

@whole
def reflected_methods_as_cpython_orders_them():
    class A:
        def __add__(self, other):
            return "A" if type(other) is not int else NotImplemented

        def __radd__(self, other):
            return "rA"

        def __eq__(self, other):
            return NotImplemented

        def __lt__(self, other):
            return NotImplemented

    class B(A):
        def __radd__(self, other):
            return "rB"

    class C(A):
        pass

    def fn(x):
        found = [A() + B(), A() + C(), C() + A(), 1 + A(), A() == A(), A() != B()]
        for attempt in (lambda: A() + 1, lambda: A() < 1, lambda: A() >= A(), lambda: A() | 1, lambda: A()(), lambda: divmod(A(), 2)):
            try:
                found.append(attempt())
            except TypeError as error:
                found.append(str(error))
        a = A()
        try:
            a -= 1
        except TypeError as error:
            found.append(str(error))
        return x + 1, found
    return fn


@whole
def special_methods_are_found_in_the_class():
    class Meta(type):
        def __getitem__(cls, key):
            return key * 2

        def __iter__(cls):
            return iter([1, 2])

        def __len__(cls):
            return 4

        def __contains__(cls, key):
            return key == 9

        def __call__(cls, *args):
            made = super().__call__(*args)
            made.by_meta = True
            return made

    class A(metaclass=Meta):
        def __len__(self):
            return 3

        def __getattribute__(self, name):
            return 7 if name == "__len__" else object.__getattribute__(self, name)

    def fn(x):
        return x + len(A()), A[3], list(A), len(A), 9 in A, A().by_meta
    return fn


@whole
def wrong_results_of_special_methods():
    class A:
        def __bool__(self):
            return 3

        def __len__(self):
            return -1

        def __iter__(self):
            return 3

        def __hash__(self):
            return "a"

        def __repr__(self):
            return 3

        def __index__(self):
            return "a"

    def fn(x):
        found = []
        for attempt in (lambda: bool(A()), lambda: len(A()), lambda: list(A()), lambda: hash(A()), lambda: repr(A()), lambda: str(A()),
                        lambda: [1][A()], lambda: 1 if A() else 2, lambda: {A(): 1}, lambda: range(A())):
            try:
                found.append(attempt())
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return x + 1, found
    return fn


@whole
def sorting_and_searching_by_methods_of_the_program():
    class K:
        def __init__(self, k):
            self.k = k

        def __hash__(self):
            return hash(self.k)

        def __eq__(self, other):
            return isinstance(other, K) and self.k == other.k

        def __lt__(self, other):
            return self.k < other.k

        def __gt__(self, other):
            return self.k > other.k

    outside = [K(3), K(1), K(2)]

    def fn(x):
        outside[0].k += 1
        keys = sorted(outside)
        keys.sort(key=lambda v: K(-v.k))
        return (x + keys[0].k, [k.k for k in keys], max(outside).k, min((K(5), 0), (K(4), 1))[1], outside.index(K(2)), outside.count(K(1)),
                {K(1): 1, K(1): 2}[K(1)], len({K(1), K(1)}), (1, K(2)) < (1, K(3)), {"a": K(1)} == {"a": K(1)}, K(9) in outside)
    return fn


# ---------------------------------------------------------------- breaks in the middle of something

@breaking
def a_break_in_native_iteration_loses_no_item():
    def fn(x):
        found = [part for part in map(os.fspath, ["a", "b", "c"])]
        rest = iter([(x < 0).all(), (x >= 0).all(), 3])
        return x + 1, found, any(rest), list(rest), sorted([3, 1, 2], key=show)
    return fn


@breaking
def iterators_over_what_grows():
    def fn(x):
        items, entries = [1, 2], {"a": 1, "b": 2}
        for i in items:
            show(i)
            x = x + i
            if i < 3:
                items.append(i + 2)
        for key in entries:
            show(key)
            entries[key] = 5
        for key in entries:
            show(key)
            entries[key + "x"] = 1
        return x
    return fn


@breaking
def methods_that_print_run_once():
    class A:
        def __hash__(self):
            return show(1)

        def __index__(self):
            return show(1)

        def __str__(self):
            return show("s")

        def __round__(self, digits=0):
            return show(3)

    def fn(x):
        a = A()
        return x + hash(a), [4, 5][a], "%s" % a, "{}".format(a), round(a), int(a)       # noqa: UP031, UP032
    return fn


@breaking
def iterators_of_every_kind_go_on():
    import itertools

    def fn(x):
        its = [iter([1, 2, 3]), iter(range(3)), reversed([1, 2]), enumerate("ab"), zip("ab", [1, 2]), itertools.cycle([1, 2]),
               itertools.accumulate([1, 2, 3]), iter(collections.deque([1, 2])), iter({1: 2, 3: 4}.items()), iter([1, 2, 3].pop, 1)]
        first = [next(it) for it in its]
        show("break")
        return x * 2, first, [next(it, None) for it in its]
    return fn


# ---------------------------------------------------------------- exceptions

@whole
def exceptions_keep_what_they_carry():
    class Error(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a}-b")
            self.a, self.b = a, b

    def fn(x):
        found = []
        try:
            try:
                raise KeyError("inner")
            except KeyError as error:
                error.add_note("note")
                raise Error(1, x + 1) from error
        except Error as error:
            found += [error, error.__traceback__ is None, error.with_traceback(error.__traceback__) is error]
        try:
            from math import no_such_name  # noqa: F401
        except ImportError as error:
            found.append((error.name, str(error)))
        return found
    return fn


@whole
def errors_of_calls():
    def fn(x):
        found = []
        for attempt in (lambda: (lambda: 0)(**{1: 2}), lambda: (lambda: 0)(*3), lambda: max(*3), lambda: (lambda: 0)(**3), lambda: type(),
                        lambda: super(), lambda: len(), lambda: isinstance(1), lambda: f"{3:q}", lambda: [][0]()):        # noqa: F524
            try:
                found.append(attempt())
            except Exception as error:
                found.append((type(error).__name__, str(error), repr(error.__context__)))
        return x + 1, found
    return fn


@breaking
def who_looks_into_a_traceback_gets_the_real_one():
    class Manager:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            self.line = traceback.tb_lineno if traceback is not None else None
            return True

    def fn(x):
        with Manager() as manager:
            x = x + 1
            raise ValueError
        with manager as other:
            x = x * 2
        return x, other.line
    return fn


@whole
def except_star():
    def fn(x):
        found = []
        for group in (ExceptionGroup("g", [ValueError(1), TypeError(2), ExceptionGroup("n", [KeyError(3), ValueError(4)])]), ValueError(5)):
            try:
                try:
                    raise group
                except* ValueError as part:
                    found.append(repr(part))
                    x = x + 1
                except* TypeError:
                    raise KeyError("new") from None
                finally:
                    x = x * 2
            except BaseException as error:
                found.append(repr(error))
        return x, found
    return fn


# ---------------------------------------------------------------- classes

@whole
def classes_of_one_region():
    class Named:
        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner):
            return self.name

    def fn(x):
        class A:
            offset = x + 1
            label = Named()

            def method(self):
                return self.offset * 2

        B = type("B", (A,), {"method": lambda self: super(B, self).method() + 1, "__slots__": ()})
        A.extra = 5
        return A().method(), B().method(), B.__name__, B().label, B.extra, B.__module__ == __name__
    return fn


@breaking
def a_class_that_outlives_its_region():
    classes = []

    def fn(x):
        class A:
            offset = x + 1
        classes.append(A)
        return A().offset, type("B", (), {"k": x * 2})().k, len(set(classes)), classes[0].offset
    return fn


@whole
def entries_of_classes_are_read_fresh():
    class A:
        n = 0

    def fn(x):
        A.n = A.n + 1
        before = A.__dict__["n"], "m" in A.__dict__, vars(A).get("m", 7)
        A.m = 3
        return x + A.__dict__["n"], before, A.__dict__.get("m")
    return fn


def test_entries_of_classes_are_guarded():
    class A:
        n = 1

    compiled = fuseline.compile(lambda x: x + A.__dict__["n"] + A.__dict__.get("m", 0), backend="eager", options={"strict": True})
    x = torch.zeros(2)
    assert compiled(x)[0] == 1
    A.n = 2
    assert compiled(x)[0] == 2
    A.m = 5
    assert compiled(x)[0] == 7


@whole
def descriptors_of_the_standard_library():
    import functools

    class A:
        calls = 0

        def add(self, a, b):
            return a + b

        add_two = functools.partialmethod(add, b=2)

        @functools.cached_property
        def once(self):
            self.calls += 1
            return self.calls

    outside = A()

    def fn(x):
        fresh = A()
        return fresh.add_two(x), fresh.once + fresh.once, outside.once + outside.once, outside.__dict__["once"]
    return fn


@whole
def text_of_named_tuples():
    Pair = collections.namedtuple("Pair", "a b")

    def fn(x):
        return x + 1, repr(Pair(1, "b")), "%s-%s" % Pair(1, 2)          # noqa: UP031
    return fn


@whole
def attribute_protocol_falls_back_in_order():
    class A:
        def __init__(self):
            self.kept = 1

        def __getattribute__(self, name):
            try:
                return object.__getattribute__(self, name)
            except AttributeError:
                if name.startswith("caught"):
                    return "caught"
                raise

        def __getattr__(self, name):
            return "fallback " + name

        @property
        def fails(self):
            raise AttributeError("inner")

    class B:
        def __init__(self):
            self.kept = 1

    outside = B()

    def fn(x):
        a, found = A(), []
        outside.kept = 2
        del outside.kept
        try:
            found.append(outside.kept)
        except AttributeError as error:
            found.append(str(error))
        outside.kept = 3
        return x + a.kept, a.caught_here, a.other, a.fails, getattr(outside, "none", 4), found
    return fn
