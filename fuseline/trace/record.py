"""Records the ATen operators that run under it as a functional Graph, in one pass.

A `Recorder` is a dispatch mode right above a FakeTensorMode, which computes what the recorder calls: every operator that
reaches it (those of the program, and those that autograd runs in the backward) is computed on fake tensors for its type and
becomes a Node; an operator with a decomposition runs as that; a write becomes a new value (`fuseline.trace.functionalize`).
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.errors import NotSupported
from fuseline.ir.dtypes import OTHER
from fuseline.ir.graph import Node, ScalarType, TensorType, Type, contiguous
from fuseline.ir.traced import ViewStep
from fuseline.trace import functionalize
from fuseline.trace.functionalize import GEOMETRY, IDENTITY, STORAGE, Alias, Store, Writes, writes_of
from fuseline.trace.sizes import Sizes

_ATTRIBUTES = {torch.ops.prim.device.default: lambda t: t.fake_device}
_NUMBER_TYPES = {int: torch.int64, float: torch.float64, bool: torch.bool}
_NAMES: dict[Any, str] = {}
_WRITES: dict[Any, Writes | None] = {}
_FORMATS = {torch.contiguous_format: "contiguous_format", torch.channels_last: "channels_last",
            torch.channels_last_3d: "channels_last_3d", torch.preserve_format: "preserve_format"}


def op_name(func: Any) -> str:
    name = _NAMES.get(func)
    if name is None:
        name = _NAMES[func] = f"{func.namespace}.{func._schema.name.split('::')[1]}.{func._overloadname}"
    return name


class Recorder(torch_internals.TorchDispatchMode):
    """nodes      what was recorded, in order
    origin        the user's line that operators recorded from now on belong to
    decompositions  operator -> function of the same arguments; may return NotImplemented
    keep          names of operators that are recorded as they are, although they have a decomposition
    constants     real tensors that the program holds (they become inputs), with the input node of each
    """

    def __init__(self, fake_mode: Any, sizes: Sizes, decompositions: dict[Any, Callable], keep: Container[str]) -> None:
        super().__init__()
        self.fake_mode, self.sizes, self.keep = fake_mode, sizes, keep
        self.nodes: list[Node] = []
        self.origin = ""
        self.constants: list[tuple[torch.Tensor, Node]] = []
        self._decompositions = decompositions
        self._aliases: dict[int, Alias] = {}
        self.floats: dict[Any, Node] = {}                        # symbol of a Python float -> the input that it is
        self._stores: dict[int, Store] = {}
        self._constant_aliases: dict[int, Alias] = {}
        self._names: set[str] = set()
        self._counts: dict[str, int] = {}
        self._plans: dict[Any, Callable | None] = {}
        self._sequence: list[int] = []
        self._origins: list[str] = []

    # ------------------------------------------------------------ what the tracer calls
    def name(self, hint: str) -> str:
        count = self._counts.get(hint, 0)
        self._counts[hint] = count + 1
        name = hint if count == 0 else f"{hint}_{count}"
        while name in self._names:
            self._counts[hint] += 1
            name = f"{hint}_{self._counts[hint]}"
        self._names.add(name)
        return name

    def set_origin(self, origin: str) -> None:
        """Operators from now on, and what autograd derives from them, belong to this line."""
        self.origin = origin
        self._sequence.append(torch_internals.autograd_sequence_number())
        self._origins.append(origin)

    def input(self, tensor: torch.Tensor, hint: str, *, static: bool = False, index: int | None = None) -> Node:
        """Make `tensor` an input of the graph (index: its number among the program's inputs, None for others)."""
        node = Node(self.name(hint), "input", type=self.type_of(tensor), static=static)
        alias = self._track(tensor, node, None)
        if index is not None:
            alias.input = index
            alias.store.inputs.append(index)
        return node

    def adopt(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """`tensor` is a clone that stands for the input `source`: a write to it is a write to the input."""
        known = self.alias(source)
        alias = self._track(tensor, known.node, None)
        alias.input = known.input
        alias.store.inputs.append(known.input)                  # type: ignore[arg-type]

    def alias(self, tensor: torch.Tensor) -> Alias:
        found = self._aliases.get(id(tensor))
        if found is not None:
            if self._stores.get(torch_internals.storage_key(tensor)) is not found.store:
                raise NotSupported("the memory of a tensor is replaced (set_data or set_)")
            return found
        if not torch_internals.is_fake(tensor):
            return self.constant(tensor)
        raise NotSupported("a tensor that was made outside the trace takes part in it")

    def constant(self, tensor: torch.Tensor, *, copy: bool = True) -> Alias:
        """A real tensor that the program holds: a number where it has one element, else an additional input."""
        known = self._constant_aliases.get(id(tensor))
        if known is not None:
            return known
        if tensor.requires_grad:
            raise NotSupported("a tensor that requires grad and is not an input")
        with torch_internals.no_dispatch():
            value = tensor.item() if tensor.numel() == 1 and not tensor.is_complex() and copy else None
            held = tensor.detach().clone() if copy else tensor
        fake = torch_internals.to_fake(self.fake_mode, tensor)
        type_ = self.type_of(fake)
        if value is not None:
            node = self._node("aten.full.default", (type_.shape, value), {"dtype": type_.dtype, "device": type_.device}, type_)
        else:
            node = Node(self.name("constant"), "input", type=type_, static=True)
            self.constants.append((held, node))
        alias = self._constant_aliases[id(tensor)] = self._track(fake, node, None)
        alias.args = (tensor,)                                   # keeps the object, so that its id stays its own
        return alias

    def current(self, tensor: torch.Tensor) -> Node:
        """The node that has the tensor's present value."""
        return self._current(self.alias(tensor))

    def type_of(self, tensor: torch.Tensor) -> TensorType:
        dtype = torch_internals.from_torch_dtype(tensor.dtype)
        if dtype is OTHER or tensor.layout != torch.strided:
            raise NotSupported(f"a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
        of = self.sizes.of
        return TensorType(dtype, tuple(map(of, tensor.shape)), tuple(map(of, tensor.stride())), str(tensor.device))

    def fresh(self, node: Node, tensor: torch.Tensor) -> Node:
        """`node` with the strides that eager gives the tensor; a copy if it has others."""
        wanted = self.type_of(tensor)
        if node.type == wanted:
            return node
        empty = self._node("aten.empty_strided.default", (wanted.shape, wanted.stride),
                           {"dtype": wanted.dtype, "device": wanted.device}, wanted)
        return self._node("aten.copy.default", (empty, node), {}, wanted)

    def clone(self, node: Node) -> Node:
        return self._node("aten.clone.default", (node,), {}, node.type)

    # ------------------------------------------------------------ dispatch
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        attribute = _ATTRIBUTES.get(func)
        if attribute is not None:
            return attribute(args[0]) if torch_internals.is_fake(args[0]) else func(*args)
        try:
            plan = self._plans[func]
        except KeyError:
            plan = self._plans[func] = self._plan(func)
        if plan is not None:
            with self:
                result = plan(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if args and type(args[0]) in (int, float, bool) and func._schema.arguments[0].type.kind() == "TensorType" \
                and not any(isinstance(a, torch.Tensor) for a in args):
            with self:                                           # a number as functorch converts it
                args = (torch.full((), args[0], dtype=_NUMBER_TYPES[type(args[0])], device="cpu"), *args[1:])
        writes = _WRITES.get(func, _WRITES)
        if writes is _WRITES:
            writes = _WRITES[func] = writes_of(func)
        if writes is not None:
            return self._write(func, writes, args, kwargs)       # type: ignore[arg-type]
        return self._record(func, args, kwargs)

    def _plan(self, func: Any) -> Callable | None:
        """The decomposition to use, or None to record the operator itself."""
        name = op_name(func)
        if name in self.keep:
            return None
        rule = self._decompositions.get(func)
        if rule is not None:
            return rule
        if name.startswith("aten._foreach_"):
            return torch_internals.foreach_loop(func)
        if torch_internals.is_composite(func):
            return func.decompose
        return None

    def _record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name
        if name == "aten::_local_scalar_dense" and not any(isinstance(a, torch.Tensor) for a in args[1:]):
            constant = getattr(args[0], "constant", None)
            if constant is None:
                raise NotSupported("a number is read from a tensor (.item())")
        if name in IDENTITY and name != "aten::view_as":
            return self._identity(func, args, kwargs)
        if name == "aten::as_strided":
            return self._as_strided(func, args, kwargs)
        operands = tuple(map(self._arg, args))
        options = {k: self._arg(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self._outputs(func, args, kwargs, operands, options, result)
        return result

    def _outputs(self, func: Any, args: tuple, kwargs: dict, operands: tuple, options: dict, result: Any) -> None:
        """Record the call and track its results."""
        if isinstance(result, torch.Tensor):
            if id(result) in self._aliases:                      # the operand itself
                return
            node = self._node(op_name(func), operands, options, self.type_of(result))
            self._track(result, node, (func, args, kwargs, None))
        elif isinstance(result, (tuple, list)) and any(isinstance(r, torch.Tensor) for r in _flat(result)):
            items = _flat(result)
            types = tuple(self._result_type(r) for r in items)
            node = self._node(op_name(func), operands, options, types)
            for i, r in enumerate(items):
                if isinstance(r, torch.Tensor):
                    self._track(r, self._node("getitem", (node, i), {}, types[i]), (func, args, kwargs, i))
        elif result is None:
            self._node(op_name(func), operands, options, None)

    def _identity(self, func: Any, args: tuple, kwargs: dict) -> Any:
        source = self.alias(args[0])
        node = self._current(source)
        result = func(source.tensor, *args[1:], **kwargs)
        if id(result) not in self._aliases:
            self._track(result, node, (func, (source.tensor, *args[1:]), kwargs, None), source=source)
        return result

    def _as_strided(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """as_strided reads the storage: recorded on the root, whose memory then must be laid out as its type says."""
        result = func(*args, **kwargs)
        self._track_as_strided(result, self.alias(args[0]))
        return result

    def _track_as_strided(self, result: torch.Tensor, alias: Alias) -> None:
        """`result` has the strides of its own that it was given, on the storage of `alias`."""
        root = alias.path()[0]
        if root.tensor.storage_offset() != 0 or not torch_internals.is_dense(root.tensor):
            raise NotSupported("as_strided of a part of a tensor")
        full = (root.tensor, tuple(result.shape), tuple(result.stride()), result.storage_offset())
        base = self._current(root)
        if base.op == "input":                               # the real input may lie anywhere in its storage
            base = self.clone(base)
        base = self.fresh(base, root.tensor)
        func = torch.ops.aten.as_strided.default
        node = self._node(op_name(func), (base, *map(self._arg, full[1:])), {}, self.type_of(result))
        self._track(result, node, (func, full, {}, None), source=root)

    # ------------------------------------------------------------ writes
    def _write(self, func: Any, writes: Writes, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name
        if name in STORAGE:
            return self._storage(func, args, kwargs)
        if name in GEOMETRY:
            return self._geometry(func, writes.functional, args, kwargs)
        targets = [args[i] if i < len(args) else kwargs.get(n) for i, n in writes.arguments]
        if name == "aten::copy_":
            self._assign(args[0], self._current(self.alias(args[1])), args[1])
            return args[0]
        if writes.functional is None:
            raise NotSupported(f"{op_name(func)} writes its argument and has no functional form")
        rest = {k: v for k, v in kwargs.items() if k not in writes.drop}
        for i, a in enumerate(func._schema.arguments):           # defaults that the functional form does not have
            if i >= len(args) and a.name not in kwargs and a.has_default_value() and a.default_value is not None:
                rest[a.name] = a.default_value
        inner = args if not writes.drop else args[:len(writes.functional._schema.arguments)]
        with self:
            if torch_internals.is_random(op_name(writes.functional)) and len(targets) == 1:
                result = _in_memory_order(writes.functional, inner, rest)
            else:
                result = writes.functional(*inner, **rest)
        results = [result] if len(writes.functional._schema.returns) == 1 else list(result)
        fresh, new = results[:len(results) - len(targets)], results[len(results) - len(targets):]
        for target, value in zip(targets, new):
            pairs = zip(target, value) if isinstance(target, (tuple, list)) else [(target, value)]
            for t, v in pairs:
                if t is not None:
                    if writes.drop and tuple(t.shape) != tuple(v.shape):
                        raise NotSupported(f"{op_name(func)} resizes its out= argument")
                    self._assign(t, self._current(self.alias(v)), v)
        fresh_results = iter(fresh)
        by_set = {frozenset(func._schema.arguments[i].alias_info.before_set): t for (i, _), t in zip(writes.arguments, targets)}
        returned = [by_set[frozenset(r.alias_info.before_set)] if r.alias_info is not None else next(fresh_results)
                    for r in func._schema.returns]
        return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)

    def _assign(self, target: torch.Tensor, node: Node, value: torch.Tensor) -> None:
        """target.copy_(value), where `node` is the value: convert, broadcast, and put it back into the bases."""
        aten = torch.ops.aten
        if value.device != target.device:
            value = aten._to_copy.default(value, device=target.device)
            node = self._node("aten._to_copy.default", (node,), {"device": str(target.device)}, self.type_of(value))
        if value.dtype != target.dtype:
            value = aten._to_copy.default(value, dtype=target.dtype)
            node = self._node("aten._to_copy.default", (node,), {"dtype": torch_internals.from_torch_dtype(target.dtype)},
                              self.type_of(value))
        if tuple(value.shape) != tuple(target.shape):
            value = aten.expand.default(value, list(target.shape))
            node = self._node("aten.expand.default", (node, tuple(map(self.sizes.of, target.shape))), {}, self.type_of(value))
        wanted = self.type_of(target)
        if node.type != wanted:
            if wanted.stride == contiguous(wanted.shape):
                node = self._node("aten.clone.default", (node,), {"memory_format": "contiguous_format"}, wanted)
            else:
                node = self.fresh(node, target)
        alias = self.alias(target)
        store = alias.store
        chain = [alias]
        while chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        before = [self._current(a) for a in chain]
        store.generation += 1
        chain[0].node, chain[0].generation = node, store.generation
        for i, child in enumerate(chain[:-1]):
            if child.func._schema.name == "aten::as_strided":
                if before[i + 1].op == "input":              # the real input may lie anywhere in its storage
                    before[i + 1] = self.clone(before[i + 1])
                before[i + 1] = self.fresh(before[i + 1], chain[i + 1].tensor)
            node = functionalize.put_back(self._emit, child, before[i + 1], node)
            chain[i + 1].node, chain[i + 1].generation = node, store.generation

    def _emit(self, func: Any, *args: Any, like: torch.Tensor) -> Node:
        """Record a call of `func` whose result has the type of `like`."""
        type_ = self.type_of(like)
        if func is torch.ops.aten.reshape.default and type_.stride != contiguous(type_.shape):
            plain = TensorType(type_.dtype, type_.shape, contiguous(type_.shape), type_.device)
            return self.fresh(self._node(op_name(func), tuple(map(self._arg, args)), {}, plain), like)
        return self._node(op_name(func), tuple(map(self._arg, args)), {}, self.type_of(like))

    def _geometry(self, func: Any, view: Any, args: tuple, kwargs: dict) -> Any:
        """t_(), squeeze_() ...: the object becomes a view, by the functional form `view`, of what it was."""
        target = args[0]
        old = self.alias(target)
        if old.input is not None:
            raise NotSupported(f"{op_name(func)} changes the geometry of an input")
        before = torch.ops.aten.alias.default(target)
        if func._schema.name != "aten::detach_":
            func(*args, **kwargs)
        self._current(old)
        old.tensor = before
        self._aliases[id(before)] = old
        del self._aliases[id(target)]
        if func._schema.name == "aten::detach_":
            self._track(target, old.node, (view, (before,), {}, None), source=old)
        elif func._schema.name == "aten::as_strided_":
            self._track_as_strided(target, old)
        else:
            node = self._emit(view, old.node, *args[1:], like=target)
            self._track(target, node, (view, (before, *args[1:]), kwargs, None), source=old)
        return target

    def _storage(self, func: Any, args: tuple, kwargs: dict) -> Any:
        target = args[0]
        if func._schema.name in ("aten::resize_", "aten::_resize_output_") and tuple(target.shape) == tuple(args[1]):
            return target
        raise NotSupported(f"{op_name(func)} changes the storage of a tensor")

    # ------------------------------------------------------------ values
    def _current(self, alias: Alias) -> Node:
        if alias.generation == alias.store.generation:
            return alias.node
        if alias.parent is None:
            raise NotSupported("two tensors share memory and one of them is written")
        parent = self._current(alias.parent)
        name = alias.func._schema.name
        if name in IDENTITY:
            node = parent
        else:
            if name == "aten::as_strided":
                parent = self.fresh(parent, alias.parent.tensor)
            operands = (parent, *map(self._arg, alias.args[1:]))
            options = {k: self._arg(v) for k, v in alias.kwargs.items()}
            index = alias.step.index                              # type: ignore[union-attr]
            if index is None:
                node = self._node(op_name(alias.func), operands, options, self.type_of(alias.tensor))
            else:
                node = self._part(alias, operands, options, index)
        alias.node, alias.generation = node, alias.store.generation
        return node

    def _part(self, alias: Alias, operands: tuple, options: dict, index: int) -> Node:
        """One result of split or unbind, regenerated as the view that it is."""
        bound = functionalize.bind(alias.func, alias.args, alias.kwargs)
        type_, dim = self.type_of(alias.tensor), bound["dim"]
        if alias.func._schema.name == "aten::unbind":
            return self._node("aten.select.int", (operands[0], dim, index), {}, type_)
        start = self._arg(functionalize.part_start(bound, index))
        return self._node("aten.slice.Tensor", (operands[0], dim, start, start + type_.shape[dim], 1), {}, type_)

    def _track(self, tensor: torch.Tensor, node: Node, made: tuple | None, source: Alias | None = None) -> Alias:
        key = torch_internals.storage_key(tensor)
        store = self._stores.get(key)
        if store is None:
            store = self._stores[key] = Store()
            source = None
            made = None
        elif source is None and made is not None:
            source = next((self._aliases[id(a)] for a in _flat((*made[1], *made[2].values()))
                           if isinstance(a, torch.Tensor) and self._aliases[id(a)].store is store), None)
            if source is None:
                raise NotSupported(f"{op_name(made[0])} returns memory of a tensor that it does not take")
        alias = Alias(tensor, store, node, store.generation)
        if source is None:
            if store.root is None:
                store.root = alias
        else:
            func, args, kwargs, index = made                      # type: ignore[misc]
            alias.parent, alias.func, alias.kwargs = source, func, kwargs
            alias.args = (source.tensor, *args[1:])
            alias.step = ViewStep(op_name(func), tuple(map(self._arg, args[1:])),
                                  tuple(sorted((k, self._arg(v)) for k, v in kwargs.items())), index)
        self._aliases[id(tensor)] = alias
        return alias

    def _result_type(self, value: Any) -> Type:
        if isinstance(value, torch.Tensor):
            return self.type_of(value)
        if value is None:
            return None
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, (int, torch.SymInt)) else "float"
        return ScalarType(kind, self.sizes.of(value) if kind == "int" else None)

    def _node(self, op: str, args: tuple, kwargs: dict[str, Any], type_: Type) -> Node:
        origin = self.origin
        backward = torch_internals.current_backward_sequence_number()
        if backward is not None:
            at = bisect_right(self._sequence, backward) - 1
            origin = self._origins[at] if at >= 0 else origin
        options = tuple(sorted((k, v) for k, v in kwargs.items()
                               if v is not None and not (k == "pin_memory" and not v) and not (k == "layout" and v == "strided")))
        node = Node(self.name(op.split(".")[1] if op != "getitem" else op), op, args, options, type_, origin)
        self.nodes.append(node)
        return node

    def _arg(self, value: Any) -> Any:
        kind = type(value)
        if kind in (int, float, bool, str, Node) or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._current(self.alias(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._arg, value))
        if isinstance(value, torch.SymInt):
            return self.sizes.of(value)
        if kind is torch.dtype:
            return torch_internals.from_torch_dtype(value)
        if kind is torch.memory_format:
            return _FORMATS[value]
        if kind is torch.device:
            return str(value)
        if kind is torch.layout:
            return str(value).removeprefix("torch.")
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            known = value.node.maybe_as_float() if isinstance(value, torch.SymFloat) else value.node.maybe_as_bool()
            if known is not None:
                return known
            node = self.floats.get(value.node.expr)
            if node is not None:
                return node
            if isinstance(value, torch.SymFloat) and value.node.expr.free_symbols <= set(self.floats):
                return float(value)                              # an operator's formula computes with it: a constant, guarded
            raise NotSupported(f"a number computed from sizes is an operand: {value.node.expr}")
        if isinstance(value, (complex, int, float)):
            return value
        raise NotSupported(f"an operand of type {kind.__module__}.{kind.__qualname__}")


def _in_memory_order(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """A random fill of args[0]: numbers are drawn in the order of its memory, as the in-place operator does."""
    target = args[0]
    if target.is_contiguous() or not torch_internals.is_dense(target):
        return func(*args, **kwargs)
    stride = target.stride()
    order = sorted(range(target.dim()), key=lambda axis: -stride[axis])
    drawn = func(target.permute(order), *args[1:], **kwargs)
    return drawn.permute([order.index(axis) for axis in range(target.dim())])


def _flat(values: Any) -> list:
    found: list = []
    for v in values:
        if isinstance(v, (list, tuple)):
            found.extend(_flat(v))
        else:
            found.append(v)
    return found
