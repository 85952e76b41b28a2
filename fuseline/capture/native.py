"""Calls of everything that is no plain Python function: builtins, C methods, classes, torch."""
from __future__ import annotations

import builtins
import collections
import copyreg
import enum
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.autograd_function import apply_function
from fuseline.capture.containers import ItemIterator, plain_number
from fuseline.capture.errors import Break, ProgramError, break_here
from fuseline.capture.library import Library
from fuseline.capture.protocols import TAKES_INDEX, defines
from fuseline.capture.provenance import CONSTANTS, IDENTITIES, MISSING, is_python, lookup
from fuseline.capture.torch_calls import LEGACY_TYPE
from fuseline.capture.values import VIEWS, is_pure
from fuseline.ir.region import Attr

_PURE_MODULES = frozenset({"math", "_operator", "itertools", "_functools", "_collections", "cmath", "_bisect", "_heapq", "_abc", "_typing"})
_IMPURE_BUILTINS = frozenset({"print", "input", "open", "eval", "exec", "compile", "breakpoint", "__import__"})
# C functions that change the container that they are given first.
_CHANGES_FIRST = frozenset({"_count_elements", "insort", "insort_left", "insort_right", "heappush", "heappop", "heapify", "heapreplace",
                            "heappushpop"})
_SHOW_VALUES = (str, repr, format, ascii)
_TAKES_FUNCTION = (map, filter, sorted, max, min, functools.reduce, itertools.accumulate, itertools.groupby, itertools.starmap,
                   itertools.takewhile, itertools.dropwhile, itertools.filterfalse)
_TAKES_ITERABLE = frozenset({list, tuple, set, frozenset, dict, zip, enumerate, map, filter, reversed, sorted, max, min, any, all,
                             functools.reduce, collections.deque, collections.OrderedDict, bytes, bytearray})
# What puts values elsewhere without looking at them.
_STRUCTURE = frozenset({list, tuple, dict, zip, enumerate, map, filter, reversed, functools.reduce, collections.deque,
                        collections.OrderedDict, operator.is_, operator.is_not, len, iter, next, id, slice, callable, isinstance})
# Which arguments native code iterates over, where it is not all of them.
_ITERATED: dict[Any, tuple[int, ...]] = {
    functools.reduce: (1,), itertools.repeat: (), itertools.count: (), itertools.islice: (0,), itertools.accumulate: (0,),
    enumerate: (0,), collections.deque: (0,), itertools.groupby: (0,)}
_READ_ONLY = frozenset({"get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference", "issubset",
                        "issuperset", "isdisjoint", "symmetric_difference", "__len__", "__contains__", "__iter__", "__getitem__",
                        "__eq__", "__ne__", "__reversed__", "__or__", "__and__", "__sub__", "__class_getitem__", "__hash__", "__repr__",
                        "__add__", "__mul__", "__lt__", "__le__", "__gt__", "__ge__"})
_LOOKS_UP = frozenset({"get", "pop", "setdefault", "add", "discard", "remove", "__contains__"})
_BINARY = {getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
                                          "lshift",
                                          "rshift")}
_COMPARE = {operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge}
_UNARY = {operator.neg, operator.pos, operator.invert, operator.abs}
_INPLACE = {getattr(operator, n) for n in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior",
                                           "ixor",
                                           "ilshift", "irshift")}


_PARTS_KNOWN = (*CONSTANTS, list, tuple, dict, set, frozenset, collections.deque)
# Classes whose instances hold their arguments as they are, without looking into them.
_HOLDS_ARGUMENTS = frozenset({functools.partial, types.MethodType, weakref.ReferenceType, staticmethod, classmethod, property})
# Containers that native code may iterate over itself: it runs no method of the program.
_PARTS_KNOWN_NATIVELY = frozenset({list, tuple, dict, set, frozenset, range, collections.deque, collections.OrderedDict,
                                   collections.defaultdict, collections.Counter})


class _Plain:
    """An instance has a dict and nothing else."""


class Callback:
    """A function of the program, as native code can call it."""

    def __init__(self, world: Any, target: Any) -> None:
        self.world, self.target = world, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.world.interpreter_call(self.target, args, kwargs)
        except Break:
            self.world.touch()                             # native code is in the middle of something
            raise


