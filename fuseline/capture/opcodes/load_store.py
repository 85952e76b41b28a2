"""Instructions that move values between the stack, variables, cells, globals and attributes."""
from __future__ import annotations

import builtins
from types import CellType

from fuseline.capture.errors import ProgramError
from fuseline.capture.frame import NULL, Frame, Unread
from fuseline.capture.instructions import Instruction, opcode


@opcode("NOP", "CACHE", "KW_NAMES", "SETUP_ANNOTATIONS_DONE")
def nop(frame: Frame, ins: Instruction) -> None:
    """Nothing to do: the information is in other instructions."""


@opcode("LOAD_CONST")
def load_const(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(ins.arg)


@opcode("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_CLOSURE")
def load_fast(frame: Frame, ins: Instruction) -> None:
    try:
        value = frame.locals[ins.arg]
    except KeyError:
        raise ProgramError(UnboundLocalError(
            f"cannot access local variable '{ins.arg}' where it is not associated with a value")) from None
    if type(value) is Unread:
        value = frame.locals[ins.arg] = frame.world.read(value.value, value.source)
    frame.stack.append(value)


@opcode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, ins: Instruction) -> None:
    value = frame.locals.get(ins.arg, NULL)
    if type(value) is Unread:
        value = frame.world.read(value.value, value.source)
    frame.locals.pop(ins.arg, None)
    frame.stack.append(value)


@opcode("STORE_FAST")
def store_fast(frame: Frame, ins: Instruction) -> None:
    value = frame.stack.pop()
    if value is NULL:
        frame.locals.pop(ins.arg, None)
    else:
        frame.locals[ins.arg] = value


@opcode("DELETE_FAST")
def delete_fast(frame: Frame, ins: Instruction) -> None:
    if ins.arg not in frame.locals:
        raise ProgramError(UnboundLocalError(
            f"cannot access local variable '{ins.arg}' where it is not associated with a value"))
    del frame.locals[ins.arg]


# ---------------------------------------------------------------- cells

@opcode("MAKE_CELL")
def make_cell(frame: Frame, ins: Instruction) -> None:
    value = frame.locals.get(ins.arg, NULL)
    if type(value) is Unread:
        value = frame.world.read(value.value, value.source)
    frame.locals[ins.arg] = CellType() if value is NULL else CellType(value)


@opcode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, ins: Instruction) -> None:
    """The frame was made with its free variables in place."""


def _unbound(frame: Frame, name: str) -> ProgramError:
    if name in frame.code.code.co_freevars:
        return ProgramError(NameError(f"cannot access free variable '{name}' where it is not associated with a value "
                                      "in enclosing scope"))
    return ProgramError(UnboundLocalError(f"cannot access local variable '{name}' where it is not associated with a value"))


def read_cell(frame: Frame, name: str) -> object:
    """The contents of the cell behind a cell or free variable; raises NameError of the program if it is empty."""
    try:
        return frame.world.load_cell(frame.locals[name])
    except ValueError:
        raise _unbound(frame, name) from None


