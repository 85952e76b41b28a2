"""raise, except, finally and with."""
from __future__ import annotations

from typing import Any

from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import Instruction, opcode


@opcode("RAISE_VARARGS")
def raise_varargs(frame: Frame, ins: Instruction) -> None:
    stack, n = frame.stack, ins.number
    if n == 0:
        active = frame.interpreter.handled
        raise ProgramError(RuntimeError("No active exception to reraise") if active is None else active)
    error = _exception(frame, stack[-n])
    if n == 2:
        cause = None if stack[-1] is None else _exception(frame, stack[-1], "exception causes must derive from BaseException")
        frame.world.setattr(error, "__cause__", cause)
        frame.world.setattr(error, "__suppress_context__", True)
    raise ProgramError(error)


def _exception(frame: Frame, value: Any, message: str = "exceptions must derive from BaseException") -> BaseException:
    """The exception that `raise value` raises: value, or an instance of it if it is a class."""
    if isinstance(value, type) and issubclass(value, BaseException):
        value = frame.interpreter.call(value, (), {})
    if not isinstance(value, BaseException):
        raise ProgramError(TypeError(message))
    return value


@opcode("PUSH_EXC_INFO")
def push_exc_info(frame: Frame, ins: Instruction) -> None:
    """stack: exception -> the exception handled before, exception"""
    error = frame.stack.pop()
    frame.stack += (frame.interpreter.handled, error)
    frame.interpreter.handled = error
    frame.handling.append(frame.raised_at)


@opcode("POP_EXCEPT")
def pop_except(frame: Frame, ins: Instruction) -> None:
    frame.interpreter.handled = frame.stack.pop()
    if frame.handling:
        frame.handling.pop()


@opcode("RERAISE")
def reraise(frame: Frame, ins: Instruction) -> None:
    raise ProgramError(frame.stack[-1])


@opcode("CHECK_EXC_MATCH")
def check_exc_match(frame: Frame, ins: Instruction) -> None:
    kinds = frame.stack[-1]
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ProgramError(TypeError("catching classes that do not inherit from BaseException is not allowed"))
    # CPython compares by the MRO alone: __subclasscheck__ is not asked.
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    frame.stack[-1] = any(kind in type(frame.stack[-2]).__mro__ for kind in wanted)


@opcode("CHECK_EG_MATCH", "PREP_RERAISE_STAR")
def exception_group(frame: Frame, ins: Instruction) -> None:
    raise break_here("except-star", "except* is not captured", "handle the exception group outside the compiled function")


@opcode("BEFORE_WITH")
def before_with(frame: Frame, ins: Instruction) -> None:
    """stack: manager -> its bound __exit__, what __enter__ gave"""
    manager = frame.stack[-1]
    kind = frame.world.type_of(manager)
    for name in ("__enter__", "__exit__"):
        if not hasattr(kind, name):
            missed = " (missed __exit__ method)" if name == "__exit__" else ""
            raise ProgramError(TypeError(f"'{kind.__name__}' object does not support the context manager protocol{missed}"))
    enter, leave = frame.world.getattr(manager, "__enter__"), frame.world.getattr(manager, "__exit__")
    value = frame.interpreter.call(enter, (), {})
    frame.stack[-1] = leave
    frame.stack.append(value)


@opcode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, ins: Instruction) -> None:
    """stack: exit, lasti, previous, exception -> same, exit's answer"""
    error = frame.stack[-1]
    traceback = frame.world.getattr(error, "__traceback__")
    answer = frame.interpreter.call(frame.stack[-4], (type(error), error, traceback), {})
    frame.stack.append(answer)


@opcode("CLEANUP_THROW")
def cleanup_throw(frame: Frame, ins: Instruction) -> None:
    """stack: receiver, last value, exception -> None, value of the StopIteration; any other exception goes on"""
    error = frame.stack[-1]
    if not isinstance(error, StopIteration):
        raise ProgramError(error)
    del frame.stack[-3:]
    frame.stack += (None, error.value)


@opcode("BEFORE_ASYNC_WITH", "GET_AITER", "GET_ANEXT", "END_ASYNC_FOR", "GET_AWAITABLE", "ASYNC_GEN_WRAP")
def asynchronous(frame: Frame, ins: Instruction) -> None:
    raise break_here("async", "coroutines are not captured", "compile the synchronous function that does the tensor work")