class Natives(Library):
    def shows_itself(self, value: Any) -> bool:
        return _shows_itself(self.contents(value))

    def callback(self, value: Any) -> Any:
        """A callable for native code that runs the program's function in the interpreter."""
        return value if isinstance(value, Callback) or value is None or not callable(value) else Callback(self, value)

    def type_of(self, value: Any) -> type:
        """type(value) as the program sees it."""
        if isinstance(value, torch.Tensor):
            real = self.real_of.get(id(value))
            if real is not None:
                return type(real)
            return torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
        if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return {torch.SymInt: int, torch.SymBool: bool, torch.SymFloat: float}[type(value)]
        return getattr(type(value), "symbolic_type", None) or type(value)

    def isinstance_(self, value: Any, kinds: Any) -> bool:
        kinds = self.contents(kinds)
        actual = self.type_of(value)
        if actual is type(value):
            return self.native(isinstance, value, kinds)
        if isinstance(value, torch.Tensor):                # classes of old torch have no instances, but answer for tensors
            if isinstance(kinds, (tuple, types.UnionType)):
                return any(self.isinstance_(value, kind) for kind in (kinds if isinstance(kinds, tuple) else kinds.__args__))
            if kinds is torch.autograd.Variable:
                return True
            if isinstance(kinds, LEGACY_TYPE):
                device = "cuda" if kinds.is_cuda else "xpu" if kinds.is_xpu else "cpu"
                return (value.dtype, value.layout, value.device.type) == (kinds.dtype, kinds.layout, device)
        return self.native(issubclass, actual, kinds)

    def call(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """Call anything that is no plain Python function of the user's."""
        kind = type(function)
        if kind is types.FunctionType:
            return self.torch_function(function, args, kwargs)
        try:
            special = _SPECIAL.get(function)
        except TypeError:
            special = None
        if special is not None:
            try:
                found = special(self, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
                found = MISSING                            # not called as the builtin wants it: that raises below
            if found is not MISSING:
                return found
        if is_pure(function):
            found = self.of_values(function, args, kwargs)
            if found is not MISSING:
                return found
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType) and args:
            return self._descriptor(function, args, kwargs)
        if kind is weakref.ReferenceType and not args and not kwargs:
            return self.dereference(function)
        if isinstance(function, type):
            return self.construct(function, args, kwargs)
        owner = getattr(function, "__self__", None)
        if owner is not None and not isinstance(owner, (types.ModuleType, type)) and (
                found := self.source(function)) is not None:
            owner = self.read(owner, Attr(found, "__self__"))
        if kind is types.MethodWrapperType:
            return self._slot(owner, function.__name__, args, kwargs, function)
        if isinstance(owner, torch.Tensor):
            return self.torch_method(function.__name__, (owner, *args), kwargs)
        if kind is types.BuiltinFunctionType and owner is not None and not isinstance(owner, (types.ModuleType, type)):
            return self._method(owner, function, args, kwargs)
        return self._c_function(function, owner, args, kwargs)

    def _descriptor(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """`list.append(xs, 1)`, `object.__setattr__(obj, "a", 1)`: unbound methods of C classes."""
        name, target = function.__name__, args[0]
        if isinstance(target, torch.Tensor):
            return self.torch_method(name, args, kwargs)
        if type(function) is types.WrapperDescriptorType:
            return self._slot(target, name, args[1:], kwargs, function.__get__(target))
        return self._method(target, self.native(function.__get__, target), args[1:], kwargs)

    def _slot(self, target: Any, name: str, args: tuple, kwargs: dict, function: Any) -> Any:
        """Special methods of builtin classes, reached through super() or a class: as the class itself has them."""
        if name == "__get__" and isinstance(target, types.FunctionType) and args:
            return self.native(function, *args) if args[0] is None else types.MethodType(target, args[0])
        if isinstance(target, type) and name == "__call__":
            return self.construct(target, args, kwargs, through_metaclass=False)
        if name == "__setattr__":
            return self.plain_setattr(target, *args)
        if name == "__delattr__":
            return self.plain_delattr(target, *args)
        if name == "__getattribute__":
            return self.plain_getattr(target, *args)
        if isinstance(target, torch.Tensor):
            return self.torch_method(name, (target, *args), kwargs)
        if name == "__init__" and self.source(target) is None:
            return self.native(function, *map(self.contents, args), **kwargs)
        if name == "__getitem__":
            return self.plain_getitem(target, *args)
        if name == "__setitem__":
            return self.plain_setitem(target, *args)
        if name in ("__eq__", "__ne__", "__hash__", "__repr__", "__str__") and type(target).__dictoffset__ and not isinstance(
                target, (dict, list, tuple, set, str, int, float)):
            if name == "__eq__":
                return True if args[0] is target else NotImplemented
            if name == "__hash__" or name == "__ne__":
                return self.native(function, *args)
        return self._method(target, function, args, kwargs)

    def reduced(self, obj: Any) -> tuple:
        """How `copy` and `pickle` take apart an object of a plain class: a new instance, and the contents of its dict."""
        cls = type(obj)
        own = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__", "__new__")
        plain = cls.__flags__ & (1 << 9) and cls.__dictoffset__ and cls.__basicsize__ <= _Plain.__basicsize__ and all(
            lookup(cls, name)[1] in (MISSING, lookup(object, name)[1]) for name in own)
        if not plain or isinstance(obj, (torch.Tensor, types.ModuleType)):
            raise break_here("pickle", f"taking a {cls.__name__} apart is not captured", "copy it outside the compiled function")
        state = self.getattr(obj, "__dict__")
        return copyreg.__newobj__, (cls,), state or None, None, None       # type: ignore[attr-defined]

    def _method(self, owner: Any, function: Any, args: tuple, kwargs: dict) -> Any:
        """A C method bound to an object."""
        name = function.__name__
        if name == "with_traceback" and isinstance(owner, BaseException) and len(args) == 1:
            self.setattr(owner, "__traceback__", args[0])
            return owner
        if (getattr(function, "__module__", None) or "").startswith("torch"):      # pybind functions are methods of a record
            return self.torch_function(function, args, kwargs)
        if name == "__reduce_ex__" and len(args) == 1 and args[0] in (2, 3, 4, 5) and not isinstance(owner, _PARTS_KNOWN):
            return self.reduced(owner)
        if self.source(function) is not None and not isinstance(owner, (list, dict, set, str, bytes)):
            raise break_here("unknown-c-function", f"{type(owner).__name__}.{name} may change what it belongs to",
                             "call it outside the compiled function")
        if isinstance(owner, (list, dict, set, frozenset, collections.deque, tuple)):
            return self._container_method(owner, name, args, kwargs, function)
        if isinstance(owner, (*CONSTANTS, slice)) or self.source(owner) is None:
            if name == "join" and isinstance(owner, (str, bytes)) and len(args) == 1:
                args = (list(self.iterate(args[0])),)
            if isinstance(owner, (str, bytes)) and any(_deep_tensor(self.contents(a)) for a in (*args, *kwargs.values())):
                raise break_here("item", "a tensor is turned into text", "format it outside the compiled function")
            if isinstance(owner, str) and name in ("format", "format_map") and any(
                    _shows_itself(self.contents(a)) for a in (*args, *kwargs.values())):
                raise break_here("text-of-objects", "the text of objects with their own __repr__ or __str__ is not captured",
                                 "format them outside the compiled function")
            if isinstance(owner, torch.Generator):
                raise break_here("generator-state", "a torch.Generator is used", "draw from the default generator")
            args = tuple(map(self.contents, args))
            return self.native(function, *args, **kwargs)
        if isinstance(owner, types.MappingProxyType) and name in _READ_ONLY:
            return self.native(getattr(self.contents(owner), name), *args, **kwargs)
        if type(owner) in VIEWS and name in _READ_ONLY:
            return self.native(getattr(self.contents(owner), name), *map(self.contents, args), **kwargs)
        raise break_here("unknown-c-function", f"{type(owner).__name__}.{name} is written in C and may change or read anything",
                         "call it outside the compiled function")

    def _container_method(self, owner: Any, name: str, args: tuple, kwargs: dict, function: Any) -> Any:
        """`function` is the C method itself: a subclass may have another one under its name."""
        if isinstance(owner, (dict, set, frozenset)):
            args = tuple(map(plain_number, args[:1])) + args[1:]
            if args and name in _LOOKS_UP:
                self.probe(self.contents(owner) if defines(args[0], ("__hash__",)) else (), args[0])
        if isinstance(owner, dict) and args and type(args[0]) in CONSTANTS and id(owner) not in self.shadows \
                and self.source(owner) is not None and name in ("get", "__contains__"):
            found = self.contains_key(owner, args[0])
            if name == "__contains__":
                return found
            return self.plain_getitem(owner, args[0]) if found else args[1] if len(args) > 1 else None
        if id(owner) in self.owners and name not in _READ_ONLY:
            return self._instance_dict_method(owner, name, args, kwargs)
        target = self.contents(owner) if name in _READ_ONLY or isinstance(owner, (tuple, frozenset)) else self.writable(owner)
        if name in ("extend", "update", "extendleft", "union", "intersection", "difference", "__iadd__", "difference_update",
                    "intersection_update", "__ior__", "fromkeys"):
            args = tuple(self._iterable(a) if not isinstance(self.contents(a), dict) else self.contents(a) for a in args)
        elif name == "sort" and isinstance(target, list) and not args:
            found = self.ordered(sorted, list(target), **{"key": None, **kwargs})
            if found is not None:
                target[:] = found
                return None
        if isinstance(owner, (list, tuple, collections.deque)) and name in ("index", "count", "remove") and len(args) > 0 \
                and any(defines(v, ("__eq__",)) for v in (*target, args[0])):
            return self._find_equal(target, name, *args)
        return self.native(function if target is owner else getattr(target, name), *args, **kwargs)

    def _find_equal(self, items: Any, name: str, wanted: Any, *limits: Any) -> Any:
        """index, count and remove of a list, tuple or deque whose items are compared by `__eq__` in Python."""
        if name == "count":
            return builtins.sum(1 for item in list(items) if item is wanted or self.truth(self.compare(operator.eq, item, wanted)))
        at = self.find(list(items), wanted, *limits)
        if at < 0:
            text = {"list": {"index": "{} is not in list"}, "tuple": {"index": "tuple.index(x): x not in tuple"},
                    "deque": {"index": "{} is not in deque", "remove": "deque.remove(x): x not in deque"}}
            kind = next(k.__name__ for k in type(items).__mro__ if k in (list, tuple, collections.deque))
            message = text[kind].get(name, "list.remove(x): x not in list")
            raise ProgramError(ValueError(message.format(self.interpreter_call(repr, (wanted,), {})) if "{" in message else message))
        if name == "remove":
            del items[at]
            return None
        return at

    def _instance_dict_method(self, entries: dict, name: str, args: tuple, kwargs: dict) -> Any:
        if name == "update":
            for key, value in {**(dict(self.contents(args[0])) if args else {}), **kwargs}.items():
                self.setattr_entry(entries, key, value)
            return None
        if name in ("pop", "setdefault") and args:
            if self.contains_key(entries, args[0]):
                value = self.plain_getitem(entries, args[0])
                if name == "pop":
                    self.plain_delattr(self.owners[id(entries)], args[0])
                return value
            if name == "setdefault":
                self.setattr_entry(entries, args[0], args[1] if len(args) > 1 else None)
                return args[1] if len(args) > 1 else None
            if len(args) > 1:
                return args[1]
            raise ProgramError(KeyError(args[0]))
        raise break_here("instance-dict", f"__dict__.{name} is not captured", "assign the attributes one by one")

    def _iterable(self, value: Any) -> Any:
        """What native code may iterate over in place of a value."""
        if isinstance(value, (str, bytes)) or value is None or isinstance(value, (int, float)):
            return value
        if self.source(value) is None and type(value) in _PARTS_KNOWN_NATIVELY:
            return value
        if isinstance(value, torch.Tensor) or hasattr(type(value), "__iter__") or hasattr(type(value), "__getitem__"):
            inside = self.contents(value)
            return inside if type(inside) in _PARTS_KNOWN_NATIVELY else self.iterate(value)
        return value

    def _c_function(self, function: Any, owner: Any, args: tuple, kwargs: dict) -> Any:
        module = getattr(function, "__module__", None) or (owner.__name__ if isinstance(owner, types.ModuleType) else "") or ""
        name = getattr(function, "__name__", "")
        if isinstance(function, functools._lru_cache_wrapper):
            return self.interpreter_call(self.getattr(function, "__wrapped__"), args, kwargs)
        if name == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            return apply_function(self, owner, args, self.interpreter_call)
        if module.startswith("torch") or isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch") \
                or isinstance(function, (torch_internals.Operator, torch_internals.OperatorPacket)) or getattr(
                    owner, "__module__", "").startswith("torch"):
            return self.torch_function(function, args, kwargs)
        if isinstance(owner, type):
            if name == "__new__":
                return self.native(function, *map(self.contents, args), **kwargs)
            if owner.__module__ in ("builtins", "collections", "itertools") or name in (
                    "__subclasses__", "mro", "__subclasshook__", "__init_subclass__"):
                return self.native(function, *map(self._iterable, args), **kwargs)
        if module == "builtins" and name not in _IMPURE_BUILTINS or module in _PURE_MODULES:
            return self._pure(function, args, kwargs)
        if name in _IMPURE_BUILTINS:
            raise break_here("print" if name == "print" else "input-output", f"{name}() reaches outside the program",
                             "call it outside the compiled function")
        if isinstance(function, (operator.attrgetter, operator.itemgetter, operator.methodcaller)):
            return self._getter(function, args)
        if not callable(function):
            return self.native(function)
        raise break_here("unknown-c-function", f"{module}.{name or type(function).__name__} is written in C and is not known to be pure",
                         "call it outside the compiled function")

    def _getter(self, function: Any, args: tuple) -> Any:
        parts = function.__reduce__()[1]
        if isinstance(function, operator.itemgetter):
            found = tuple(self.getitem(args[0], key) for key in parts)
        elif isinstance(function, operator.attrgetter):
            found = tuple(functools.reduce(self.getattr, path.split("."), args[0]) for path in parts)
        else:
            return self.call_method(function, args[0])
        return found[0] if len(found) == 1 else found

    def _pure(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """A C function without effects: called on shadows and fakes."""
        if getattr(function, "__name__", "") in _CHANGES_FIRST:
            return self.native(function, self.writable(args[0]), *map(self.contents, args[1:]), **kwargs)
        if getattr(function, "__name__", "") == "dir" or function is operator.length_hint and self.source(args[0]) is not None:
            raise break_here("introspection", "dir() looks at everything in an object", "ask for the attributes by name")
        found = self._of_numbers(function, args, kwargs)
        if found is not MISSING:
            return found
        if function is hash and len(args) == 1:
            return self.hash(args[0])
        known, found = self.converted(function, args) if not kwargs else (False, None)
        if known:
            return found
        if function in TAKES_INDEX:
            args = tuple(map(self.index_of, args))
        if function in (sorted, min, max) and args and not (kwargs.keys() - {"key", "reverse"}):
            items = list(self.iterate(args[0])) if len(args) == 1 else list(args)
            found = self.ordered(function, items, **{"key": None, **kwargs}) if items else None
            if found is not None:
                return found
            args = (items,)
        if function not in _STRUCTURE and getattr(function, "__module__", "") != "itertools":
            args = tuple(self.fixed(self.contents(a)) if _numbers_inside(self.contents(a)) else a for a in args)
            kwargs = {k: self.fixed(v) for k, v in kwargs.items()}
        if function not in _STRUCTURE and function is not hash:
            for value in args:
                if type(value) not in CONSTANTS and not isinstance(value, IDENTITIES) and not callable(value):
                    self.known_state(value, f"{getattr(function, '__name__', 'text')}()")
        if function in _SHOW_VALUES and any(map(_deep_tensor, map(self.contents, args))):
            raise break_here("item", "a tensor is turned into text", "format it outside the compiled function")
        if function in _SHOW_VALUES and any(_shows_itself(self.contents(a)) for a in args):
            raise break_here("text-of-objects", "the text of objects with their own __repr__ or __str__ is not captured",
                             "format them outside the compiled function")
        if function in _SHOW_VALUES or function is hash:
            args = tuple(plain_number(a) for a in args)
        if function in _TAKES_FUNCTION:
            at: tuple[int, ...] = (1,) if function is itertools.accumulate else (0,)
            if function in (sorted, max, min, itertools.groupby):
                at = ()
                kwargs = {k: self.callback(v) if k == "key" else v for k, v in kwargs.items()}
                if function is itertools.groupby and len(args) > 1:
                    at = (1,)
            if function is itertools.accumulate and len(args) < 2 and "func" not in kwargs:
                kwargs = {**kwargs, "func": operator.add}
            args = tuple(self.callback(a) if i in at else a for i, a in enumerate(args))
            kwargs = {k: self.callback(v) if k == "func" else v for k, v in kwargs.items()}
        if function in _TAKES_ITERABLE or getattr(function, "__module__", "") == "itertools":
            which = _ITERATED.get(function, range(len(args)))
            args = tuple(self._iterable(a) if i in which and not isinstance(a, Callback) else self.contents(a) for i, a in enumerate(args))
        else:
            args = tuple(map(self.contents, args))
        return self.native(function, *args, **{k: self.contents(v) for k, v in kwargs.items()})

    def _of_numbers(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """A function of symbolic floats, or a math function of symbolic sizes, that Python computes on each call; else MISSING."""
        floats = getattr(function, "__module__", "") == "math" or function in (float, abs, complex, round)
        wanted = (torch.SymFloat, torch.SymInt) if floats or any(type(a) is float for a in args) else torch.SymFloat
        if function is sum and args and _numbers_inside(self.contents(args[0])):
            total = args[1] if len(args) > 1 else kwargs.get("start", 0)
            for value in self.iterate(args[0]):
                total = self.binary(operator.add, total, value)
            return total
        if function in (min, max) and len(args) == 1 and not kwargs and _numbers_inside(self.contents(args[0])):
            args = tuple(self.iterate(args[0]))
        if kwargs or function in _STRUCTURE or not any(isinstance(a, wanted) for a in args):
            return MISSING
        return self.derive(function, *args)

    # -- instances -----------------------------------------------------------------------------------------------
    def construct(self, cls: type, args: tuple, kwargs: dict, through_metaclass: bool = True) -> Any:
        """Make an instance: __new__, and __init__ in the interpreter if they are Python."""
        if through_metaclass and not issubclass(type(cls), enum.EnumMeta) and is_python(type(cls), "__call__") \
                and not cls.__module__.startswith("torch"):
            return self.interpreter_call(self.class_member(type(cls), "__call__"), (cls, *args), kwargs)
        if issubclass(type(cls), enum.EnumMeta):
            return self.native(cls, *args, **kwargs)
        if issubclass(cls, torch.Tensor) or isinstance(cls, LEGACY_TYPE):
            if cls is torch.nn.Parameter or cls.__module__.startswith("torch.nn"):
                return self.record("call_function", cls, args, kwargs)
            legacy = cls is torch.Tensor or isinstance(cls, LEGACY_TYPE) and cls.__module__ == "torch" and not cls.is_sparse
            if legacy and len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple)):
                dtype = torch.get_default_dtype() if cls is torch.Tensor else cls.dtype
                data, numbers = self._plain(args[0]), (int, float) if dtype.is_floating_point else int
                if _all_numbers(data, numbers):
                    return self.record("call_function", torch.tensor, (data,), {"dtype": dtype, "device": torch.device("cpu")})
            raise break_here("tensor-class", f"{cls.__name__}(...) is not captured", "use torch.tensor")
        new, init = lookup(cls, "__new__")[1], lookup(cls, "__init__")[1]
        python_new = isinstance(new, staticmethod) and isinstance(new.__func__, types.FunctionType)
        python_init = isinstance(init, types.FunctionType)
        if not python_new and not python_init:
            return self._builtin_instance(cls, args, kwargs)
        if python_new:
            obj = self.interpreter_call(self.getattr(cls, "__new__"), (cls, *args), kwargs)
        elif issubclass(cls, BaseException):
            obj = self.native(cls.__new__, cls, *args, **kwargs)
        elif new is object.__new__ or getattr(new, "__self__", None) is object:
            obj = self.native(object.__new__, cls)
        else:
            obj = self.native(cls.__new__, cls, *(map(self._iterable, args) if issubclass(cls, (tuple, frozenset)) else args if issubclass(
                cls, (int, float, str)) else ()))
        if not isinstance(obj, cls) or isinstance(obj, torch.Tensor):
            return obj
        if python_init:
            found = self.interpreter_call(self.class_member(cls, "__init__", obj), (obj, *args), kwargs)
            if found is not None:
                raise ProgramError(TypeError(f"__init__() should return None, not '{type(found).__name__}'"))
        elif init is not object.__init__:
            self.native(init, obj, *map(self._iterable, args), **kwargs)
        return obj

    def _builtin_instance(self, cls: type, args: tuple, kwargs: dict) -> Any:
        if cls in _TAKES_ITERABLE or cls in _SHOW_VALUES or cls in (
                int, float, bool, complex, bytes, range, slice, object, property, staticmethod,
                                                                   classmethod) or cls.__module__ == "itertools":
            if cls in (int, float, complex) and args and isinstance(args[0], torch.Tensor):
                raise break_here("item", f"{cls.__name__}() reads the value of a tensor", "keep the value in a tensor")
            if cls is range and any(isinstance(a, torch.Tensor) for a in args):
                raise break_here("item", "range() reads the value of a tensor", "keep the value in a tensor")
            if cls is str and len(args) == 1 and is_python(type(args[0]), "__str__"):
                return _text(self, args[0], "__str__")
            if cls is dict and args and not isinstance(args[0], dict) and hasattr(args[0], "keys"):
                keys = list(self.iterate(self.interpreter_call(self.getattr(args[0], "keys"), (), {})))
                return {**{k: self.getitem(args[0], k) for k in keys}, **kwargs}
            return self._pure(cls, args, kwargs)
        if cls is collections.defaultdict:
            if args and not (isinstance(args[0], type) and args[0].__module__ == "builtins"):
                args = (self.callback(args[0]), *args[1:])
            return self.native(cls, *args[:1], *map(self._iterable, args[1:]), **kwargs)
        if cls.__module__.partition(".")[0] in ("builtins", "collections", "torch", "types", "functools", "operator", "weakref"):
            if cls.__module__.startswith("torch") and (
                    cls.__name__ in ("Generator", "Event", "Stream", "_InferenceMode") or "Guard" in cls.__name__):
                raise break_here("unsupported-torch", f"{cls.__name__}(...) is not captured", "make it outside the compiled function")
            if cls is weakref.ReferenceType and (len(args) > 1 or kwargs):
                raise break_here("weak-reference", "a weak reference with a callback is not captured", "make it outside")
            return self.native(cls, *(args if cls in _HOLDS_ARGUMENTS else map(self.contents, args)), **kwargs)
        if cls.__flags__ & (1 << 9):                       # a class of the program without a constructor of its own
            return self.native(cls, *map(self._iterable, args), **kwargs)
        raise break_here("unknown-c-function", f"{cls.__module__}.{cls.__name__} is written in C and is not known to be pure",
                         "make it outside the compiled function")


def _all_numbers(value: Any, kinds: Any) -> bool:
    """Whether nested lists and tuples hold nothing but plain numbers of these kinds."""
    return all(_all_numbers(v, kinds) for v in value) if type(value) in (list, tuple) else isinstance(value, kinds)


def _numbers_inside(value: Any) -> bool:
    """Whether a symbolic float is a value or in a list, tuple or dict that native code would look into."""
    if type(value) is dict:
        return any(_numbers_inside(x) for pair in value.items() for x in pair)
    return isinstance(value, torch.SymFloat) or type(value) in (list, tuple) and any(map(_numbers_inside, value))


def _deep_tensor(value: Any, depth: int = 0) -> bool:
    """Whether a tensor is in a value or in the containers and objects that its text would show."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > 4 or isinstance(value, (str, bytes, int, float)):
        return False
    if isinstance(value, dict):
        return any(_deep_tensor(v, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return any(_deep_tensor(v, depth + 1) for v in value)
    return type(value).__module__ not in ("builtins", "torch") and any(
        _deep_tensor(v, depth + 1) for v in getattr(value, "__dict__", {}).values()) if not isinstance(value, type) else False


def _shows_itself(value: Any, depth: int = 0) -> bool:
    """Whether native code that makes a value's text would run methods of the program."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return any(is_python(kind, m) and lookup(kind, m)[1].__module__ != "enum" for m in ("__repr__", "__str__", "__format__"))
    if is_python(kind, "__repr__") or is_python(kind, "__str__") or is_python(kind, "__format__"):
        return True
    if depth > 4 or isinstance(value, type):
        return False
    if isinstance(value, dict):
        return any(_shows_itself(v, depth + 1) for pair in value.items() for v in pair)
    return isinstance(value, (list, tuple, set, frozenset, collections.deque)) and any(_shows_itself(v, depth + 1) for v in value)


# ---------------------------------------------------------------- builtins that follow the program's own protocols

_SPECIAL: dict[Any, Callable] = {}


def special(*targets: Any) -> Callable:
    def register(function: Callable) -> Callable:
        for target in targets:
            _SPECIAL[target] = function
        return function
    return register


@special(isinstance)
def _isinstance(world: Natives, value: Any, kinds: Any) -> bool:
    return world.isinstance_(value, kinds)


@special(type)
def _type(world: Natives, value: Any, *more: Any, **kwargs: Any) -> Any:
    if more or kwargs:
        raise break_here("class-definition", "type(name, bases, dict) is not captured", "define the class outside the compiled function")
    return world.type_of(value)


@special(getattr)
def _getattr(world: Natives, obj: Any, name: str, *default: Any) -> Any:
    try:
        return world.getattr(obj, name)
    except ProgramError as error:
        if default and isinstance(error.value, AttributeError):
            return default[0]
        raise


@special(hasattr)
def _hasattr(world: Natives, obj: Any, name: str) -> bool:
    try:
        world.getattr(obj, name)
    except ProgramError as error:
        if isinstance(error.value, AttributeError):
            return False
        raise
    return True


@special(setattr)
def _setattr(world: Natives, obj: Any, name: str, value: Any) -> None:
    world.setattr(obj, name, value)


@special(delattr)
def _delattr(world: Natives, obj: Any, name: str) -> None:
    world.delattr(obj, name)


@special(vars)
def _vars(world: Natives, *args: Any) -> Any:
    return world.getattr(args[0], "__dict__") if args else MISSING


@special(iter)
def _iter(world: Natives, value: Any, *sentinel: Any) -> Any:
    return world.iterate(value) if not sentinel else world.native(iter, world.callback(value), *sentinel)


@special(reversed)
def _reversed(world: Natives, value: Any) -> Any:
    cls = type(value)
    if is_python(cls, "__reversed__"):
        return world.interpreter_call(world.getattr(value, "__reversed__"), (), {})
    if hasattr(cls, "__reversed__") or not is_python(cls, "__getitem__") or not is_python(cls, "__len__"):
        return MISSING
    size = world.interpreter_call(len, (value,), {})
    return ItemIterator([world.getitem(value, i) for i in range(size - 1, -1, -1)])


@special(next)
def _next(world: Natives, iterator: Any, *default: Any) -> Any:
    if is_python(type(iterator), "__next__") and not hasattr(type(iterator), "symbolic_type") and type(iterator).__module__ != (
            "fuseline.capture.containers"):
        try:
            return world.interpreter_call(world.special_method(iterator, "__next__"), (), {})
        except ProgramError as error:
            if default and isinstance(error.value, StopIteration):
                return default[0]
            raise
    if world.source(iterator) is not None:
        raise break_here("iterator", f"a {type(iterator).__name__} that began outside the captured code is advanced",
                         "pass the list or the range and iterate over it inside")
    return world.native(next, iterator, *default)


@special(bool)
def _bool(world: Natives, *args: Any) -> bool:
    return world.truth(args[0]) if args else False


@special(len)
def _len(world: Natives, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.dim() else world.native(len, value)
    if is_python(type(value), "__len__"):
        return world.length(world.interpreter_call(world.special_method(value, "__len__"), (), {}))
    source = world.source(value)
    if source is not None and id(value) not in world.shadows and isinstance(value, (list, tuple, collections.deque, dict, set)):
        if isinstance(value, (dict, set)):
            world.guard(source, "length", len(value))
        return len(value)
    world.known_state(value, "len()")
    return world.native(len, world.contents(value))


@special(sum)
def _sum(world: Natives, items: Any, start: Any = 0) -> Any:
    total = start
    for item in world.iterate(items):
        total = world.binary(operator.add, total, item)
    return total


@special(abs)
def _abs(world: Natives, value: Any) -> Any:
    return world.unary(operator.abs, value)


@special(pow)
def _pow(world: Natives, a: Any, b: Any, *modulus: Any) -> Any:
    return world.native(pow, *map(plain_number, (a, b, *modulus))) if modulus else world.binary(operator.pow, a, b)


@special(round)
def _round(world: Natives, value: Any, *digits: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return world.torch_method("round", (value,), {"decimals": digits[0]} if digits else {})
    return MISSING


@special(divmod)
def _divmod(world: Natives, a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return world.binary(operator.floordiv, a, b), world.binary(operator.mod, a, b)
    return world.binary(divmod, a, b) if is_python(type(a), "__divmod__") or is_python(type(b), "__rdivmod__") else MISSING


@special(id)
def _id(world: Natives, value: Any) -> int:
    if world.source(value) is None or isinstance(value, torch.Tensor):
        raise break_here("identity", "id() of an object made in the compiled function is not captured", "compare objects with `is`")
    return id(value)


@special(operator.getitem)
def _getitem(world: Natives, value: Any, key: Any) -> Any:
    return world.getitem(value, key)


@special(operator.setitem)
def _setitem(world: Natives, value: Any, key: Any, new: Any) -> None:
    world.setitem(value, key, new)


@special(operator.contains)
def _contains(world: Natives, value: Any, key: Any) -> bool:
    return world.contains(value, key)


@special(operator.truth)
def _truth(world: Natives, value: Any) -> bool:
    return world.truth(value)


@special(operator.not_)
def _not(world: Natives, value: Any) -> bool:
    return not world.truth(value)


@special(any)
def _any_of(world: Natives, items: Any) -> bool:
    return builtins.any(world.truth(item) for item in world.iterate(items))


@special(all)
def _all_of(world: Natives, items: Any) -> bool:
    return builtins.all(world.truth(item) for item in world.iterate(items))


@special(operator.iconcat)
def _iconcat(world: Natives, a: Any, b: Any) -> Any:
    return world.inplace(operator.iadd, a, b)


@special(operator.delitem)
def _delitem(world: Natives, value: Any, key: Any) -> None:
    world.delitem(value, key)


if hasattr(operator, "call"):
    @special(operator.call)
    def _call(world: Natives, function: Any, *args: Any, **kwargs: Any) -> Any:
        return world.interpreter_call(function, args, kwargs)


@special(str)
def _str(world: Natives, *args: Any) -> Any:
    if len(args) == 1 and not isinstance(args[0], torch.Tensor):
        if is_python(type(args[0]), "__str__"):
            return _text(world, args[0], "__str__")
        if lookup(type(args[0]), "__str__")[1] is object.__str__:
            if is_python(type(args[0]), "__repr__"):
                return _text(world, args[0], "__repr__", asked="__str__")
            return _repr(world, args[0])
    return MISSING


def _text(world: Natives, value: Any, method: str, *args: Any, asked: str = "") -> Any:
    """What a special method makes of a value; `asked`: the method that the program asked for, where that is another one."""
    found = world.interpreter_call(world.special_method(value, method), args, {})
    if not isinstance(found, str):
        raise ProgramError(TypeError(f"{asked or method} returned non-string (type {type(found).__name__})" if method != "__format__" else
                                     f"__format__ must return a str, not {type(found).__name__}"))
    return found


@special(repr)
def _repr(world: Natives, value: Any) -> Any:
    if is_python(type(value), "__repr__") and not isinstance(value, torch.Tensor):
        return _text(world, value, "__repr__")
    return world.native(repr, value) if type(value) is type or isinstance(value, BaseException) else MISSING


@special(format)
def _format(world: Natives, value: Any, *spec: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return MISSING
    if is_python(type(value), "__format__"):
        return _text(world, value, "__format__", *(spec or ("",)))
    plain = lookup(type(value), "__format__")[1] is object.__format__
    return world.interpreter_call(str, (value,), {}) if plain and (not spec or spec[0] == "") else MISSING


def _register_operators() -> None:
    for op in _BINARY:
        _SPECIAL[op] = lambda world, a, b, op=op: world.binary(op, a, b)
    for op in _COMPARE:
        _SPECIAL[op] = lambda world, a, b, op=op: world.compare(op, a, b)
    for op in _UNARY:
        _SPECIAL[op] = lambda world, a, op=op: world.unary(op, a)
    for op in _INPLACE:
        _SPECIAL[op] = lambda world, a, b, op=op: world.inplace(op, a, b)


_register_operators()
