"""Memory words that change whenever an object does: how a whole module tree is checked in a few microseconds.

CPython keeps in each dict a version tag that is unique to its contents, and in each class one for all that lookups on it can
give; a tensor's facts are fields of its C++ object. A `WordTable` remembers the values of such words, found by their address,
and one native call compares them all with what is there now. Where everything is as it was, no guard needs to be evaluated.

Addresses are only read while a table holds references to the objects. Where a word is a pointer to an object whose words
follow, it is compared first and the comparison stops at the first difference, so nothing stale is followed.
Where each word lies in its object is not taken on trust: `layout()` finds or verifies it by experiments with real objects;
if one fails (another build of CPython or torch) the kind of word is reported missing and its guards stay ordinary ones.
"""
from __future__ import annotations

import ctypes
import functools
import types
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fuseline import torch_internals

ALL_BITS = (1 << 64) - 1
_MANAGED_DICT = -24                                       # 3.11 and 3.12 keep the dict pointer in front of the object
_DICT_VERSION = 24
_TYPE_VERSION, _TYPE_VERSION_BITS = 384, 0xFFFFFFFF
_CELL_CONTENTS = 16
_OBJECT_TYPE = 8
_FUNCTION_FIELDS = {"__code__": 48, "__defaults__": 56, "__kwdefaults__": 64}
_HEAP_TYPE = 1 << 9
_TENSOR_WORDS = 26


