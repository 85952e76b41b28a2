"""A World without tensors, sources or guards: plain Python semantics, to test the interpreter's instructions by themselves."""
from __future__ import annotations

import functools
import operator
from types import FunctionType, MethodType, SimpleNamespace

from fuseline.capture.errors import Break, ProgramError, RegionEnd, RestartCapture
from fuseline.capture.frame import Frame
from fuseline.capture.instructions import prepare
from fuseline.capture.interpret import Interpreter
from fuseline.capture.process_state import ProcessState
from fuseline.capture.tracebacks import Tracebacks
from fuseline.options import Options

TAKES_CALLBACK = (map, filter, sorted, max, min, functools.reduce)


def guarded(function, *args, **kwargs):
    """Call natively; what it raises is the program's exception."""
    try:
        return function(*args, **kwargs)
    except (ProgramError, Break, RestartCapture, RegionEnd):
        raise
    except BaseException as error:
        raise ProgramError(error) from None


class PlainWorld:
    native = staticmethod(guarded)

    def __init__(self, options, dynamic, where):
        self.where = where
        self.tracebacks, self.made_classes = Tracebacks(), {}

    def source(self, value):
        return None

    def adopt_cell(self, cell, source):
        pass

    def is_leaf(self, function):
        return False

    def read(self, value, source):
        return value

    def load_global(self, namespace, name):
        import builtins
        if name in namespace:
            return namespace[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise ProgramError(NameError(f"name '{name}' is not defined"))

    def store_global(self, namespace, name, value):
        namespace[name] = value

    def delete_global(self, namespace, name):
        del namespace[name]

    def load_cell(self, cell):
        return cell.cell_contents

    def store_cell(self, cell, value):
        cell.cell_contents = value

    def delete_cell(self, cell):
        del cell.cell_contents

    def getattr(self, value, name):
        return guarded(getattr, value, name)

    def setattr(self, value, name, new):
        guarded(setattr, value, name, new)

    def delattr(self, value, name):
        guarded(delattr, value, name)

    def getitem(self, value, key):
        return guarded(operator.getitem, value, key)

    def setitem(self, value, key, new):
        guarded(operator.setitem, value, key, new)

    def delitem(self, value, key):
        guarded(operator.delitem, value, key)

    def contains(self, value, key):
        return guarded(operator.contains, value, key)

    def binary(self, op, a, b):
        return guarded(op, a, b)

    inplace = compare = binary

    def unary(self, op, a):
        return guarded(op, a)

    def truth(self, value):
        return guarded(bool, value)

    def iterate(self, value):
        return guarded(iter, value)

    def type_of(self, value):
        return type(value)

    def call(self, function, args, kwargs):
        if function in TAKES_CALLBACK:
            args = [self._callback(a) for a in args]
            kwargs = {k: self._callback(v) for k, v in kwargs.items()}
        if isinstance(function, type) and isinstance(getattr(function, "__init__", None), FunctionType) \
                and not issubclass(function, BaseException):
            made = guarded(function.__new__, function)
            self.interpreter_call(function.__init__, (made, *args), kwargs)
            return made
        return guarded(function, *args, **kwargs)

    def _callback(self, value):
        if isinstance(value, (FunctionType, MethodType)):
            return lambda *args, **kwargs: self.interpreter_call(value, args, kwargs)
        return value


def run(function, *args, **kwargs):
    """Interpret function(*args, **kwargs) with plain values: what it returns, or the exception that it raises."""
    start = SimpleNamespace(code=function.__code__)
    interpreter = Interpreter(start, Options(), frozenset(), {}, ProcessState.now(), PlainWorld)
    root = Frame(interpreter, prepare(compile("0", "<root>", "eval")), {}, {})
    interpreter.frames.append(root)
    return interpreter.call(function, args, kwargs)
