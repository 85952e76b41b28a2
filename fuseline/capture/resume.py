"""Code for going on after a graph break: execute one instruction for real, then resume in code that is compiled anew.

For a suspended frame two kinds of code objects are made from the code that it was running:

  break code     puts stack and locals back, jumps to the instruction at the break and executes it exactly as Python would,
                 the handlers of the original code around it. Then it returns a `Continue` to the resume code of the successor
                 (of the one taken, for a jump). If the instruction raises into a handler of the same frame, the rest of the
                 frame runs right there, eagerly.
  resume code    the original code, entered in its middle: its arguments are the locals and the values on the stack.
                 It is an ordinary function to the dispatcher: captured, compiled and guarded like any other.

An outer frame's break code executes, in place of its suspended call, a call of what goes on in the inner frame, so that an
exception of the inner frame meets the handlers around that call.

All variables in cells become free variables of the new codes, so that they take the frame's own cells as closure. Codes are
always derived from the *original* code, so a break in a loop's body comes back to the same codes. NULLs that calls of 3.11 and
3.12 keep on the stack are part of the layout, not arguments.
"""
from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from bytecode import Bytecode, CellVar, FreeVar, Instr, Label

from fuseline.errors import NotSupported
from fuseline.ir.entry import Continue, drive
from fuseline.ir.region import Const, FrameState

_SUSPENDABLE_NOT = 0x20 | 0x80 | 0x100 | 0x200            # generator, coroutine, iterable coroutine, async generator
_HAS_PRECALL = sys.version_info < (3, 12)
_TERMINATORS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"})
_UNCONDITIONAL = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_REFUSED = frozenset({"SEND", "YIELD_VALUE", "RETURN_GENERATOR", "GET_AWAITABLE", "GET_ANEXT", "END_ASYNC_FOR", "PUSH_EXC_INFO",
                      "POP_EXCEPT", "CHECK_EXC_MATCH", "CHECK_EG_MATCH", "WITH_EXCEPT_START", "CLEANUP_THROW", "END_SEND",
                      "MAKE_CELL", "COPY_FREE_VARS"})

