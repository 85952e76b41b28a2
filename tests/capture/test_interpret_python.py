"""Plain Python functions give the same when interpreted: every instruction family, without tensors."""
import contextlib
import functools
import sys

import pytest
from plain_world import run

from fuseline.capture.errors import ProgramError

CASES = []


def case(*args, **kwargs):
    def register(function):
        CASES.append(pytest.param(function, args, kwargs, id=function.__name__))
        return function
    return register


@case(7)
def arithmetic_and_loops(n):
    total, i = 0, 0
    while i < n:
        i += 1
        if i % 2:
            continue
        total += i ** 2 // 3 - (i << 1) | 5 & ~i
        if total > 1000:
            break
    else:
        total = -total
    return total, not total, -n, +n, 1 < n <= 7, n is None, n not in (1, 2)


@case([3, 1, 2], {"a": 1, "b": 2})
def containers(xs, d):
    first, *rest = xs
    a, (b, c) = 1, (2, 3)
    merged = {**d, "z": [*xs, *d], **{k: v for k, v in zip("pq", xs)}}
    xs[0:2] = [9]
    del xs[0]
    return first, rest, a, b, c, merged, xs, {1, *xs}, (*d,), xs[::-1], {x: y for x in "ab" for y in xs if y}


@case(3)
def closures(n):
    count = 0

    def bump(by=1, *more, key=2, **kw):
        nonlocal count
        count += by + sum(more) + key + len(kw)
        return count
    fs = [lambda i=i: i * n for i in range(3)]
    late = [lambda: j for j in range(3)]
    return bump(), bump(5, 6, key=1, z=1), count, [f() for f in fs], [f() for f in late], bump(*[1, 2], **{"key": 4})


def wrong_calls():
    def f(a, b, /, c, d=1, *, e, g=2):
        return a
    def h(a):
        return a
    found = []
    for call in (lambda: f(), lambda: f(1), lambda: f(1, 2, 3, 4, 5, e=1), lambda: f(1, 2, 3), lambda: f(1, 2, 3, e=1, zz=1),
                 lambda: f(1, b=2, c=3, e=1), lambda: f(1, 2, 3, c=3, e=1), lambda: h(), lambda: h(1, 2), lambda: (lambda: 0)(1)):
        try:
            call()
        except TypeError as error:
            found.append(str(error))
    return found


CASES.append(pytest.param(wrong_calls, (), {}, id="wrong_calls"))


@case(2)
def exceptions(n):
    log = []

    def risky(k):
        try:
            if k == 0:
                return "early"
            if k == 1:
                raise ValueError("one", k)
            if k == 2:
                return {}["missing"]
            return "fine"
        except ValueError as e:
            log.append(e.args)
            raise KeyError("from") from e
        finally:
            log.append(("finally", k))
    for k in range(4):
        try:
            log.append(risky(k))
        except (KeyError, IndexError) as e:
            log.append((type(e).__name__, e.args, type(e.__cause__).__name__, type(e.__context__).__name__, sys.exc_info()[0]))
        else:
            log.append("else")
    try:
        try:
            raise IndexError("deep")
        except IndexError:
            log.append("inner")
            raise
        finally:
            log.append("done")
    except LookupError as e:
        log.append(type(e))
    try:
        assert n == 3, "message"
    except AssertionError as e:
        log.append(str(e))
    return log, sys.exc_info()


class Manager:
    def __init__(self, swallow, log):
        self.swallow, self.log = swallow, log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, trace):
        self.log.append(("exit", kind))
        return self.swallow


@case()
def with_statements():
    log = []
    with Manager(True, log) as m, Manager(False, log):
        log.append(m.swallow)
        raise ValueError("x")
    try:
        with Manager(False, log):
            {}["y"]
    except KeyError:
        log.append("out")
    for i in range(3):
        with Manager(False, log):
            if i == 1:
                break
            continue

    @contextlib.contextmanager
    def managed(a):
        log.append("before")
        try:
            yield a + 1
        except KeyError:
            log.append("caught")
        finally:
            log.append("after")
    with managed(1) as two:
        log.append(two)
    with managed(2):
        raise KeyError
    with contextlib.ExitStack() as stack:
        for i in range(3):
            stack.callback(log.append, i)
    with contextlib.suppress(KeyError):
        {}["gone"]
        log.append("never")
    return log


