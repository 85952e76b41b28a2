"""What capture hands on: a Region, the part of a program from a start to a return or to the next graph break.

The interpreter (`capture/`) makes Regions; `capture/assemble.py` turns a Region and the compiled form of its graph into
a callable; `runtime/dispatch.py` keeps, for each piece of code, the entries made so far and the guards of each.

Three kinds of expression tell how things are found or made again when the compiled code runs:
  Source   where an object that existed before the call is found:  arguments, globals, attributes, items of these
  Recipe   how a value of the running program is rebuilt after the graph ran:  a source, an output of the graph, a new list
  Effect   one change to an object that the caller can see, replayed in program order after the graph ran
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Union

# ---------------------------------------------------------------- sources

class _Nested:
    """A source that contains others: its hash is computed once, since capture looks long chains up again and again."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            value = hash((type(self).__name__, *(getattr(self, name) for name in self.__match_args__)))   # type: ignore[attr-defined]
            object.__setattr__(self, "_hash", value)
            return value


@dataclass(frozen=True, slots=True)
class Local:
    """A local variable of the code at its start, by name: an argument (`*args` and `**kwargs` as Python stores them)."""
    name: str


@dataclass(frozen=True, slots=True)
class Cell:
    """The contents of the function's closure cell for the free variable `name`."""
    name: str


@dataclass(frozen=True, slots=True)
class CellObject:
    """The closure cell itself (not its contents) for the free variable `name` of the code that runs."""
    name: str


@dataclass(frozen=True, slots=True)
class CellOf(_Nested):
    """The contents of a closure cell of another function: `function.__closure__[index].cell_contents`."""
    function: Source
    index: int

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class Global:
    """A global of the module whose `__dict__` is `namespace` (held by reference: it is the function's `__globals__`)."""
    name: str
    namespace: Any = field(repr=False, hash=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and self.name == other.name and self.namespace is other.namespace


@dataclass(frozen=True, slots=True)
class Builtin:
    """A name of the builtins module."""
    name: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """One given object, held by the entry (something that has no other expression: a module's class, an enum member)."""
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pinned) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Attr(_Nested):
    """`base.name` through normal attribute lookup."""
    base: Source
    name: str

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class InDict(_Nested):
    """`base.__dict__[name]`: the instance's own entry, without descriptors."""
    base: Source
    name: str

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class TypeOf(_Nested):
    """`type(base)`."""
    base: Source

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class ClassDict(_Nested):
    """The object that `name` is bound to in `base.__dict__` of a class (raw: a function, a property)."""
    base: Source
    name: str

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class Item(_Nested):
    """`base[key]` for a list, tuple, dict (key a constant)."""
    base: Source
    key: Any

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class KeyAt(_Nested):
    """The index-th key of a dict, in order (`list(base)[index]`)."""
    base: Source
    index: int

    __hash__ = _Nested.__hash__


@dataclass(frozen=True, slots=True)
class Computed(_Nested):
    """`function(*arguments)`: a number that Python computes again on each call from numbers at other sources, exactly as the
    program does. The function has no effects; constants among the arguments are Pinned."""
    function: Callable
    arguments: tuple[Source, ...]

    __hash__ = _Nested.__hash__


Source = Union[Local, Cell, CellObject, CellOf, Global, Builtin, Pinned, Attr, InDict, TypeOf, ClassDict, Item, KeyAt, Computed]


# ---------------------------------------------------------------- guards

