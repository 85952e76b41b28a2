"""Generators: yield, yield from and the intrinsics around them."""
from __future__ import annotations

import operator
import sys
import typing

from fuseline.capture.calls import next_item
from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.frame import YIELDED, Frame
from fuseline.capture.generators import Generator
from fuseline.capture.instructions import Instruction, opcode
from fuseline.capture.opcodes.exceptions import prep_reraise_star

_AFTER_3_12 = sys.version_info >= (3, 12)


@opcode("RETURN_GENERATOR")
def return_generator(frame: Frame, ins: Instruction) -> None:
    """The generator was made when the function was called; this is its first `next`, which sends None."""
    frame.stack.append(None)


@opcode("YIELD_VALUE")
def yield_value(frame: Frame, ins: Instruction) -> object:
    frame.result = frame.stack.pop()
    return YIELDED


@opcode("GET_YIELD_FROM_ITER")
def get_yield_from_iter(frame: Frame, ins: Instruction) -> None:
    value = frame.stack[-1]
    if not isinstance(value, Generator):
        frame.stack[-1] = frame.world.iterate(value)


@opcode("SEND")
def send(frame: Frame, ins: Instruction) -> None:
    """stack: receiver, value -> receiver, what it yields; at its end jump with its value (3.11: without the receiver)"""
    receiver, value = frame.stack[-2:]
    if isinstance(receiver, Generator):
        try:
            found, item = True, receiver.send(value)
        except StopIteration as stop:
            found, item = False, stop.value
    elif value is None:
        found, item = next_item(frame.interpreter, receiver)
    else:
        found, item = True, frame.interpreter.call(frame.world.getattr(receiver, "send"), (value,), {})
    if not found:
        frame.pc = ins.target
        if not _AFTER_3_12:
            frame.stack.pop()
    frame.stack[-1] = item


@opcode("END_SEND")
def end_send(frame: Frame, ins: Instruction) -> None:
    value = frame.stack.pop()
    frame.stack[-1] = value


@opcode("CALL_INTRINSIC_1")
def call_intrinsic_1(frame: Frame, ins: Instruction) -> None:
    """3.12: 3 is StopIteration -> RuntimeError at a generator's edge, 5 unary plus, 6 list to tuple,
    7 to 10 type parameters."""
    value = frame.stack[-1]
    if ins.number == 3:
        if isinstance(value, StopIteration):
            failure = RuntimeError("generator raised StopIteration")
            failure.__cause__ = failure.__context__ = value
            frame.stack[-1] = failure
    elif ins.number == 5:
        frame.stack[-1] = frame.world.unary(operator.pos, value)
    elif ins.number == 6:
        frame.stack[-1] = tuple(value)
    elif ins.number in (7, 8, 9):
        made_by = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)[ins.number - 7]
        frame.stack[-1] = made_by(value) if ins.number == 9 else made_by(value, infer_variance=True)       # type: ignore[call-arg]
    elif ins.number == 10:
        frame.stack[-1] = typing.Generic[value]                # type: ignore[index]
    else:
        raise break_here("unsupported-syntax", f"{ins.arg} is not captured", "move the statement out of the compiled function")


@opcode("CALL_INTRINSIC_2")
def call_intrinsic_2(frame: Frame, ins: Instruction) -> None:
    """3.12: 1 ends an except* statement, 4 gives a function its type parameters."""
    if ins.number == 1:
        prep_reraise_star(frame, ins)
    elif ins.number == 4:
        function, parameters = frame.stack[-2:]
        function.__type_params__ = parameters
        frame.stack.pop()
    else:
        raise break_here("unsupported-syntax", f"{ins.arg} is not captured", "move the statement out of the compiled function")


@opcode("PRINT_EXPR", "IMPORT_STAR")
def statement_of_modules(frame: Frame, ins: Instruction) -> None:
    raise ProgramError(SystemError(f"{ins.op} outside a module"))
