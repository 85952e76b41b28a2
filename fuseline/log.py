"""One voice: `FUSELINE_LOG=graph,fusion,guards` prints those artifacts to stderr; problems go to the logger "fuseline"."""
from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

ARTIFACTS = ("capture", "graph", "aten", "breaks", "guards", "recompiles", "fusion", "loops", "code", "memory", "cudagraphs", "cache",
             "times")

logger = logging.getLogger("fuseline")


def _wanted() -> frozenset[str]:
    names = frozenset(filter(None, (n.strip() for n in os.environ.get("FUSELINE_LOG", "").split(","))))
    wrong = sorted(names - set(ARTIFACTS))
    if wrong:
        raise ValueError(f"FUSELINE_LOG names unknown artifacts {', '.join(wrong)}; there are {', '.join(ARTIFACTS)}")
    return names


_ENABLED = _wanted()
_said: set[str] = set()


def enabled(artifact: str) -> bool:
    return artifact in _ENABLED


def emit(artifact: str, text: str | Callable[[], str]) -> None:
    """Print an artifact if the user asked for it; pass a callable where the text costs time."""
    if artifact in _ENABLED:
        body = text() if callable(text) else text
        print("\n".join(f"[{artifact}] {line}" for line in body.splitlines()), file=sys.stderr, flush=True)


def warn_once(key: str, message: str) -> None:
    """Log a warning the first time that this key comes up in the process."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
