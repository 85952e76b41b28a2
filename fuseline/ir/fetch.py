"""Sources as Python: expressions that find an object again at run time, and the slow evaluation of the same.

Guards, assembled entries and word tables all read sources; `Fetcher` writes each one's expression once per function
(common subexpressions are shared), `fetch` evaluates a source without generating code (for explanations and tests).

Generated functions take the bound locals of a call as parameters (`parameter(name)`), then `C`: the tuple of closure cells.
"""
from __future__ import annotations

import builtins
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuseline.ir.region import (
    Attr,
    Builtin,
    Cell,
    CellObject,
    CellOf,
    ClassDict,
    Computed,
    Global,
    InDict,
    Item,
    KeyAt,
    Local,
    Pinned,
    Source,
    TypeOf,
)


def parameter(name: str) -> str:
    """The name under which generated code knows a local variable: any name becomes an identifier."""
    if name.isidentifier():
        return f"L_{name}"
    return "L__" + "".join(c if c.isalnum() else f"_{ord(c):x}_" for c in name)


def item(container: Any, key: Any) -> Any:
    """`container[key]` that never runs `__missing__` (a defaultdict would grow) nor a subclass's `__getitem__`."""
    if isinstance(container, dict):
        if not dict.__contains__(container, key):
            raise KeyError(key)
        return dict.__getitem__(container, key)
    if isinstance(container, list):
        return list.__getitem__(container, key)
    if isinstance(container, tuple):
        return tuple.__getitem__(container, key)
    return container[key]


def key_at(mapping: Mapping, index: int) -> Any:
    for i, key in enumerate(mapping):
        if i == index:
            return key
    raise IndexError(index)


class Constants:
    """The namespace of one generated function: objects that it refers to, under short names."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {"_item": item, "_key_at": key_at}
        self._names: dict[int, str] = {}

    def name(self, value: Any) -> str:
        """A name bound to exactly this object (by identity)."""
        found = self._names.get(id(value))
        if found is None:
            found = self._names[id(value)] = f"K{len(self._names)}"
            self.namespace[found] = value
        return found

    def literal(self, value: Any) -> str:
        """An expression for a constant: the literal itself for small plain values, a name otherwise."""
        if value is None or value is True or value is False or type(value) is int and abs(value) < 1 << 62:
            return repr(value)
        if type(value) is str and len(value) < 80:
            return repr(value)
        return self.name(value)


class Fetcher:
    """Writes the statements that fetch sources, each source once.

    emit        takes a statement
    on_fetched  called with (source, expression) after a source was fetched for the first time: guards check its type there
    """

    def __init__(self, constants: Constants, freevars: Sequence[str], emit: Callable[[str], None],
                 on_fetched: Callable[[Source, str], None] | None = None) -> None:
        self.constants, self.emit, self.on_fetched = constants, emit, on_fetched
        self._cells = {name: i for i, name in enumerate(freevars)}
        self._known: dict[Any, str] = {}
        self._plain: set[Source] = set()
        self._count = 0

    def define(self, source: Source, expression: str) -> None:
        """Declare that a source is found under an expression already (a prefetched input)."""
        self._known[source] = expression

    def declare_plain(self, sources: set[Source]) -> None:
        """Containers whose exact type is a builtin and is checked when fetched: subscripted directly."""
        self._plain = sources

    def name(self, source: Source) -> str:
        """A name (or constant) holding the source's object; emits what is needed to fetch it."""
        found = self._known.get(source)
        if found is None:
            expression = self._expression(source)
            if expression.isidentifier():
                found = expression
            else:
                found = self._fresh(expression)
            self._known[source] = found
            if self.on_fetched is not None:
                self.on_fetched(source, found)
        return found

    def dict_of(self, source: Source) -> str:
        """A name holding the instance dict of a source's object."""
        key = ("dict of", source)
        if key not in self._known:
            self._known[key] = self._fresh(f"{self.name(source)}.__dict__")
        return self._known[key]

    def _fresh(self, expression: str) -> str:
        self._count += 1
        variable = f"v{self._count}"
        self.emit(f"{variable} = {expression}")
        return variable

    def _expression(self, source: Source) -> str:
        constants = self.constants
        match source:
            case Local(name):
                return parameter(name)
            case Cell(name):
                return f"C[{self._cells[name]}].cell_contents"
            case CellObject(name):
                return f"C[{self._cells[name]}]"
            case CellObject(name):
                return f"C[{self._cells[name]}]"
            case CellOf(function, index):
                return f"{self.name(function)}.__closure__[{index}].cell_contents"
            case Global(name, namespace):
                return f"{constants.name(namespace)}[{constants.literal(name)}]"
            case Builtin(name):
                return f"{constants.name(builtins.__dict__)}[{constants.literal(name)}]"
            case Pinned(value):
                return constants.name(value)
            case Attr(base, name):
                if name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__"):
                    return f"{self.name(base)}.{name}"
                return f"getattr({self.name(base)}, {name!r})"
            case InDict(base, name):
                return f"{self.dict_of(base)}[{constants.literal(name)}]"
            case TypeOf(base):
                return f"type({self.name(base)})"
            case ClassDict(base, name):
                return f"{self.name(base)}.__dict__[{constants.literal(name)}]"
            case Item(base, key):
                holder = self.name(base)
                if base in self._plain:
                    return f"{holder}[{constants.literal(key)}]"
                return f"_item({holder}, {constants.literal(key)})"
            case KeyAt(base, index):
                return f"_key_at({self.name(base)}, {index})"
            case Computed(function, operands):
                return f"{constants.name(function)}({', '.join(map(self.name, operands))})"
        raise TypeError(f"{source!r} is not a source")


