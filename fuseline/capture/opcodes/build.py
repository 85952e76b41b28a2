"""Building and unpacking containers, strings, slices and functions."""
from __future__ import annotations

from types import FunctionType
from typing import Any

from fuseline.capture.calls import mapping_items, next_item
from fuseline.capture.errors import ProgramError
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import Instruction, opcode


def _take(stack: list, n: int) -> list:
    """Pop n values, in order."""
    if not n:
        return []
    items = stack[-n:]
    del stack[-n:]
    return items


@opcode("BUILD_TUPLE")
def build_tuple(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(tuple(_take(frame.stack, ins.number)))


@opcode("BUILD_LIST")
def build_list(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(_take(frame.stack, ins.number))


@opcode("BUILD_SET")
def build_set(frame: Frame, ins: Instruction) -> None:
    items = frame.stack[len(frame.stack) - ins.number:]
    made = frame.interpreter.call(set, (items,), {}) if items else set()
    _take(frame.stack, ins.number)
    frame.stack.append(made)


@opcode("BUILD_MAP")
def build_map(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    items = stack[len(stack) - 2 * ins.number:] if ins.number else []
    made: dict = {}
    for i in range(0, len(items), 2):
        frame.world.setitem(made, items[i], items[i + 1])
    _take(stack, 2 * ins.number)
    stack.append(made)


@opcode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, ins: Instruction) -> None:
    keys = frame.stack.pop()
    frame.stack.append(dict(zip(keys, _take(frame.stack, ins.number))))


@opcode("BUILD_SLICE")
def build_slice(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(slice(*_take(frame.stack, ins.number)))


@opcode("BUILD_STRING")
def build_string(frame: Frame, ins: Instruction) -> None:
    frame.stack.append("".join(_take(frame.stack, ins.number)))


# ---------------------------------------------------------------- growing

def _grow(frame: Frame, container: Any, method: str, *values: Any) -> None:
    """container.method(*values); directly if the container was made in this region."""
    if frame.world.source(container) is None and type(container) in (list, set, dict):
        try:
            getattr(container, method)(*values)
        except Exception as error:
            raise ProgramError(error) from None
    else:
        frame.interpreter.call(frame.world.getattr(container, method), values, {})


@opcode("LIST_APPEND")
def list_append(frame: Frame, ins: Instruction) -> None:
    _grow(frame, frame.stack[-1 - ins.number], "append", frame.stack[-1])
    frame.stack.pop()


@opcode("SET_ADD")
def set_add(frame: Frame, ins: Instruction) -> None:
    target, value = frame.stack[-1 - ins.number], frame.stack[-1]
    frame.interpreter.call(frame.world.getattr(target, "add"), (value,), {})
    frame.stack.pop()


@opcode("MAP_ADD")
def map_add(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    frame.world.setitem(stack[-2 - ins.number], stack[-2], stack[-1])
    del stack[-2:]


@opcode("LIST_EXTEND")
def list_extend(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    _grow(frame, stack[-1 - ins.number], "extend", unpacked(frame, stack[-1], "Value after * must be an iterable, not {}"))
    stack.pop()


@opcode("SET_UPDATE")
def set_update(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    _grow(frame, stack[-1 - ins.number], "update", unpacked(frame, stack[-1], "'{}' object is not iterable"))
    stack.pop()


@opcode("DICT_UPDATE")
def dict_update(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    target = stack[-1 - ins.number]
    for key, value in mapping_items(frame.interpreter, stack[-1], "'{}' object is not a mapping"):
        frame.world.setitem(target, key, value)
    stack.pop()


def shown_name(function: Any) -> str:
    """How CPython names a callable in errors about its arguments."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    if not isinstance(name, str):
        return str(function)
    return f"{module}.{name}()" if isinstance(module, str) and module != "builtins" else f"{name}()"


@opcode("DICT_MERGE")
def dict_merge(frame: Frame, ins: Instruction) -> None:
    """As DICT_UPDATE, for `f(**a, **b)`: a key that is there already is an error."""
    stack = frame.stack
    target = stack[-1 - ins.number]
    function = stack[-3 - ins.number] if len(stack) >= 3 + ins.number else None
    name = shown_name(function)
    for key, value in mapping_items(frame.interpreter, stack[-1], f"{name} argument after ** must be a mapping, not {{}}"):
        if key in target:
            raise ProgramError(TypeError(f"{name} got multiple values for keyword argument '{key}'"))
        target[key] = value
    stack.pop()


@opcode("LIST_TO_TUPLE")
def list_to_tuple(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = tuple(frame.stack[-1])


# ---------------------------------------------------------------- unpacking

def unpacked(frame: Frame, value: Any, message: str) -> list:
    """The items of an iterable as a list; TypeError with `message` (type name filled in) if it is none."""
    if type(value) in (list, tuple) and frame.world.source(value) is None:
        return list(value)
    try:
        iterator = frame.world.iterate(value)
    except ProgramError as error:
        if isinstance(error.value, TypeError) and not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
            raise ProgramError(TypeError(message.format(type(value).__name__))) from None
        raise
    return list(iterator)


@opcode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, ins: Instruction) -> None:
    value, n = frame.stack[-1], ins.number
    if type(value) in (list, tuple) and frame.world.source(value) is None:
        items = list(value)
    else:
        items = _first(frame, value, n + 1)
    if len(items) > n:
        raise ProgramError(ValueError(f"too many values to unpack (expected {n})"))
    if len(items) < n:
        raise ProgramError(ValueError(f"not enough values to unpack (expected {n}, got {len(items)})"))
    frame.stack.pop()
    frame.stack.extend(reversed(items))


def _first(frame: Frame, value: Any, n: int) -> list:
    """At most n items of an iterable, consuming no more, as CPython's unpacking does."""
    try:
        iterator = frame.world.iterate(value)
    except ProgramError as error:
        if isinstance(error.value, TypeError) and not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
            raise ProgramError(TypeError(f"cannot unpack non-iterable {type(value).__name__} object")) from None
        raise
    items: list = []
    while len(items) < n:
        found, item = next_item(frame.interpreter, iterator)
        if not found:
            break
        items.append(item)
    return items


@opcode("UNPACK_EX")
def unpack_ex(frame: Frame, ins: Instruction) -> None:
    before, after = ins.number & 0xFF, ins.number >> 8
    items = unpacked(frame, frame.stack[-1], "cannot unpack non-iterable {} object")
    if len(items) < before + after:
        raise ProgramError(ValueError(f"not enough values to unpack (expected at least {before + after}, got {len(items)})"))
    end = len(items) - after
    frame.stack.pop()
    frame.stack.extend(reversed([*items[:before], items[before:end], *items[end:]]))


# ---------------------------------------------------------------- functions

@opcode("MAKE_FUNCTION")
def make_function(frame: Frame, ins: Instruction) -> None:
    """stack: [defaults], [keyword defaults], [annotations], [closure], code -> function"""
    stack, flags = frame.stack, ins.number
    code = stack.pop()
    closure = stack.pop() if flags & 8 else None
    annotations = stack.pop() if flags & 4 else None
    kwdefaults = stack.pop() if flags & 2 else None
    defaults = stack.pop() if flags & 1 else None
    function = FunctionType(code, frame.globals, code.co_name, defaults, closure)
    if kwdefaults is not None:
        function.__kwdefaults__ = kwdefaults
    if annotations is not None:
        function.__annotations__ = dict(zip(annotations[::2], annotations[1::2]))
    function.__qualname__ = code.co_qualname
    if frame.namespace is not None and "__module__" in frame.namespace:
        function.__module__ = frame.namespace["__module__"]
    stack.append(function)
