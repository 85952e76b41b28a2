"""A Region and its compiled graph become straight-line Python: fetch inputs, run the graph, rebuild values, replay effects, end.

The order in generated code is fixed: sources are read first (the state at entry), then the graph runs, then new objects are
built (each once; those in cycles are made empty and filled afterwards), then effects are replayed in program order, then
the region returns, raises, or hands its frames to the code that executes the instruction at the break.
"""
from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.entry import Assembled, Recovery, drive, input_versions
from fuseline.ir.fetch import Constants, Fetcher, parameter
from fuseline.ir.region import (
    Attr,
    Broke,
    CompiledGraph,
    Const,
    Effect,
    FrameState,
    FromGraph,
    FromSource,
    GraphInput,
    InDict,
    Item,
    Local,
    New,
    Raised,
    Recipe,
    Region,
    Returned,
    Source,
)

# code, stack, locals and cells of a suspended frame -> the function that executes its instruction and goes on
ResumeFactory = Callable[[FrameState, bool], "Any"]


def set_attribute(target: Any, name: str, value: Any) -> None:
    """setattr past the class's own `__setattr__`."""
    if isinstance(target, type):
        type.__setattr__(target, name, value)
        return
    try:
        object.__setattr__(target, name, value)
    except TypeError:                                     # a C type with its own slot: a module, a tensor
        setattr(target, name, value)


def delete_attribute(target: Any, name: str) -> None:
    """delattr past the class's own `__delattr__`."""
    if isinstance(target, type):
        type.__delattr__(target, name)
        return
    try:
        object.__delattr__(target, name)
    except TypeError:
        delattr(target, name)


def _container_class(target: Any) -> Any:
    for base in (collections.OrderedDict, dict, list, set, collections.deque):
        if isinstance(target, base):
            return base
    return None


def set_item(target: Any, key: Any, value: Any) -> None:
    """`target[key] = value` past a subclass's `__setitem__`, which the interpreter has followed."""
    base = _container_class(target)
    if base is None:
        target[key] = value
    else:
        base.__setitem__(target, key, value)


def delete_item(target: Any, key: Any) -> None:
    base = _container_class(target)
    if base is None:
        del target[key]
    else:
        base.__delitem__(target, key)


def replace_contents(target: Any, contents: Any) -> None:
    """Give a list, dict, set or deque the contents of another one, in order; the object stays."""
    base = _container_class(target)
    if base is list:
        list.__setitem__(target, slice(None), list(contents))
    elif base in (dict, collections.OrderedDict):
        pairs = list(contents.items())
        base.clear(target)
        for key, value in pairs:
            base.__setitem__(target, key, value)
    elif base is set:
        values = list(contents)
        set.clear(target)
        set.update(target, values)
    elif base is collections.deque:
        values = list(contents)
        collections.deque.clear(target)
        collections.deque.extend(target, values)
    elif isinstance(target, bytearray):
        target[:] = contents
    else:
        raise InternalError(f"cannot replace the contents of a {type(target).__name__}")


def make_function(code: types.CodeType, namespace: dict, name: str, qualname: str, cells: tuple, fields: dict) -> types.FunctionType:
    """A function made during capture. fields: defaults, kwdefaults, annotations, doc, module, dict where they are set."""
    function = types.FunctionType(code, namespace, name, None, cells or None)
    function.__qualname__ = qualname
    names = {"defaults": "__defaults__", "kwdefaults": "__kwdefaults__", "annotations": "__annotations__", "doc": "__doc__",
             "module": "__module__", "type_params": "__type_params__"}
    for field, value in fields.items():
        if field in ("dict", "__dict__"):
            function.__dict__.update(value)
        else:
            setattr(function, names.get(field, field), value)
    return function


_IMMUTABLE_BASES = (tuple, frozenset, str, bytes, int, float, complex)


def make_instance(cls: type, *contents: Any) -> Any:
    """An instance without running the class's own `__new__` or `__init__`; `contents` of an immutable builtin base are given here."""
    for base in cls.__mro__:
        if not base.__flags__ & (1 << 9):                 # the first class that is not made by Python code allocates
            return base.__new__(cls, *contents)
    raise InternalError(f"{cls.__name__} has no builtin base")


