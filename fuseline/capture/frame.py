"""Frames: the state of one Python function while it is interpreted, and what a region starts from."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

from fuseline.capture.instructions import Code, Instruction

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter


@dataclass(frozen=True, eq=False)
class FrameStart:
    """What a region starts from: a piece of code and the values it starts with, as CPython would have them.

    arguments   name -> real value of the bound parameters; `*args` is a tuple, `**kw` a dict
    closure     the real cells for code.co_freevars, in order, or None
    function    the function object being called, where there is one
    """
    code: CodeType
    globals: dict
    builtins: Any = None
    closure: tuple | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    function: Any = None
    name: str = ""


class _Marker:
    """A unique value that is no Python object of the program."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


NULL = _Marker("NULL")                  # the empty slot of the calling convention, and an unbound local on the stack
DONE, YIELDED = _Marker("DONE"), _Marker("YIELDED")


class Unread:
    """A local of the region's first frame that the program has not looked at yet: it is guarded when it is."""

    __slots__ = ("value", "source")

    def __init__(self, value: Any, source: Any) -> None:
        self.value, self.source = value, source


class Frame:
    """One active function.

    locals    what `localsplus` is in CPython: name -> value, or name -> cell for cell and free variables; unbound: absent
    pc        index of the next instruction; `at` of the current one, which began as instruction number `step`
    pending   during a call whose result is all that the instruction still needs: operands on the stack that it will drop
    direct    the caller waits for nothing but this frame's result, so that a break in here can suspend the caller too
    handling  for each except block that is active in the frame, the step of the instruction that raised
    handled   the exception that `sys.exc_info()` tells
    namespace the dict that names are stored in, for class bodies
    """

    __slots__ = ("interpreter", "world", "code", "instructions", "stack", "locals", "globals", "builtins", "pc", "at", "step",
                 "pending", "direct", "handling", "raised_at", "result", "namespace", "function", "first", "loops")

    def __init__(self, interpreter: Interpreter, code: Code, locals_: dict[str, Any], globals_: dict, function: Any = None) -> None:
        self.interpreter, self.world, self.code, self.instructions = interpreter, interpreter.world, code, code.instructions
        self.stack: list = []
        self.locals, self.globals, self.function = locals_, globals_, function
        self.builtins = None
        self.pc = self.at = self.step = self.pending = 0
        self.direct = False
        self.handling: list[int] = []
        self.raised_at = 0
        self.result: Any = None
        self.namespace: dict | None = None
        self.first: str | None = None

    @property
    def instruction(self) -> Instruction:
        return self.instructions[self.at]

    def where(self) -> str:
        """The current line: "file.py:12"."""
        return f"{self.code.code.co_filename.rpartition('/')[2]}:{self.instructions[self.at].line}"

    def __str__(self) -> str:
        return f"{self.where()} in {self.code.code.co_qualname}"
