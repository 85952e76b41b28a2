"""Extern steps as Python source: which callable runs the operator, and the text of its arguments.

Executors generate straight-line Python. This module knows operators (overloads, `out` variants, what an argument string
means by the operator's schema); a `Scope` of the executor knows where buffers and sizes are.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Atom, Div, Expr, Int, Max, Mod, Sym
from fuseline.ir.kernels import Extern, Ref, ViewOf

_MEMORY_FORMATS = {"contiguous_format": torch.contiguous_format, "channels_last": torch.channels_last,
                   "channels_last_3d": torch.channels_last_3d, "preserve_format": torch.preserve_format}
_LAYOUTS = {"strided": torch.strided, "sparse_coo": torch.sparse_coo}

# torch's Python bindings of these take half a microsecond less than calling the overload, and mean the same for these arguments.
_DIRECT = {f"aten.{name}.{overload}": getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm") for overload in ("default", "out")}
_DIRECT["aten.convolution.default"] = torch.convolution


class Scope(Protocol):
    """What the executor tells about its generated function."""

    def tensor(self, buffer: str) -> str:
        """Source of the buffer as a tensor."""
    def view(self, view: ViewOf) -> str:
        """Source of a buffer seen with another geometry."""
    def size(self, e: Int) -> str:
        """Source of an index expression's value."""
    def constant(self, value: Any) -> str:
        """A name that the generated function sees for an object."""


def size_source(e: Int, name_of: Callable[[Sym], str]) -> str:
    """Python source that computes an index expression; `name_of` gives the variable of a symbol."""
    if isinstance(e, int):
        return repr(e)
    terms = []
    for monomial, coefficient in e.terms:
        factors = [_atom_source(a, name_of) for a in monomial]
        if coefficient != 1 or not factors:
            factors.insert(0, repr(coefficient))
        terms.append(" * ".join(factors))
    return terms[0] if len(terms) == 1 and "*" not in terms[0] else "(" + " + ".join(terms) + ")"


def _atom_source(atom: Atom, name_of: Callable[[Sym], str]) -> str:
    if isinstance(atom, Sym):
        return name_of(atom)
    if isinstance(atom, Div):
        return f"({size_source(atom.numerator, name_of)} // {size_source(atom.denominator, name_of)})"
    if isinstance(atom, Mod):
        return f"({size_source(atom.numerator, name_of)} % {size_source(atom.denominator, name_of)})"
    if isinstance(atom, Max):
        return f"max({size_source(atom.a, name_of)}, {size_source(atom.b, name_of)})"
    raise InternalError(f"unknown atom {atom!r}")


def operator_of(name: str) -> torch_internals.Operator:
    """Raises InternalError for a name that this build of torch does not have."""
    found = torch_internals.operator(name)
    if found is None:
        raise InternalError(f"torch has no operator {name}")
    return found


@functools.cache
def _schema(name: str) -> Any:
    return operator_of(name)._schema


def callable_of(name: str) -> Callable[..., Any]:
    """The fastest callable for an operator's overload."""
    direct = _DIRECT.get(name)
    return direct if direct is not None else operator_of(name)


def out_names(variant: str) -> tuple[str, ...]:
    """The keyword names of an `out` overload's result arguments, in order."""
    return tuple(a.name for a in _schema(variant).arguments if a.is_out)


def call_source(step: Extern, scope: Scope, *, out: bool) -> str:
    """Source of the call. out: of the `out` variant, with the step's result buffers as its out arguments."""
    name = step.out_variant if out else step.op
    if name is None:
        raise InternalError(f"{step.op} has no out variant")
    schema = _schema(step.op)
    types = {a.name: str(a.type) for a in schema.arguments}
    positional = [str(a.type) for a in schema.arguments]
    parts = [argument_source(a, positional[k] if k < len(positional) else "", scope) for k, a in enumerate(step.args)]
    parts += [f"{_keyword(k)}={argument_source(v, types.get(k, ''), scope)}" for k, v in step.kwargs]
    if out:
        names = out_names(name)
        if len(names) != len(step.outs):
            raise InternalError(f"{name} writes {len(names)} results, the step has {len(step.outs)}")
        for keyword, buffer in zip(names, step.outs, strict=True):
            if buffer is None:
                raise InternalError(f"{name}: the out variant needs memory for every result")
            parts.append(f"{_keyword(keyword)}={scope.tensor(buffer)}")
    function = scope.constant(callable_of(name))
    return f"{function}({', '.join(parts)})"


def _keyword(name: str) -> str:
    """`self` and `from` cannot all be written as keywords: torch's bindings call the first by position, the second is rare."""
    if not name.isidentifier():
        raise InternalError(f"argument name {name!r} cannot be a keyword")
    return name


def argument_source(value: Any, type_: str, scope: Scope) -> str:
    """Source of one argument. A string is a device, layout or memory format where the schema's type says so."""
    if isinstance(value, Ref):
        return scope.tensor(value.buffer)
    if isinstance(value, ViewOf):
        return scope.view(value)
    if isinstance(value, Expr):
        return scope.size(value)
    if isinstance(value, DType):
        return scope.constant(torch_internals.to_torch_dtype(value))
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(argument_source(v, type_, scope) for v in value) + "]"
    if isinstance(value, str):
        return _string_source(value, type_, scope)
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    return scope.constant(value)                             # floats too: inf and NaN have no literal


def _string_source(value: str, type_: str, scope: Scope) -> str:
    if value in _MEMORY_FORMATS and "str" not in type_.lower():
        return scope.constant(_MEMORY_FORMATS[value])
    if value in _LAYOUTS and "str" not in type_.lower():
        return scope.constant(_LAYOUTS[value])
    if "Device" in type_:
        return scope.constant(torch.device(value))
    return repr(value)


def result_may_alias(step: Extern) -> bool:
    """True if a result may share memory with an argument: by its schema, or for operators that return their input at times."""
    if torch_internals.returns_alias(step.op):
        return True
    name = step.op.split(".")[1]
    return name in ("reshape", "contiguous", "to", "flatten", "expand_as", "type_as", "reshape_as")


def relayout(tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """An operator's result with the strides that its buffer has, copied where the operator chose others.

    Raises InternalError for another shape: kernels after it would read outside of it.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise InternalError(f"an operator returned shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if all(n <= 1 or a == b for n, a, b in zip(shape, tensor.stride(), stride, strict=True)):
        return tensor.as_strided(shape, stride)
    copy = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor)
    return copy