@dataclass(frozen=True, slots=True)
class Guard:
    """A fact about a source that the compiled code relies on.

    kind       facts
    "type"     the exact type:                             type(v) is value
    "is"       identity (functions, classes, None, modules, enum members): v is value
    "equals"   type and value of a constant:               type(v) is type(value) and v == value (bitwise for floats, NaN equal)
    "tensor"   a TensorFacts (value)
    "length"   len(v) == value
    "keys"     tuple(v) == value for a dict, in order
    "absent"   `value` (a name) is not a key of v's __dict__ / not an attribute: not in v.__dict__
    "no_key"   value not in v, for a dict
    "same"     v is the object at another source (value: Source): two inputs that were one object
    "distinct" v is not the object at another source (value: Source)
    "no_overlap" / "overlap"   the storages of two tensors (value: Source) do not / do share memory
    "range"    type and range of a symbolic number: value = (low, high), two ints or two floats (NaN is in no range)
    "sizes"    a relation between sizes (value: text over s0, s1, ...; `symbols` maps each to (Source, axis or None))
    "mode"     process state: value = (name, state), name one of "grad", "inference", "autocast", "deterministic",
               "default_dtype", "default_device", "num_threads"?, "torch_function", ...  (source None)
    "call"     value(v) is true: a callable for what nothing else expresses (kept rare: it is slow)
    """

    source: Source | None
    kind: str
    value: Any
    why: str = ""                 # the user's line that read it: "model.py:12"
    symbols: tuple = ()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What the compiled code relies on of a tensor. None in shape or stride: any (a dynamic axis).

    type          the exact class: Tensor, Parameter
    python_attrs  names in the tensor's __dict__ that were read are guarded apart
    """
    type: type
    dtype: Any
    device: Any
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    requires_grad: bool
    layout: Any = None
    is_leaf: bool | None = None           # None: not relied on
    dispatch_keys: Any = None             # conj, neg, inference, functorch wrappers: an opaque equality key
    storage_offset: int | None = None     # only where the program asked for it


# ---------------------------------------------------------------- recipes

@dataclass(frozen=True, slots=True)
class FromSource:
    source: Source


@dataclass(frozen=True, slots=True)
class FromGraph:
    """Output `index` of the compiled graph."""
    index: int


@dataclass(frozen=True, slots=True)
class Const:
    """A constant that can stand in co_consts or be held by the entry: immutable, or meant to be shared."""
    value: Any = field(hash=False)


@dataclass(eq=False, slots=True)
class New:
    """A new object, built once per run however often it is referred to (identity is kept: recipes compare by identity).

    kind       parts
    "list" "tuple" "set" "frozenset" "deque"      items (recipes); deque: extra = maxlen
    "dict"     items alternate key, value; extra: the class (dict, OrderedDict, defaultdict: first item is its factory)
    "slice"    start, stop, step        "range"   start, stop, step
    "cell"     item: contents (absent: an empty cell)
    "function" items: closure cells (recipes) ...; extra = (code, globals, name, qualname); see `fields`
    "instance" an object of a Python class made by cls.__new__: items[0] = recipe of the class; fields = attributes
               (set with object.__setattr__ semantics, slots included); extra = builtin base contents or None
    "iterator" items[0] = the iterable's remaining items as a list/tuple recipe
    "method"   items: function, self       "partial"  items: func, args tuple, kwargs dict
    "call"     items[0](*items[1:], **fields): a value that is made by calling a pure constructor (torch.device, enum, Size)
    Containers and instances may refer to themselves: they are made first and filled afterwards.
    """
    kind: str
    items: list = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    extra: Any = None


Recipe = Union[FromSource, FromGraph, Const, New]


# ---------------------------------------------------------------- effects

@dataclass(frozen=True, slots=True)
class Effect:
    """One visible change. `target` and `values` are recipes.

    kind            meaning
    "setattr"       object.__setattr__-like: setattr(target, name, values[0]), going past a class's own __setattr__,
                    which the interpreter has already followed     "delattr"
    "setitem"       target[values[0]] = values[1] for dicts and lists     "delitem"
    "replace"       the whole contents of a list/dict/set/deque become those of values[0] (same object, new contents, in order)
    "setcell"       target (a recipe of a cell) gets values[0]; no values: emptied
    "setglobal"     the global `name` of the namespace (extra) gets values[0]; no values: deleted
    "call"          values[0](*values[1:]): replays a call whose result nobody reads, in order (warnings.warn, logging; printing)
    "grad"          target.grad = values[0]
    """
    kind: str
    target: Recipe | None
    name: str = ""
    values: tuple = ()
    extra: Any = None


# ---------------------------------------------------------------- graph break and region

@dataclass(frozen=True, slots=True)
class GraphBreak:
    """Why a region ended: a value shared by log, report, error and tests.

    kind         a short stable identifier: "data-dependent-branch", "item", "print", "unknown-c-function", ...
    where        "file.py:12 in function"
    explanation  one sentence: what cannot be captured
    remedy       one sentence: what the user can do
    stack        the user's frames from the outermost, each "file.py:12 in function"
    """
    kind: str
    where: str
    explanation: str
    remedy: str
    stack: tuple[str, ...] = ()


@dataclass(eq=False)
class FrameState:
    """A suspended Python frame: enough to go on with it.

    code      the frame's code object (a resume function's code is derived from the original: `origin_code`)
    offset    index (in bytes, as `dis` gives it) of the instruction to execute next
    stack     recipes from bottom to top, None for a NULL slot of 3.11/3.12's calling convention
    locals    name -> recipe for the bound fast locals that are not cells
    cells     name -> recipe of the *cell object* for every cell and free variable
    globals   the frame's namespace;  `function` the recipe of the function being run, where there is one
    kwnames   for a CALL in 3.11/3.12: the keyword names that KW_NAMES announced (a tuple of strings)
    """
    code: CodeType
    offset: int
    stack: list
    locals: dict[str, Any]
    cells: dict[str, Any]
    globals: dict
    kwnames: tuple[str, ...] = ()
    builtins: Any = None


@dataclass(eq=False)
class Returned:
    value: Recipe


@dataclass(eq=False)
class Broke:
    """The region ended at an instruction that Python itself executes.

    frames[0] is the innermost frame, its `offset` at the instruction to execute; frames[i+1].offset is the instruction
    *after* the call that frames[i] belongs to, with that call's operands off the stack: its result is pushed first.
    """
    frames: list[FrameState]
    reason: GraphBreak


@dataclass(eq=False)
class Raised:
    """The program raised: the compiled code raises it too, after the effects before it. `exception`: a recipe of it."""
    exception: Recipe
    where: str = ""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """Input of the torch-level graph: a tensor (example: the fake tensor) or a number (example: SymInt, or a 0-d fake)."""
    name: str
    source: Source
    example: Any
    static: bool = False          # a parameter or buffer of a module, or another tensor held by the program, not an argument


@dataclass(eq=False)
class Region:
    """`graph` is a torch.fx.GraphModule whose placeholders are `inputs`, and whose output is a flat tuple; None if empty.

    restore   puts the state of the process back to that at the region's start, if the graph changes it
    """
    code: CodeType
    graph: Any | None
    inputs: tuple[GraphInput, ...]
    guards: tuple[Guard, ...]
    effects: tuple[Effect, ...]
    end: Returned | Broke | Raised
    name: str = ""
    shape_env: Any = None
    notes: dict = field(default_factory=dict)
    restore: Callable[[], None] | None = None


CompiledGraph = Callable[..., tuple]          # inputs in order -> flat tuple of outputs