def fill_instance(instance: Any, contents: Any, fields: dict[str, Any]) -> None:
    """Set the builtin contents (of a subclass of list, dict, set, deque) and the attributes of a new instance."""
    if contents is not None and not isinstance(instance, _IMMUTABLE_BASES):
        replace_contents(instance, contents)
    for name, value in fields.items():
        set_attribute(instance, name, value)


def set_cell(cell: types.CellType, *values: Any) -> None:
    if values:
        cell.cell_contents = values[0]
        return
    try:
        del cell.cell_contents
    except ValueError:
        pass


def finish_frame(call: Callable, cells: tuple, *arguments: Any) -> Any:
    """Run a suspended inner frame to its end."""
    return drive(call(cells, *arguments))


_RUNTIME = {
    "_set_attribute": set_attribute, "_delete_attribute": delete_attribute, "_set_item": set_item, "_delete_item": delete_item,
    "_replace": replace_contents, "_make_function": make_function, "_make_instance": make_instance, "_fill_instance": fill_instance,
    "_set_cell": set_cell, "_cell": types.CellType, "_method": types.MethodType, "_partial": functools.partial,
    "_deque": collections.deque, "_thunk": functools.partial, "_finish": finish_frame, "_versions": input_versions,
}
_FILLED_LATER = ("list", "dict", "set", "deque", "instance", "cell", "function")


