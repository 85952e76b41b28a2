"""raise, except, finally and with."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import Instruction, opcode
from fuseline.capture.provenance import is_python


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


@opcode("CHECK_EG_MATCH")
def check_eg_match(frame: Frame, ins: Instruction) -> None:
    """stack: exception (or None), classes -> what except* leaves of it, the group that it handles (or None)"""
    error, kinds = frame.stack[-2:]
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ProgramError(TypeError("catching classes that do not inherit from BaseException is not allowed"))
        if issubclass(kind, BaseExceptionGroup):
            raise ProgramError(TypeError("catching ExceptionGroup with except* is not allowed. Use except instead."))
    handled: BaseException | None = None
    rest = error
    if isinstance(error, kinds):
        handled, rest = (error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("", (error,))), None
    elif isinstance(error, BaseExceptionGroup):
        if any(is_python(type(error), name) for name in ("split", "derive", "subgroup")):
            raise break_here("except-star", "an exception group that splits itself in Python is not captured",
                             "handle the exception group outside the compiled function")
        handled, rest = error.split(kinds)
    frame.stack[-2:] = rest, handled
    if handled is not None:
        frame.interpreter.handled = handled


@opcode("PREP_RERAISE_STAR")
def prep_reraise_star(frame: Frame, ins: Instruction) -> None:
    """stack: exception, list of what was raised in the except* blocks and of what none handled -> what goes on, or None"""
    error, found = frame.stack[-2:]
    rest = _after_star(error, [e for e in found if e is not None])
    known = frame.interpreter.raised.get(id(error))
    if rest is not None and known is not None:             # where the region can end before the group was raised
        frame.interpreter.raised.setdefault(id(rest), (*known[:2], rest))
    frame.stack[-2:] = [rest]


def _after_star(error: BaseException, found: list[BaseException]) -> BaseException | None:
    if not isinstance(error, BaseExceptionGroup):
        return found[0] if found else None
    again = [e for e in found if _is_part(e, error)]
    raised = [e for e in found if not _is_part(e, error)]
    kept = {id(leaf) for group in again for leaf in _leaves(group)}
    rest = error.subgroup(lambda e: not isinstance(e, BaseExceptionGroup) and id(e) in kept)
    if rest is not None:
        raised.append(rest)
    return BaseExceptionGroup("", raised) if len(raised) > 1 else raised[0] if raised else None


def _is_part(error: BaseException, whole: BaseException) -> bool:
    """Whether a group was split from another one, and not raised anew."""
    return isinstance(error, BaseExceptionGroup) and all(
        getattr(error, name, None) is getattr(whole, name, None) for name in ("__notes__", "__cause__", "__context__"))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inside in error.exceptions:
            yield from _leaves(inside)
    else:
        yield error


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


