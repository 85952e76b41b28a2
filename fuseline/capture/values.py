"""Values of the standard library and of NumPy that never change, and native functions that depend on their arguments alone."""
from __future__ import annotations

import array
import binascii
import collections
import copy
import datetime
import gc
import inspect
import json
import os
import posixpath
import re
import struct
import sys
import textwrap
import types
import weakref
import zlib
from typing import Any

try:
    import numpy
except ImportError:                                        # PyTorch works without it, and so do we
    numpy = None                                           # type: ignore[assignment]

_DATES: tuple[type, ...] = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
_SCALARS: tuple[type, ...] = () if numpy is None else tuple({numpy.dtype(code).type for code in "?bhilqBHILQefdFD"})
_DTYPES: tuple[type, ...] = () if numpy is None else tuple({type(numpy.dtype(code)) for code in "?bhilqBHILQefdFD"})
# Immutable, compared by value, their own recipe: as Python's own numbers and strings.
LIBRARY_CONSTANTS: tuple[type, ...] = (*_DATES, *_SCALARS, *_DTYPES)
# Immutable, and compared by identity.
LIBRARY_IDENTITIES: tuple[type, ...] = (re.Pattern,)
# Objects that native functions may make and look at, and that nobody can change.
FROZEN: tuple[type, ...] = (re.Pattern, re.Match)

# Views of dicts -> the method that makes them.
_EMPTY: tuple[dict, ...] = ({}, collections.OrderedDict())
VIEWS: dict[type, str] = {type(getattr(entries, name)()): name for entries in _EMPTY for name in ("keys", "values", "items")}

# Functions of strings and plain containers, in C or in Python, that look at nothing else.
_PURE_FUNCTIONS: frozenset[Any] = frozenset({
    json.dumps, json.loads, os.fspath, posixpath.join, posixpath.basename, posixpath.dirname, posixpath.splitext, posixpath.split,
    posixpath.normpath, posixpath.isabs, posixpath.normcase, re.compile, re.match, re.search, re.fullmatch, re.findall, re.split,
    re.escape, struct.pack, struct.unpack, struct.calcsize, textwrap.dedent, textwrap.fill, textwrap.wrap, textwrap.shorten,
    textwrap.indent, inspect.getdoc, inspect.iscoroutinefunction, inspect.isgeneratorfunction, str.maketrans, bytes.fromhex,
    bytearray.fromhex, float.fromhex, int.from_bytes, sys.intern, binascii.hexlify, binascii.b2a_base64, binascii.a2b_base64,
    zlib.crc32,
})
PYTHON_FUNCTIONS: tuple[types.FunctionType, ...] = tuple(f for f in _PURE_FUNCTIONS if isinstance(f, types.FunctionType))
_LOOKS_AT_FUNCTIONS = frozenset({inspect.getdoc, inspect.iscoroutinefunction, inspect.isgeneratorfunction})
# Functions of NumPy whose arguments stay as they are; `out=` is refused.
_NUMPY_FUNCTIONS = frozenset({
    "abs", "all", "amax", "amin", "any", "arange", "argmax", "argmin", "argsort", "around", "array", "array_equal",
    "asarray", "broadcast_to", "ceil", "clip", "concatenate", "cumprod", "cumsum", "diff", "dot", "empty", "exp",
    "expand_dims", "eye", "finfo", "floor", "full", "geomspace", "gradient", "identity", "iinfo", "interp", "isclose",
    "iscomplexobj", "isscalar", "linspace", "logspace", "max", "mean", "median", "meshgrid", "min", "ndim", "ones", "outer",
    "prod", "ravel", "repeat", "reshape", "result_type", "round", "searchsorted", "shape", "size", "sort", "split",
    "squeeze", "stack", "std", "sum", "swapaxes", "tile", "transpose", "tri", "tril", "triu", "unique", "var", "where",
    "zeros"})


def is_pure(function: Any) -> bool:
    """Whether a call with constant arguments, and with plain containers of such, depends on them alone and has no effects."""
    try:
        if function in _PURE_FUNCTIONS:
            return True
    except TypeError:                                      # it has no hash
        return False
    if isinstance(function, type):
        return function in LIBRARY_CONSTANTS or numpy is not None and function is numpy.dtype
    if numpy is not None and "numpy" in (type(function).__module__, (getattr(function, "__module__", None) or "").partition(".")[0]):
        name = getattr(function, "__name__", "")
        return isinstance(function, numpy.ufunc) or name in _NUMPY_FUNCTIONS and getattr(numpy, name, None) is function
    owner = getattr(function, "__self__", None)
    return isinstance(function, types.BuiltinFunctionType) and isinstance(owner, FROZEN)


def takes_functions(function: Any) -> bool:
    """Whether a pure function looks at what another function is, without calling it."""
    return function in _LOOKS_AT_FUNCTIONS


def is_scalar(value: Any) -> bool:
    """Whether a value is a NumPy number."""
    return type(value) in _SCALARS


def is_array(value: Any) -> bool:
    return numpy is not None and isinstance(value, numpy.ndarray)


def memory_of(value: Any) -> Any:
    """The object that owns the bytes of an array of numbers or of a bytearray; None for anything else."""
    if type(value) in (bytearray, array.array):
        return value
    if numpy is None or type(value) is not numpy.ndarray or value.dtype.hasobject:
        return None
    while type(value.base) is numpy.ndarray:
        value = value.base
    return value if value.base is None else None


def copy_of_buffer(value: Any) -> Any:
    """A new buffer like one that was made during capture."""
    return value.copy(order="K") if is_array(value) else copy.copy(value)


def viewed(view: Any) -> dict:
    """The dict that a view of keys, values or items shows: the function of a Computed source."""
    return gc.get_referents(view)[0]


def dereference(reference: weakref.ReferenceType) -> Any:
    """What a weak reference refers to now: the function of a Computed source."""
    return reference()


_made_in_c: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
_PYTHON_BASES = (collections.deque, list, tuple, dict, set, frozenset, int, float, complex, str, bytes, bytearray, BaseException,
                 types.ModuleType, type, property, staticmethod, classmethod, slice, types.MappingProxyType, types.SimpleNamespace)


def is_opaque(cls: type) -> bool:
    """Whether instances hold state that only code in C sees: neither Python's own containers nor attributes of a class in Python."""
    known = _made_in_c.get(cls)
    if known is None:
        base = next(b for b in cls.__mro__ if not b.__flags__ & (1 << 9))      # not made by a class statement
        known = not _allocated_by_object(cls) if base is object else not issubclass(base, _PYTHON_BASES)
        _made_in_c[cls] = known
    return known


def _allocated_by_object(cls: type) -> bool:
    """Whether object.__new__ makes instances: classes that C modules make at run time look like classes in Python otherwise."""
    if cls is object or hasattr(cls, "__del__") or cls.__dict__.get("__abstractmethods__"):
        return True
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True