class _Writer:
    """Writes the body of one entry's function."""

    def __init__(self, region: Region, names: Sequence[str], freevars: Sequence[str]) -> None:
        self.region = region
        self.lines: list[str] = []
        self.constants = Constants()
        self.constants.namespace.update(_RUNTIME)
        self.fetcher = Fetcher(self.constants, freevars, self.lines.append)
        self.freevars = tuple(freevars)
        self.names = tuple(names)
        self._built: dict[int, str] = {}
        self._cyclic: set[int] = set()
        self._later: list[tuple[str, New]] = []
        self._count = 0
        self.recovery: Recovery | None = None

    # -- recipes --------------------------------------------------------------------------------------------
    def fetch_sources(self, recipes: Sequence[Recipe | None]) -> None:
        """Read every source that the recipes need, and find the new objects that refer to themselves."""
        done: set[int] = set()
        path: list[int] = []

        def visit(recipe: Any) -> None:
            if isinstance(recipe, FromSource):
                self.fetcher.name(recipe.source)
            elif isinstance(recipe, New):
                if id(recipe) in path:
                    self._cyclic.update(path[path.index(id(recipe)):])
                    return
                if id(recipe) in done:
                    return
                path.append(id(recipe))
                for part in _parts(recipe):
                    visit(part)
                path.pop()
                done.add(id(recipe))

        for recipe in recipes:
            visit(recipe)

    def expression(self, recipe: Recipe) -> str:
        """An expression for a value: a name, a constant, or an output of the graph."""
        match recipe:
            case FromSource(source):
                return self.fetcher.name(source)
            case FromGraph(index):
                return f"G[{index}]"
            case Const(value):
                return self.constants.literal(value)
            case New():
                found = self._built.get(id(recipe))
                return found if found is not None else self._build(recipe)
        raise InternalError(f"{recipe!r} is not a recipe")

    def fresh(self, expression: str) -> str:
        self._count += 1
        name = f"n{self._count}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _build(self, new: New) -> str:
        if id(new) in self._cyclic and new.kind in _FILLED_LATER and not (new.kind == "instance" and self._is_immutable(new)):
            return self._build_empty_then_fill(new)
        name = self._built[id(new)] = self.fresh(self._made(new))
        return name

    def _made(self, new: New) -> str:
        items = [self.expression(i) for i in new.items] if new.kind not in ("dict", "function", "instance") else []
        match new.kind:
            case "list":
                return f"[{', '.join(items)}]"
            case "tuple":
                return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            case "set":
                return f"{{{', '.join(items)}}}" if items else "set()"
            case "frozenset":
                return f"frozenset(({', '.join(items)}{',' if items else ''}))"
            case "deque":
                return f"_deque([{', '.join(items)}], {new.extra!r})"
            case "dict":
                return self._dict(new)
            case "slice" | "range":
                return f"{new.kind}({', '.join(items)})"
            case "cell":
                return f"_cell({', '.join(items)})"
            case "iterator":
                return f"iter({items[0]})"
            case "method":
                return f"_method({items[0]}, {items[1]})"
            case "partial":
                kwargs = f", **{items[2]}" if len(items) > 2 else ""
                return f"_partial({items[0]}, *{items[1]}{kwargs})"
            case "call":
                keywords = [f"{k}={self.expression(v)}" for k, v in new.fields.items()]
                return f"{items[0]}({', '.join([*items[1:], *keywords])})"
            case "function":
                code, namespace, name, qualname = new.extra
                cells = [self.expression(i) for i in new.items]
                fields = self._fields(new.fields)
                return (f"_make_function({self.constants.name(code)}, {self.constants.name(namespace)}, {name!r}, {qualname!r}, "
                        f"({', '.join(cells)}{',' if cells else ''}), {fields})")
            case "instance":
                cls = self.expression(new.items[0])
                contents = self._contents(new)
                fields = self._fields(new.fields)
                given = f", {contents}" if self._is_immutable(new) else ""
                made = self.fresh(f"_make_instance({cls}{given})")
                if contents != "None" or new.fields:
                    self.lines.append(f"_fill_instance({made}, {contents}, {fields})")
                return made
        raise InternalError(f"unknown kind of new object {new.kind!r}")

    def _fields(self, fields: dict[str, Any]) -> str:
        return "{" + ", ".join(f"{k!r}: {self.expression(v)}" for k, v in fields.items()) + "}"

    def _contents(self, new: New) -> str:
        extra = new.extra
        if extra is None:
            return "None"
        return self.expression(extra) if isinstance(extra, (New, FromSource, FromGraph, Const)) else self.constants.name(extra)

    def _is_immutable(self, new: New) -> bool:
        """Whether a new instance gets its contents when it is made, because its builtin base cannot be changed later."""
        cls = getattr(new.items[0], "value", None)
        return new.extra is not None and isinstance(cls, type) and issubclass(cls, _IMMUTABLE_BASES)

    def _dict(self, new: New) -> str:
        cls, items = new.extra or dict, list(new.items)
        factory = self.expression(items.pop(0)) if issubclass(cls, collections.defaultdict) else None
        pairs = [(self.expression(k), self.expression(v)) for k, v in zip(items[::2], items[1::2])]
        literal = "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
        if cls is dict:
            return literal
        if factory is not None:
            return f"{self.constants.name(cls)}({factory}, {literal})"
        return f"{self.constants.name(cls)}({literal})"

    def _build_empty_then_fill(self, new: New) -> str:
        """For an object that (indirectly) contains itself: make it empty, build its parts, fill it."""
        kind = new.kind
        if kind == "instance":
            name = self._built[id(new)] = self.fresh(f"_make_instance({self.expression(new.items[0])})")
            self._later.append((name, new))
            return name
        if kind == "function":
            # Cells break the cycle; a function is never reached again before its cells are.
            name = self._built[id(new)] = self.fresh(self._made(New("function", new.items, {}, new.extra)))
            self._later.append((name, new))
            return name
        if kind == "dict":
            cls = new.extra or dict
            factory = self.expression(new.items[0]) if issubclass(cls, collections.defaultdict) else ""
            empty = f"{self.constants.name(cls)}({factory})"
        elif kind == "deque":
            empty = f"_deque([], {new.extra!r})"
        else:
            empty = {"list": "[]", "set": "set()", "cell": "_cell()"}[kind]
        name = self._built[id(new)] = self.fresh(empty)
        self._later.append((name, new))
        return name

    def fill(self) -> None:
        """Fill what was made empty; filling may make more."""
        while self._later:
            name, new = self._later.pop(0)
            match new.kind:
                case "list" | "deque":
                    self.lines.append(f"{name}.extend([{', '.join([self.expression(i) for i in new.items])}])")
                case "set":
                    self.lines.append(f"{name}.update([{', '.join([self.expression(i) for i in new.items])}])")
                case "cell":
                    if new.items:
                        self.lines.append(f"{name}.cell_contents = {self.expression(new.items[0])}")
                case "dict":
                    items = new.items[1:] if issubclass(new.extra or dict, collections.defaultdict) else new.items
                    for k, v in zip(items[::2], items[1::2]):
                        self.lines.append(f"_set_item({name}, {self.expression(k)}, {self.expression(v)})")
                case "instance":
                    self.lines.append(f"_fill_instance({name}, {self._contents(new)}, {self._fields(new.fields)})")
                case "function":
                    self.lines.append(f"_set_function({name}, {self._fields(new.fields)})")

    # -- effects --------------------------------------------------------------------------------------------
    def effect(self, effect: Effect) -> None:
        target = self.expression(effect.target) if effect.target is not None else ""
        values = [self.expression(v) for v in effect.values]
        match effect.kind:
            case "setattr":
                self.lines.append(f"_set_attribute({target}, {effect.name!r}, {values[0]})")
            case "delattr":
                self.lines.append(f"_delete_attribute({target}, {effect.name!r})")
            case "setitem":
                self.lines.append(f"_set_item({target}, {values[0]}, {values[1]})")
            case "delitem":
                self.lines.append(f"_delete_item({target}, {values[0]})")
            case "replace":
                self.lines.append(f"_replace({target}, {values[0]})")
            case "setcell":
                self.lines.append(f"_set_cell({', '.join([target, *values])})")
            case "setglobal":
                place = f"{self.constants.name(effect.extra)}[{effect.name!r}]"
                self.lines.append(f"{place} = {values[0]}" if values else f"del {place}")
            case "call":
                self.lines.append(f"{values[0]}({', '.join(values[1:])})")
            case "grad":
                self.lines.append(f"{target}.grad = {values[0]}")
            case _:
                raise InternalError(f"unknown effect {effect.kind!r}")

    # -- the graph ------------------------------------------------------------------------------------------
    def run_graph(self, compiled: CompiledGraph) -> None:
        """Call the graph. `G` holds its outputs."""
        arguments = [self.fetcher.name(i.source) for i in self.region.inputs]
        call = f"G = {self.constants.name(compiled)}({', '.join(arguments)})"
        graph = self.region.graph
        if self.region.restore is None or _writes_unseen(graph):
            self.lines.append(call)
            return
        self.recovery = Recovery(self.region.restore if _changes_state(graph) else None)
        recovery, versions = self.constants.name(self.recovery), "None"
        # Only what capture saw written to can have changed when the graph raises: reading all parameters' versions takes 70 us a call.
        given = ", ".join(name for name, i in zip(arguments, self.region.inputs, strict=True) if _written(i.example))
        if given and _writes(graph):
            versions = "V"
            self.lines.append(f"V = _versions([{given}])")
        values = ", ".join([*map(parameter, self.names), "C"])
        self.lines += ["try:", f"    {call}", "except Exception as error:",
                       f"    if not {recovery}.prepare(error, {versions}, [{given}]): raise", "    G = None",
                       f"if G is None: return {recovery}.eager({values})"]

    def build(self, prefetched: Sequence[Source]) -> Callable:
        parameters = ", ".join(["P", *map(parameter, self.names), "C"])
        body = "\n".join(f"    {line}" for line in self.lines)
        hoisted = "".join(f", {k}={k}" for k in self.constants.namespace if k in body)
        source = f"def run({parameters}{hoisted}):\n{body}\n"
        namespace = dict(self.constants.namespace)
        exec(compile(source, f"<fuseline entry {self.region.name or self.region.code.co_name}>", "exec"), namespace)
        function = namespace["run"]
        function.source_text = source
        return function