_CELL_INSTRUCTIONS = frozenset({"LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_FIRST = "__first"

# code, namespace -> a callable (cells, *arguments): the dispatcher of a resume code
Wrap = Callable[[CodeType, dict], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a suspended frame holds: the names of its bound locals, and which stack slots are NULL, from bottom to top."""

    locals: tuple[str, ...]
    nulls: tuple[bool, ...]

    @property
    def values(self) -> int:
        """How many stack slots hold a value."""
        return self.nulls.count(False)


@dataclass(frozen=True, slots=True)
class _Point:
    """An instruction of an original code, by its number (extended arguments and caches do not count)."""

    index: int
    layout: Layout


@dataclass(eq=False)
class _Parsed:
    """An original code, ready to derive codes from. `positions[i]`: where instruction i is in `items`."""

    code: CodeType
    items: list
    positions: list[int]
    raw: list[dis.Instruction]
    index_at: dict[int, int]                              # byte offset -> instruction number
    cell_names: tuple[str, ...]
    inlined: dict[str, list[range]]                       # variables in cells of their own in inlined comprehensions: where

    @property
    def first(self) -> tuple[str, ...]:
        """`super()` without arguments looks at the frame's first argument: where that lives in a cell, a copy must stand first."""
        code = self.code
        return (_FIRST,) if "__class__" in code.co_freevars and code.co_argcount and code.co_varnames[0] in code.co_cellvars else ()


@dataclass(frozen=True, slots=True, eq=False)
class Suspended:
    """A frame's break code. `call(cells, *arguments)`; for an outer frame the last argument is the inner frame's thunk."""

    call: Callable[..., Any]
    layout: Layout
    cell_names: tuple[str, ...]
    leading: tuple[Const, ...] = ()

    def arguments(self, frame: FrameState) -> list[Any]:
        """The recipes of the frame that `call` takes, in order."""
        return [*self.leading, *(frame.locals[name] for name in self.layout.locals), *(s for s in frame.stack if s is not None)]


def _stack_name(i: int) -> str:
    return f"__stack_{i}"


def parse(code: CodeType) -> _Parsed:
    """Raises NotSupported for code that cannot be entered in its middle."""
    if code.co_flags & _SUSPENDABLE_NOT:
        raise NotSupported(f"{code.co_qualname} is a generator or coroutine: it cannot be resumed in its middle")
    bytecode: Any = Bytecode.from_code(code, conserve_exception_block_stackdepth=True)
    raw = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    positions = [n for n, item in enumerate(bytecode) if isinstance(item, Instr)]
    if len(raw) != len(positions) or any(bytecode[p].name != r.opname for p, r in zip(positions, raw)):
        raise NotSupported(f"the bytecode of {code.co_qualname} is not understood")
    items: list[Any] = list(bytecode)
    inlined = _inlined_cells(code, raw)
    for p in positions:
        instr = items[p]
        if instr.name in ("MAKE_CELL", "COPY_FREE_VARS"):
            if p < positions[_first_real(raw)]:
                items[p] = Instr("NOP", location=instr.location)
        elif isinstance(instr.arg, CellVar) and instr.arg.name in inlined:
            pass
        elif isinstance(instr.arg, CellVar):
            if instr.name not in _CELL_INSTRUCTIONS:
                raise NotSupported(f"{code.co_qualname} uses the cell {instr.arg.name} as a local variable")
            items[p] = Instr(instr.name, FreeVar(instr.arg.name), location=instr.location)
    index_at, start = {}, 0
    for n, r in enumerate(raw):
        for offset in range(start, r.offset + 2, 2):      # the offset of an EXTENDED_ARG stands for its instruction
            index_at[offset] = n
        start = r.offset + 2
    cells = tuple(n for n in dict.fromkeys((*code.co_cellvars, *code.co_freevars)) if n not in inlined)
    return _Parsed(code, items, positions, raw, index_at, cells, inlined)


def _inlined_cells(code: CodeType, raw: Sequence[dis.Instruction]) -> dict[str, list[range]]:
    """Where comprehensions that 3.12 inlined keep a variable of theirs in a cell: name -> instruction numbers.

    Such a cell lives from where the outer variable is put aside to the store that brings the outer variable back.
    Raises NotSupported if the function keeps a variable of the same name in a cell too.
    """
    found: dict[str, list[range]] = {}
    for n, r in enumerate(raw):
        if r.opname == "MAKE_CELL" and n > _first_real(raw):
            end = next(m for m in range(n, len(raw)) if raw[m].opname == "STORE_FAST" and raw[m].argval == r.argval)
            start = next((m for m in range(n, 0, -1) if raw[m].opname == "LOAD_FAST_AND_CLEAR" and raw[m].argval == r.argval), n)
            found.setdefault(r.argval, []).append(range(start, end + 1))
    for n, r in enumerate(raw):
        if r.argval in found and ("DEREF" in r.opname or r.opname == "LOAD_CLOSURE") and not any(n in span for span in found[r.argval]):
            raise NotSupported(f"{code.co_qualname} has {r.argval!r} in a cell, and in another one in a comprehension")
    return found


def _first_real(raw: Sequence[dis.Instruction]) -> int:
    """The number of the RESUME at the start."""
    return next(n for n, r in enumerate(raw) if r.opname == "RESUME")


@dataclass(eq=False)
class _Derived:
    """Where a derived code comes from: its instruction numbers and those of the original."""

    code: CodeType
    parsed: _Parsed
    index_at: dict[int, int] = field(default_factory=dict)


class Resumer:
    """Makes break and resume codes, each once for an instruction and layout. One a compiled function, shared by its regions."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap
        self._parsed: dict[int, _Derived] = {}
        self._targets: dict[tuple, Callable[..., Any]] = {}
        self._suspended: dict[tuple, Suspended] = {}

    def factory(self, frame: FrameState, outer: bool) -> Suspended:
        """The break code of a frame. Raises NotSupported where a frame cannot be resumed at that instruction.

        outer  False: execute the instruction at `frame.offset`. True: the instruction before it is a call that is still
               running; the last argument of `call` is the thunk that finishes it, its result is pushed on the stack.
        """
        derived = self._origin(frame.code)
        parsed = derived.parsed
        if frame.offset not in derived.index_at:
            raise NotSupported(f"offset {frame.offset} of {frame.code.co_qualname} is not an instruction")
        bound = [n for n in parsed.code.co_varnames if n in frame.locals and n not in parsed.cell_names and n not in parsed.inlined]
        extra = [n for n in frame.locals if n not in parsed.code.co_varnames and n != _FIRST]
        if extra:
            raise NotSupported(f"{frame.code.co_qualname} has a local {extra[0]!r} that is no variable of its original")
        layout = Layout(tuple(bound), tuple(s is None for s in frame.stack))
        point = _Point(derived.index_at[frame.offset], layout)
        if any(point.index in span for spans in parsed.inlined.values() for span in spans):
            raise NotSupported(f"{frame.code.co_qualname} is in a comprehension whose variable is in a cell")
        key = (id(parsed), point, outer, id(frame.globals))
        found = self._suspended.get(key)
        if found is None:
            found = self._suspended[key] = self._suspend(parsed, point, outer, frame.globals)
        return found

    def resume_code(self, code: CodeType, offset: int, layout: Layout) -> CodeType:
        """The code that goes on at an instruction: arguments are the bound locals, then the values on the stack."""
        derived = self._origin(code)
        return self._resume_code(derived.parsed, _Point(derived.index_at[offset], layout))

    # -- origins --------------------------------------------------------------------------------------------
    def _origin(self, code: CodeType) -> _Derived:
        found = self._parsed.get(id(code))
        if found is None:
            parsed = parse(code)
            found = self._parsed[id(code)] = _Derived(code, parsed, parsed.index_at)
        return found

    def _register(self, code: CodeType, parsed: _Parsed, prologue: int) -> None:
        """Remember that instruction `prologue + i` of a derived code is instruction i of its original."""
        index_at: dict[int, int] = {}
        n, start = 0, 0
        for instruction in dis.get_instructions(code):
            if instruction.opname == "EXTENDED_ARG":
                continue
            number = n - prologue
            if 0 <= number < len(parsed.raw):
                for offset in range(start, instruction.offset + 2, 2):
                    index_at[offset] = number
            n, start = n + 1, instruction.offset + 2
        self._parsed[id(code)] = _Derived(code, parsed, index_at)

    # -- assembling -----------------------------------------------------------------------------------------
    def _restore(self, parsed: _Parsed, layout: Layout) -> list[Instr]:
        """Function entry: closure cells, then the stack from the arguments."""
        location = parsed.items[parsed.positions[0]].location
        made = [Instr("COPY_FREE_VARS", len(parsed.cell_names), location=location)] if parsed.cell_names else []
        made += [Instr("MAKE_CELL", CellVar(name), location=location) for name in parsed.inlined]
        made.append(Instr("RESUME", 0, location=location))
        for name in parsed.first:
            made += [Instr("LOAD_DEREF", FreeVar(parsed.code.co_varnames[0]), location=location),
                     Instr("STORE_FAST", name, location=location)]
        value = 0
        for null in layout.nulls:
            if null:
                made.append(Instr("PUSH_NULL", location=location))
            else:
                made.append(Instr("LOAD_FAST", _stack_name(value), location=location))
                made.append(Instr("DELETE_FAST", _stack_name(value), location=location))
                value += 1
        return made

    def _finish(self, parsed: _Parsed, items: list, arguments: Sequence[str], extra_stack: int) -> CodeType:
        origin = parsed.code
        bytecode: Any = Bytecode(items)
        bytecode.name, bytecode.qualname, bytecode.filename = origin.co_name, origin.co_qualname, origin.co_filename
        bytecode.first_lineno = origin.co_firstlineno
        bytecode.flags = origin.co_flags & ~0x0C          # no *args, **kwargs
        bytecode.argcount, bytecode.posonlyargcount, bytecode.kwonlyargcount = len(arguments), 0, 0
        bytecode.argnames = list(arguments)
        bytecode.cellvars, bytecode.freevars = list(parsed.inlined), list(parsed.cell_names)
        code = bytecode.to_code(stacksize=origin.co_stacksize + extra_stack, compute_exception_stack_depths=False)
        if code.co_freevars != parsed.cell_names:
            raise NotSupported(f"the cells of {origin.co_qualname} came out in another order")
        return code

    def _label(self, items: list, position: int) -> Label:
        """A new label right before an item."""
        label = Label()
        items.insert(position, label)
        return label

    def _resume_code(self, parsed: _Parsed, point: _Point) -> CodeType:
        prologue = self._restore(parsed, point.layout)
        items = list(parsed.items)
        label = self._label(items, parsed.positions[point.index])
        prologue.append(Instr("JUMP_FORWARD", label, location=prologue[-1].location))
        arguments = [*parsed.first, *point.layout.locals, *map(_stack_name, range(point.layout.values))]
        code = self._finish(parsed, [*prologue, *items], arguments, len(point.layout.nulls) + 2)
        self._register(code, parsed, len(prologue))
        return code

    def _target(self, parsed: _Parsed, point: _Point, namespace: dict) -> Callable[..., Any]:
        """The dispatcher of a resume code."""
        key = (id(parsed), point, id(namespace))
        found = self._targets.get(key)
        if found is None:
            found = self._targets[key] = self._wrap(self._resume_code(parsed, point), namespace)
        return found

    def _handover(self, parsed: _Parsed, point: _Point, physical: Sequence[bool], namespace: dict, location: Any) -> list[Instr]:
        """Take the values off the stack and return a Continue. `physical`: which slots are NULL really, not in the layout."""
        made: list[Instr] = []

        def add(name: str, *arg: Any) -> None:
            made.append(Instr(name, *arg, location=location))

        def call(count: int) -> None:
            if _HAS_PRECALL:
                add("PRECALL", count)
            add("CALL", count)

        value = point.layout.values
        for null in reversed(physical):
            if null:                                      # a call is what takes a NULL off the stack
                add("LOAD_CONST", tuple)
                call(0)
                add("POP_TOP")
            else:
                value -= 1
                add("STORE_FAST", _stack_name(value))
        add("PUSH_NULL")
        add("LOAD_CONST", Continue)
        add("LOAD_CONST", self._target(parsed, point, namespace))
        for name in parsed.cell_names:
            add("LOAD_CLOSURE", FreeVar(name))
        add("BUILD_TUPLE", len(parsed.cell_names))
        names = [*point.layout.locals, *map(_stack_name, range(point.layout.values))]
        for _ in parsed.first:
            add("LOAD_CONST", None)                       # the prologue gives it its value
        for name in names:
            add("LOAD_FAST", name)
        add("BUILD_TUPLE", len(parsed.first) + len(names) + 1)
        call(2)
        add("RETURN_VALUE")
        return made

    def _suspend(self, parsed: _Parsed, point: _Point, outer: bool, namespace: dict) -> Suspended:
        prologue = self._restore(parsed, point.layout)
        items = list(parsed.items)
        if outer:
            tail, entry = self._outer(parsed, point, items, namespace)
        else:
            tail, entry = self._inner(parsed, point, items, namespace)
        prologue.append(Instr("JUMP_FORWARD", entry, location=prologue[-1].location))
        names = [*parsed.first, *point.layout.locals, *map(_stack_name, range(point.layout.values)), *(["__inner"] if outer else [])]
        room = len(point.layout.nulls) + len(names) + len(parsed.cell_names) + 8
        code = self._finish(parsed, [*prologue, *items, *tail], names, room)
        if parsed.cell_names:
            name = code.co_name

            def call(cells: tuple, *arguments: Any) -> Any:
                return FunctionType(code, namespace, name, None, cells)(*arguments)
        else:
            function = FunctionType(code, namespace, code.co_name)

            def call(cells: tuple, *arguments: Any) -> Any:
                return function(*arguments)
        return Suspended(call, point.layout, parsed.cell_names, tuple(Const(None) for _ in parsed.first))

    def _outer(self, parsed: _Parsed, point: _Point, items: list, namespace: dict) -> tuple[list, Label]:
        """Replace the suspended call by a call of the thunk in `__inner`."""
        if point.index == 0:
            raise NotSupported(f"{parsed.code.co_qualname} is suspended before its first instruction")
        position = parsed.positions[point.index - 1]
        location = items[position].location
        handover = Label()
        entry = Label()
        call = [entry, Instr("PUSH_NULL", location=location), Instr("LOAD_FAST", "__inner", location=location)]
        call += [Instr("DELETE_FAST", "__inner", location=location)]
        if _HAS_PRECALL:
            call.append(Instr("PRECALL", 0, location=location))
        call += [Instr("CALL", 0, location=location), Instr("JUMP_FORWARD", handover, location=location)]
        nulls = (*point.layout.nulls, False)
        after = _Point(point.index, Layout(point.layout.locals, nulls))
        tail = [handover, *self._handover(parsed, after, nulls, namespace, location)]
        # In front of the call, so that the same handlers are around it; nothing falls into it: what was before jumps over.
        skip = Label()
        items[position:position] = [Instr("JUMP_FORWARD", skip, location=location), *call, skip]
        return tail, entry

    def _inner(self, parsed: _Parsed, point: _Point, items: list, namespace: dict) -> tuple[list, Label]:
        """Execute one instruction where it stands, then hand over to the resume code of what comes next."""
        index = point.index
        if parsed.raw[index].opname == "PRECALL":         # the call is what is executed
            index += 1
        elif parsed.raw[index].opname == "KW_NAMES":
            index += 2 if _HAS_PRECALL else 1
        start = index
        while start and parsed.raw[start - 1].opname in ("PRECALL", "KW_NAMES"):
            start -= 1
        position = parsed.positions[index]
        instr, raw = items[position], parsed.raw[index]
        if instr.name in _REFUSED:
            raise NotSupported(f"{parsed.code.co_qualname} cannot be resumed at {instr.name}")
        step = _step(instr, raw, point.layout)
        location = instr.location
        entry = Label()
        tail: list[Any] = []
        inserted: list[Any] = []
        replacement = step.replacement
        if step.jump is not None:
            jump_label = Label()
            goal = self._index_of_label(parsed, instr.arg) + step.jump_skip
            tail.append(jump_label)
            if step.jump_skip:
                tail.append(Instr("END_FOR", location=location))
            tail += self._handover(parsed, _Point(goal, step.jump.layout), step.jump.physical, namespace, location)
            replacement = Instr(instr.name, jump_label, location=location)
            if instr.name in _UNCONDITIONAL or "BACKWARD" in instr.name:   # the handover is further on
                replacement = Instr(instr.name.replace("BACKWARD_NO_INTERRUPT", "FORWARD").replace("BACKWARD", "FORWARD"),
                                    jump_label, location=location)
        if step.fall is not None:
            fall_label = Label()
            inserted = [Instr("JUMP_FORWARD", fall_label, location=location)]
            tail += [fall_label, *self._handover(parsed, _Point(index + 1, step.fall.layout), step.fall.physical, namespace, location)]
        if replacement is not None:
            items[position] = replacement
        items[position + 1:position + 1] = inserted
        items.insert(parsed.positions[start], entry)
        return tail, entry

    def _index_of_label(self, parsed: _Parsed, label: Label) -> int:
        position = next(n for n, item in enumerate(parsed.items) if item is label)
        return next(n for n, p in enumerate(parsed.positions) if p > position)


@dataclass(frozen=True, slots=True)
class _After:
    """The frame after an instruction: its layout, and which slots hold NULL in fact (the layout may call for more)."""

    layout: Layout
    physical: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Step:
    fall: _After | None
    jump: _After | None = None
    jump_skip: int = 0
    replacement: Instr | None = None


def _step(instr: Any, raw: dis.Instruction, before: Layout) -> _Step:
    """What an instruction does to the layout. Loads of methods become loads of attributes, called with a NULL below."""
    name, nulls, location = instr.name, before.nulls, instr.location
    bound = before.locals
    if name == "STORE_FAST" and instr.arg not in bound and not nulls[-1]:
        bound = (*bound, instr.arg)
    elif name in ("DELETE_FAST", "LOAD_FAST_AND_CLEAR") or name == "STORE_FAST" and nulls[-1]:
        bound = tuple(n for n in bound if n != instr.arg)

    def after(flags: Sequence[bool], physical: Sequence[bool] | None = None) -> _After:
        return _After(Layout(bound, tuple(flags)), tuple(flags if physical is None else physical))

    if name in _TERMINATORS:
        return _Step(None)
    if name == "LOAD_METHOD":
        replacement = Instr("LOAD_ATTR", instr.arg, location=location)
        return _Step(after((*nulls[:-1], True, False), (*nulls[:-1], False)), replacement=replacement)
    if name == "LOAD_ATTR" and isinstance(instr.arg, tuple) and instr.arg[0]:
        replacement = Instr("LOAD_ATTR", (False, instr.arg[1]), location=location)
        return _Step(after((*nulls[:-1], True, False), (*nulls[:-1], False)), replacement=replacement)
    if name == "LOAD_SUPER_ATTR" and instr.arg[0]:
        replacement = Instr("LOAD_SUPER_ATTR", (False, *instr.arg[1:]), location=location)
        return _Step(after((*nulls[:-3], True, False), (*nulls[:-3], False)), replacement=replacement)
    if name == "LOAD_GLOBAL" and instr.arg[0]:
        return _Step(after((*nulls, True, False)))
    if name == "LOAD_FAST_AND_CLEAR":                     # inlined comprehensions of 3.12 put the outer variable aside
        return _Step(after((*nulls, instr.arg not in before.locals)))
    if name == "PUSH_NULL":
        return _Step(after((*nulls, True)))
    if name == "SWAP":
        flags = list(nulls)
        flags[-1], flags[-instr.arg] = flags[-instr.arg], flags[-1]
        return _Step(after(flags))
    if name == "FOR_ITER":
        skip = 0 if _HAS_PRECALL else 1                   # 3.12 jumps to an END_FOR that it steps over
        return _Step(after((*nulls, False)), after(nulls[:-1]), skip)
    effect = -((raw.arg or 0) + 1) if name == "CALL" else None
    jumps = isinstance(instr.arg, Label)

    def flags_after(jump: bool) -> list[bool]:
        change = dis.stack_effect(raw.opcode, raw.arg if raw.opcode >= dis.HAVE_ARGUMENT else None, jump=jump) if effect is None else effect
        depth = len(nulls) + change
        flags = [*nulls[:depth], *[False] * (depth - len(nulls))]
        if flags and not name.startswith(("STORE_", "DELETE_", "POP_")) and name not in ("NOP", "RESUME"):
            flags[-1] = False                             # it pushed its result
        return flags

    fall = None if name in _UNCONDITIONAL else after(flags_after(False))
    return _Step(fall, after(flags_after(True)) if jumps else None)


def run_eagerly(code: CodeType, namespace: dict, cells: tuple, *arguments: Any) -> Any:
    """Run a resume code without compiling it."""
    return FunctionType(code, namespace, code.co_name, None, cells or None)(*arguments)


__all__ = ["Layout", "Resumer", "Suspended", "Wrap", "drive", "parse", "run_eagerly"]
