"""Tracebacks of exceptions that are raised and caught during capture: there, but what they tell is only known to Python."""
from __future__ import annotations

import types
from typing import Any, NoReturn

from fuseline.capture.errors import RestartCapture
from fuseline.ir.region import GraphBreak


class Traceback:
    """What `__traceback__` of a caught exception is. The program may pass it on; who looks into it gets the real one.

    step   where the region can end before the exception was raised
    """

    symbolic_type = types.TracebackType

    def __init__(self, step: int) -> None:
        self.step = step

    def look_into(self) -> NoReturn:
        raise RestartCapture(self.step, GraphBreak("traceback", "", "the traceback of an exception is looked at",
                                                   "look at tracebacks outside the compiled function"))

    def recipe(self, world: Any) -> NoReturn:
        self.look_into()


class Tracebacks:
    """Which traceback each exception has that was raised or got one assigned during capture."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[BaseException, Traceback | None]] = {}

    def raised(self, error: BaseException, step: int) -> None:
        if self.of(error) is None:
            self._of[id(error)] = (error, Traceback(step))

    def of(self, error: BaseException) -> Traceback | None:
        return self._of[id(error)][1] if id(error) in self._of else None

    def assign(self, error: BaseException, traceback: Traceback | None) -> None:
        self._of[id(error)] = (error, traceback)
