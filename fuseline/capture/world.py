"""What values stand for during capture: sources, graph nodes, overlays of what was changed. First form: to be split by subject."""
from __future__ import annotations

import builtins, collections, enum, functools, inspect, itertools, math, operator, types
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fuseline.capture.errors import Break, CannotCapture, ProgramError, RegionEnd, RestartCapture, break_here
from fuseline.ir.region import *
from fuseline.ir.region import Guard, TensorFacts

CONST = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(...))
PASS = (Break, CannotCapture, ProgramError, RegionEnd, RestartCapture)
ABSENT = object()
_MISSING = object()
CALLBACKS = {map, filter, sorted, max, min, functools.reduce, itertools.accumulate, itertools.groupby, itertools.starmap}


def lookup(cls, name):
    for base in cls.__mro__:
        if name in base.__dict__:
            return base, base.__dict__[name]
    return None, _MISSING


class ItemIter:
    def __init__(self, world, items): self.world, self.items, self.i = world, items, 0
    def __iter__(self): return self
    def __next__(self):
        if self.i >= len(self.items): raise StopIteration
        self.i += 1
        return self.items[self.i - 1]


class UserIter:
    def __init__(self, world, obj): self.world, self.obj = world, obj
    def __iter__(self): return self
    def __next__(self):
        try:
            return self.world.interpreter_call(self.world.getattr(self.obj, "__next__"), (), {})
        except ProgramError as e:
            if isinstance(e.value, StopIteration): raise StopIteration(e.value.value) from None
            raise


