"""How the values that survive a region are made again at run time: a source, an output of the graph, or a new object."""
from __future__ import annotations

import collections
import copy
import enum
import functools
import gc
import types
import warnings
import weakref
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.containers import ItemIterator, ProgramIterator
from fuseline.capture.errors import RestartCapture, break_here
from fuseline.capture.native import Callback, Natives
from fuseline.capture.provenance import CONSTANTS
from fuseline.capture.values import FROZEN, copy_of_buffer, is_opaque, memory_of
from fuseline.errors import InternalError
from fuseline.ir.region import Attr, Cell, CellObject, CellOf, Const, FromGraph, FromSource, GraphBreak, Item, New, Pinned, Recipe

# Iterators of Python's own containers: `__reduce__` tells what they go over and how far they are.
_ITERATORS = frozenset({"list_iterator", "tuple_iterator", "range_iterator", "list_reverseiterator", "str_ascii_iterator", "str_iterator",
                        "set_iterator", "bytes_iterator", "_deque_iterator", "_deque_reverse_iterator", "longrange_iterator", "reversed",
                        "odict_iterator", "callable_iterator"})
_DICT_ITERATORS: dict[str, tuple] = {"dict_keyiterator": (iter,), "dict_valueiterator": (iter, dict.values),
                                     "dict_itemiterator": (iter, dict.items), "dict_reversekeyiterator": (reversed,),
                                     "dict_reversevalueiterator": (reversed, dict.values),
                                     "dict_reverseitemiterator": (reversed, dict.items)}
_VIEWS = frozenset({"dict_keys", "dict_values", "dict_items", "odict_keys", "odict_values", "odict_items"})


