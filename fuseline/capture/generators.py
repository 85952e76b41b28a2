"""Generators made during capture: a suspended frame that is driven where it is consumed.

A Generator is an ordinary Python iterator, so native code (`list`, `sum`, `zip`) can consume it: each `__next__` runs the
interpreter up to the next yield. At the end of a region one that has not begun is made again by calling its function;
one that has begun cannot be rebuilt, so the region is cut before the call that made it.
"""
from __future__ import annotations

import sys
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any

from fuseline.capture.errors import ProgramError, RestartCapture
from fuseline.capture.frame import YIELDED, Frame
from fuseline.ir.region import GraphBreak, New

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter


class Generator:
    """A generator of the program. `symbolic_type` is what the program takes its type for."""

    symbolic_type = GeneratorType

    def __init__(self, interpreter: Interpreter, frame: Frame, function: FunctionType, args: tuple, kwargs: dict) -> None:
        self.interpreter, self.frame = interpreter, frame
        self.function, self.args, self.kwargs = function, args, kwargs
        self.made_at = interpreter.break_position()
        self.begun = self.running = self.closed = False
        self.handled: BaseException | None = None

    def __iter__(self) -> Generator:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        """Go on until the next yield; raises StopIteration at the end, ProgramError for what the body raises."""
        if self.closed:
            raise StopIteration
        if self.begun:
            self.frame.stack.append(value)
        elif value is not None:
            raise ProgramError(TypeError("can't send non-None value to a just-started generator"))
        return self._go(None)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raise an exception at the yield where the generator waits."""
        error = kind if isinstance(kind, BaseException) else value if isinstance(value, BaseException) else (
            kind() if value is None else kind(value))
        if self.closed or not self.begun:
            self.closed = True
            raise ProgramError(error)
        frame = self.frame
        sending = frame.instructions[frame.at - 1] if frame.at else None
        delegate = frame.stack[-1] if frame.stack and sending is not None and sending.op == "SEND" else None
        if sending is None or not isinstance(delegate, Generator):
            return self._go(ProgramError(error))
        try:
            return delegate.throw(error)                 # `yield from`: the innermost generator gets it first
        except StopIteration as stop:
            if sys.version_info >= (3, 12):
                frame.stack.append(stop.value)
            else:
                frame.stack[-1] = stop.value
            frame.pc = sending.target
            return self._go(None)
        except ProgramError as raised:
            return self._go(raised)

    def close(self) -> None:
        if self.closed or not self.begun:
            self.closed = True
            return
        try:
            self.throw(GeneratorExit())
        except StopIteration:
            return
        except ProgramError as error:
            if isinstance(error.value, (GeneratorExit, StopIteration)):
                return
            raise
        raise ProgramError(RuntimeError("generator ignored GeneratorExit"))

    def __del__(self) -> None:
        if self.begun and not self.closed and not self.running and self._must_clean_up():
            self.interpreter.let_go(self)

    def _must_clean_up(self) -> bool:
        """Whether the generator waits inside a try or with (3.12 has a handler of its own around every generator)."""
        catch = self.frame.instruction.catch
        return catch is not None and self.frame.instructions[catch[0]].op != "CALL_INTRINSIC_1"

    def may_clean_up(self) -> bool:
        """Whether it has a try or with anywhere: then its last reference going away runs code of the program."""
        code = self.frame.instructions
        return any(i.catch is not None and code[i.catch[0]].op not in ("CALL_INTRINSIC_1", "POP_TOP", "SWAP", "END_FOR") for i in code)

    def _go(self, error: ProgramError | None) -> Any:
        interpreter, frame = self.interpreter, self.frame
        if self.running:
            raise ProgramError(ValueError("generator already executing"))
        self.begun = self.running = True
        outer, interpreter.handled = interpreter.handled, self.handled if self.handled is not None else interpreter.handled
        interpreter.frames.append(frame)
        try:
            if error is not None:
                interpreter.unwind(frame, error)
            signal = interpreter.loop(frame)
        except ProgramError as raised:
            self.closed = True
            if isinstance(raised.value, StopIteration):
                failure = RuntimeError("generator raised StopIteration")
                failure.__cause__ = failure.__context__ = raised.value
                raise ProgramError(failure) from None
            raise
        finally:
            self.running = False
            interpreter.frames.pop()
            self.handled = interpreter.handled if frame.handling else None
            interpreter.handled = outer
        if signal is YIELDED:
            return frame.result
        self.closed = True
        raise StopIteration(*(() if frame.result is None else (frame.result,)))

    def recipe(self, world: Any) -> New:
        """How to make the generator at run time. Raises RestartCapture if it has begun: the region must end before it."""
        if self.begun or self.closed:
            raise RestartCapture(self.made_at, GraphBreak(
                "generator", "", f"the generator {self.function.__qualname__} is in use where the region ends",
                "consume the generator before, or build a list instead"))
        made = New("call", [world.recipe(self.function), *(world.recipe(a) for a in self.args)])
        made.fields = {name: world.recipe(value) for name, value in self.kwargs.items()}
        return made