def read_word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Word numbers within a tensor's C++ object and its autograd metadata; `pointer` is the byte offset in the Python object."""

    pointer: int
    first: int
    last: int
    autograd: int
    requires_grad: tuple[int, int]                        # word number, mask
    grad_fn: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which kinds of words can be relied on here."""

    dicts: bool
    types: bool
    cells: bool
    functions: bool
    tensors: TensorLayout | None


@functools.cache
def layout() -> Layout:
    """The result of the experiments, made once a process."""
    return Layout(_holds(_dict_experiment), _holds(_type_experiment), _holds(_cell_experiment), _holds(_function_experiment),
                  _tensor_layout())


def _holds(experiment: Callable[[], bool]) -> bool:
    try:
        return experiment()
    except Exception:                                     # an experiment that cannot be made proves nothing
        return False


def _dict_experiment() -> bool:
    d: dict[Any, Any] = {"a": 1}
    seen = [read_word(id(d) + _DICT_VERSION)]

    def changed() -> bool:
        seen.append(read_word(id(d) + _DICT_VERSION))
        return seen[-1] not in seen[:-1]

    d["b"] = 2
    steps = [changed()]
    d["b"] = 3
    steps.append(changed())
    del d["b"]
    steps.append(changed())
    d.clear()
    steps.append(changed())
    d.update(a=1)
    steps.append(changed())
    before = read_word(id(d) + _DICT_VERSION)
    d.get("a"), list(d), d["a"]
    steps.append(read_word(id(d) + _DICT_VERSION) == before)

    class Holder:
        pass

    holder = Holder()
    holder.x = 1                                          # type: ignore[attr-defined]
    d = holder.__dict__
    steps.append(read_word(id(holder) + _MANAGED_DICT) == id(d))
    for i in range(50):                                   # long enough for the store to be specialised
        holder.x = i                                      # type: ignore[attr-defined]
        steps.append(changed())
    return all(steps)


def _type_experiment() -> bool:
    class A:
        x = 1

    class B(A):
        pass

    def tag(cls: type) -> int:
        return read_word(id(cls) + _TYPE_VERSION) & _TYPE_VERSION_BITS

    B().x, A().x
    first_a, first_b = tag(A), tag(B)
    A.x = 2
    between = tag(B)
    B().x, A().x
    second_a, second_b = tag(A), tag(B)
    B.y = 3                                               # type: ignore[attr-defined]
    alone = tag(B)
    return bool(first_a and first_b and between != first_b and second_a != first_a and second_b not in (first_b, 0) and alone != second_b)


def _cell_experiment() -> bool:
    value, other = object(), object()
    cell = types.CellType(value)
    ok = read_word(id(cell) + _CELL_CONTENTS) == id(value)
    cell.cell_contents = other
    return ok and read_word(id(cell) + _CELL_CONTENTS) == id(other) and read_word(id(value) + _OBJECT_TYPE) == id(object)


def _function_experiment() -> bool:
    def f(a: int = 1, *, b: int = 2) -> None:
        pass

    def right() -> bool:
        return all(read_word(id(f) + at) == id(getattr(f, name)) for name, at in _FUNCTION_FIELDS.items())

    ok = right()
    f.__defaults__, f.__kwdefaults__, f.__code__ = (5,), {"b": 7}, (lambda a=1, *, b=2: None).__code__
    return ok and right()


def _tensor_layout() -> TensorLayout | None:
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            return _tensor_experiment()
    except Exception:                                     # as for the others: not found is not relied on
        return None


def _tensor_experiment() -> TensorLayout | None:
    t = torch.nn.Parameter(torch.ones(3, 4))
    base = t._cdata
    pointer = next(8 * i for i in range(2, 5) if read_word(id(t) + 8 * i) == base)
    words = [read_word(base + 8 * i) for i in range(_TENSOR_WORDS)]
    first = words.index(t.untyped_storage()._cdata)
    last = words.index(torch_internals.dispatch_keys(t))
    if not 1 < first < last:
        return None

    def snapshot(x: torch.Tensor) -> list[int]:
        return [read_word(x._cdata + 8 * i) for i in range(first, last + 1)]

    plain = torch.ones(2)
    before = snapshot(plain)
    plain.requires_grad_(True)
    changed = [first + i for i, (a, b) in enumerate(zip(before, snapshot(plain))) if a != b]
    if len(changed) != 1 or before[changed[0] - first] != 0:
        return None
    autograd = changed[0]

    def meta(x: torch.Tensor) -> list[int]:
        address = read_word(x._cdata + 8 * autograd)
        return [read_word(address + 8 * i) for i in range(20)]

    one = meta(plain)
    plain.requires_grad_(False)
    two = meta(plain)
    flips = [(i, a ^ b) for i, (a, b) in enumerate(zip(one, two)) if a != b]
    if len(flips) != 1 or flips[0][1] & (flips[0][1] - 1):
        return None
    plain.grad = torch.ones(2)
    three = meta(plain)
    grads = [i for i, (a, b) in enumerate(zip(two, three)) if a != b]
    with torch.enable_grad():
        plain.add_(t[0, :2])
    grad_fn = tuple(i for i, (a, b) in enumerate(zip(three, meta(plain))) if a != b and a == 0)
    if not grad_fn or set(grads) & {*grad_fn, flips[0][0]}:
        return None
    found = TensorLayout(pointer, first, last, autograd, flips[0], grad_fn)
    return found if _tensor_changes_show(found) else None


def _tensor_changes_show(found: TensorLayout) -> bool:
    """Each change that a guard could notice moves a word; running, saving for backward and `.grad` move none."""
    def snapshot(x: torch.Tensor) -> list[int]:
        return [read_word(x._cdata + 8 * i) for i in range(found.first, found.last + 1)]

    def moves(x: torch.Tensor, change: Callable[[], Any]) -> bool:
        before = snapshot(x)
        change()
        return snapshot(x) != before

    p = torch.nn.Parameter(torch.ones(4, 4))
    other = {"shape": torch.ones(2, 8), "stride": torch.ones(4, 4).t(), "dtype": torch.ones(4, 4, dtype=torch.float64)}
    with torch.no_grad():
        steps = [moves(p, functools.partial(setattr, p, "data", v)) for v in other.values()]
    buffer = torch.ones(4, 4)
    steps += [moves(buffer, change) for change in (lambda: buffer.resize_(2, 3), buffer.t_, lambda: buffer.unsqueeze_(0))]
    q = torch.nn.Parameter(torch.ones(4, 4))
    quiet = not moves(q, lambda: (q * 2).sum().backward()) and not moves(q, lambda: q.data.add_(1)) and q.grad is not None
    return all(steps) and quiet


# ---------------------------------------------------------------- tables

class WordTable:
    """(address, mask, expected) in the order of comparison, and the objects that own the memory.

    `owner_of(i)` is the object that word i belongs to. Build with the `add_*` methods, each of which returns False (or None)
    where its object has no word that tells of changes; then `seal`.
    """

    def __init__(self) -> None:
        self._address, self._mask, self._expected = array("Q"), array("Q"), array("Q")
        self._owners: list[Any] = []
        self._keep: dict[int, Any] = {}
        self._seen: set[tuple] = set()
        self._packed: array | None = None
        self.pointer = 0

    def __len__(self) -> int:
        return len(self._address)

    def _add(self, owner: Any, address: int, expected: int | None = None, mask: int = ALL_BITS) -> None:
        self._address.append(address)
        self._mask.append(mask)
        self._expected.append((read_word(address) if expected is None else expected) & mask)
        self._owners.append(owner)

    def _first_time(self, kind: str, owner: Any) -> bool:
        key = (kind, id(owner))
        if key in self._seen:
            return False
        self._seen.add(key)
        self._keep[id(owner)] = owner
        return True

    def add_dict(self, d: dict) -> bool:
        """The contents of a dict (or OrderedDict: contents, not order)."""
        if not layout().dicts or not isinstance(d, dict):
            return False
        if self._first_time("dict", d):
            self._add(d, id(d) + _DICT_VERSION)
        return True

    def add_instance_dict(self, instance: Any) -> dict | None:
        """Which dict is the `__dict__` of an instance (not what is in it)."""
        if not layout().dicts:
            return None
        d = instance.__dict__
        if type(d) is not dict:
            return None
        if isinstance(instance, types.ModuleType):
            return d                                      # a module's dict cannot be exchanged
        if self._first_time("instance dict", instance):
            offsets = (_MANAGED_DICT,) if type(instance).__flags__ & (1 << 4) else (type(instance).__dictoffset__,)
            place = next((id(instance) + o for o in offsets if o and o != -1 and read_word(id(instance) + o) == id(d)), None)
            if place is None:
                self._seen.discard(("instance dict", id(instance)))
                return None
            self._keep[id(d)] = d
            self._add(instance, place)
        return d

    def add_type_of(self, instance: Any) -> bool:
        """The class of an object. Objects of C types keep theirs for life."""
        cls = type(instance)
        if cls.__flags__ & _HEAP_TYPE and self._first_time("type of", instance):
            if not layout().cells:
                return False
            self._keep[id(cls)] = cls
            self._add(instance, id(instance) + _OBJECT_TYPE, id(cls))
        return True

    def add_class(self, cls: type) -> bool:
        """All that attribute lookups on a class and its bases can give."""
        if not layout().types or type(cls).__getattribute__ is not type.__getattribute__:
            return False
        if not cls.__flags__ & _HEAP_TYPE:
            return True                                   # a class made in C cannot be changed
        if self._first_time("class", cls):
            getattr(cls, "__doc__", None)                 # a lookup gives the class a version if it has none
            tag = read_word(id(cls) + _TYPE_VERSION) & _TYPE_VERSION_BITS
            if not tag:
                self._seen.discard(("class", id(cls)))
                return False
            self._add(cls, id(cls) + _TYPE_VERSION, tag, _TYPE_VERSION_BITS)
        return True

    def add_cell(self, cell: types.CellType) -> bool:
        if not layout().cells:
            return False
        if self._first_time("cell", cell):
            contents = cell.cell_contents
            self._keep[id(contents)] = contents
            self._add(cell, id(cell) + _CELL_CONTENTS, id(contents))
        return True

    def add_function_field(self, function: types.FunctionType, name: str) -> bool:
        if not layout().functions or name not in _FUNCTION_FIELDS:
            return False
        if self._first_time(name, function):
            address = id(function) + _FUNCTION_FIELDS[name]
            value = getattr(function, name)
            if value is None and read_word(address) not in (0, id(None)):
                return False
            self._keep[id(value)] = value
            self._add(function, address)
        return True

    def add_tensor(self, tensor: torch.Tensor) -> bool:
        """The facts of a leaf tensor: class, dtype, device, sizes, strides, storage, requires_grad."""
        found = layout().tensors
        if found is None or tensor.dim() > 5 or not tensor.is_leaf or tensor.layout is not torch.strided:
            return False                                  # beyond five dimensions the sizes lie elsewhere
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if not self._first_time("tensor", tensor):
            return True
        base = tensor._cdata
        autograd = read_word(base + 8 * found.autograd)
        self.add_type_of(tensor)
        self._add(tensor, id(tensor) + found.pointer, base)
        for i in range(found.first, found.last + 1):
            self._add(tensor, base + 8 * i)
        if autograd:
            word, mask = found.requires_grad
            self._add(tensor, autograd + 8 * word, None, mask)
            for i in found.grad_fn:
                self._add(tensor, autograd + 8 * i)
        return True

    def owner_of(self, index: int) -> Any:
        return self._owners[index]

    def forget(self, owner: Any) -> None:
        """Hold no reference to an object, which the caller watches instead: the table must not be used after its death."""
        self._keep.pop(id(owner), None)
        self._owners = [None if o is owner else o for o in self._owners]

    def seal(self) -> WordTable:
        """Pack for the native comparison: count, then addresses, masks, expected values. `pointer` is the argument of `differs`."""
        n = len(self._address)
        self._packed = array("Q", [n]) + self._address + self._mask + self._expected
        self.pointer = self._packed.buffer_info()[0]
        return self

    def differs_in_python(self) -> int:
        """The twin of the native comparison: the number of the first word that differs, from 1; 0 if none does."""
        for i, (address, mask, expected) in enumerate(zip(self._address, self._mask, self._expected)):
            if read_word(address) & mask != expected:
                return i + 1
        return 0


_IR = """
define i64 @fuseline_words_differ(ptr %table) {
entry:
  %n = load i64, ptr %table
  %addresses = getelementptr i64, ptr %table, i64 1
  %masks = getelementptr i64, ptr %addresses, i64 %n
  %expected = getelementptr i64, ptr %masks, i64 %n
  %empty = icmp eq i64 %n, 0
  br i1 %empty, label %same, label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %step]
  %address_at = getelementptr i64, ptr %addresses, i64 %i
  %address = load ptr, ptr %address_at
  %word = load volatile i64, ptr %address
  %mask_at = getelementptr i64, ptr %masks, i64 %i
  %mask = load i64, ptr %mask_at
  %masked = and i64 %word, %mask
  %expected_at = getelementptr i64, ptr %expected, i64 %i
  %wanted = load i64, ptr %expected_at
  %equal = icmp eq i64 %masked, %wanted
  %next = add i64 %i, 1
  br i1 %equal, label %step, label %different
step:
  %more = icmp ult i64 %next, %n
  br i1 %more, label %loop, label %same
different:
  ret i64 %next
same:
  ret i64 0
}
"""


@functools.cache
def native_differs() -> Callable[[int], int] | None:
    """(WordTable.pointer) -> number of the first word that differs, from 1, or 0. None without llvmlite. Holds the GIL."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    module = llvm.parse_assembly(_IR)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    function: Any = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(engine.get_function_address("fuseline_words_differ"))
    function.engine = engine                              # the code lives as long as this
    return function