def fetch(source: Source, arguments: Mapping[str, Any], cells: Mapping[str, Any], known: dict[Source, Any] | None = None) -> Any:
    """The object at a source now. `cells` maps free variables to cell objects. Raises what the lookup raises.

    known   what was fetched before in the same evaluation, by source; it is added to
    """
    if known is None:
        return _fetch(source, arguments, cells, {})
    return _fetch(source, arguments, cells, known)


def _fetch(source: Source, arguments: Mapping[str, Any], cells: Mapping[str, Any], known: dict[Source, Any]) -> Any:
    if source in known:
        return known[source]

    def base(inner: Source) -> Any:
        return _fetch(inner, arguments, cells, known)

    match source:
        case Local(name):
            value = arguments[name]
        case Cell(name):
            value = cells[name].cell_contents
        case CellObject(name):
            value = cells[name]
        case CellOf(function, index):
            value = base(function).__closure__[index].cell_contents
        case Global(name, namespace):
            value = namespace[name]
        case Builtin(name):
            value = builtins.__dict__[name]
        case Pinned(pinned):
            value = pinned
        case Attr(owner, name):
            value = getattr(base(owner), name)
        case InDict(owner, name) | ClassDict(owner, name):
            value = base(owner).__dict__[name]
        case TypeOf(owner):
            value = type(base(owner))
        case Item(owner, key):
            value = item(base(owner), key)
        case KeyAt(owner, index):
            value = key_at(base(owner), index)
        case Computed(function, operands):
            value = function(*map(base, operands))
        case _:
            raise TypeError(f"{source!r} is not a source")
    known[source] = value
    return value


def describe(source: Source | None) -> str:
    """A source as the user would write it."""
    match source:
        case None:
            return "the process"
        case Local(name):
            return name
        case Cell(name) | CellObject(name):
            return name
        case CellOf(function, index):
            return f"closure variable {index} of {describe(function)}"
        case Global(name, _) | Builtin(name):
            return name
        case Pinned(value):
            return getattr(value, "__qualname__", None) or type(value).__name__
        case Attr(base, name) | InDict(base, name) | ClassDict(base, name):
            return f"{describe(base)}.{name}"
        case TypeOf(base):
            return f"type({describe(base)})"
        case Item(InDict(base, ("_parameters" | "_buffers" | "_modules")), str() as key):
            return f"{describe(base)}.{key}"
        case Item(base, key):
            return f"{describe(base)}[{key!r}]"
        case KeyAt(base, index):
            return f"list({describe(base)})[{index}]"
        case Computed(function, operands):
            values = [repr(o.value) if isinstance(o, Pinned) else describe(o) for o in operands]
            return f"{getattr(function, '__name__', function)}({', '.join(values)})"
    raise TypeError(f"{source!r} is not a source")
