"""Tensors and symbolic numbers from outside become inputs of the graph."""
from __future__ import annotations

from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.errors import break_here
from fuseline.capture.provenance import Provenance
from fuseline.ir.region import Attr, GraphInput, Guard, InDict, Item, Local, Source, TensorFacts
from fuseline.options import Options

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) if hasattr(torch.nn, "Buffer") else (torch.Tensor, torch.nn.Parameter)

_LARGEST = (1 << 53) - 1       # symbolic numbers are 64-bit in the graph, and exact in floating point


class Inputs(Provenance):
    """The graph under construction and its inputs.

    nodes    id of a fake tensor -> (fake, FX node)          fakes   id of a real tensor -> (real, fake)
    """

    def __init__(self, options: Options, dynamic: frozenset, where: Any) -> None:
        super().__init__(where)
        self.options, self.dynamic = options, dynamic
        self.shape_env = torch_internals.new_shape_env()
        self.fake_mode = torch_internals.new_fake_mode(self.shape_env)
        self.graph = torch.fx.Graph()
        self.inputs: list[GraphInput] = []
        self.nodes: dict[int, tuple[Any, Any]] = {}
        self.fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.real_of: dict[int, torch.Tensor] = {}
        self.symbols: dict[Any, tuple[Source, int | None]] = {}
        self._symbol_nodes: dict[Any, Any] = {}
        self._numbers: dict[Source, Any] = {}

    def read(self, value: Any, source: Source) -> Any:
        """An object from outside enters the stack: tensors are wrapped, everything is guarded as far as reading it needs."""
        if isinstance(value, torch.Tensor):
            return value if torch_internals.is_fake(value) else self.wrap(value, source)
        if type(value) is int and (source, None) in self.dynamic:
            return self._number(value, source)
        return self.read_object(value, source)

    def _placeholder(self, source: Source, example: Any, static: bool) -> Any:
        node = self.graph.placeholder(f"arg{len(self.inputs)}")
        node.meta["example_value"] = example
        self.inputs.append(GraphInput(node.name, source, example, static))
        return node

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
        axes = self._dynamic_axes(tensor, source)
        fake = torch_internals.to_fake(self.fake_mode, tensor) if not axes else torch_internals.to_symbolic_fake(
            self.fake_mode, tensor, axes, f"in{len(self.inputs)}")
        static = isinstance(tensor, torch.nn.Parameter) or is_module_state(source)
        node = self._placeholder(source, fake, static)
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
        if known is not None:
            node, axis = known
            if axis is None:
                return node
            made = self.graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
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


def is_module_state(source: Source) -> bool:
    """Whether a tensor is found among the parameters or buffers of a module."""
    return isinstance(source, Item) and isinstance(source.base, InDict) and source.base.name in ("_parameters", "_buffers")


def is_argument(source: Source | None) -> bool:
    """Whether an object is an argument or an element of one, not held by a module."""
    while isinstance(source, Item):
        source = source.base
    return isinstance(source, Local) and not isinstance(source, Attr)
