"""Calls of torch become nodes of the graph: executed on fake tensors, recorded with what they gave and the line that made them."""
from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.capture.containers import PASS_THROUGH, holds_tensor
from fuseline.capture.errors import RestartCapture, break_here
from fuseline.capture.operators import Operators
from fuseline.capture.provenance import CONSTANTS, lookup
from fuseline.capture.refusals import demands, refused
from fuseline.capture.values import is_scalar
from fuseline.ir.region import GraphBreak

# Modules of torch whose Python functions are leaves of the graph; all other Python code of torch is interpreted.
_LEAF_MODULES = frozenset({"torch.nn.functional", "torch.functional", "torch._tensor", "torch", "torch._C._nn", "torch._VF",
                           "torch.special", "torch.linalg", "torch.fft", "torch._lowrank", "torch.overrides",
                           "torch.signal.windows.windows", "torch.fx.experimental.sym_node"})
_INLINED_OF_TORCH = frozenset({"is_storage"})
# Methods and functions that give Python the values of tensors, or touch what no graph can hold.
_READS_VALUES = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
                           "is_nonzero", "equal", "allclose", "__contains__", "__format__", "__repr__", "__str__"})
_UNSUPPORTED = frozenset({"backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "set_",
                          "resize_", "resize_as_", "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_",
                          "storage_offset", "record_stream", "__deepcopy__", "__reduce_ex__", "__reduce__", "__setstate__", "detach_",
                          "apply_", "map_", "as_subclass", "_make_subclass", "from_numpy", "frombuffer", "manual_seed", "seed",
                          "compile", "set_default_device", "set_default_dtype", "set_num_threads", "use_deterministic_algorithms",
                          "save", "load", "__enter__", "__exit__", "set_rng_state", "get_rng_state", "grad", "vmap", "from_dlpack",
                          "set_flush_denormal",
                          "set_printoptions", "set_default_tensor_type", "set_float32_matmul_precision", "cond"})
