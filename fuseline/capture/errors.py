"""How capture ends early: at one instruction, for a whole frame, by starting anew, or because the user's program raised."""
from __future__ import annotations

from fuseline.errors import NotSupported
from fuseline.ir.region import GraphBreak


class Break(Exception):
    """The region ends at the current instruction, which Python itself executes.

    reason   a GraphBreak; the interpreter fills in `where` and `stack` if they are empty
    """

    def __init__(self, reason: GraphBreak) -> None:
        super().__init__(f"{reason.kind}: {reason.explanation}")
        self.reason = reason


class CannotCapture(NotSupported):
    """The whole frame must run eagerly."""

    def __init__(self, reason: GraphBreak) -> None:
        super().__init__(reason.explanation, at=reason.where, hint=reason.remedy)
        self.reason = reason


class RestartCapture(Exception):
    """What was interpreted so far must be thrown away: the interpreter begins the region anew, knowing more."""


class ProgramError(Exception):
    """The user's program raised `value`: an exception object on the symbolic level, routed to its handlers as CPython would."""

    def __init__(self, value: BaseException) -> None:
        super().__init__(value)
        self.value = value


def break_here(kind: str, explanation: str, remedy: str = "") -> Break:
    """A Break at the current instruction; the interpreter adds where that is."""
    return Break(GraphBreak(kind, "", explanation, remedy))
