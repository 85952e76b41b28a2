"""CPython bytecode of 3.11 and 3.12 as one instruction set.

What differs between the versions and is settled here: caches, PRECALL and EXTENDED_ARG are gone, KW_NAMES is a field of
its CALL, relative jumps in two directions are one jump with a target index, flags packed into arguments are unpacked,
LOAD_ATTR with the method flag is LOAD_METHOD, RETURN_CONST is kept. Each instruction knows its handler and, if an
exception can be caught around it, where it is caught.
"""
from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from fuseline.capture.errors import CannotCapture
from fuseline.ir.region import GraphBreak

Handler = Callable[[Any, "Instruction"], Any]
HANDLERS: dict[str, Handler] = {}

CO_OPTIMIZED, CO_VARARGS, CO_VARKEYWORDS, CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR = 0x1, 0x4, 0x8, 0x20, 0x80, 0x200


def opcode(*names: str) -> Callable[[Handler], Handler]:
    """Register the handler of the normalised instructions `names`. A handler is called with (frame, instruction).

    It returns None to go on with the next instruction (or where it set `frame.pc`), `frame.DONE` when `frame.result` is
    the frame's return value, `frame.YIELDED` when it is a value that a generator yields. It changes the frame only after
    all that can fail.
    """
    def register(handler: Handler) -> Handler:
        for name in names:
            if name in HANDLERS:
                raise ValueError(f"two handlers for {name}")
            HANDLERS[name] = handler
        return handler
    return register


@dataclass(eq=False, slots=True)
class Instruction:
    """One normalised instruction.

    arg      the name, constant, count or operator's symbol that `dis` resolves; `flag` the low bit of packed arguments
    target   index of the instruction a jump goes to
    offset   byte offset in the code, as `dis` gives it
    kwnames  keyword names of a CALL
    catch    (index of the handler, stack depth, whether the offset is pushed) where exceptions are caught, or None
    """
    op: str
    arg: Any
    number: int
    offset: int
    line: int
    run: Handler
    flag: bool = False
    target: int = -1
    kwnames: tuple[str, ...] = ()
    catch: tuple[int, int, bool] | None = None

    def __str__(self) -> str:
        jump = f" -> {self.target}" if self.target >= 0 else ""
        return f"{self.offset:4d} {self.op} {self.arg!r}{jump}"


@dataclass(eq=False, slots=True)
class Code:
    """A code object ready to be interpreted. `positional`, `keyword`: parameter names, in order."""
    code: CodeType
    instructions: list[Instruction]
    positional: tuple[str, ...]
    positional_only: int
    keyword_only: tuple[str, ...]
    varargs: str | None
    varkw: str | None
    is_generator: bool
    is_async: bool
    cells: frozenset[str]
    user_file: bool


_RENAMED = {"JUMP_FORWARD": "JUMP", "JUMP_BACKWARD": "JUMP", "JUMP_BACKWARD_NO_INTERRUPT": "JUMP", "PRECALL": "NOP",
            "RESUME": "NOP", "MAKE_CELL": "MAKE_CELL", "LOAD_CLOSURE": "LOAD_CLOSURE", "INSTRUMENTED_RESUME": "NOP"}
_cache: dict[CodeType, Code] = {}
_library = ""


def set_library_root(path: str) -> None:
    """Files under `path` (torch's folder) are not the user's lines: reasons and origins name the caller's line instead."""
    global _library
    _library = path


def prepare(code: CodeType) -> Code:
    """The normalised form of `code`, made once per code object. Raises CannotCapture for an instruction we do not know."""
    known = _cache.get(code)
    # Equal code objects may differ in what equality ignores; the identity of the code matters for line numbers and consts.
    if known is not None and known.code is code:
        return known
    made = _prepare(code)
    _cache[code] = made
    return made


def _prepare(code: CodeType) -> Code:
    flags = code.co_flags
    count = code.co_argcount
    names = code.co_varnames
    at = count + code.co_kwonlyargcount
    varargs = names[at] if flags & CO_VARARGS else None
    varkw = names[at + (varargs is not None)] if flags & CO_VARKEYWORDS else None
    return Code(code, _normalise(code), names[:count], code.co_posonlyargcount, names[count:at], varargs, varkw,
                bool(flags & CO_GENERATOR), bool(flags & (CO_COROUTINE | CO_ASYNC_GENERATOR)),
                frozenset(code.co_cellvars), not (_library and code.co_filename.startswith(_library)))


def _normalise(code: CodeType) -> list[Instruction]:
    out: list[Instruction] = []
    index_at: dict[int, int] = {}             # byte offset -> index; an EXTENDED_ARG's offset is that of what follows
    pending: list[int] = []
    jumps: list[tuple[Instruction, int]] = []
    kwnames: tuple[str, ...] = ()
    line = code.co_firstlineno
    for raw in dis.get_instructions(code):
        if raw.starts_line is not None:
            line = raw.starts_line
        if raw.opname == "EXTENDED_ARG":
            pending.append(raw.offset)
            continue
        for offset in (*pending, raw.offset):
            index_at[offset] = len(out)
        pending.clear()
        if raw.opname == "KW_NAMES":
            kwnames = code.co_consts[raw.arg or 0]
        op, arg, flag = _resolve(raw)
        run = HANDLERS.get(op)
        if run is None:
            raise CannotCapture(GraphBreak("unknown-instruction", f"{code.co_filename}:{line} in {code.co_qualname}",
                                           f"the bytecode instruction {op} of Python {sys.version_info[0]}.{sys.version_info[1]} "
                                           "is not supported", "rewrite the function without the construct"))
        made = Instruction(op, arg, raw.arg or 0, raw.offset, raw.positions.lineno or line if raw.positions else line, run, flag)
        if op == "CALL":
            made.kwnames, kwnames = kwnames, ()
        if raw.opcode in dis.hasjrel or raw.opcode in dis.hasjabs:
            jumps.append((made, raw.argval))
        out.append(made)
    for made, offset in jumps:
        made.target = index_at[offset]
        if made.op == "FOR_ITER" and out[made.target].op == "END_FOR":
            made.target += 1                  # 3.12 skips the END_FOR, which is there for specialised loops
    for entry in dis._parse_exception_table(code):             # type: ignore[attr-defined]
        handler = (index_at[entry.target], entry.depth, entry.lasti)
        for made in out:
            if entry.start <= made.offset < entry.end:
                made.catch = handler
    return out


def _resolve(raw: dis.Instruction) -> tuple[str, Any, bool]:
    """(normalised name, argument, flag) of an instruction."""
    op, arg = raw.opname, raw.argval
    number = raw.arg or 0
    if op == "LOAD_GLOBAL":
        return op, arg, bool(number & 1)
    if op == "LOAD_ATTR" and sys.version_info >= (3, 12):
        return ("LOAD_METHOD" if number & 1 else "LOAD_ATTR"), arg, bool(number & 1)
    if op == "LOAD_SUPER_ATTR":
        return op, arg, bool(number & 1)
    if op.startswith("POP_JUMP_"):
        return op.replace("FORWARD_", "").replace("BACKWARD_", ""), arg, False
    if op == "BINARY_OP":
        return op, raw.argrepr, False
    if op in ("FORMAT_VALUE", "MAKE_FUNCTION", "KW_NAMES"):
        return op, number, False
    if op in ("IS_OP", "CONTAINS_OP"):
        return op, number, bool(number)
    if op == "LOAD_CONST" or op == "RETURN_CONST":
        return op, arg, False
    return _RENAMED.get(op, op), arg, False