# Reductions without a neutral element: fake tensors do not always raise where eager does.
_NEED_ELEMENTS = frozenset({"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "median", "nanmedian", "mode", "kthvalue"})
# Functions that need the values of floats. PyTorch chooses kernels and derivatives by exponents; sizes are made of numbers.
_NEED_VALUES = frozenset({"pow", "pow_", "ipow", "__pow__", "__rpow__", "__ipow__", "float_power", "norm", "vector_norm", "arange", "range",
                          "interpolate", "upsample", "upsample_nearest", "upsample_bilinear"})
# To these a NumPy number is an array of its own dtype; to all others it is a Python number.
_SEES_SCALARS = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor", "is_tensor"})
# C functions that change the state of the process: recorded, and done, so that later operators see it.
_SETTERS = frozenset({"_set_grad_enabled", "set_autocast_enabled", "set_autocast_dtype", "set_autocast_cache_enabled",
                      "autocast_increment_nesting", "autocast_decrement_nesting", "clear_autocast_cache"})
# Functions of torch that tell a setting of the process, but for those that a region may change and whose state at entry is guarded.
_SETTINGS = ("_get_", "get_", "are_", "is_deterministic", "is_warn")
_CHANGEABLE = ("autocast", "default", "grad", "inference", "tracing", "rng", "compiling")
_ASKS = ("is_", "_is_", "get_", "_get_", "has_", "_has_", "_log_api_usage", "finfo", "iinfo", "can_cast", "promote_types", "result_type",
         "broadcast_shapes", "numel", "_disabled_torch", "_jit_internal", "typename", "sym_", "_nn_module", "_len_torch", "_functorch")


class TorchCalls(Operators):
    def is_leaf(self, function: types.FunctionType) -> bool:
        """Whether a Python function is torch's API: recorded as one node instead of being interpreted."""
        known = _leaves.get(function)
        if known is None:
            known = _leaves[function] = function.__module__ in _LEAF_MODULES and function.__name__ not in _INLINED_OF_TORCH \
                and not function.__qualname__.startswith("Module.") and function.__globals__.get("__name__", "").startswith("torch")
        return known

    def torch_method(self, name: str, args: tuple, kwargs: dict) -> Any:
        """A method of a tensor; args[0] is the tensor."""
        if name == "requires_grad_" and len(args) + len(kwargs) < 3 and args[0].requires_grad is (
                args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
            return args[0]
        if name != "requires_grad_" or self.source(args[0]) is not None:
            self._check(name)
        if name in ("size", "dim", "numel", "nelement", "ndimension", "stride", "is_contiguous", "is_floating_point", "is_complex",
                    "element_size", "get_device", "type", "is_signed", "__len__", "__hash__") and not (name == "type" and len(args) > 1):
            return self.native(getattr(args[0], name), *args[1:], **kwargs)
        if name in _OPERATOR_METHODS and len(args) == 2 and not kwargs:
            return self.record("call_function", _OPERATOR_METHODS[name], args, kwargs)
        return self.record("call_method", name, args, kwargs)

    def torch_function(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """A function of torch, in C or Python."""
        name = getattr(function, "__name__", "")
        if isinstance(function, types.FunctionType) and args and isinstance(args[0], torch.Tensor) \
                and lookup(torch.Tensor, name)[1] is function:
            return self.torch_method(name, args, kwargs)
        if function in torch_internals.TRANSFORM_STEPS:
            level = self.native(function, *args, **kwargs)
            self._node("call_function", function, args, kwargs, level)
            return level
        self._check(name)
        if name in _SETTERS:
            self.native(function, *args, **kwargs)
            self._node("call_function", function, args, kwargs, None)
            return None
        if isinstance(function, types.BuiltinFunctionType) and name.startswith("_") and not name.startswith(_ASKS) \
                and not _any_tensor(args, kwargs):
            raise break_here("unsupported-torch", f"{name}() is not captured", "call it outside the compiled function")
        return self.record("call_function", function, args, kwargs)

    def _check(self, name: str) -> None:
        if name in _READS_VALUES:
            raise break_here("item", f"{name}() gives Python the values of a tensor",
                             "keep the value in a tensor, or read it outside the compiled function")
        if name in _UNSUPPORTED:
            raise break_here("unsupported-torch", f"{name}() is not captured", "call it outside the compiled function")

    # -- recording -----------------------------------------------------------------------------------------------
    def record(self, kind: str, target: Any, args: tuple, kwargs: dict) -> Any:
        """Execute an operator on fakes and add its node. The result is a value of the program.

        Raises Break where the result depends on data, and where the operator raises: Python then raises the real exception.
        """
        if target is operator.pow and not isinstance(args[0], torch.Tensor):
            target = torch.pow                             # FX would print -2 ** x, which is -(2 ** x)
        if _name(target) in _SEES_SCALARS and any(map(is_scalar, (*args, *kwargs.values()))):
            raise break_here("numpy", f"{_name(target)} of a NumPy number is not captured", "give it a Python number")
        args = tuple(self._plain(a) for a in args)
        kwargs = {k: self._plain(v) for k, v in kwargs.items()}
        if _name(target) in _NEED_VALUES:
            args, kwargs = self.fixed(args), self.fixed(kwargs)
        function = target if kind == "call_function" else getattr(torch.Tensor, target)
        if _name(target) in _NEED_ELEMENTS and isinstance(args[0], torch.Tensor) and 0 in args[0].shape:
            raise break_here("empty-reduction", f"{_name(target)} over an empty tensor raises unless the axis has elements",
                             "none needed if eager raises too")
        if reason := refused(_name(target), args, kwargs):
            raise break_here("operator-error", f"{_name(target)}: {reason}", "none needed if eager raises too")
        for holds, message in demands(_name(target), args, kwargs):
            self._demand(holds, message)
        try:
            with torch_internals.symbolic_formulas(bool(self.symbols)), self.fake_mode:
                if kwargs.get("out") is not None:
                    self._check_out(function, args, kwargs)
                result = function(*args, **kwargs)
        except PASS_THROUGH:
            raise
        except torch_internals.unsupported_in_trace() as error:
            raise break_here("data-dependent", f"{_name(target)} gives a result whose form depends on the values of a tensor",
                             "use an operator whose result has a fixed shape, such as torch.where") from error
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise break_here("operator-error", f"{_name(target)} raises {type(error).__name__}: {first_line}",
                             "none needed if eager raises too") from error
        if not holds_tensor(result) and function is not operator.setitem:
            if result is None and kind == "call_function" and not isinstance(target, types.FunctionType) \
                    and not _name(target).startswith(_ASKS) and not _any_tensor(args, kwargs):
                raise break_here("unsupported-torch", f"{_name(target)} is not captured", "call it outside the compiled function")
            if result is not None or not _any_tensor(args, kwargs):
                if kind == "call_function" and not (args or kwargs):
                    self._asked(target, result)
                return result
        for alias, version, position in self.aliases:
            if alias._version != version:                  # the graph cannot write past the version counter of its input
                raise RestartCapture(position, GraphBreak("data-write", self.where(), "a tensor is written through .data",
                                                          "use torch.no_grad() and write to the tensor itself"))
        node = self._node(kind, target, args, kwargs, result)
        self._bind(result, node)
        return result

    def _asked(self, function: Callable, answer: Any) -> None:
        """The program asked for a setting of the process: guard it, unless it is among those that a region may change."""
        name = _name(function)
        if name.startswith(_SETTINGS) and type(answer) in CONSTANTS and torch_internals.asks_setting(function, name) \
                and not any(word in name for word in _CHANGEABLE):
            self.guard(None, "mode", (name, answer))
        else:
            self.asks_modes = True

    def _demand(self, holds: Callable, message: str) -> None:
        """Record that the graph raises RuntimeError(message) unless a formula of the tensor that is given first holds everywhere."""
        condition = holds(lambda f, *args: self.record("call_function", f, args, {}))
        self.record("call_function", torch_internals.assert_async(), (condition, message), {})

    def _check_out(self, function: Callable, args: tuple, kwargs: dict) -> None:
        """Raise Break where an operator would resize the tensors that it writes its results into."""
        results, targets = function(*args, **{k: v for k, v in kwargs.items() if k != "out"}), kwargs["out"]
        results, targets = ((x,) if isinstance(x, torch.Tensor) else x for x in (results, targets))
        if any(r.shape != t.shape for r, t in zip(results, targets)):
            raise break_here("resized-output", "out= is resized to the shape of the result", "give a tensor of the result's shape")

    def _node(self, kind: str, target: Any, args: tuple, kwargs: dict, result: Any) -> Any:
        node = self.graph.create_node(kind, target, self.operand(args), self.operand(kwargs))
        node.meta["example_value"], node.meta["origin"] = result, self.where()
        self.calls += 1
        self.touch()
        return node

    def _bind(self, result: Any, node: Any) -> None:
        if isinstance(result, torch.Tensor):
            if id(result) not in self.nodes:
                self.nodes[id(result)] = (result, node)
                self.bind_sizes(result, node)
        elif isinstance(result, (tuple, list)):
            for i, item in enumerate(result):
                if isinstance(item, (torch.Tensor, tuple, list)):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["example_value"], part.meta["origin"] = item, self.where()
                    self._bind(item, part)

    def _plain(self, value: Any) -> Any:
        """An argument as torch may see it: containers from outside as wrapped copies, at every depth."""
        if is_scalar(value):
            return value.item()
        if isinstance(value, (list, tuple, dict)) and not isinstance(value, torch.Size):
            inside = self.contents(value)
            if isinstance(inside, dict):
                return {k: self._plain(v) for k, v in inside.items()}
            items = [self._plain(v) for v in inside]
            if isinstance(inside, list):
                return items
            return inside if all(a is b for a, b in zip(items, inside)) else tuple(items) if type(inside) is tuple else type(inside)(*items)
        return value

    def operand(self, value: Any) -> Any:
        """An argument as FX has it. Raises Break for what cannot stand in a graph."""
        if isinstance(value, torch.Tensor):
            found = self.nodes.get(id(value))
            if found is None:
                raise break_here("unknown-tensor", "a tensor that native code made cannot be an argument", "make it with torch operations")
            return self.local(found[1])
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.number_node(value)
        if isinstance(value, enum.IntEnum):
            return int(value)
        if type(value) in CONSTANTS:
            return tuple(self.operand(v) for v in value) if type(value) is torch.Size else value
        if isinstance(value, tuple):
            return tuple(self.operand(v) for v in value)
        if isinstance(value, list):
            return [self.operand(v) for v in value]
        if isinstance(value, dict):
            return {k: self.operand(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(self.operand(value.start), self.operand(value.stop), self.operand(value.step))
        if isinstance(value, (int, float, str)) and self.source(value) is None:      # FX prints them: as what they are underneath
            return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else str.__str__(value)
        if isinstance(value, type) and value in _DTYPES:   # FX prints a class as no Python text
            return _DTYPES[value]
        if isinstance(value, LEGACY_TYPE):
            return torch.typename(value)
        if not isinstance(value, type) and callable(value) and getattr(value, "__module__", "").startswith("torch"):
            return value
        raise break_here("unknown-argument", f"a {type(value).__name__} as the argument of a torch function is not captured",
                         "pass tensors, numbers and plain containers")


_leaves: dict[types.FunctionType, bool] = {}
_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool, complex: torch.complex128}      # dtype=int, x.to(float)
LEGACY_TYPE = type(torch.FloatTensor)                   # x.type(torch.FloatTensor)
_OPERATOR_METHODS = {f"__{n}__": getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_",
                                                               "or_", "xor", "lt", "le", "eq", "ne", "gt", "ge") if not n.endswith("_")}
_OPERATOR_METHODS["__getitem__"] = operator.getitem


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _any_tensor(args: tuple, kwargs: dict) -> bool:
    return holds_tensor(args) or any(map(holds_tensor, kwargs.values()))