def _set_function(function: types.FunctionType, fields: dict) -> None:
    """Give a function that was made before its defaults and attributes what belongs there."""
    made = make_function(function.__code__, function.__globals__, function.__name__, function.__qualname__,
                         function.__closure__ or (), fields)
    for name in ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__"):
        setattr(function, name, getattr(made, name))
    function.__dict__.update(made.__dict__)


_RUNTIME["_set_function"] = _set_function


def _parts(new: New) -> list[Any]:
    extra = [new.extra] if isinstance(new.extra, (New, FromSource, FromGraph, Const)) else []
    return [*new.items, *new.fields.values(), *extra]


def _is_kept(graph_input: GraphInput) -> bool:
    """Whether an input is found at the end of a path that rarely changes, so that the dispatcher may keep it."""
    source = graph_input.source
    base = getattr(source, "base", None)
    if isinstance(source, Local) or isinstance(base, Local) and isinstance(source, Item):
        return False                                      # an argument, or one of *args
    return graph_input.static or isinstance(source, (Item, InDict, Attr)) and isinstance(base, (Item, InDict, Attr))


_WRITING = frozenset(["setitem", "__setitem__", *(name for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)
                                                 and name not in ("index", "inv", "invert", "is_", "is_not"))])


def _target_name(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _written(example: Any) -> bool:
    """Whether an input's fake tensor was written to during capture."""
    return isinstance(example, torch.Tensor) and torch_internals.version_of(example) != 0


def _writes(graph: Any) -> bool:
    """Whether an operator of the torch-level graph may write to a tensor: then inputs can have changed when another one raises."""
    return any(node.op in ("call_module", "get_attr") or _target_name(node).endswith("_") or _target_name(node) in _WRITING
               or "out" in node.kwargs for node in graph.graph.nodes if node.op not in ("placeholder", "output"))


def _writes_unseen(graph: Any) -> bool:
    """Whether it may write to a tensor whose version does not tell: running statistics."""
    return any(_target_name(node) in ("batch_norm", "instance_norm") and any(a is True for a in (*node.args, *node.kwargs.values()))
               for node in graph.graph.nodes)


def _changes_state(graph: Any) -> bool:
    """Whether it changes a setting of the process, which has to be put back."""
    return any(_target_name(node).lstrip("_").startswith(("set_", "autocast", "enter", "exit")) for node in graph.graph.nodes
               if node.op == "call_function")


def parameter_names(code: types.CodeType) -> tuple[str, ...]:
    """The bound locals of a code object at its start, in the order that entries take them."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    return code.co_varnames[:count]


def assemble(region: Region, compiled: CompiledGraph | None, resume_factory: ResumeFactory | None = None) -> Assembled:
    """The code of a region's entry.

    compiled        the compiled graph: inputs in order -> flat tuple of outputs; None for a region without tensor work
    resume_factory  makes, for a frame suspended at a break, the function that goes on (see `capture.resume.Resumer.factory`)
    """
    names = parameter_names(region.code)
    writer = _Writer(region, names, region.code.co_freevars)
    end = region.end
    prefetched = tuple(i.source for i in region.inputs if _is_kept(i))
    for index, source in enumerate(prefetched):
        writer.fetcher.define(source, f"p{index}")
    if prefetched:
        writer.lines.append("".join(f"p{i}, " for i in range(len(prefetched))) + "= P")
    recipes: list[Any] = [r for e in region.effects for r in (e.target, *e.values)]
    match end:
        case Returned(value):
            recipes.append(value)
        case Raised(exception, _):
            recipes.append(exception)
        case Broke(frames, _):
            for frame in frames:
                recipes += [*frame.stack, *frame.locals.values(), *frame.cells.values()]
    writer.fetch_sources(recipes)
    if compiled is not None and region.graph is not None:
        writer.run_graph(compiled)
    for recipe in recipes:
        if isinstance(recipe, New):
            writer.expression(recipe)
    writer.fill()
    for effect in region.effects:
        writer.effect(effect)
    continues = False
    match end:
        case Returned(value):
            writer.lines.append(f"return {writer.expression(value)}")
        case Raised(exception, _):
            writer.lines.append(f"raise {writer.expression(exception)}")
        case Broke(frames, _):
            if resume_factory is None:
                raise InternalError("a region that broke needs a resume factory", at=region.name)
            continues = True
            _write_break(writer, frames, resume_factory)
    return Assembled(writer.build(prefetched), prefetched, continues, writer.recovery)


def _write_break(writer: _Writer, frames: Sequence[FrameState], factory: ResumeFactory) -> None:
    """Call the break code of the outermost frame, which calls that of the next one at the suspended call, and so on."""
    inner = ""
    for index, frame in enumerate(frames):
        suspended = factory(frame, index > 0)
        arguments = [writer.expression(r) for r in suspended.arguments(frame)]
        cells = [writer.expression(frame.cells[name]) for name in suspended.cell_names]
        head = [writer.constants.name(suspended.call), f"({', '.join(cells)}{',' if cells else ''})"]
        if index:
            arguments.append(inner)
        if index == len(frames) - 1:
            writer.lines.append(f"return {head[0]}({', '.join([head[1], *arguments])})")
        else:
            inner = writer.fresh(f"_thunk(_finish, {', '.join([*head, *arguments])})")
