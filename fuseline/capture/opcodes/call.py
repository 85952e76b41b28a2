"""Calls."""
from __future__ import annotations

from fuseline.capture.calls import mapping_items
from fuseline.capture.errors import ProgramError
from fuseline.capture.frame import NULL, Frame
from fuseline.capture.instructions import Instruction, opcode
from fuseline.capture.opcodes.build import shown_name, unpacked


@opcode("CALL")
def call(frame: Frame, ins: Instruction) -> None:
    """stack: NULL, callable, arguments (or callable, self, arguments) -> result"""
    stack = frame.stack
    base = len(stack) - ins.number - 2
    if stack[base] is NULL:
        function, args = stack[base + 1], stack[base + 2:]
    else:
        function, args = stack[base], stack[base + 1:]
    kwargs = {}
    if ins.kwnames:
        n = len(args) - len(ins.kwnames)
        kwargs = dict(zip(ins.kwnames, args[n:]))
        del args[n:]
    frame.pending = ins.number + 2
    value = frame.interpreter.call(function, tuple(args), kwargs, True)
    del stack[base:]
    stack.append(value)


@opcode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, ins: Instruction) -> None:
    """stack: NULL, callable, arguments, [keyword arguments] -> result"""
    stack, has_keywords = frame.stack, ins.number & 1
    kwargs = {}
    function = stack[-2 - has_keywords]
    name = shown_name(function)
    if has_keywords:
        kwargs = dict(mapping_items(frame.interpreter, stack[-1], f"{name} argument after ** must be a mapping, not {{}}"))
        if not all(isinstance(key, str) for key in kwargs):
            raise ProgramError(TypeError("keywords must be strings"))
    given = stack[-1 - has_keywords]
    args = given if type(given) is tuple and frame.world.source(given) is None else tuple(
        unpacked(frame, given, f"{name} argument after * must be an iterable, not {{}}"))
    frame.pending = 3 + has_keywords
    value = frame.interpreter.call(function, args, kwargs, True)
    del stack[-3 - has_keywords:]
    stack.append(value)
