"""A decision that can say no, as a value: what was decided, why, about what, and what the user can do."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a decision such as `can_fuse`; true in a boolean context when the answer is yes."""

    ok: bool
    reason: str = ""
    subject: str = ""
    saved_bytes: int = 0

    @classmethod
    def yes(cls, reason: str = "", *, saved_bytes: int = 0) -> Verdict:
        return cls(True, reason, saved_bytes=saved_bytes)

    @classmethod
    def no(cls, reason: str, subject: object = "") -> Verdict:
        return cls(False, reason, str(subject))

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = "yes" if self.ok else "no"
        tail = f" ({self.subject})" if self.subject else ""
        return f"{head}: {self.reason}{tail}" if self.reason else head
