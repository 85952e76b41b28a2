"""The exceptions of fuseline. Not supported, our own bug, and the user's exception are three things (see `docs/architecture.md`)."""
from __future__ import annotations


class FuselineError(Exception):
    """Base of every exception that fuseline itself raises. Prints as: where: what, then `in` and `hint` lines."""

    def __init__(self, what: str, *, at: str = "", node: object = None, hint: str = "") -> None:
        self.what, self.at, self.node, self.hint = what, at, node, hint
        lines = [f"{at}: {what}" if at else what]
        if node is not None:
            lines.append(f"  in    {node}")
        if hint:
            lines.append(f"  hint  {hint}")
        super().__init__("\n".join(lines))


class NotSupported(FuselineError):
    """Something correct that we do not do: the caller falls back, and the reason is reported."""


class LoweringError(NotSupported):
    """An operator that has no loops of ours: it becomes a call of PyTorch's."""


class GraphBreakError(NotSupported):
    """A graph break where the user asked for none (`fullgraph=True`, strict mode). Carries the `GraphBreak` as `reason`."""

    def __init__(self, reason: object, message: str, **more: str) -> None:
        super().__init__(message, **more)
        self.reason = reason


class RecompileLimit(NotSupported):
    """A function was compiled more often than `recompile_limit` allows, under `fullgraph=True`."""


class InternalError(FuselineError):
    """Our bug. Raised in tests; in users' hands the function falls back to eager once, with the reason logged."""


class VerifyError(InternalError):
    """A stage made something that breaks the rules of its type."""
