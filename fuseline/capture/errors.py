"""How capture ends early: at one instruction, for a whole frame, by starting anew, or because the user's program raised.

Break, RestartCapture and RegionEnd are control flow of the interpreter, so they derive from BaseException: they must
pass through native code that catches Exception (a `sorted` key function that breaks, a library's try/except).
"""
from __future__ import annotations

from fuseline.errors import NotSupported
from fuseline.ir.region import Broke, GraphBreak, Raised, Returned


class Break(BaseException):
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


class RestartCapture(BaseException):
    """What was interpreted so far must be thrown away: the region is interpreted anew and breaks at the step given.

    step     number of the instruction, counted from the start of the region, at which to break
    reason   the GraphBreak to end with there
    """

    def __init__(self, step: int, reason: GraphBreak) -> None:
        super().__init__(step, reason.kind)
        self.step, self.reason = step, reason


class RegionEnd(BaseException):
    """Unwinds the interpreter once the end of the region (a Returned, Broke or Raised) is known."""

    def __init__(self, end: Returned | Raised | Broke) -> None:
        super().__init__()
        self.end = end


class ProgramError(Exception):
    """The user's program raised `value`: an exception object on the symbolic level, routed to its handlers as CPython would.

    step, where   set by the interpreter: the instruction before which the region can end, and the line that raised
    """

    def __init__(self, value: BaseException) -> None:
        super().__init__(value)
        self.value = value
        self.step, self.where = 0, ""


def break_here(kind: str, explanation: str, remedy: str = "") -> Break:
    """A Break at the current instruction; the interpreter adds where that is."""
    return Break(GraphBreak(kind, "", explanation, remedy))
