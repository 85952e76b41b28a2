"""Operators, comparisons, subscripts, string formatting, imports."""
from __future__ import annotations

import importlib
import operator
import sys
from types import ModuleType

from fuseline.capture.errors import ProgramError, break_here
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import Instruction, opcode
from fuseline.errors import InternalError
from fuseline.ir.region import Pinned

_BINARY = {"+": operator.add, "&": operator.and_, "//": operator.floordiv, "<<": operator.lshift, "@": operator.matmul,
           "*": operator.mul, "%": operator.mod, "|": operator.or_, "**": operator.pow, ">>": operator.rshift,
           "-": operator.sub, "/": operator.truediv, "^": operator.xor}
_INPLACE = {"+=": operator.iadd, "&=": operator.iand, "//=": operator.ifloordiv, "<<=": operator.ilshift, "@=": operator.imatmul,
            "*=": operator.imul, "%=": operator.imod, "|=": operator.ior, "**=": operator.ipow, ">>=": operator.irshift,
            "-=": operator.isub, "/=": operator.itruediv, "^=": operator.ixor}
_COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}
_PLAIN = frozenset({int, float, str})           # exact types that operators treat without looking further


@opcode("BINARY_OP")
def binary_op(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    function = _BINARY.get(ins.arg)
    if function is not None:
        value = frame.world.binary(function, stack[-2], stack[-1])
    else:
        value = frame.world.inplace(_INPLACE[ins.arg], stack[-2], stack[-1])
    stack.pop()
    stack[-1] = value


@opcode("UNARY_NEGATIVE")
def unary_negative(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = frame.world.unary(operator.neg, frame.stack[-1])


@opcode("UNARY_POSITIVE")
def unary_positive(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = frame.world.unary(operator.pos, frame.stack[-1])


@opcode("UNARY_INVERT")
def unary_invert(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = frame.world.unary(operator.invert, frame.stack[-1])


@opcode("UNARY_NOT")
def unary_not(frame: Frame, ins: Instruction) -> None:
    frame.stack[-1] = not frame.world.truth(frame.stack[-1])


@opcode("COMPARE_OP")
def compare_op(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    value = frame.world.compare(_COMPARE[ins.arg], stack[-2], stack[-1])
    stack.pop()
    stack[-1] = value


@opcode("IS_OP")
def is_op(frame: Frame, ins: Instruction) -> None:
    right = frame.stack.pop()
    frame.stack[-1] = (frame.stack[-1] is right) is not ins.flag


@opcode("CONTAINS_OP")
def contains_op(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    found = frame.world.contains(stack[-1], stack[-2])
    stack.pop()
    stack[-1] = (not found) if ins.flag else found


# ---------------------------------------------------------------- subscripts

@opcode("BINARY_SUBSCR")
def binary_subscr(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    value = frame.world.getitem(stack[-2], stack[-1])
    stack.pop()
    stack[-1] = value


@opcode("STORE_SUBSCR")
def store_subscr(frame: Frame, ins: Instruction) -> None:
    """stack: value, container, key ->"""
    stack = frame.stack
    frame.world.setitem(stack[-2], stack[-1], stack[-3])
    del stack[-3:]


@opcode("DELETE_SUBSCR")
def delete_subscr(frame: Frame, ins: Instruction) -> None:
    frame.world.delitem(frame.stack[-2], frame.stack[-1])
    del frame.stack[-2:]


@opcode("BINARY_SLICE")
def binary_slice(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    value = frame.world.getitem(stack[-3], slice(stack[-2], stack[-1]))
    del stack[-3:]
    stack.append(value)


@opcode("STORE_SLICE")
def store_slice(frame: Frame, ins: Instruction) -> None:
    """stack: value, container, start, stop ->"""
    stack = frame.stack
    frame.world.setitem(stack[-3], slice(stack[-2], stack[-1]), stack[-4])
    del stack[-4:]


@opcode("GET_LEN")
def get_len(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.call(len, (frame.stack[-1],), {}))


# ---------------------------------------------------------------- text

def _plain_text(value: object, spec: str) -> str:
    try:
        return format(value, spec)
    except ValueError as error:
        raise ProgramError(error) from None


@opcode("FORMAT_VALUE")
def format_value(frame: Frame, ins: Instruction) -> None:
    stack, call = frame.stack, frame.interpreter.call
    has_spec = bool(ins.number & 4)
    spec = stack[-1] if has_spec else ""
    value = stack[-2] if has_spec else stack[-1]
    convert = (None, str, repr, ascii)[ins.number & 3]
    if convert is not None:
        value = call(convert, (value,), {})
    if type(value) is not str or spec != "":
        value = _plain_text(value, spec) if type(value) in _PLAIN and type(spec) is str else call(format, (value, spec), {})
    if has_spec:
        stack.pop()
    stack[-1] = value


# ---------------------------------------------------------------- imports

@opcode("IMPORT_NAME")
def import_name(frame: Frame, ins: Instruction) -> None:
    """stack: level, names -> module; a module that is not loaded yet is imported by Python itself"""
    stack = frame.stack
    level, names = stack[-2:]
    package = frame.globals.get("__package__") or frame.globals.get("__name__", "")
    full = importlib.util.resolve_name("." * level + ins.arg, package) if level else ins.arg
    is_package = hasattr(sys.modules.get(full), "__path__")   # only a package has modules that are still to be loaded
    wanted = [full] + [f"{full}.{n}" for n in names or () if is_package and n != "*" and not hasattr(sys.modules[full], n)]
    if any(name not in sys.modules for name in wanted):
        raise break_here("import", f"importing {full} for the first time runs its code",
                         "import it at the top of the file")
    module = __import__(ins.arg, frame.globals, None, names, level)
    stack.pop()
    stack[-1] = frame.world.read(module, Pinned(module))


@opcode("IMPORT_FROM")
def import_from(frame: Frame, ins: Instruction) -> None:
    module = frame.stack[-1]
    try:
        value = frame.world.getattr(module, ins.arg)
    except ProgramError as error:
        loaded = sys.modules.get(f"{getattr(module, '__name__', '')}.{ins.arg}")
        if not isinstance(error.value, AttributeError):
            raise
        if not isinstance(loaded, ModuleType):
            raise ProgramError(_no_such_name(module, ins.arg)) from None
        value = frame.world.read(loaded, Pinned(loaded))
    frame.stack.append(value)


def _no_such_name(module: object, name: str) -> ImportError:
    """The error that Python itself raises for `from module import name`."""
    namespace = {"__name__": "__main__", "__builtins__": {"__import__": lambda *_: module}}
    try:
        exec(f"from module import {name}", namespace)
    except ImportError as error:
        return error
    raise InternalError(f"{name} could be imported after all")
