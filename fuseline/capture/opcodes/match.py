"""The match statement."""
from __future__ import annotations

import collections.abc
from typing import Any

from fuseline.capture.errors import ProgramError
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import Instruction, opcode

# Builtin classes whose one positional pattern is the subject itself (Py_TPFLAGS_MATCH_SELF).
_MATCH_SELF = (bool, bytearray, bytes, dict, float, frozenset, int, list, set, str, tuple)


@opcode("MATCH_MAPPING")
def match_mapping(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(issubclass(frame.world.type_of(frame.stack[-1]), collections.abc.Mapping))


@opcode("MATCH_SEQUENCE")
def match_sequence(frame: Frame, ins: Instruction) -> None:
    kind = frame.world.type_of(frame.stack[-1])
    frame.stack.append(issubclass(kind, collections.abc.Sequence) and not issubclass(kind, (str, bytes, bytearray)))


@opcode("MATCH_KEYS")
def match_keys(frame: Frame, ins: Instruction) -> None:
    """stack: subject, keys -> subject, keys, values or None"""
    subject, keys = frame.stack[-2:]
    if all(frame.world.contains(subject, key) for key in keys):
        frame.stack.append(tuple(frame.world.getitem(subject, key) for key in keys))
    else:
        frame.stack.append(None)


@opcode("MATCH_CLASS")
def match_class(frame: Frame, ins: Instruction) -> None:
    """stack: subject, class, attribute names -> the attributes' values, or None"""
    subject, kind, names = frame.stack[-3:]
    values = _match(frame, subject, kind, ins.number, names)
    del frame.stack[-3:]
    frame.stack.append(values)


def _match(frame: Frame, subject: Any, kind: Any, count: int, names: tuple[str, ...]) -> tuple | None:
    world = frame.world
    if not isinstance(kind, type):
        raise ProgramError(TypeError("called match pattern must be a class"))
    if not frame.interpreter.call(isinstance, (subject, kind), {}):
        return None
    values: list = []
    wanted: tuple[str, ...] = ()
    if count:
        if "__match_args__" in {name for base in kind.__mro__ for name in base.__dict__}:
            wanted = tuple(world.getattr(kind, "__match_args__"))
        elif issubclass(kind, _MATCH_SELF) and count == 1:
            values.append(subject)
            count = 0
        if count > len(wanted):
            raise ProgramError(TypeError(f"{kind.__name__}() accepts {len(wanted)} positional sub-pattern"
                                         f"{'' if len(wanted) == 1 else 's'} ({count} given)"))
    for name in (*wanted[:count], *names):
        try:
            values.append(world.getattr(subject, name))
        except ProgramError as error:
            if isinstance(error.value, AttributeError):
                return None
            raise
    return tuple(values)
