"""Guards as code: one generated function per entry that says whether the entry may run, and fetches its static inputs.

`compile_check` gives `check(*bound locals, C) -> tuple | None`: None when a guard fails, else the objects at `prefetch`.
The order is: process modes, tensors that are arguments, then the rest as capture read it. A source is fetched once; its exact
type, where a guard states it, is checked as soon as it is fetched, so nothing is asked of an object of another type.
An exception while fetching means that the guard failed.
`failures` evaluates the same guards one by one, slowly, and says what differs.
"""
from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fuseline.ir.fetch import Constants, Fetcher, describe, fetch, parameter
from fuseline.ir.region import Guard, Local, Source, TensorFacts
from fuseline.runtime import modes

Check = Callable[..., "tuple | None"]
_PLAIN_CONTAINERS = (dict, list, tuple, OrderedDict)
_FACTS = ("type", "dtype", "device", "layout", "requires_grad", "is_leaf")


def exactly_equal(a: Any, b: Any) -> bool:
    """Equality of constants as "equals" guards mean it: same types all the way down, floats bit by bit (NaN equals NaN)."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if type(a) in (tuple, list):
        return len(a) == len(b) and all(map(exactly_equal, a, b))
    if type(a) is slice:
        return exactly_equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if type(a) in (set, frozenset):
        return a == b and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if type(a) is dict:
        return exactly_equal(list(a.items()), list(b.items()))
    if type(a).__module__ in ("numpy", "datetime"):        # -0.0, NaN, and times that are equal but in different zones
        return repr(a) == repr(b)
    return bool(a == b)


def same_keys(mapping: Mapping, keys: tuple) -> bool:
    """Whether a dict has exactly these keys, in this order."""
    return len(mapping) == len(keys) and exactly_equal(tuple(mapping), keys)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the memory that two tensors can reach overlaps (by the extent of each, not element by element)."""
    if a is b:
        return True
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    return _start(a) < _end(b) and _start(b) < _end(a)


def _start(t: torch.Tensor) -> int:
    return t.data_ptr()


def _end(t: torch.Tensor) -> int:
    return t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))