def _placed(iterator: Any, state: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        iterator.__setstate__(state)
    return iterator


def _advanced(iterator: Any, steps: int) -> Any:
    for _ in range(steps):
        next(iterator)
    return iterator


def _exception(cls: type[BaseException], args: tuple, state: dict) -> BaseException:
    """An exception as if its class's own constructor had run, which the interpreter has followed."""
    base = next(b for b in cls.__mro__ if not b.__flags__ & (1 << 9))
    made = base.__new__(cls, *args)
    base.__init__(made, *args)                             # type: ignore[misc]
    made.args = args
    for name, value in state.items():
        if name.startswith("__") and name != "__notes__" or name in ("name", "path", "obj"):
            object.__setattr__(made, name, value)
        else:
            made.__dict__[name] = value
    return made


class Recipes(Natives):
    """`recipes`: id of a value -> (value, recipe). `outputs`: the FX nodes that the graph returns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._recipes: dict[int, tuple[Any, Recipe]] = {}
        self.outputs: list[Any] = []
        self._output_at: dict[Any, int] = {}
        self._buffers: dict[int, Any] = {}

    def recipe(self, value: Any) -> Recipe:
        """The recipe of a value; the same for the same object. Raises Break for what cannot be rebuilt."""
        if type(value) in CONSTANTS and self.source(value) is None:
            if type(value) is torch.Size and not all(type(n) is int for n in value):
                return New("call", [Const(torch.Size), New("list", [self.recipe(n) for n in value])])
            return Const(value)
        found = self._recipes.get(id(value))
        if found is not None:
            return found[1]
        made = self._make(value)
        self._recipes[id(value)] = (value, made)
        return made

    def _begin(self, value: Any, made: New) -> New:
        """Remember the recipe before its parts are made: a part may be the object itself."""
        self._recipes[id(value)] = (value, made)
        return made

    def _output(self, node: Any) -> FromGraph:
        if node not in self._output_at:
            self._output_at[node] = len(self.outputs)
            self.outputs.append(node)
        return FromGraph(self._output_at[node])

    def _make(self, value: Any) -> Recipe:
        source = self.source(value)
        if source is not None:
            return FromSource(source)
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if torch_internals.is_transformed(value):
                raise break_here("torch-func", "a tensor that only exists inside a torch.func transform is in use where the region ends",
                                 "return it from the transformed function")
            return self._output(self.operand(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            own = self.symbols.get(torch_internals.own_symbol(value))
            if own is not None and own[1] is None:
                return FromSource(own[0])
            node = self.number_node(value)
            if not isinstance(node, torch.fx.Node):
                return Const(node)
            where = next((place for symbol, place in self.symbols.items() if symbol == value.node.expr and place[1] is None), None)
            return FromSource(where[0]) if where is not None else self._output(node)
        if kind is types.CellType:
            return self._cell(value)
        if hasattr(kind, "symbolic_type"):
            return value.recipe(self)
        if id(value) in self.made_classes:
            raise RestartCapture(self.made_classes[id(value)][1], GraphBreak(
                "class-definition", "", f"the class {value.__name__} is in use where the region ends",
                "define the class outside the compiled function"))
        if isinstance(value, (type, types.ModuleType, enum.Enum, types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType,
                              types.GenericAlias, types.UnionType, property, staticmethod, classmethod, *FROZEN)):
            return Const(value)
        if kind is Callback:
            return self.recipe(value.target)
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
            owner = value.__self__
            module = getattr(value, "__module__", None) or ""
            if owner is None or isinstance(owner, (types.ModuleType, type)) or module.startswith("torch"):
                return Const(value)
            return New("call", [Const(getattr), self.recipe(owner), Const(value.__name__)])
        if kind is types.MethodType:
            return New("method", [self.recipe(value.__func__), self.recipe(value.__self__)])
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            return New("partial", [self.recipe(value.func), self.recipe(value.args), self.recipe(value.keywords)])
        if kind is super:
            return New("call", [Const(super), self.recipe(value.__thisclass__), self.recipe(value.__self__)])
        if kind in (list, set, collections.deque):
            made = self._begin(value, New(kind.__name__, extra=value.maxlen if kind is collections.deque else None))
            made.items += [self.recipe(v) for v in list(value)]
            return made
        if kind in (tuple, frozenset):
            return New(kind.__name__, [self.recipe(v) for v in value])
        if isinstance(value, tuple):
            if hasattr(kind, "n_sequence_fields"):         # what torch.max and its like return
                return New("call", [Const(kind), New("tuple", [self.recipe(v) for v in value])])
            if not hasattr(value, "__dict__"):
                return New("call", [Const(tuple.__new__), Const(kind), New("tuple", [self.recipe(v) for v in value])])
            raise self._refuse(value)
        if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            return self._dict(value)
        if kind is types.SimpleNamespace:
            return self._begin(value, New("call", [Const(kind)], {k: self.recipe(v) for k, v in vars(value).items()}))
        if kind is types.MappingProxyType:
            return self._begin(value, New("call", [Const(kind), self.recipe(self._from_shadow(gc.get_referents(value)[0]))]))
        if kind is weakref.ReferenceType and value.__callback__ is None and value() is not None:
            return self._begin(value, New("call", [Const(kind), self.recipe(value())]))
        if (memory := memory_of(value)) is not None:
            if id(memory) in self._buffers:
                raise self._refuse(value)                  # two views of one array would no longer share it
            self._buffers[id(memory)] = memory
            return self._begin(value, New("call", [Const(copy_of_buffer), Const(copy_of_buffer(value))]))
        if kind is slice:
            return New("slice", [self.recipe(value.start), self.recipe(value.stop), self.recipe(value.step)])
        found = self._iterator(value)
        if found is not None:
            return found
        return self._instance(value)

    def _from_shadow(self, contents: Any) -> Any:
        """The container from outside that a shadow stands for; anything else as it is."""
        return next((outside for outside, shadow in self.shadows.values() if shadow is contents), contents)

    def _refuse(self, value: Any) -> BaseException:
        return break_here("cannot-rebuild", f"a {type(value).__name__} that is in use where the region ends cannot be made again",
                          "make it outside the compiled function")

    def _cell(self, cell: types.CellType) -> Recipe:
        source = self.cell_source(cell)
        if source is not None:
            if isinstance(source, Cell):
                return FromSource(CellObject(source.name))
            if not isinstance(source, CellOf):
                raise InternalError(f"a cell found at {source}")
            return FromSource(Item(Attr(source.function, "__closure__"), source.index))
        made = self._begin(cell, New("cell"))
        try:
            contents = cell.cell_contents
        except ValueError:
            return made
        made.items.append(self.recipe(contents))
        return made

    def _function(self, function: types.FunctionType) -> Recipe:
        if function.__code__.co_filename.startswith("<fuseline") or function.__module__ == "fuseline.capture.interpret":
            raise self._refuse(function)
        made = self._begin(function, New("function", [], {}, (
            function.__code__, function.__globals__, function.__name__, function.__qualname__)))
        made.items += [self.recipe(cell) for cell in function.__closure__ or ()]
        if function.__defaults__:
            made.fields["defaults"] = self.recipe(function.__defaults__)
        if function.__kwdefaults__:
            made.fields["kwdefaults"] = self.recipe(function.__kwdefaults__)
        if function.__annotations__:
            made.fields["annotations"] = self.recipe(function.__annotations__)
        if function.__dict__:
            made.fields["dict"] = self.recipe(dict(function.__dict__))
        made.fields["module"] = Const(function.__module__)
        made.fields["doc"] = Const(function.__doc__)
        return made

    def _dict(self, value: dict) -> New:
        made = self._begin(value, New("dict", extra=type(value)))
        if isinstance(value, collections.defaultdict):
            made.items.append(self.recipe(value.default_factory))
        for key, item in value.items():
            made.items += [self.recipe(key), self.recipe(item)]
        return made

    def _iterator(self, value: Any) -> Recipe | None:
        kind = type(value)
        if kind is ItemIterator:
            return New("iterator", [New("list", [self.recipe(v) for v in value.rest()])])
        if kind is ProgramIterator:
            return self.recipe(value.target)
        name = kind.__name__
        if name in _DICT_ITERATORS:
            return self._dict_iterator(value, *_DICT_ITERATORS[name])
        if name in _VIEWS and hasattr(value, "mapping"):
            shown = self._from_shadow(gc.get_referents(value)[0])
            return New("call", [New("call", [Const(getattr), self.recipe(shown), Const(name.partition("_")[2])])])
        if kind in (zip, map, filter, enumerate) or kind.__module__ == "itertools" or name in _ITERATORS:
            try:
                with warnings.catch_warnings():            # 3.12 announces that 3.14 has no __reduce__
                    warnings.simplefilter("ignore", DeprecationWarning)
                    made_by, parts, *state = value.__reduce__()
            except TypeError:
                raise self._refuse(value) from None
            made = New("call", [Const(made_by), *map(self._recipe_of_shadowed, parts)])
            return made if not state or state[0] is None else New("call", [Const(_placed), made, self.recipe(state[0])])
        return None

    def _recipe_of_shadowed(self, value: Any) -> Recipe:
        """The recipe of a container, where a shadow stands for the one from outside."""
        if isinstance(value, (list, dict, collections.deque)):
            value = next((outside for outside, shadow in self.shadows.values() if shadow is value), value)
        return self.recipe(value)

    def _dict_iterator(self, value: Any, make: Any, view: Any = None) -> Recipe:
        entries = next((found for found in gc.get_referents(value) if isinstance(found, dict)), None)
        try:
            rest = list(copy.copy(value))
        except RuntimeError:                               # the dict changed its size: the next step must raise
            raise self._refuse(value) from None
        outside = next((v for v, shadow in self.shadows.values() if shadow is entries), None)
        if entries is None or id(outside) in self.replaced:
            return New("iterator", [New("list", [self.recipe(v) for v in rest])])
        over = self._recipe_of_shadowed(entries)
        begun = New("call", [Const(make), over if view is None else New("call", [Const(view), over])])
        return New("call", [Const(_advanced), begun, Const(len(entries) - len(rest))])

    def _exception(self, value: BaseException) -> New:
        state = {name: getattr(value, name) for name in ("name", "path", "obj") if isinstance(
            getattr(type(value), name, None), types.MemberDescriptorType) and getattr(value, name) is not None}
        state.update(vars(value))
        for name in ("__cause__", "__context__", "__suppress_context__"):
            if getattr(value, name) not in (None, False):
                state[name] = getattr(value, name)
        return self._begin(value, New("call", [Const(_exception), self.recipe(type(value)), self.recipe(value.args), self.recipe(state)]))

    def _instance(self, value: Any) -> New:
        cls = type(value)
        if isinstance(value, BaseException):
            return self._exception(value)
        if not cls.__flags__ & (1 << 9) or is_opaque(cls):       # a class in C: only Python's own containers are known
            raise self._refuse(value)
        made = self._begin(value, New("instance", [self.recipe(cls)]))
        if isinstance(value, dict):
            made.extra = self._dict(dict(dict.items(value)))
        elif isinstance(value, (list, set, collections.deque)):
            made.extra = New("list", [self.recipe(v) for v in list(value)])
        elif isinstance(value, (int, float, str, bytes, tuple, types.ModuleType)):
            raise self._refuse(value)
        for name, item in getattr(value, "__dict__", {}).items():
            made.fields[name] = self.recipe(item)
        for base in cls.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                name = f"_{base.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    made.fields[name] = self.recipe(getattr(value, name))
        return made


def pinned(value: Any) -> FromSource:
    """The recipe of a given object that the entry holds."""
    return FromSource(Pinned(value))