@opcode("LOAD_DEREF")
def load_deref(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(read_cell(frame, ins.arg))


@opcode("LOAD_CLASSDEREF")
def load_classderef(frame: Frame, ins: Instruction) -> None:
    if frame.namespace is not None and ins.arg in frame.namespace:
        frame.stack.append(frame.namespace[ins.arg])
    else:
        frame.stack.append(read_cell(frame, ins.arg))


@opcode("LOAD_FROM_DICT_OR_DEREF")
def load_from_dict_or_deref(frame: Frame, ins: Instruction) -> None:
    namespace = frame.stack[-1]
    frame.stack[-1] = namespace[ins.arg] if ins.arg in namespace else read_cell(frame, ins.arg)


@opcode("STORE_DEREF")
def store_deref(frame: Frame, ins: Instruction) -> None:
    frame.world.store_cell(frame.locals[ins.arg], frame.stack[-1])
    frame.stack.pop()


@opcode("DELETE_DEREF")
def delete_deref(frame: Frame, ins: Instruction) -> None:
    read_cell(frame, ins.arg)
    frame.world.delete_cell(frame.locals[ins.arg])


# ---------------------------------------------------------------- globals and names

@opcode("LOAD_GLOBAL")
def load_global(frame: Frame, ins: Instruction) -> None:
    value = frame.world.load_global(frame.globals, ins.arg)
    if ins.flag:
        frame.stack.append(NULL)
    frame.stack.append(value)


@opcode("STORE_GLOBAL")
def store_global(frame: Frame, ins: Instruction) -> None:
    frame.world.store_global(frame.globals, ins.arg, frame.stack[-1])
    frame.stack.pop()


@opcode("DELETE_GLOBAL")
def delete_global(frame: Frame, ins: Instruction) -> None:
    frame.world.delete_global(frame.globals, ins.arg)


@opcode("LOAD_NAME")
def load_name(frame: Frame, ins: Instruction) -> None:
    if frame.namespace is not None and ins.arg in frame.namespace:
        frame.stack.append(frame.namespace[ins.arg])
    else:
        frame.stack.append(frame.world.load_global(frame.globals, ins.arg))


@opcode("LOAD_LOCALS")
def load_locals(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(_namespace(frame))


@opcode("LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(frame: Frame, ins: Instruction) -> None:
    namespace = frame.stack[-1]
    frame.stack[-1] = namespace[ins.arg] if ins.arg in namespace else frame.world.load_global(frame.globals, ins.arg)


def _namespace(frame: Frame) -> dict:
    """The dict that a class body stores names in."""
    if frame.namespace is None:
        frame.namespace = {}
    return frame.namespace


@opcode("STORE_NAME")
def store_name(frame: Frame, ins: Instruction) -> None:
    _namespace(frame)[ins.arg] = frame.stack.pop()


@opcode("DELETE_NAME")
def delete_name(frame: Frame, ins: Instruction) -> None:
    if ins.arg not in _namespace(frame):
        raise ProgramError(NameError(f"name '{ins.arg}' is not defined"))
    del _namespace(frame)[ins.arg]


@opcode("SETUP_ANNOTATIONS")
def setup_annotations(frame: Frame, ins: Instruction) -> None:
    _namespace(frame).setdefault("__annotations__", {})


@opcode("LOAD_BUILD_CLASS")
def load_build_class(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(builtins.__build_class__)


@opcode("LOAD_ASSERTION_ERROR")
def load_assertion_error(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(AssertionError)


# ---------------------------------------------------------------- attributes

@opcode("LOAD_ATTR")
def load_attr(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = frame.world.getattr(frame.stack[-1], ins.arg)


@opcode("LOAD_METHOD")
def load_method(frame: Frame, ins: Instruction) -> None:
    """stack: object -> NULL, bound method (CALL takes this form as well as the one with self apart)"""
    stack = frame.stack
    value = frame.world.getattr(stack[-1], ins.arg)
    stack[-1] = NULL
    stack.append(value)


@opcode("LOAD_SUPER_ATTR")
def load_super_attr(frame: Frame, ins: Instruction) -> None:
    """stack: super, class, self -> attribute (preceded by NULL with the method flag)"""
    stack = frame.stack
    function, owner, instance = stack[-3:]
    proxy = frame.interpreter.call(function, (owner, instance), {})
    value = frame.world.getattr(proxy, ins.arg)
    del stack[-3:]
    if ins.flag:
        stack.append(NULL)
    stack.append(value)


@opcode("STORE_ATTR")
def store_attr(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    frame.world.setattr(stack[-1], ins.arg, stack[-2])
    del stack[-2:]


@opcode("DELETE_ATTR")
def delete_attr(frame: Frame, ins: Instruction) -> None:
    frame.world.delattr(frame.stack[-1], ins.arg)
    frame.stack.pop()


# ---------------------------------------------------------------- stack

@opcode("POP_TOP", "END_FOR_POP")
def pop_top(frame: Frame, ins: Instruction) -> None:
    frame.stack.pop()


@opcode("END_FOR")
def end_for(frame: Frame, ins: Instruction) -> None:
    del frame.stack[-2:]


@opcode("PUSH_NULL")
def push_null(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(NULL)


@opcode("COPY")
def copy(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.stack[-ins.number])


@opcode("SWAP")
def swap(frame: Frame, ins: Instruction) -> None:
    stack, n = frame.stack, ins.number
    stack[-1], stack[-n] = stack[-n], stack[-1]
