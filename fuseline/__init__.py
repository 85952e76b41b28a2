"""fuseline: a just-in-time compiler for PyTorch programs. `model = fuseline.compile(model)` is all that a user needs.

Everything else here tells what happened (`explain`, `compile_count`) or limits it (`disable`, `set_strict_mode`).
The interface is loaded on first use, so that parts of the package (`fuseline.ir`) can be imported without the compiler.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fuseline.api import (
        compile,
        compile_count,
        disable,
        explain,
        is_compiling,
        is_enabled,
        list_backends,
        mark_dynamic,
        recompile_reasons,
        register_backend,
        reset,
        set_strict_mode,
    )
    from fuseline.errors import FuselineError, GraphBreakError, InternalError, LoweringError, NotSupported, RecompileLimit

__version__ = "0.1.0"

__all__ = [
    "FuselineError", "GraphBreakError", "InternalError", "LoweringError", "NotSupported", "RecompileLimit", "compile", "compile_count",
    "disable", "explain", "is_compiling", "is_enabled", "list_backends", "mark_dynamic", "recompile_reasons", "register_backend",
    "reset", "set_strict_mode",
]
_ERRORS = ("FuselineError", "GraphBreakError", "InternalError", "LoweringError", "NotSupported", "RecompileLimit")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fuseline' has no attribute {name!r}")
    value = getattr(importlib.import_module("fuseline.errors" if name in _ERRORS else "fuseline.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