class GuardWriter:
    """Collects the body of one check function."""

    def __init__(self, names: Sequence[str], freevars: Sequence[str], guards: Sequence[Guard]) -> None:
        self.names = tuple(names)
        self.lines: list[str] = []
        self.constants = Constants()
        self.constants.namespace.update(math=math, _equal=exactly_equal, _keys=same_keys, _overlaps=overlaps, **modes.NAMESPACE)
        self._types: dict[Source, type] = {g.source: g.value for g in guards if g.kind == "type" and g.source is not None}
        self._checked: set[Source] = set()
        self.fetcher = Fetcher(self.constants, freevars, self.lines.append, self._on_fetched)
        self.fetcher.declare_plain({s for s, t in self._types.items() if t in _PLAIN_CONTAINERS})

    def fail_if(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def _on_fetched(self, source: Source, expression: str) -> None:
        wanted = self._types.get(source)
        if wanted is not None and source not in self._checked:
            self._checked.add(source)
            self.fail_if(f"type({expression}) is not {self.constants.name(wanted)}")

    def guard(self, guard: Guard) -> None:
        constants, kind, value = self.constants, guard.kind, guard.value
        if kind == "mode":
            self.fail_if(modes.differs(value[0], value[1], constants.literal(value[1])))
            return
        if kind == "sizes":
            self._sizes(guard)
            return
        if guard.source is None:
            raise ValueError(f"a guard of kind {kind!r} needs a source")
        v = self.fetcher.name(guard.source)
        match kind:
            case "type":
                if guard.source not in self._checked:
                    self.fail_if(f"type({v}) is not {constants.name(value)}")
                    self._checked.add(guard.source)
            case "is":
                self.fail_if(f"{v} is not {constants.literal(value) if value in (None,) else constants.name(value)}")
            case "equals":
                self._equals(v, guard)
            case "tensor":
                self._tensor(v, value)
            case "length":
                plain = self._types.get(guard.source) in _PLAIN_CONTAINERS
                self.fail_if(v if plain and not value else f"len({v}) != {value}")
            case "keys":
                self.fail_if(f"not _keys({v}, {constants.name(value)})" if value else f"len({v})")
            case "absent":
                self.fail_if(f"{constants.literal(value)} in {self.fetcher.dict_of(guard.source)}")
            case "no_key":
                self.fail_if(f"{constants.literal(value)} in {v}")
            case "same":
                self.fail_if(f"{v} is not {self.fetcher.name(value)}")
            case "distinct":
                self.fail_if(f"{v} is {self.fetcher.name(value)}")
            case "no_overlap":
                self.fail_if(f"_overlaps({v}, {self.fetcher.name(value)})")
            case "overlap":
                self.fail_if(f"not _overlaps({v}, {self.fetcher.name(value)})")
            case "range":
                low, high = value
                if type(low) is float:
                    self.fail_if(f"type({v}) is not {constants.name(float)} or not {low!r} <= {v} <= {high!r}")
                    return
                bounds = ([f"{v} < {low}"] if low is not None and low > -(1 << 62) else []) + (
                    [f"{v} > {high}"] if high is not None and high < (1 << 62) else [])
                self.fail_if(" or ".join([f"type({v}) is not int", *bounds]))
            case "call":
                self.fail_if(f"not {constants.name(value)}({v})")
            case _:
                raise ValueError(f"unknown guard kind {kind!r}")

    def _equals(self, v: str, guard: Guard) -> None:
        value, constants = guard.value, self.constants
        wanted = type(value)
        if value is None or wanted is bool:
            self.fail_if(f"{v} is not {value!r}")
        elif wanted in (int, str, bytes):
            self.fail_if(f"{v} != {constants.literal(value)}" if guard.source in self._checked and self._types[guard.source] is wanted
                         else f"type({v}) is not {constants.name(wanted)} or {v} != {constants.literal(value)}")
        elif wanted is float and math.isfinite(value) and value:
            self.fail_if(f"type({v}) is not {constants.name(float)} or {v} != {constants.name(value)}")
        else:
            self.fail_if(f"not _equal({v}, {constants.name(value)})")

    def _tensor(self, v: str, facts: TensorFacts) -> None:
        c = self.constants
        parts = [f"type({v}) is not {c.name(facts.type)}", f"{v}.dtype is not {c.name(facts.dtype)}"]
        parts += self._extents(f"{v}.shape", facts.shape)
        parts += self._extents(f"{v}.stride()", facts.stride)
        parts.append(f"{v}.device != {c.name(facts.device)}")
        parts.append(f"not {v}.requires_grad" if facts.requires_grad else f"{v}.requires_grad")
        if facts.layout is not None and facts.layout is not torch.strided:
            parts.append(f"{v}.layout is not {c.name(facts.layout)}")
        if facts.is_leaf is not None:
            parts.append(f"{v}.is_leaf is not {facts.is_leaf}")
        if facts.dispatch_keys is not None:
            parts.append(f"_dispatch_keys({v}) != {c.literal(facts.dispatch_keys)}")
        if facts.storage_offset is not None:
            parts.append(f"{v}.storage_offset() != {facts.storage_offset}")
        self.fail_if(" or ".join(parts))

    def _extents(self, expression: str, wanted: tuple[int | None, ...]) -> list[str]:
        """Conditions under which the shape or stride is another one; None in `wanted` is any."""
        if None not in wanted:
            return [f"{expression} != {self.constants.name(wanted)}"]
        known = [(i, n) for i, n in enumerate(wanted) if n is not None]
        name = f"e{len(self.lines)}_{len(expression)}"
        parts = [f"len({name} := {expression}) != {len(wanted)}"]
        return parts + [f"{name}[{i}] != {n}" for i, n in known]

    def _sizes(self, guard: Guard) -> None:
        for symbol, (source, axis) in _symbol_items(guard):
            v = self.fetcher.name(source)
            self.lines.append(f"{symbol} = {v if axis is None else f'{v}.shape[{axis}]'}")
        self.fail_if(f"not ({guard.value})")

    def build(self, prefetch: Sequence[Source]) -> Check:
        """The check function: None, or the objects at `prefetch`."""
        fetched = [self.fetcher.name(source) for source in prefetch]
        return self.finish(f"({', '.join(fetched)}{',' if len(fetched) == 1 else ''})")

    def finish(self, result: str, leading: Sequence[str] = ()) -> Check:
        """Compile what was written, to return `result`. Constants become default arguments, which are read faster than globals;
        `leading` names some that come first and are given values later."""
        parameters = ", ".join([*map(parameter, self.names), "C", *(f"{k}=None" for k in leading)])
        body = "\n".join(f"        {line}" for line in [*self.lines, f"return {result}"])
        hoisted = "".join(f", {k}={k}" for k in self.constants.namespace if k in body)
        source = f"def check({parameters}{hoisted}):\n    try:\n{body}\n    except Exception:\n        return None\n"
        namespace = dict(self.constants.namespace)
        exec(compile(source, "<fuseline guards>", "exec"), namespace)
        function = namespace["check"]
        function.source_text = source
        return function


def _symbol_items(guard: Guard) -> Iterator[tuple[str, tuple[Source, int | None]]]:
    symbols = guard.symbols
    return iter(symbols.items() if isinstance(symbols, Mapping) else symbols)


def rank(guard: Guard) -> int:
    if guard.kind == "mode":
        return 0
    if guard.kind == "tensor" and isinstance(guard.source, Local):
        return 1
    return 3 if guard.kind in ("sizes", "no_overlap", "overlap", "call") else 2


def compile_check(guards: Sequence[Guard], names: Sequence[str], freevars: Sequence[str] = (),
                  prefetch: Sequence[Source] = ()) -> Check:
    """The check function of an entry (see the module's docstring). `names`: the bound locals in parameter order."""
    writer = GuardWriter(names, freevars, guards)
    for guard in sorted(guards, key=rank):
        writer.guard(guard)
    return writer.build(prefetch)


class FullCheck:
    """The check function of an entry, compiled when it pays: many guards are evaluated one by one the first times.

    The guards of a module tree are checked in full once, and then stand for by words (`fast_check`): compiling a function of
    thousands of lines for one call would be the slowest part of capture.
    """

    COMPILE_AT_ONCE = 60                                  # guards; below that compiling takes about 2 ms
    INTERPRETED_CALLS = 3

    def __init__(self, guards: Sequence[Guard], names: Sequence[str], freevars: Sequence[str], prefetch: Sequence[Source]) -> None:
        self._parts = (tuple(guards), tuple(names), tuple(freevars), tuple(prefetch))
        self._in_order = sorted(guards, key=rank)
        self._left = self.INTERPRETED_CALLS if len(self._in_order) > self.COMPILE_AT_ONCE else 0
        self._check: Check | None = None if self._left else compile_check(*self._parts)

    def best(self) -> Check:
        """The function to call: the compiled one where there is one already."""
        return self if self._check is None else self._check

    def __call__(self, *values: Any) -> tuple | None:
        if self._check is None and self._left > 0:
            self._left -= 1
            return self._one_by_one(values)
        if self._check is None:
            self._check = compile_check(*self._parts)
        return self._check(*values)

    def _one_by_one(self, values: Sequence[Any]) -> tuple | None:
        _, names, freevars, prefetch = self._parts
        arguments, cells = dict(zip(names, values)), dict(zip(freevars, values[-1]))
        known: dict[Source, Any] = {}
        try:
            for guard in self._in_order:
                if _difference(guard, arguments, cells, known) is not None:
                    return None
            return tuple(fetch(source, arguments, cells, known) for source in prefetch)
        except Exception:                                 # what cannot be read is not what it was
            return None


# ---------------------------------------------------------------- one by one

def holds(guard: Guard, arguments: Mapping[str, Any], cells: Mapping[str, Any]) -> bool:
    """Whether one guard holds now; False where its source cannot be fetched."""
    try:
        return _difference(guard, arguments, cells) is None
    except Exception:
        return False


def failures(guards: Sequence[Guard], arguments: Mapping[str, Any], cells: Mapping[str, Any]) -> list[tuple[Guard, str]]:
    """The guards that do not hold, in checking order, each with what differs: "argument x: size 1 was 128, now 160"."""
    found = []
    for guard in sorted(guards, key=rank):
        try:
            text = _difference(guard, arguments, cells)
        except Exception as error:
            text = f"it cannot be read any more ({type(error).__name__})"
        if text is not None:
            name = describe(guard.source) if guard.source is not None else ""
            subject = f"argument {name}: " if isinstance(guard.source, Local) else f"{name}: " if name else ""
            found.append((guard, f"{subject}{text}" + (f" (read at {guard.why})" if guard.why else "")))
    return found


def explain_failure(guards: Sequence[Guard], arguments: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
    """The first guard that fails, as text; empty if all hold."""
    found = failures(guards, arguments, cells)
    return found[0][1] if found else ""


def _difference(guard: Guard, arguments: Mapping[str, Any], cells: Mapping[str, Any],
                known: dict[Source, Any] | None = None) -> str | None:
    """What differs; `known` keeps what was fetched, across the guards of one check."""
    kind, wanted = guard.kind, guard.value
    if kind == "mode":
        now = modes.read(wanted[0])
        return None if now == wanted[1] else f"{modes.describe(wanted[0])} was {wanted[1]}, now {now}"
    if kind == "sizes":
        values = {}
        for symbol, (source, axis) in _symbol_items(guard):
            v = fetch(source, arguments, cells, known)
            values[symbol] = v if axis is None else v.shape[axis]
        return None if eval(guard.value, {"math": math}, values) else f"sizes no longer satisfy {guard.value} ({_named(values)})"
    if guard.source is None:
        raise ValueError(f"a guard of kind {kind!r} needs a source")
    v = fetch(guard.source, arguments, cells, known)
    match kind:
        case "type":
            return None if type(v) is wanted else f"type was {wanted.__name__}, now {type(v).__name__}"
        case "is":
            return None if v is wanted else f"was {_short(wanted)}, now {'another object' if _short(v) == _short(wanted) else _short(v)}"
        case "equals":
            return None if exactly_equal(v, wanted) else f"was {_short(wanted)}, now {_short(v)}"
        case "tensor":
            return tensor_difference(v, wanted)
        case "length":
            return None if len(v) == wanted else f"length was {wanted}, now {len(v)}"
        case "keys":
            return None if same_keys(v, wanted) else f"keys were {_short(list(wanted))}, now {_short(list(v))}"
        case "absent":
            return None if wanted not in v.__dict__ else f"attribute {wanted!r} appeared"
        case "no_key":
            return None if wanted not in v else f"key {wanted!r} appeared"
        case "same":
            return None if v is fetch(wanted, arguments, cells) else f"was the same object as {describe(wanted)}"
        case "distinct":
            return None if v is not fetch(wanted, arguments, cells) else f"is now the same object as {describe(wanted)}"
        case "no_overlap":
            return f"now shares memory with {describe(wanted)}" if overlaps(v, fetch(wanted, arguments, cells)) else None
        case "overlap":
            return None if overlaps(v, fetch(wanted, arguments, cells)) else f"no longer shares memory with {describe(wanted)}"
        case "range":
            low, high = wanted
            wanted = float if type(low) is float else int
            inside = type(v) is wanted and (low is None or v >= low) and (high is None or v <= high)
            return None if inside else f"{_short(v)} is outside of {low}..{high}" if type(v) is wanted else (
                f"type was {wanted.__name__}, now {type(v).__name__}")
        case "call":
            return None if wanted(v) else f"{getattr(wanted, '__name__', 'a check')} no longer holds"
    raise ValueError(f"unknown guard kind {kind!r}")


def tensor_difference(value: Any, facts: TensorFacts) -> str | None:
    """What differs between a tensor and the facts relied on; None if nothing does."""
    v: Any = value
    wanted: Any
    now: Any
    if type(value) is not facts.type:
        return f"type was {facts.type.__name__}, now {type(v).__name__}"
    for name in _FACTS:
        wanted, now = getattr(facts, name), getattr(v, name)
        if wanted is not None and wanted != now and name != "type":
            return f"{name} was {wanted}, now {now}"
    for what, wanted, now in (("size", facts.shape, v.shape), ("stride", facts.stride, v.stride())):
        if len(wanted) != len(now):
            return f"had {len(wanted)} dimensions, now {len(now)}"
        for axis, (a, b) in enumerate(zip(wanted, now)):
            if a is not None and a != b:
                return f"{what} {axis} was {a}, now {b}"
    if facts.dispatch_keys is not None and modes.dispatch_keys(v) != facts.dispatch_keys:
        return "its dispatch keys changed"
    if facts.storage_offset is not None and v.storage_offset() != facts.storage_offset:
        return f"storage offset was {facts.storage_offset}, now {v.storage_offset()}"
    return None


def _short(value: Any) -> str:
    if isinstance(value, type) or callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} = {v}" for k, v in values.items())
