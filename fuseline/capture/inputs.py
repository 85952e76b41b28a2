"""Tensors and symbolic numbers from outside become inputs of the graph."""
from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.errors import break_here
from fuseline.capture.provenance import CONSTANTS, MISSING, Provenance
from fuseline.capture.subgraph import Subgraph
from fuseline.ir.region import Attr, Computed, GraphInput, Guard, InDict, Item, Local, Pinned, Source, TensorFacts
from fuseline.options import Options

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (torch.Tensor, torch.nn.Parameter)

_FLOATS = (-sys.float_info.max, sys.float_info.max)
# Of floats and ints that are not too large, these are floats and never raise.
_TOTAL = frozenset({operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, abs, float})
_LARGEST = (1 << 53) - 1       # symbolic numbers are 64-bit in the graph, and exact in floating point


class Inputs(Provenance):
    """The graph under construction and its inputs.

    nodes    id of a fake tensor -> (fake, FX node)          fakes   id of a real tensor -> (real, fake)
    """

    def __init__(self, options: Options, dynamic: frozenset, where: Any) -> None:
        super().__init__(where)
        self.options, self.dynamic = options, dynamic
        self.shape_env = torch_internals.new_shape_env(data_dependent_sizes=options.fullgraph)
        self.fake_mode = torch_internals.new_fake_mode(self.shape_env)
        self.graph = self.root = torch.fx.Graph()
        self.subgraph: Subgraph | None = None              # what operators are recorded in now, if that is not the root
        self.inputs: list[GraphInput] = []
        self.nodes: dict[int, tuple[Any, Any]] = {}
        self.fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.real_of: dict[int, torch.Tensor] = {}
        self.symbols: dict[Any, tuple[Source, int | None]] = {}
        self._symbol_nodes: dict[Any, Any] = {}
        self._numbers: dict[Source, Any] = {}
        self._values: dict[Any, float] = {}                # symbol of a float -> its value in this call

    def read(self, value: Any, source: Source) -> Any:
        """An object from outside enters the stack: tensors are wrapped, everything is guarded as far as reading it needs."""
        if isinstance(value, torch.Tensor):
            return value if torch_internals.is_fake(value) else self.wrap(value, source)
        if type(value) is int and (source, None) in self.dynamic:
            return self._number(value, source)
        if type(value) is float and (source, None) in self.dynamic:
            return self._float(value, source)
        return self.read_object(value, source)

    def _placeholder(self, source: Source, example: Any, static: bool) -> Any:
        node = self.root.placeholder(f"arg{len(self.inputs)}")
        node.meta["example_value"] = example
        self.inputs.append(GraphInput(node.name, source, example, static))
        return node

    @contextmanager
    def separate_graph(self) -> Iterator[Subgraph]:
        """Record operators in a graph of their own; what they read from the root becomes an input of it."""
        self.subgraph = subgraph = Subgraph(self)
        self.graph, before = subgraph.graph, dict(self._symbol_nodes)
        try:
            yield subgraph
        finally:
            self.graph, self.subgraph = self.root, None
            for symbol, (node, _) in list(self._symbol_nodes.items()):
                if node.graph is subgraph.graph:
                    del self._symbol_nodes[symbol]
                    if symbol in before:
                        self._symbol_nodes[symbol] = before[symbol]

    def local(self, node: Any) -> Any:
        """The node as the graph that is recorded now has it. Raises Break for one of another subgraph."""
        if node.graph is self.graph:
            return node
        if self.subgraph is None or node.graph is not self.root:
            raise break_here("autograd-function", "a tensor that a custom backward made is used elsewhere", "return it as a gradient")
        return self.subgraph.lift(node)

    def wrap(self, tensor: torch.Tensor, source: Source) -> torch.Tensor:
        """The fake tensor that stands for a real one. Raises Break for classes of tensors that are not captured."""
        found = self.fakes.get(id(tensor))
        if found is not None:
            first = self.source(found[1])
            if first != source:
                self.guard(source, "same", first)
            return found[1]
        if type(tensor) not in _PLAIN_TENSORS:
            raise break_here("tensor-subclass", f"tensors of class {type(tensor).__name__} are not captured", "use plain tensors")
        if tensor.layout is not torch.strided:
            raise break_here("tensor-layout", f"tensors of layout {tensor.layout} are not captured", "use dense tensors")
        static = isinstance(tensor, torch.nn.Parameter) or is_module_state(source)
        fake, node = self._input(tensor, source, static)
        symbolic = {i: torch_internals.symbol_of(n) for i, n in enumerate(fake.shape) if isinstance(n, torch.SymInt)}
        for axis, symbol in symbolic.items():
            self.symbols.setdefault(symbol, (source, axis))
            self._symbol_nodes.setdefault(symbol, (node, axis))
        stride = tuple(None if isinstance(n, torch.SymInt) else n for n in fake.stride())
        self.guard(source, "tensor", TensorFacts(
            type(tensor), tensor.dtype, tensor.device, tuple(None if i in symbolic else n for i, n in enumerate(tensor.shape)), stride,
            tensor.requires_grad, tensor.layout, tensor.is_leaf, torch_internals.dispatch_keys(tensor)))
        self.fakes[id(tensor)] = (tensor, fake)
        self.real_of[id(fake)] = tensor
        self.nodes[id(fake)] = (fake, node)
        self.register(fake, source)
        for real, other in list(self.fakes.values()):
            if real is not tensor and not static and is_argument(self.source(other)):
                self.guard(source, "distinct", self.source(other))
        return fake

    def _input(self, tensor: torch.Tensor, source: Source, static: bool) -> tuple[torch.Tensor, Any]:
        """The fake tensor and the node of a new input."""
        axes = self._dynamic_axes(tensor, source)
        if axes:
            fake = torch_internals.to_symbolic_fake(self.fake_mode, tensor, axes, f"in{len(self.inputs)}")
        elif not tensor.requires_grad and not tensor.is_inference() and any(
                torch_internals.storage_key(tensor) == torch_internals.storage_key(real) for real, _ in self.fakes.values()):
            with self.fake_mode:                           # inputs are apart, though they may be parts of one storage
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        else:
            fake = torch_internals.to_fake(self.fake_mode, tensor)
        return fake, self._placeholder(source, fake, static)

    def _dynamic_axes(self, tensor: torch.Tensor, source: Source) -> frozenset[int]:
        axes = {axis for where, axis in self.dynamic if axis is not None and where == source and axis < tensor.dim()}
        if self.options.dynamic is True and is_argument(source) and not isinstance(tensor, torch.nn.Parameter):
            axes |= set(range(tensor.dim()))
        return frozenset(a for a in axes if tensor.shape[a] > 1)

    def _number(self, value: int, source: Source) -> Any:
        """A symbolic int, which is an input of the graph; 0 and 1 are special enough to stay constants."""
        if value in (0, 1) or not -_LARGEST <= value <= _LARGEST:
            return self.read_object(value, source)
        if source not in self._numbers:
            number = torch_internals.new_symbolic_int(self.shape_env, value, f"in{len(self.inputs)}")
            symbol = torch_internals.symbol_of(number)
            self.symbols[symbol] = (source, None)
            self._symbol_nodes[symbol] = (self._placeholder(source, number, False), None)
            self.guard(source, "range", (-_LARGEST, _LARGEST))
            self._numbers[source] = number
        return self._numbers[source]

    # -- floats ---------------------------------------------------------------------------------------------------
    # A float from outside and each number that Python computes from it is a symbol of its own, whose source says how Python
    # computes it again on each call: in doubles, in the program's order. Tensor operators take such a number as a graph input.
    def _float(self, value: float, source: Source, guarded: bool = True) -> Any:
        """A symbolic float, which is a finite float on each call if `guarded`, or as soon as the graph takes it. What is not finite,
        and zero (whose sign relations do not tell), stays a constant."""
        if value == 0.0 or not math.isfinite(value):
            return self.read_object(value, source)
        if source not in self._numbers:
            number = torch_internals.new_symbolic_float(self.shape_env, value, f"number{len(self._numbers)}")
            symbol = torch_internals.own_symbol(number)
            self.symbols[symbol] = (source, None)
            self._values[symbol] = value
            if guarded:
                self.guard(source, "range", _FLOATS)
            self._numbers[source] = number
        return self._numbers[source]

    def derive(self, function: Callable, *args: Any) -> Any:
        """function(*args) for a pure function of symbolic numbers and constants, as a value with a source.

        A float is symbolic again, an int is if it comes of one, any other constant is guarded. MISSING where an argument's source
        is not known. Raises the program's exception.
        """
        sources = tuple(self._number_source(a) for a in args)
        if None in sources:
            return MISSING
        values = [self._number_value(a) for a in args]
        try:
            value = self.native(function, *values)         # type: ignore[attr-defined]
        except Exception:
            for a in args:
                self.fixed(a)
            raise
        if type(value) is float:
            return self._float(value, Computed(function, sources), function not in _TOTAL)          # type: ignore[arg-type]
        if type(value) is int and any(isinstance(a, torch.SymInt) for a in args):
            return self._number(value, Computed(function, sources))         # type: ignore[arg-type]
        if type(value) in CONSTANTS:
            return self.read(value, Computed(function, sources))            # type: ignore[arg-type]
        for a in args:
            self.fixed(a)
        return value

    def fixed(self, value: Any) -> Any:
        """A symbolic float as the constant that it is in this call, guarded; containers made in this capture likewise, at any depth."""
        if isinstance(value, torch.SymFloat):
            symbol = torch_internals.own_symbol(value)
            if symbol not in self._values:
                return float(value)                        # a relation of sizes: the ShapeEnv guards it
            self.guard(self.symbols[symbol][0], "equals", self._values[symbol])
            return self._values[symbol]
        if type(value) in (list, tuple) and _holds_float(value):
            return type(value)(map(self.fixed, value))
        if type(value) is dict and _holds_float(value):
            return {self.fixed(k): self.fixed(v) for k, v in value.items()}
        return value

    def _number_value(self, number: Any) -> Any:
        if isinstance(number, torch.SymFloat):
            return self._values[torch_internals.own_symbol(number)]
        return torch_internals.hint_of(number) if isinstance(number, torch.SymInt) else number

    def _number_source(self, number: Any) -> Source | None:
        if isinstance(number, torch.SymFloat):
            place = self.symbols.get(torch_internals.own_symbol(number))
            return None if place is None else place[0]
        if isinstance(number, torch.SymInt):
            return None if torch_internals.hint_of(number) is None else self._size_source(torch_internals.expression_of(number))
        return Pinned(number) if type(number) in CONSTANTS else None

    def _size_source(self, expression: Any) -> Source | None:
        """How Python computes an expression of sizes again."""
        if expression.is_Integer:
            return Pinned(int(expression))
        place = self.symbols.get(expression)
        if place is not None:
            return place[0] if place[1] is None else Computed(extent, (place[0], Pinned(place[1])))
        try:
            function, operands = torch_internals.operation_of(expression)
        except NotImplementedError:
            return None
        sources = [self._size_source(o) for o in operands]
        if not sources or None in sources:
            return None
        total = sources[0]
        for source in sources[1:]:
            total = Computed(function, (total, source))    # type: ignore[arg-type]
        return total if len(sources) > 1 else Computed(function, (total,))        # type: ignore[arg-type]

    def bind_sizes(self, tensor: torch.Tensor, node: Any) -> None:
        """A result whose extents depend on data brings symbols of its own."""
        for axis, extent in enumerate(tensor.shape):
            if isinstance(extent, torch.SymInt):
                symbol = torch_internals.symbol_of(extent)
                if symbol.is_Symbol:
                    self._symbol_nodes.setdefault(symbol, (node, axis))

    # -- symbolic numbers in the graph --------------------------------------------------------------------------
    def number_node(self, value: Any) -> Any:
        """The FX node (or plain number) of a SymInt, SymFloat or SymBool."""
        try:
            return self._expression_node(torch_internals.expression_of(value))
        except NotImplementedError as error:
            raise break_here("size-expression", f"{error} cannot be computed in a graph", "compute the size outside") from None

    def _expression_node(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Number:
            return float(expression)
        known = self._symbol_nodes.get(expression)
        if known is None and expression in self._values:
            source = self.symbols[expression][0]
            self.guard(source, "range", _FLOATS)
            known = self._symbol_nodes[expression] = (self._placeholder(source, self._numbers[source], False), None)
        if known is not None:
            node, axis = known
            if axis is None:
                return self.local(node)
            made = self.graph.call_function(torch.ops.aten.sym_size.int, (self.local(node), axis))
            made.meta["example_value"] = torch_internals.number_from(self.shape_env, expression)
            self._symbol_nodes[expression] = (made, None)
            return made
        function, operands = torch_internals.operation_of(expression)
        values = [self._expression_node(o) for o in operands]
        total = values[0]
        for value in values[1:]:
            total = self.graph.call_function(function, (total, value))
        if len(values) == 1:
            total = self.graph.call_function(function, (total,))
        total.meta["example_value"] = torch_internals.number_from(self.shape_env, expression)
        return total

    def size_guards(self) -> tuple[Guard, ...]:
        """What was decided from symbolic sizes, as relations that the compiled code relies on."""
        texts = torch_internals.shape_guard_texts(self.shape_env)
        items = tuple((str(symbol), place) for symbol, place in self.symbols.items())
        guards = []
        for text, names in [*texts, *((f"{name} >= 2", {name}) for name, place in items if place[1] is not None)]:
            used = tuple(i for i in items if i[0] in names)
            if len(used) == len(names):
                guards.append(Guard(None, "sizes", text, "", used))
        return tuple(guards)


def extent(tensor: torch.Tensor, axis: int) -> int:
    return tensor.shape[axis]


def _holds_float(value: Any) -> bool:
    if isinstance(value, torch.SymFloat):
        return True
    if type(value) is dict:
        return any(_holds_float(x) for pair in value.items() for x in pair)
    return type(value) in (list, tuple) and any(map(_holds_float, value))


def is_module_state(source: Source) -> bool:
    """Whether a tensor is found among the parameters or buffers of a module."""
    return isinstance(source, Item) and isinstance(source.base, InDict) and source.base.name in ("_parameters", "_buffers")


def is_argument(source: Source | None) -> bool:
    """Whether an object is an argument or an element of one, not held by a module."""
    while isinstance(source, Item):
        source = source.base
    return isinstance(source, Local) and not isinstance(source, Attr)
