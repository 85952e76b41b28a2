"""The attribute protocol on objects from outside and on new ones: what is read is guarded, what is written goes to an overlay."""
from __future__ import annotations

import functools
import types
from typing import Any

import torch

from fuseline.capture.class_entries import ClassEntries
from fuseline.capture.containers import Containers
from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.provenance import MISSING, is_python, lookup
from fuseline.capture.tracebacks import Traceback, Tracebacks
from fuseline.ir.region import Attr, ClassDict, Global, InDict, Pinned

ABSENT = object()              # in an overlay: deleted
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_IMMUTABLE_CLASS = 1 << 8      # Py_TPFLAGS_IMMUTABLETYPE: nobody can put an attribute into such a class
_READ_OF_TENSOR = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_VALUES_OF_TENSOR = frozenset({"grad_fn", "_version", "__dict__", "__array_interface__", "__cuda_array_interface__",
                               "_base", "_backward_hooks"})


class Attributes(Containers):
    """`overlay`: id of an object from outside -> (object, name -> new value or ABSENT)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aliases: list[tuple[torch.Tensor, int, int]] = []       # what .data of inputs gave, its version, where
        self.overlay: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.tracebacks = Tracebacks()

    def watch(self, tensor: torch.Tensor) -> None:
        """From now on a write to the tensor's memory leads back to here, where the region then ends."""
        self.aliases.append((tensor, tensor._version, self.break_position()))

    def getattr(self, obj: Any, name: str) -> Any:
        """`obj.name` with the whole lookup protocol. Raises ProgramError(AttributeError) as Python would."""
        cls = type(obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor_attribute(obj, name)
        if cls is torch.SymFloat:
            return self.getattr(self.fixed(obj), name)
        if cls is super:
            return self._super_attribute(obj, name)
        if cls is Traceback:
            obj.look_into()
        if cls is ClassEntries:
            return obj.get if name == "get" else obj.whole()
        if isinstance(obj, type):
            return self._class_attribute(obj, name)
        if isinstance(obj, types.ModuleType) and not is_python(cls, "__getattribute__"):
            return self._module_attribute(obj, name)
        if is_python(cls, "__getattribute__"):
            try:
                return self.interpreter_call(self.class_member(cls, "__getattribute__", obj), (obj, name), {})
            except ProgramError as error:
                if isinstance(error.value, AttributeError) and is_python(cls, "__getattr__"):
                    return self.interpreter_call(self.class_member(cls, "__getattr__", obj), (obj, name), {})
                raise
        try:
            return self.plain_getattr(obj, name)
        except ProgramError as error:
            if isinstance(error.value, AttributeError) and is_python(cls, "__getattr__"):
                return self.interpreter_call(self.class_member(cls, "__getattr__", obj), (obj, name), {})
            raise

    def plain_getattr(self, obj: Any, name: str) -> Any:
        """As object.__getattribute__."""
        cls = type(obj)
        base, raw = lookup(cls, name)
        written = self._written(obj, name)
        kind = type(raw)
        if raw is not MISSING and (kind is property or hasattr(kind, "__set__") or hasattr(kind, "__delete__")):
            return self._data_descriptor(obj, cls, base, raw, name, written)
        if written is not MISSING and written is not ABSENT:
            return written
        source = self.source(obj)
        entries = obj.__dict__ if cls.__dictoffset__ else {}
        if name in entries and written is not ABSENT:
            value = entries[name]
            return value if source is None else self.read(value, InDict(source, name))
        if source is not None and cls.__dictoffset__ and written is not ABSENT:
            self.guard(source, "absent", name)
        if raw is not MISSING:
            return self._from_class(obj, cls, base, raw, name)
        if isinstance(obj, torch.nn.Module) and lookup(cls, "__getattr__")[1] is torch.nn.Module.__getattr__:
            found = self._module_entry(obj, name)
            if found is not MISSING:
                return found
        if written is ABSENT:
            raise ProgramError(AttributeError(f"'{cls.__name__}' object has no attribute '{name}'"))
        if is_python(cls, "__getattr__") or is_python(cls, "__getattribute__"):
            return self.native(object.__getattribute__, obj, name)
        value = self.native(getattr, obj, name)            # C code answers, a proxy of another object for example
        return value if source is None else self.read(value, Attr(source, name))

    def _written(self, obj: Any, name: str) -> Any:
        found = self.overlay.get(id(obj))
        return MISSING if found is None else found[1].get(name, MISSING)

    def special_method(self, obj: Any, name: str) -> types.MethodType:
        """A method that Python itself calls: found in the class, past the instance's own entries and `__getattribute__`."""
        return types.MethodType(self.class_member(type(obj), name), obj)

    def class_member(self, cls: type, name: str, instance: Any = None) -> Any:
        """What a name is bound to in a class's MRO, guarded: no class before it may define the name."""
        base, raw = lookup(cls, name)
        return self._guarded_member(cls, base, raw, name)

    def _guarded_member(self, cls: type, base: type, raw: Any, name: str) -> Any:
        for earlier in cls.__mro__:
            if earlier is base:
                break
            if not earlier.__flags__ & _IMMUTABLE_CLASS:
                self.guard(self._owner(earlier), "absent", name)
        if base.__flags__ & _IMMUTABLE_CLASS:
            return raw
        written = self._written(base, name)
        return written if written is not MISSING else self.read(raw, ClassDict(self._owner(base), name))

    def class_entry(self, cls: type, name: Any, default: Any) -> Any:
        """`cls.__dict__.get(name, default)`."""
        written = self._written(cls, name)
        if written is ABSENT or written is MISSING and name not in cls.__dict__:
            if written is MISSING:
                self.guard(self._owner(cls), "absent", name)
            return default
        return written if written is not MISSING else self._guarded_member(cls, cls, cls.__dict__[name], name)

    def _owner(self, cls: type) -> Any:
        found = self.source(cls)
        return found if found is not None else Pinned(cls)

    def _data_descriptor(self, obj: Any, cls: type, base: type, raw: Any, name: str, written: Any) -> Any:
        if isinstance(raw, property) and type(raw) is property:
            self._guarded_member(cls, base, raw, name)
            if raw.fget is None:
                return self.native(getattr, obj, name)
            return self.interpreter_call(self._accessor(raw, base, "fget", name), (obj,), {})
        if is_python(type(raw), "__get__"):
            self._guarded_member(cls, base, raw, name)
            return self.interpreter_call(lookup(type(raw), "__get__")[1], (raw, obj, cls), {})
        source = self.source(obj)
        if name == "__traceback__" and source is None and isinstance(obj, BaseException):
            return self.tracebacks.of(obj)
        if name == "__dict__":
            return obj.__dict__ if source is None else self.instance_dict(obj, source)
        if name == "__class__":
            return self.type_of(obj)
        if written is ABSENT:
            raise ProgramError(AttributeError(f"'{cls.__name__}' object has no attribute '{name}'"))
        if written is not MISSING:
            return written
        value = self.native(getattr, obj, name)
        return value if source is None else self.read(value, Attr(source, name))

    def _accessor(self, raw: property, base: type, which: str, name: str) -> Any:
        function = getattr(raw, which)
        if base.__flags__ & _IMMUTABLE_CLASS:
            return function
        return self.read(function, Attr(ClassDict(self._owner(base), name), which))

    def _from_class(self, obj: Any, cls: type, base: type, raw: Any, name: str) -> Any:
        """A name that only the class binds: a method bound to obj, a class attribute, what a descriptor gives."""
        raw = self._guarded_member(cls, base, raw, name)
        kind = type(raw)
        if kind is types.FunctionType:
            return types.MethodType(raw, obj)
        if kind is staticmethod:
            return self._unwrapped(raw)
        if kind is classmethod:
            return types.MethodType(self._unwrapped(raw), cls)
        if kind is functools.cached_property and cls.__dictoffset__ and raw.attrname is not None:
            value = self.interpreter_call(self.getattr(raw, "func"), (obj,), {})       # 3.11 does it under a lock
            self.plain_setattr(obj, raw.attrname, value)
            return value
        if is_python(kind, "__get__"):
            return self.interpreter_call(lookup(kind, "__get__")[1], (raw, obj, cls), {})
        if hasattr(kind, "__get__"):
            return self.native(raw.__get__, obj, cls)
        return raw

    def _module_entry(self, module: torch.nn.Module, name: str) -> Any:
        """What nn.Module.__getattr__ would find in its tables, without interpreting it for every parameter."""
        source = self.source(module)
        if source is None:
            for table in _MODULE_TABLES:
                if name in module.__dict__.get(table, ()):
                    return module.__dict__[table][name]
            return MISSING
        for table in _MODULE_TABLES:
            entries = self.plain_getattr(module, table) if table in module.__dict__ else None
            if entries is not None and self.contains_key(entries, name):
                return self.getitem(entries, name)
        return MISSING

    def instance_dict(self, obj: Any, source: Any) -> dict:
        """`obj.__dict__` of an object from outside: a container whose writes are writes of attributes."""
        entries = obj.__dict__
        if self.source(entries) is None:
            self.register(entries, Attr(source, "__dict__"))
            self.guard(Attr(source, "__dict__"), "keys", tuple(entries))
            self.owners[id(entries)] = obj
            written = self.overlay.get(id(obj))
            if written is not None:
                shadow = dict(self.contents(entries))
                for key, value in written[1].items():
                    if _in_class(obj, key):
                        continue
                    shadow.pop(key, None) if value is ABSENT else shadow.__setitem__(key, value)
                self.shadows[id(entries)] = (entries, shadow)
        return entries

    def attribute_written(self, obj: Any, name: str, value: Any) -> None:
        """The dict of an object from outside got (or lost, if ABSENT) an entry."""
        self.overlay.setdefault(id(obj), (obj, {}))[1][name] = value
        entries = obj.__dict__ if type(obj).__dictoffset__ and not isinstance(obj, type) else None
        if entries is not None and self.source(entries) is not None and not _in_class(obj, name):
            shadow = self.writable(entries)
            if value is ABSENT:
                shadow.pop(name, None)
            else:
                shadow[name] = value

    # -- modules, classes, super, tensors ------------------------------------------------------------------------
    def _module_attribute(self, module: types.ModuleType, name: str) -> Any:
        entries = module.__dict__
        if name == "__dict__":
            return self.read(entries, Pinned(entries))
        written = self.written_globals.get((id(entries), name), MISSING)
        if written is not MISSING and written is not ABSENT:
            return written
        if name in entries and written is not ABSENT:
            return self.read(entries[name], Global(name, entries))
        value = self.native(getattr, module, name)         # a lazy submodule, or Python's own attributes
        return self.read(value, Attr(self.source(module) or Pinned(module), name))

    def _unwrapped(self, method: Any) -> Any:
        """The function in a staticmethod or classmethod, which never holds another one."""
        source = self.source(method)
        if source is not None and self.source(method.__func__) is None:
            self.register(method.__func__, Attr(source, "__func__"))
        return method.__func__

    def _class_attribute(self, cls: type, name: str) -> Any:
        meta_base, meta_raw = lookup(type(cls), name)
        if meta_raw is not MISSING and hasattr(type(meta_raw), "__set__") and meta_base is not type:
            if isinstance(meta_raw, property):
                return self.interpreter_call(meta_raw.fget, (cls,), {})
            return self.native(getattr, cls, name)
        base, raw = lookup(cls, name)
        if name == "__dict__" and not cls.__flags__ & _IMMUTABLE_CLASS:
            return ClassEntries(self, cls)
        if raw is MISSING or name in ("__dict__", "__mro__", "__bases__", "__name__", "__qualname__", "__class__", "__module__", "__doc__"):
            for owner in cls.__mro__:
                written = self._written(owner, name)
                if written is not MISSING and written is not ABSENT:
                    return written
            if raw is MISSING and meta_raw is not MISSING:
                if isinstance(meta_raw, types.FunctionType):
                    return types.MethodType(self.class_member(type(cls), name), cls)
                return self.native(getattr, cls, name)
            if raw is MISSING and is_python(type(cls), "__getattr__"):
                return self.interpreter_call(lookup(type(cls), "__getattr__")[1], (cls, name), {})
            return self.native(getattr, cls, name)
        raw = self._guarded_member(cls, base, raw, name)
        kind = type(raw)
        if kind is classmethod:
            return types.MethodType(self._unwrapped(raw), cls)
        if kind is staticmethod:
            return self._unwrapped(raw)
        if kind is types.FunctionType or not hasattr(kind, "__get__"):
            return raw
        if is_python(kind, "__get__"):
            return self.interpreter_call(lookup(kind, "__get__")[1], (raw, None, cls), {})
        return self.native(raw.__get__, None, cls)

    def _super_attribute(self, proxy: Any, name: str) -> Any:
        instance, owner, cls = proxy.__self__, proxy.__thisclass__, proxy.__self_class__
        if name == "__class__":
            return super
        mro = cls.__mro__
        for base in mro[mro.index(owner) + 1:]:
            if name not in base.__dict__:
                continue
            raw = base.__dict__[name]
            if not base.__flags__ & _IMMUTABLE_CLASS:
                raw = self.read(raw, ClassDict(self._owner(base), name))
            if type(raw) is types.FunctionType:
                return raw if instance is cls else types.MethodType(raw, instance)
            if type(raw) is property and raw.fget is not None:
                return self.interpreter_call(self._accessor(raw, base, "fget", name), (instance,), {})
            if type(raw) is classmethod:
                return types.MethodType(self._unwrapped(raw), cls)
            if type(raw) is staticmethod:
                return self._unwrapped(raw)
            if is_python(type(raw), "__get__"):
                return self.interpreter_call(lookup(type(raw), "__get__")[1], (raw, instance, cls), {})
            if hasattr(type(raw), "__get__"):
                return self.native(raw.__get__, None if instance is cls else instance, cls)
            return raw
        return self.native(getattr, proxy, name)

    def _tensor_attribute(self, tensor: torch.Tensor, name: str) -> Any:
        if name == "grad_fn" and tensor.grad_fn is None and self.real_of.get(id(tensor), tensor).is_leaf:
            return None
        if name in _VALUES_OF_TENSOR:
            raise break_here("tensor-internals", f"reading .{name} of a tensor is not captured", "read it outside the compiled function")
        real = self.real_of.get(id(tensor))
        if name == "grad":
            written = self._written(tensor, name)
            if written is not MISSING or real is None:
                return None if written is MISSING else written
            return self.read(real.grad, Attr(self.found_at(tensor), "grad"))
        if name == "data" and real is not None:
            alias = self.record("call_function", getattr, (tensor, name), {})
            self.watch(alias)
            return alias
        if name in _READ_OF_TENSOR:
            return self.record("call_function", getattr, (tensor, name), {})
        raw = lookup(torch.Tensor, name)[1]
        if raw is MISSING:
            written = self._written(tensor, name)
            if written is not MISSING and written is not ABSENT:
                return written
            if real is not None and name in real.__dict__:
                return self.read(real.__dict__[name], Attr(self.found_at(tensor), name))
            if real is not None:
                self.guard(self.source(tensor), "absent", name)
            raise ProgramError(AttributeError(f"'{self.type_of(tensor).__name__}' object has no attribute '{name}'"))
        if isinstance(raw, types.FunctionType):
            return types.MethodType(raw, tensor)
        if isinstance(raw, types.MethodDescriptorType):    # fakes override some methods
            return raw.__get__(tensor)
        if name == "__class__":
            return self.type_of(tensor)
        return self.native(getattr, tensor, name)

    # -- writing -------------------------------------------------------------------------------------------------
    def setattr(self, obj: Any, name: str, value: Any) -> None:
        cls = type(obj)
        if isinstance(obj, torch.Tensor):
            self._set_tensor_attribute(obj, name, value)
        elif isinstance(obj, torch.nn.Module) and lookup(cls, "__setattr__")[1] is torch.nn.Module.__setattr__:
            self._set_module_attribute(obj, name, value)
        elif is_python(cls, "__setattr__"):
            self.interpreter_call(self.class_member(cls, "__setattr__", obj), (obj, name, value), {})
        else:
            self.plain_setattr(obj, name, value)

    def plain_setattr(self, obj: Any, name: str, value: Any) -> None:
        """As object.__setattr__."""
        cls = type(obj)
        base, raw = lookup(cls, name)
        if type(raw) is property:
            if raw.fset is None:
                self.native(setattr, obj, name, value)
            else:
                self._guarded_member(cls, base, raw, name)
                self.interpreter_call(self._accessor(raw, base, "fset", name), (obj, value), {})
            return
        if raw is not MISSING and is_python(type(raw), "__set__"):
            self._guarded_member(cls, base, raw, name)
            self.interpreter_call(lookup(type(raw), "__set__")[1], (raw, obj, value), {})
            return
        if isinstance(obj, types.ModuleType):
            self.store_global(obj.__dict__, name, value)
            return
        if name == "__traceback__" and isinstance(obj, BaseException) and type(value) is Traceback:
            self.tracebacks.assign(obj, value)
            return
        if self.source(obj) is None and not (isinstance(obj, type) and id(obj) not in self.made_classes):
            if isinstance(obj, type):
                self.native(setattr, obj, name, value)
            elif is_python(cls, "__setattr__"):
                self.native(object.__setattr__, obj, name, value)
            else:
                self.native(setattr, obj, name, value)
            return
        if not isinstance(obj, type) and raw is MISSING and not cls.__dictoffset__:
            raise ProgramError(AttributeError(f"'{cls.__name__}' object has no attribute '{name}'"))
        if name in ("__class__", "__dict__", "__code__", "__defaults__", "__kwdefaults__"):
            raise break_here("special-attribute", f"assigning {name} is not captured", "assign it outside the compiled function")
        self.attribute_written(obj, name, value)
        self.effect("setattr", obj, name, value)

    def _set_module_attribute(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """nn.Module.__setattr__: an entry of a table stays one; a new parameter or submodule goes the long way."""
        entries = module.__dict__
        if self.source(module) is None:
            self.native(setattr, module, name, value)
            return
        for table, kind in (("_parameters", torch.nn.Parameter), ("_modules", torch.nn.Module), ("_buffers", torch.Tensor)):
            if table in entries and (value is None or isinstance(value, kind)) \
                    and self.contains_key(self.plain_getattr(module, table), name):
                self.setitem(self.plain_getattr(module, table), name, value)
                return
        if isinstance(value, (torch.nn.Parameter, torch.nn.Module)) or any(name in entries.get(t, ()) for t in _MODULE_TABLES):
            self.interpreter_call(torch.nn.Module.__setattr__, (module, name, value), {})
        else:
            self.plain_setattr(module, name, value)

    def _set_tensor_attribute(self, tensor: torch.Tensor, name: str, value: Any) -> None:
        """An attribute of the program's own; PyTorch's own ones are left to Python."""
        if lookup(torch.Tensor, name)[1] is MISSING and not name.startswith("__"):
            self.overlay.setdefault(id(tensor), (tensor, {}))[1][name] = value
            self.effect("setattr", tensor, name, value)
            return
        real = self.real_of.get(id(tensor))
        if name == "grad" and real is not None and real.is_leaf and self._can_be_gradient(tensor, value):
            self.overlay.setdefault(id(tensor), (tensor, {}))[1][name] = value
            self.effect("grad", tensor, "", value)
            return
        if name == "requires_grad" and value is tensor.requires_grad:
            return
        raise break_here("tensor-attribute", f"assigning .{name} of a tensor is not captured", "assign it outside the compiled function")

    @staticmethod
    def _can_be_gradient(tensor: torch.Tensor, value: Any) -> bool:
        """Whether `tensor.grad = value` raises nothing, for sizes that are known."""
        return value is None or isinstance(value, torch.Tensor) and value is not tensor and (value.dtype, value.device) == (
            tensor.dtype, tensor.device) and not any(isinstance(n, torch.SymInt) for n in (*value.shape, *tensor.shape)) \
            and value.shape == tensor.shape

    def delattr(self, obj: Any, name: str) -> None:
        cls = type(obj)
        if is_python(cls, "__delattr__") and not isinstance(obj, torch.nn.Module):
            self.interpreter_call(self.class_member(cls, "__delattr__", obj), (obj, name), {})
        elif isinstance(obj, torch.nn.Module) and self.source(obj) is not None and any(
                name in obj.__dict__.get(t, ()) for t in _MODULE_TABLES):
            self.interpreter_call(torch.nn.Module.__delattr__, (obj, name), {})
        else:
            self.plain_delattr(obj, name)

    def plain_delattr(self, obj: Any, name: str) -> None:
        raw = lookup(type(obj), name)[1]
        if isinstance(obj, torch.Tensor):
            raise break_here("tensor-attribute", f"deleting .{name} of a tensor is not captured", "delete it outside the compiled function")
        if type(raw) is property and raw.fdel is not None:
            self.interpreter_call(raw.fdel, (obj,), {})
            return
        if raw is not MISSING and is_python(type(raw), "__delete__"):
            self.interpreter_call(lookup(type(raw), "__delete__")[1], (raw, obj), {})
            return
        if self.source(obj) is None and not isinstance(obj, type):
            self.native(object.__delattr__, obj, name)
            return
        written = self._written(obj, name)
        entries = obj.__dict__ if hasattr(obj, "__dict__") else {}
        if written is ABSENT or (written is MISSING and name not in entries and not hasattr(type(raw), "__set__")):
            raise ProgramError(AttributeError(f"'{type(obj).__name__}' object has no attribute '{name}'"))
        if written is MISSING:
            self.getattr(obj, name)
        self.attribute_written(obj, name, ABSENT)
        self.effect("delattr", obj, name)


def _in_class(obj: Any, name: str) -> bool:
    """Whether an attribute lives in a slot of the class, not in the instance's dict."""
    return isinstance(lookup(type(obj), name)[1], types.MemberDescriptorType)
