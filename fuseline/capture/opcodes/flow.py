"""Jumps, loops and returns."""
from __future__ import annotations

from fuseline.capture.calls import next_item
from fuseline.capture.errors import break_here
from fuseline.capture.frame import DONE, Frame
from fuseline.capture.instructions import Instruction, opcode


@opcode("JUMP")
def jump(frame: Frame, ins: Instruction) -> None:
    frame.pc = ins.target


@opcode("POP_JUMP_IF_TRUE")
def pop_jump_if_true(frame: Frame, ins: Instruction) -> None:
    value = frame.stack[-1]
    if value is True or (value is not False and frame.world.truth(value)):
        frame.pc = ins.target
    frame.stack.pop()


@opcode("POP_JUMP_IF_FALSE")
def pop_jump_if_false(frame: Frame, ins: Instruction) -> None:
    value = frame.stack[-1]
    if value is False or (value is not True and not frame.world.truth(value)):
        frame.pc = ins.target
    frame.stack.pop()


@opcode("POP_JUMP_IF_NONE")
def pop_jump_if_none(frame: Frame, ins: Instruction) -> None:
    if frame.stack.pop() is None:
        frame.pc = ins.target


@opcode("POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(frame: Frame, ins: Instruction) -> None:
    if frame.stack.pop() is not None:
        frame.pc = ins.target


@opcode("JUMP_IF_TRUE_OR_POP")
def jump_if_true_or_pop(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack[-1]):
        frame.pc = ins.target
    else:
        frame.stack.pop()


@opcode("JUMP_IF_FALSE_OR_POP")
def jump_if_false_or_pop(frame: Frame, ins: Instruction) -> None:
    if not frame.world.truth(frame.stack[-1]):
        frame.pc = ins.target
    else:
        frame.stack.pop()


@opcode("GET_ITER")
def get_iter(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = frame.world.iterate(frame.stack[-1])


@opcode("FOR_ITER")
def for_iter(frame: Frame, ins: Instruction) -> None:
    iterator = frame.stack[-1]
    if frame.world.source(iterator) is not None:
        raise break_here("iterator", f"a {type(iterator).__name__} that began outside the captured code is advanced",
                         "pass the list or the range and iterate over it inside")
    found, item = next_item(frame.interpreter, iterator)
    if found:
        frame.stack.append(item)
    else:
        frame.stack.pop()
        frame.pc = ins.target


@opcode("RETURN_VALUE")
def return_value(frame: Frame, ins: Instruction) -> object:
    frame.result = frame.stack[-1]
    return DONE


@opcode("RETURN_CONST")
def return_const(frame: Frame, ins: Instruction) -> object:
    frame.result = ins.arg
    return DONE