@case(4)
def generators(n):
    log = []

    def numbers(k):
        for i in range(k):
            log.append(i)
            got = yield i * 2
            if got:
                log.append(("got", got))
        return "end"

    def outer(k):
        value = yield from numbers(k)
        log.append(value)
        yield from [7, 8]
        try:
            yield 9
        finally:
            log.append("cleanup")
    g = numbers(3)
    first = next(g), g.send("hello"), next(g, None), next(g, None)
    for x in outer(n):
        if x == 7:
            break
    o = outer(0)
    all_of = next(o), next(o), next(o)
    o.close()
    def bad():
        yield 1
        raise StopIteration
    try:
        list(bad())
    except RuntimeError as e:
        log.append(str(e))
    t = numbers(2)
    next(t)
    try:
        t.throw(ValueError("thrown"))
    except ValueError as e:
        log.append(e.args)
    return first, all_of, log, sum(numbers(3)), list(outer(1)), [*zip(numbers(2), numbers(2))], max(v for v in numbers(3)), any(numbers(2))


@case()
def dropped_generators_clean_up():
    log = []

    def produce():
        try:
            yield 1
            yield 2
        finally:
            log.append("closed")
    for x in produce():
        log.append(x)
        break
    log.append("after")
    first = next(produce())

    def inner():
        return next(produce())
    return first, inner(), log


class Base:
    def __init__(self, x):
        self.x = x

    @property
    def double(self):
        return self.x * 2

    @classmethod
    def make(cls, x):
        return cls(x + 1)

    @staticmethod
    def static(x):
        return x - 1


class Derived(Base):
    def __init__(self, x, *rest):
        super().__init__(x)
        self.rest = rest

    def total(self):
        return super().double + len(self.rest) + self.make(1).x + self.static(5)


@case(3)
def classes(n):
    d = Derived(n, 1, 2)
    d.extra = 5
    del d.extra

    class Local(Base):
        kind = "local"
        table = [i for i in range(n)]

        def total(self):
            return self.x + super().double
    return d.total(), d.x, hasattr(d, "extra"), Local(4).total(), Local.kind, Local.table, Local.__qualname__.rpartition(".")[2]


@case({"kind": "circle", "r": 2}, [1, 2, 3], Base(4))
def matching(shape, seq, obj):
    out = []
    for subject in (shape, seq, obj, 3, "text", (1,), None):
        match subject:
            case {"kind": "circle", "r": r, **rest}:
                out.append(("circle", r, rest))
            case [a, *b] if a == 1 and b:
                out.append((a, b))
            case [a]:
                out.append(("single", a))
            case Base(x=x):
                out.append(("base", x))
            case int(v) | str(v):
                out.append(v)
            case None:
                out.append("none")
    return out


@case(3.14159, "w")
def text(x, s):
    width = 10
    old = "%s-%d" % (s, 3)  # noqa: UP031
    return f"{x:.2f} {s!r:>{width}} {x!s} {{}} {width=}", old, s.join("abc").upper()


@case(5)
def functional(n):
    from functools import reduce

    @functools.wraps(text)
    def wrapper(*args, **kwargs):
        return inner(*args, **kwargs)

    def inner(a, b=2):
        return a * b

    def fact(k):
        return 1 if k < 2 else k * fact(k - 1)
    part = functools.partial(wrapper, 3, b=4)
    return wrapper.__name__, part(), part(b=5), fact(n), reduce(lambda a, b: a + b, range(n)), sorted("bca", key=lambda c: -ord(c)), \
        list(map(lambda v: v + 1, [1, 2])), locals()["n"]


@case()
def comprehension_scopes():
    i = 10
    parts = [i for i in range(3)]
    kept = [last := p * 2 for p in parts]
    nested = [[x * y for x in range(2)] for y in range(2)]
    gen = sum(x for x in parts)
    cells = [f() for f in [lambda: i + k for k in range(2)]]
    try:
        [unbound for _ in range(1)]
    except NameError as e:
        kept.append(str(e))
    return i, kept, last, nested, gen, cells, {a: b for a, b in zip("ab", parts)}, {len(s) for s in ("a", "bb")}


@case()
def unpacking_errors():
    found = []

    def f(**kw):
        return kw
    for bad in (lambda: [(a, b) for a, b in [(1,)]], lambda: [(a, b) for a, b in [(1, 2, 3)]], lambda: [a for a, b in [5]],
                lambda: f(**{"a": 1}, **{"a": 2}), lambda: [*5], lambda: print(*5), lambda: f(**5), lambda: {**5}, lambda: len(5)):
        try:
            bad()
        except (TypeError, ValueError) as e:
            found.append(str(e).partition("wrong")[0])
    return found


@pytest.mark.parametrize("function, args, kwargs", CASES)
def test_interpreting_equals_running(function, args, kwargs):
    import copy
    want = function(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    assert repr(run(function, *copy.deepcopy(args), **copy.deepcopy(kwargs))) == repr(want)


def test_an_uncaught_exception_leaves_with_its_context():
    def f():
        try:
            raise ValueError("first")
        except ValueError:
            raise KeyError("second")  # noqa: B904
    with pytest.raises(ProgramError) as caught:
        run(f)
    assert repr(caught.value.value) == "KeyError('second')" and repr(caught.value.value.__context__) == "ValueError('first')"