class World:
    def __init__(self, options, dynamic, where):
        self.dynamic, self.where = dynamic, where
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.graph = torch.fx.Graph()
        self.sources, self.guards, self.nodes, self.fakes, self.recipes = {}, {}, {}, {}, {}
        self.attrs, self.shadows, self.cells, self.globals_ = {}, {}, {}, {}
        self.inputs, self.effects, self.outputs, self.keep = [], [], [], []
        self.cell_sources = {}

    # -- sources
    def guard(self, source, kind, value, ):
        key = (source, kind, value if kind in ("is", "type", "same") and False else repr(value) if kind == "tensor" else id(value) if kind in ("is", "type") else (type(value), repr(value)))
        if key not in self.guards:
            self.keep.append(value)
            self.guards[key] = Guard(source, kind, value, self.where())

    def source(self, value):
        found = self.sources.get(id(value))
        return found[1] if found is not None and found[0] is value else None

    def is_fresh(self, value): return self.source(value) is None

    def register(self, value, source):
        self.sources[id(value)] = (value, source)

    def read(self, value, source):
        t = type(value)
        if isinstance(value, FakeTensor) : return value
        if t in CONST:
            self.guard(source, "equals", value)
            return value
        if isinstance(value, torch.Tensor): return self.wrap(value, source)
        known = self.source(value)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)) or t in (types.MethodDescriptorType, types.WrapperDescriptorType, classmethod, staticmethod, property, types.GetSetDescriptorType, types.MemberDescriptorType):
            if not isinstance(source, Pinned): self.guard(source, "is", value)
        else:
            if known is not None and known != source:
                self.guard(source, "same", known); return value
            self.guard(source, "type", t)
            if issubclass(t, dict): self.guard(source, "keys", tuple(value))
            elif issubclass(t, (list, tuple, collections.deque)): self.guard(source, "length", len(value))
        if known is None: self.register(value, source)
        return value

    def wrap(self, t, source):
        found = self.fakes.get(id(t))
        if found is not None:
            if self.tensor_source[id(t)] != source: self.guard(source, "same", self.tensor_source[id(t)])
            return found[1]
        fake = self.mode.from_tensor(t, static_shapes=True)
        node = self.graph.placeholder(f"a{len(self.inputs)}")
        node.meta["example_value"] = fake
        static = not isinstance(source, Local)
        self.inputs.append(GraphInput(node.name, source, fake, static))
        self.guard(source, "tensor", TensorFacts(type(t), t.dtype, t.device, tuple(t.shape), tuple(t.stride()), t.requires_grad, t.layout, t.is_leaf))
        self.fakes[id(t)] = (t, fake)
        self.nodes[id(fake)] = (fake, node)
        self.register(fake, source)
        return fake

    @property
    def tensor_source(self):
        return {k: self.source(f) for k, (t, f) in self.fakes.items()}

    # -- names
    def load_global(self, ns, name):
        key = (id(ns), name)
        if key in self.globals_:
            v = self.globals_[key]
            if v is ABSENT: raise ProgramError(NameError(f"name '{name}' is not defined"))
            return v
        if name in ns: return self.read(ns[name], Global(name, ns))
        b = builtins.__dict__
        if name in b: return b[name]
        raise ProgramError(NameError(f"name '{name}' is not defined"))

    def store_global(self, ns, name, v):
        self.globals_[(id(ns), name)] = v
        self.effects.append(("setglobal", ns, name, v))

    def delete_global(self, ns, name): self.store_global(ns, name, ABSENT)

    def adopt_cell(self, cell, source): self.cell_sources[id(cell)] = (cell, source)

    def load_cell(self, cell):
        if id(cell) in self.cells: return self.cells[id(cell)][1]
        v = cell.cell_contents
        s = self.cell_sources.get(id(cell))
        return v if s is None else self.read(v, s[1])

    def store_cell(self, cell, v):
        if id(cell) in self.cell_sources:
            self.cells[id(cell)] = (cell, v)
            self.effects.append(("setcell", cell, "", v))
        else: cell.cell_contents = v

    # -- attributes
    def getattr(self, obj, name):
        if isinstance(obj, FakeTensor): return self.tensor_attr(obj, name)
        if isinstance(obj, super): return self.super_attr(obj, name)
        src = self.source(obj)
        if isinstance(obj, types.ModuleType):
            if name not in obj.__dict__: return self._native(getattr, obj, name)
            return self.read(obj.__dict__[name], Global(name, obj.__dict__))
        if isinstance(obj, type):
            over = self.attrs.get(id(obj), {}).get(name, _MISSING)
            if over is not _MISSING: return over
            base, raw = lookup(obj, name)
            if isinstance(raw, types.FunctionType): return self.read(raw, ClassDict(Pinned(base), name))
            if isinstance(raw, (classmethod,)) and isinstance(raw.__func__, types.FunctionType): return types.MethodType(raw.__func__, obj)
            v = self._native(getattr, obj, name)
            return self.read(v, Attr(src or Pinned(obj), name)) if not isinstance(v, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)) else v
        cls = type(obj)
        _, ga = lookup(cls, "__getattribute__")
        if isinstance(ga, types.FunctionType): return self.interpreter_call(ga, (obj, name), {})
        base, raw = lookup(cls, name)
        over = self.attrs.get(id(obj), {}).get(name, _MISSING)
        if raw is not _MISSING and hasattr(type(raw), "__set__"):
            if isinstance(raw, property): return self.interpreter_call(raw.fget, (obj,), {})
            if isinstance(type(raw).__dict__.get("__get__"), types.FunctionType): return self.interpreter_call(type(raw).__get__, (raw, obj, cls), {})
            if over is ABSENT: raise ProgramError(AttributeError(f"'{cls.__name__}' object has no attribute '{name}'"))
            if over is not _MISSING: return over
            if name == "__dict__": raise break_here("dict", "__dict__")
            v = self._native(getattr, obj, name)
            return self.read(v, Attr(src, name)) if src is not None else v
        if over is not _MISSING and over is not ABSENT: return over
        d = getattr(obj, "__dict__", {})
        if over is not ABSENT and name in d:
            return self.read(d[name], InDict(src, name)) if src is not None else d[name]
        if src is not None and hasattr(obj, "__dict__"): self.guard(src, "absent", name)
        if raw is not _MISSING:
            if isinstance(raw, types.FunctionType):
                return types.MethodType(self.read(raw, ClassDict(Pinned(base), name)), obj)
            if isinstance(raw, classmethod): return types.MethodType(raw.__func__, cls)
            if isinstance(raw, staticmethod): return raw.__func__
            if hasattr(type(raw), "__get__"):
                if isinstance(type(raw).__dict__.get("__get__"), types.FunctionType): return self.interpreter_call(type(raw).__get__, (raw, obj, cls), {})
                v = self._native(getattr, obj, name)
                return v
            return self.read(raw, ClassDict(Pinned(base), name))
        if isinstance(obj, torch.nn.Module) and lookup(cls, "__getattr__")[1] is torch.nn.Module.__getattr__:
            for table in ("_parameters", "_buffers", "_modules"):
                dd = obj.__dict__.get(table)
                over = self.shadows.get(id(dd))
                dd2 = over[1] if over else dd
                if dd2 and name in dd2:
                    v = dd2[name]
                    if over and not (isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor)): return v
                    return self.read(v, Item(InDict(src, table), name)) if src is not None else v
        _, ga = lookup(cls, "__getattr__")
        if isinstance(ga, types.FunctionType): return self.interpreter_call(ga, (obj, name), {})
        v = self._native(getattr, obj, name)
        return v

    def super_attr(self, proxy, name):
        obj, start = proxy.__self__, proxy.__thisclass__
        cls = proxy.__self_class__
        mro = cls.__mro__
        for base in mro[mro.index(start) + 1:]:
            if name in base.__dict__:
                raw = base.__dict__[name]
                if isinstance(raw, types.FunctionType):
                    return types.MethodType(self.read(raw, ClassDict(Pinned(base), name)), obj) if not isinstance(obj, type) or obj is not cls else raw
                if isinstance(raw, property): return self.interpreter_call(raw.fget, (obj,), {})
                if isinstance(raw, classmethod): return types.MethodType(raw.__func__, cls)
                break
        return self._native(getattr, proxy, name)

    def tensor_attr(self, t, name):
        if name == "shape": return t.shape
        if name == "grad":
            src = self.source(t)
            for real, fake in self.fakes.values():
                if fake is t: return self.read(real.grad, Attr(src, "grad"))
            return None
        _, raw = lookup(type(t), name)
        if name in ("T", "mT", "H", "data", "real", "imag"): return self.record("call_function", getattr, (t, name), {})
        if isinstance(raw, types.FunctionType): return types.MethodType(getattr(torch.Tensor, name), t)
        return self._native(getattr, t, name)

    def setattr(self, obj, name, v):
        _, sa = lookup(type(obj), "__setattr__")
        if isinstance(sa, types.FunctionType) and sa is not torch.nn.Module.__setattr__:
            return self.interpreter_call(sa, (obj, name, v), {})
        _, raw = lookup(type(obj), name)
        if isinstance(raw, property):
            return self.interpreter_call(raw.fset, (obj, v), {})
        if isinstance(type(raw).__dict__.get("__set__"), types.FunctionType): return self.interpreter_call(type(raw).__set__, (raw, obj, v), {})
        src = self.source(obj)
        if src is None: return self._native(setattr, obj, name, v)
        if isinstance(obj, torch.nn.Module):
            for table in ("_parameters", "_buffers"):
                if name in obj.__dict__[table]:
                    return self.setitem(self.read(obj.__dict__[table], InDict(src, table)), name, v)
        self.attrs.setdefault(id(obj), {})[name] = v
        self.effects.append(("setattr", obj, name, v))

    def delattr(self, obj, name):
        if self.source(obj) is None: return self._native(delattr, obj, name)
        self.getattr(obj, name)
        self.attrs.setdefault(id(obj), {})[name] = ABSENT
        self.effects.append(("delattr", obj, name, None))

    # -- containers
    def contents(self, c):
        """native stand-in of a container"""
        src = self.source(c)
        if src is None: return c
        found = self.shadows.get(id(c))
        if found is not None: return found[1]
        if isinstance(c, dict):
            s = {k: self.read(v, Item(src, k)) for k, v in c.items()}
            if type(c) is not dict and type(c) is collections.OrderedDict: s = collections.OrderedDict(s)
        elif isinstance(c, (list, tuple, collections.deque)):
            s = [self.read(v, Item(src, i)) for i, v in enumerate(c)]
            if isinstance(c, tuple):
                return tuple(s) if type(c) in (tuple, torch.Size) else c if not any(isinstance(x, FakeTensor) for x in s) else type(c)(*s)
            if isinstance(c, collections.deque): s = collections.deque(s, c.maxlen)
        elif isinstance(c, (set, frozenset)):
            if any(isinstance(x, torch.Tensor) for x in c): raise break_here("set", "set of tensors")
            self.guard(src, "equals", c)
            s = set(c)
        else: return c
        self.shadows[id(c)] = (c, s)
        return s

    def getitem(self, c, key):
        if isinstance(c, FakeTensor) or (isinstance(key, FakeTensor) and not isinstance(c, (dict, list, tuple))): return self.record("call_function", operator.getitem, (c, key), {})
        if isinstance(lookup(type(c), "__getitem__")[1], types.FunctionType): return self.interpreter_call(self.getattr(c, "__getitem__"), (key,), {})
        return self._native(operator.getitem, self.contents(c), key)

    def setitem(self, c, key, v):
        if isinstance(c, FakeTensor): self.record("call_function", operator.setitem, (c, key, v), {}); return
        if isinstance(lookup(type(c), "__setitem__")[1], types.FunctionType): self.interpreter_call(self.getattr(c, "__setitem__"), (key, v), {}); return
        self.mutated(c)
        self._native(operator.setitem, self.contents(c), key, v)

    def delitem(self, c, key):
        self.mutated(c)
        self._native(operator.delitem, self.contents(c), key)

    def mutated(self, c):
        if self.source(c) is not None:
            self.contents(c)
            if not any(e[0] == "replace" and e[1] is c for e in self.effects): self.effects.append(("replace", c, "", None))

    def contains(self, c, key):
        if isinstance(lookup(type(c), "__contains__")[1], types.FunctionType): return self.truth(self.interpreter_call(self.getattr(c, "__contains__"), (key,), {}))
        return self._native(operator.contains, self.contents(c), key)

    # -- operators
    def _op(self, op, args):
        if any(isinstance(a, (FakeTensor)) for a in args): return self.record("call_function", op, args, {})
        return None

    def binary(self, op, a, b):
        name, rname = f"__{op.__name__.strip('_')}__", f"__r{op.__name__.strip('_')}__"
        for x, y, n in ((a, b, name), (b, a, rname)):
            m = lookup(type(x), n)[1]
            if isinstance(m, types.FunctionType) and not isinstance(x, torch.Tensor):
                r = self.interpreter_call(self.getattr(x, n), (y,), {})
                if r is not NotImplemented: return r
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor): return self.record("call_function", op, (a, b), {})
        return self._native(op, self.contents(a), self.contents(b))

    def inplace(self, op, a, b):
        n = f"__{op.__name__}__"
        m = lookup(type(a), n)[1]
        if isinstance(a, torch.Tensor): return self.record("call_function", op, (a, b), {})
        if isinstance(m, types.FunctionType): return self.interpreter_call(self.getattr(a, n), (b,), {})
        if isinstance(a, (list, dict, set, collections.deque)):
            self.mutated(a); self._native(op, self.contents(a), self.contents(b)); return a
        return self.binary(getattr(operator, {"iand": "and_", "ior": "or_"}.get(op.__name__, op.__name__[1:])), a, b)

    def compare(self, op, a, b):
        n = f"__{op.__name__}__"
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor): return self.record("call_function", op, (a, b), {})
        if isinstance(lookup(type(a), n)[1], types.FunctionType): 
            r = self.interpreter_call(self.getattr(a, n), (b,), {})
            if r is not NotImplemented: return r
        return self._native(op, self.contents(a), self.contents(b))

    def unary(self, op, a):
        if isinstance(a, torch.Tensor): return self.record("call_function", op, (a,), {})
        return self._native(op, a)

    def truth(self, v):
        if isinstance(v, FakeTensor): raise break_here("data-dependent-branch", "a branch depends on the value of a tensor")
        if v is None or type(v) in (bool, int, str, float): return bool(v)
        for n in ("__bool__", "__len__"):
            m = lookup(type(v), n)[1]
            if isinstance(m, types.FunctionType): return bool(self.interpreter_call(self.getattr(v, n), (), {}))
        return self._native(bool, self.contents(v))

    def iterate(self, v):
        if isinstance(v, FakeTensor): return ItemIter(self, list(self.record("call_method", "unbind", (v, 0), {})))
        if isinstance(v, (ItemIter, UserIter)): return v
        m = lookup(type(v), "__iter__")[1]
        from fuseline.capture.generators import Generator
        if type(v) is Generator: return v
        if isinstance(m, types.FunctionType):
            it = self.interpreter_call(self.getattr(v, "__iter__"), (), {})
            return UserIter(self, it) if isinstance(lookup(type(it), "__next__")[1], types.FunctionType) else it
        return self._native(iter, self.contents(v))

    def type_of(self, v):
        if isinstance(v, FakeTensor): return torch.nn.Parameter if isinstance(v, torch.nn.Parameter) else torch.Tensor
        return getattr(type(v), "symbolic_type", type(v))

    # -- calls
    def is_leaf(self, fn):
        m = fn.__module__ or ""
        return m in ("torch.nn.functional", "torch.functional", "torch._tensor", "torch._C._nn", "torch") or fn in torch.Tensor.__dict__.values()

    def _native(self, fn, *args, **kw):
        try: return fn(*args, **kw)
        except PASS: raise
        except StopIteration as e: raise ProgramError(e) from None
        except Exception as e: raise ProgramError(e) from None

    def call(self, fn, args, kwargs):
        if fn is isinstance:
            return self._native(issubclass, self.type_of(args[0]), args[1])
        if fn is type and len(args) == 1: return self.type_of(args[0])
        if fn is getattr or fn is hasattr:
            try: v = self.getattr(*args[:2])
            except ProgramError as e:
                if not isinstance(e.value, AttributeError) or (fn is getattr and len(args) == 2): raise
                return False if fn is hasattr else args[2]
            return True if fn is hasattr else v
        if fn is setattr: return self.setattr(*args)
        if fn is delattr: return self.delattr(*args)
        if fn is iter and len(args) == 1: return self.iterate(*args)
        if fn is bool and args: return self.truth(*args)
        if fn is object.__setattr__ and len(args) == 3:
            o, n, v = args
            if self.source(o) is None: return self._native(object.__setattr__, o, n, v)
            self.attrs.setdefault(id(o), {})[n] = v; self.effects.append(("setattr", o, n, v)); return None
        if fn in (print, input, open, eval, exec): raise break_here("print", f"{fn.__name__} is called")
        if fn is next and isinstance(args[0], UserIter): pass
        if isinstance(fn, types.MethodType) : return self.torch_python(fn.__func__, (fn.__self__, *args), kwargs)
        if isinstance(fn, type) and issubclass(fn, torch.Tensor) : raise break_here("tensor-class", "tensor constructor")
        if isinstance(fn, types.FunctionType): return self.torch_python(fn, args, kwargs)
        own = getattr(fn, "__self__", None)
        if isinstance(own, FakeTensor): return self.method(fn.__name__, (own, *args), kwargs)
        if isinstance(fn, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args and isinstance(args[0], FakeTensor): return self.method(fn.__name__, args, kwargs)
        module = getattr(fn, "__module__", None) or ""
        if isinstance(fn, type): return self.construct(fn, args, kwargs)
        if own is not None and not isinstance(own, types.ModuleType) and not isinstance(own, type) and isinstance(fn, types.BuiltinMethodType):
            if isinstance(own, (list, dict, set, collections.deque)) and self.source(own) is not None:
                if fn.__name__ not in ("get", "keys", "values", "items", "copy", "index", "count", "union"): self.mutated(own)
                fn = getattr(self.contents(own), fn.__name__)
            elif self.source(own) is not None and not isinstance(own, CONST): raise break_here("unknown-c-function", f"{fn}")
            return self._native(fn, *map(self.contents, args), **kwargs)
        if module.startswith("torch") or isinstance(own, types.ModuleType) and own.__name__.startswith("torch"):
            return self.torch_c(fn, args, kwargs)
        if module in ("builtins", "math", "_operator", "operator", "itertools", "_functools", "functools", "_collections", "collections"):
            if any(isinstance(a, FakeTensor) for a in args) and fn in (abs, pow, operator.add, operator.mul, operator.getitem): return self.record("call_function", {abs: operator.abs}.get(fn, fn), args, kwargs)
            if fn in CALLBACKS: args = [self.callback(a) for a in args]; kwargs = {k: self.callback(v) for k, v in kwargs.items()}
            if fn in (sum, any, all, sorted, functools.reduce, min, max) : args = [self.iterable(a) for a in args]
            if fn is len and isinstance(lookup(type(args[0]), "__len__")[1], types.FunctionType): return self.interpreter_call(self.getattr(args[0], "__len__"), (), {})
            if fn is sum:
                it = iter(args[0]); total = args[1] if len(args) > 1 else kwargs.get("start", 0)
                for x in it: total = self.binary(operator.add, total, x)
                return total
            return self._native(fn, *map(self.contents, args), **kwargs)
        if not any(isinstance(a, FakeTensor) for a in args) and not kwargs and all(self.source(a) is None for a in args): return self._native(fn, *args)
        raise break_here("unknown-c-function", f"{fn!r} is called")

    def iterable(self, a):
        if isinstance(a, (int, float, str, types.FunctionType)) or a is None or self.source(a) is None and isinstance(a, (list, tuple, dict, set)): return a
        if hasattr(a, "__iter__") and not callable(a): return self.iterate(a)
        return a

    def callback(self, v):
        if isinstance(v, (types.FunctionType, types.MethodType, functools.partial)): return lambda *a, **k: self.interpreter_call(v, a, k)
        return v

    def construct(self, cls, args, kwargs):
        if cls.__module__ in ("builtins", "itertools", "collections", "functools") and "__init__" not in cls.__dict__ or cls in (list, tuple, dict, set, frozenset, super, int, float, str, collections.OrderedDict, collections.defaultdict, collections.deque) or issubclass(cls, BaseException) and not isinstance(cls.__init__, types.FunctionType):
            if cls in CALLBACKS: args = [self.callback(a) for a in args]
            if cls in (int, float) and isinstance(args[0], FakeTensor): raise break_here("item", "value of tensor is read")
            if cls in (list, tuple, set, zip, enumerate, map, filter, reversed, frozenset, collections.deque) or cls.__module__ == "itertools": args = [args[0] if cls in (map, filter) and i == 0 else self.iterable(a) for i, a in enumerate(args)]
            return self._native(cls, *map(self.contents, args), **kwargs)
        meta_call = lookup(type(cls), "__call__")[1]
        if isinstance(meta_call, types.FunctionType) and not issubclass(type(cls), enum.EnumType): return self.interpreter_call(meta_call, (cls, *args), kwargs)
        if cls.__module__.startswith("torch") and not isinstance(lookup(cls, "__init__")[1], types.FunctionType): return self._native(cls, *args, **kwargs)
        new = lookup(cls, "__new__")[1]
        if isinstance(new, staticmethod) and isinstance(new.__func__, types.FunctionType): obj = self.interpreter_call(new.__func__, (cls, *args), kwargs)
        else:
            init = lookup(cls, "__init__")[1]
            obj = self._native(cls.__new__, cls, *(() if isinstance(init, types.FunctionType) and not issubclass(cls, BaseException) else args), **({} if isinstance(init, types.FunctionType) else kwargs))
        if not isinstance(obj, cls): return obj
        init = lookup(cls, "__init__")[1]
        if isinstance(init, types.FunctionType): self.interpreter_call(types.MethodType(init, obj), args, kwargs)
        else: self._native(init, obj, *args, **kwargs) if init is not object.__init__ else None
        return obj

    def method(self, name, args, kwargs):
        if name in ("item", "tolist", "__bool__", "__int__", "__float__", "numpy", "nonzero"): raise break_here("item", f"{name} reads values")
        return self.record("call_method", name, args, kwargs)

    def torch_python(self, fn, args, kwargs):
        if getattr(torch.Tensor, fn.__name__, None) is fn: return self.method(fn.__name__, args, kwargs)
        return self.record("call_function", fn, args, kwargs)

    def torch_c(self, fn, args, kwargs):
        return self.record("call_function", fn, args, kwargs)

    def record(self, op, target, args, kwargs):
        fn = target if op == "call_function" else getattr(torch.Tensor, target)
        if op == "call_method" and target == "__getitem__": op, target = "call_function", operator.getitem
        args = tuple(self.contents(a) if isinstance(a, (list, dict, tuple)) else a for a in args)
        try:
            with self.mode: out = fn(*args, **kwargs)
        except PASS: raise
        except Exception as e:
            raise break_here("operator-error", f"{type(e).__name__}: {e}")
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        mutates = getattr(fn, "__name__", "").startswith("_set") or "autocast" in getattr(fn, "__name__", "")
        if not tensors and fn is not operator.setitem and not (mutates and out is None): return out
        node = self.graph.create_node(op, target, self.fx(args), self.fx(kwargs))
        node.meta.update(example_value=out, origin=self.where())
        self.bind(out, node)
        return out

    def bind(self, out, node):
        if isinstance(out, torch.Tensor):
            if id(out) not in self.nodes: self.nodes[id(out)] = (out, node)
        elif isinstance(out, (tuple, list)):
            for i, x in enumerate(out):
                if isinstance(x, (torch.Tensor, tuple, list)):
                    n = self.graph.call_function(operator.getitem, (node, i)); n.meta.update(example_value=x, origin=self.where())
                    self.bind(x, n)

    def fx(self, v):
        if isinstance(v, torch.Tensor): return self.nodes[id(v)][1]
        if isinstance(v, torch.Size): return tuple(v)
        if isinstance(v, tuple): return tuple(self.fx(x) for x in v)
        if isinstance(v, list): return [self.fx(x) for x in v]
        if isinstance(v, dict): return {k: self.fx(x) for k, x in v.items()}
        if isinstance(v, slice): return slice(self.fx(v.start), self.fx(v.stop), self.fx(v.step))
        return v

    # -- end
    def recipe(self, v):
        if type(v) in CONST: return Const(v)
        found = self.recipes.get(id(v))
        if found is not None: return found
        self.keep.append(v)
        r = self.recipes[id(v)] = self._recipe(v)
        return r

    def _recipe(self, v):
        from fuseline.capture.generators import Generator
        src = self.source(v)
        if src is not None: return FromSource(src)
        if isinstance(v, torch.Tensor):
            self.outputs.append(self.nodes[id(v)][1]); return FromGraph(len(self.outputs) - 1)
        if isinstance(v, Generator): return v.recipe(self)
        if isinstance(v, types.CellType):
            s = self.cell_sources.get(id(v))
            if s is not None:
                return FromSource(CellObject(s[1].name) if isinstance(s[1], Cell) else Item(Attr(s[1].function, "__closure__"), s[1].index))
            r = self.recipes[id(v)] = New("cell")
            try: r.items.append(self.recipe(v.cell_contents))
            except ValueError: pass
            return r
        if isinstance(v, (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)) and not (isinstance(v, types.BuiltinMethodType) and v.__self__ is not None and not isinstance(v.__self__, (types.ModuleType, type))): return Const(v)
        if isinstance(v, types.BuiltinMethodType): return New("call", [Const(getattr), self.recipe(v.__self__), Const(v.__name__)])
        if isinstance(v, types.MethodType): return New("method", [self.recipe(v.__func__), self.recipe(v.__self__)])
        if isinstance(v, types.FunctionType):
            r = self.recipes[id(v)] = New("function", [], {}, (v.__code__, v.__globals__, v.__name__, v.__qualname__))
            r.items += [self.recipe(c) for c in v.__closure__ or ()]
            if v.__defaults__: r.fields["defaults"] = self.recipe(v.__defaults__)
            if v.__kwdefaults__: r.fields["kwdefaults"] = self.recipe(v.__kwdefaults__)
            if v.__dict__: r.fields["dict"] = self.recipe(dict(v.__dict__))
            return r
        if isinstance(v, (ItemIter,)): return New("iterator", [New("list", [self.recipe(x) for x in v.items[v.i:]])])
        if type(v) in (list, tuple, set, frozenset, collections.deque):
            r = self.recipes[id(v)] = New(type(v).__name__, extra=v.maxlen if isinstance(v, collections.deque) else None); r.items += [self.recipe(x) for x in v]; return r
        if isinstance(v, torch.Size): return New("call", [Const(torch.Size), New("tuple", [self.recipe(x) for x in v])])
        if isinstance(v, tuple): return New("call", [Const(tuple.__new__), Const(type(v)), New("tuple", [self.recipe(x) for x in v])])
        if isinstance(v, dict):
            r = self.recipes[id(v)] = New("dict", extra=type(v))
            if isinstance(v, collections.defaultdict): r.items.append(self.recipe(v.default_factory))
            for k, x in v.items(): r.items += [self.recipe(k), self.recipe(x)]
            return r
        if isinstance(v, slice): return New("slice", [self.recipe(v.start), self.recipe(v.stop), self.recipe(v.step)])
        if isinstance(v, range): return New("range", [Const(v.start), Const(v.stop), Const(v.step)])
        if hasattr(v, "__next__") and hasattr(v, "__reduce__") and type(v).__module__ in ("builtins", "itertools"):
            fn, a, *rest = v.__reduce__()
            state = rest[0] if rest else None
            if type(v).__name__ in ("list_iterator", "tuple_iterator", "range_iterator", "dict_keyiterator", "dict_valueiterator", "dict_itemiterator", "list_reverseiterator"):
                import copy
                return New("iterator", [New("list", [self.recipe(x) for x in copy.copy(v)])])
            if state is None: return New("call", [Const(fn), *map(self.recipe, a)])
            raise CannotCapture(GraphBreak("iterator", self.where(), f"{type(v)}", ""))
        if isinstance(v, BaseException) or type(v).__module__ not in ("builtins",):
            r = self.recipes[id(v)] = New("instance", [self.recipe(type(v))])
            if isinstance(v, BaseException): return New("call", [Const(type(v)), *map(self.recipe, v.args)])
            r.fields.update({k: self.recipe(x) for k, x in getattr(v, "__dict__", {}).items()})
            for b in type(v).__mro__:
                for s in (b.__dict__.get("__slots__") or ()):
                    if hasattr(v, s): r.fields[s] = self.recipe(getattr(v, s))
            return r
        raise CannotCapture(GraphBreak("recipe", self.where(), f"a {type(v)} cannot be rebuilt", ""))

    def finish(self, roots):
        done = []
        for kind, target, name, v in self.effects:
            if kind == "setglobal": done.append(Effect("setglobal", None, name, () if v is ABSENT else (self.recipe(v),), target))
            elif kind == "setcell": done.append(Effect("setcell", self.recipe(target), "", (self.recipe(v),)))
            elif kind == "replace": done.append(Effect("replace", FromSource(self.source(target)), "", (self.recipe(self.shadows[id(target)][1]),)))
            elif kind == "delattr": done.append(Effect("delattr", self.recipe(target), name))
            else: done.append(Effect("setattr", self.recipe(target), name, (self.recipe(v),)))
        gm = None
        if any(n.op.startswith("call") for n in self.graph.nodes):
            self.graph.output(tuple(self.outputs))
            gm = torch.fx.GraphModule(torch.nn.Module(), self.graph)
        elif self.outputs: raise AssertionError
        return gm, tuple(self.inputs), tuple(self.guards.values()), tuple(done)
