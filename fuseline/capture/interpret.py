"""The symbolic interpreter: runs a piece of the program once, on real Python values, and describes it as a Region.

The values are ordinary objects; what they stand for is known to the `World` (tensors are fakes that stand for nodes of
the graph, objects from outside have a source). A region ends where the program returns, raises, or comes to an
instruction that only Python can execute. Such a break suspends all active frames. Where a frame cannot be suspended (a
generator, a callback of native code, an `__init__`), the region is interpreted anew up to the call that led there, which
then breaks as a whole: interpretation is deterministic, so an instruction is named by its number since the start.
"""
from __future__ import annotations

import builtins
import functools
import sys
import types
from dataclasses import replace
from typing import Any

from fuseline import torch_internals
from fuseline.capture import checkpointing, copying, opcodes  # noqa: F401  they register what calls and instructions do
from fuseline.capture.calls import bind, check_inlined
from fuseline.capture.class_entries import ClassEntries
from fuseline.capture.containers import plain_number
from fuseline.capture.errors import Break, CannotCapture, ProgramError, RegionEnd, RestartCapture, break_here
from fuseline.capture.frame import DONE, NULL, Frame, FrameStart, Unread
from fuseline.capture.generators import Generator
from fuseline.capture.instructions import Code, prepare
from fuseline.capture.liveness import live_locals
from fuseline.capture.process_state import ProcessState
from fuseline.capture.provenance import CONSTANTS, is_python
from fuseline.capture.shared_memory import RestartShared, Span
from fuseline.capture.special import SPECIAL
from fuseline.capture.transforms import is_transform
from fuseline.capture.world import World
from fuseline.ir.region import Attr, Broke, Cell, CellOf, FrameState, FromSource, GraphBreak, Local, Pinned, Raised, Region, Returned
from fuseline.options import Options

MAX_STEPS = 2_000_000          # instructions in one region; a loop that long is no graph
MAX_DEPTH = 200                # frames inlined into each other
MAX_RESTARTS = 60
ORIGINAL = "_fuseline_original"
_CONSTANT_MARK = "_dynamo_marked_constant"      # set by torch.compiler.assume_constant_result


def interpret(start: FrameStart, options: Options, dynamic: frozenset) -> Region:
    """The Region that begins at `start`. Raises CannotCapture, with the reason, if the frame must run eagerly.

    dynamic   (source, axis) of tensor axes and (source, None) of numbers that are symbolic
    Process state that the program changes (grad mode, autocast) is put back before this returns.
    """
    if start.code.co_flags & (0x20 | 0x80 | 0x200):
        raise CannotCapture(GraphBreak("generator-function", f"{start.code.co_filename}:{start.code.co_firstlineno}",
                                       "a generator or coroutine function is not compiled itself",
                                       "compile the functions that it calls"))
    stops: dict[int, GraphBreak] = {}
    spans: tuple[Span, ...] = ()
    recursion = sys.getrecursionlimit()
    sys.setrecursionlimit(max(recursion, 20_000))
    try:
        for _ in range(MAX_RESTARTS):
            state = ProcessState.now()
            try:
                attempt = Interpreter(start, options, dynamic, stops, state)
                attempt.world.spans = spans
                with torch_internals.quiet_failures():
                    return attempt.run_region()
            except RestartShared as again:
                spans = (*spans, *again.spans)
            except RestartCapture as again:
                if stops and again.step >= min(stops):
                    raise CannotCapture(again.reason) from None
                stops = {again.step: again.reason}
            finally:
                state.restore()
        raise CannotCapture(next(iter(stops.values())))
    finally:
        sys.setrecursionlimit(recursion)


class Interpreter:
    """The state of one interpretation of a region.

    frames    active frames, outermost first       handled   the exception that is being handled, as sys.exception() tells
    raised    id of an exception -> the step at which the region can end before it was raised, and where that was
    dropped   generators that the program let go of inside a try or with: they are closed before the next instruction
    steps     instructions begun so far            limit     the number of the next instruction that needs attention
    touched   the last instruction that changed something before its end: no break can be there, only before it
    """

    def __init__(self, start: FrameStart, options: Options, dynamic: frozenset, stops: dict[int, GraphBreak],
                 state: ProcessState, make_world: Any = World) -> None:
        self.start, self.options, self.stops, self.state = start, options, stops, state
        self.frames: list[Frame] = []
        self.handled: BaseException | None = None
        self.raised: dict[int, tuple[int, str, BaseException]] = {}      # holds the exception, so that its id stays its own
        self.dropped: list[Generator] = []
        self.over = False
        self.steps = self.touched = 0
        self.limit = min([*stops, MAX_STEPS])
        self.world = make_world(options, dynamic, self.where)
        self.world.interpreter_call = self.call
        self.world.break_position = self.break_position
        self.world.touch = self.touch

    # -- the region -------------------------------------------------------------------------------------------
    def run_region(self) -> Region:
        start, world = self.start, self.world
        code = prepare(start.code)
        names: dict[str, Any] = {name: Unread(value, Local(name)) for name, value in start.arguments.items()}
        for name, cell in zip(start.code.co_freevars, start.closure or ()):
            names[name] = cell
            world.adopt_cell(cell, Cell(name))
        frame = Frame(self, code, names, start.globals, start.function)
        frame.direct = True
        end: Returned | Raised | Broke
        try:
            value = self.run(frame)
            del frame
            self.close_dropped()
            end = Returned(self.recipe(value))
        except ProgramError as error:
            if not self.options.fullgraph:
                # Python itself executes the instruction that raises: the traceback is the real one.
                raise RestartCapture(error.step, GraphBreak(
                    "exception", error.where, f"{type(error.value).__name__} is raised and leaves the function",
                    "none needed, unless this is the usual case")) from None
            end = Raised(self.recipe(error.value), error.where)
        except RegionEnd as ended:
            end = ended.end
        finally:
            self.over = True
        graph, inputs, guards, effects = world.finish(())
        effects = (*effects, *self.state.effects())
        return Region(start.code, graph, tuple(inputs), tuple(guards), tuple(effects), end, start.name or start.code.co_qualname,
                      getattr(world, "shape_env", None), {"steps": self.steps}, self.state.restore)

    def recipe(self, value: Any) -> Any:
        """The recipe of a value that survives the region, where failing means that the frame runs eagerly."""
        try:
            return self.world.recipe(value)
        except Break as stop:
            raise CannotCapture(self.complete(stop.reason)) from None

    # -- running frames ---------------------------------------------------------------------------------------
    def run(self, frame: Frame) -> Any:
        """Interpret a new frame to its return and give the value it returns."""
        self.frames.append(frame)
        try:
            return self.loop(frame)
        finally:
            self.frames.pop()

    def loop(self, frame: Frame) -> Any:
        """Interpret the innermost frame: its return value, or YIELDED when it yields `frame.result`."""
        instructions = frame.instructions
        while True:
            try:
                while True:
                    index = frame.pc
                    ins = instructions[index]
                    frame.at = index
                    frame.pc = index + 1
                    self.steps = frame.step = step = self.steps + 1
                    if step >= self.limit:
                        self.reached(step)
                    signal = ins.run(frame, ins)
                    if signal is not None:
                        return frame.result if signal is DONE else signal
            except ProgramError as error:
                self.unwind(frame, error)
            except Break as stop:
                self.end_at(stop)

    def reached(self, step: int) -> None:
        """Called where an instruction needs attention: the region must end here, or it is too long."""
        reason = self.stops.get(step)
        if reason is not None:
            raise Break(reason)
        self.limit = min([*self.stops, MAX_STEPS])
        if self.dropped:
            self.close_dropped()
        if step < MAX_STEPS:
            return
        raise CannotCapture(self.complete(GraphBreak("too-long", "", f"more than {MAX_STEPS} instructions in one region",
                                                     "a loop of this length is better compiled by its body")))

    def let_go(self, generator: Generator) -> None:
        """The program dropped its last reference to a generator that has cleaning up to do."""
        if not self.over:
            self.dropped.append(generator)
            self.limit = 0

    def close_dropped(self) -> None:
        while self.dropped:
            try:
                self.dropped.pop().close()
            except ProgramError:                           # CPython reports it as unraisable and goes on
                continue

    def unwind(self, frame: Frame, error: ProgramError) -> None:
        """Send an exception to the frame's handler around the current instruction; raises it again if there is none."""
        value, ins = error.value, frame.instructions[frame.at]
        if not error.step:
            error.step, error.where = self.break_position(), str(frame)
            if ins.op != "RERAISE":
                self._add_context(value)
            else:                                          # it was raised before it was caught
                error.step, error.where = self.raised.get(id(value), (error.step, error.where, value))[:2]
            self.raised[id(value)] = (error.step, error.where, value)
            self.world.tracebacks.raised(value, error.step)
        if ins.catch is None:
            raise error
        index, depth, with_offset = ins.catch
        del frame.stack[depth:]
        if with_offset:
            frame.stack.append(ins.offset // 2)
        frame.stack.append(value)
        frame.pc = index
        frame.raised_at = frame.step
        frame.pending = 0

    def _add_context(self, value: BaseException) -> None:
        handled = self.handled
        if self.world.source(value) is not None:
            return
        value.__traceback__ = None
        if handled is None or handled is value:
            return
        link = handled
        while link.__context__ is not None:                # no cycles, as in CPython
            if link.__context__ is value:
                link.__context__ = None
                break
            link = link.__context__
        value.__context__ = handled

    # -- calls ------------------------------------------------------------------------------------------------
    def call(self, function: Any, args: tuple, kwargs: dict, direct: bool = False) -> Any:
        """Call anything. `direct`: the caller's instruction needs nothing but the result (see Frame.direct)."""
        world = self.world
        while True:
            kind = type(function)
            if kind is types.FunctionType:
                special = SPECIAL.get(function)
                if special is not None:
                    return special(self, args, kwargs)
                if world.is_leaf(function):
                    return world.call(function, args, kwargs)
                if ORIGINAL in function.__dict__:          # a compiled function: what it was made from is inlined
                    source, function = world.source(function), function.__dict__[ORIGINAL]
                    if source is not None:
                        function = world.read(function, Attr(source, ORIGINAL))
                    continue
                if _CONSTANT_MARK in function.__dict__:
                    return self.known_result(function, args, kwargs)
                if function.__module__ == "fuseline.api" and function.__name__ in ("is_compiling", "is_enabled"):
                    return True
                return self.inline(function, args, kwargs, direct and not is_transform(function))
            if kind is types.MethodType:
                receiver = function.__self__
                if type(receiver) in (Generator, ClassEntries):
                    return self._generator_method(function, args, kwargs)
                if world.source(function) is not None:
                    source = world.source(function)
                    receiver = world.read(receiver, Attr(source, "__self__"))
                    function = world.read(function.__func__, Attr(source, "__func__"))
                else:
                    function = function.__func__
                args = (receiver, *args)
                continue
            if kind is functools.partial:
                function, args, kwargs = (world.getattr(function, "func"),
                                          (*world.iterate(world.getattr(function, "args")), *args),
                                          {**self._mapping(world.getattr(function, "keywords")), **kwargs})
                continue
            if isinstance(function, type) or kind is types.BuiltinFunctionType:
                try:
                    special = SPECIAL.get(function)
                except TypeError:                          # a class whose metaclass makes it unhashable
                    special = None
                return special(self, args, kwargs) if special is not None else world.call(function, args, kwargs)
            method = _python_call(kind)
            if method is None or issubclass(kind, (torch_internals.Operator, torch_internals.OperatorPacket)):
                return world.call(function, args, kwargs)
            if "__call__" in getattr(function, "__dict__", ()):
                # Special methods are looked up on the type, past the instance's own entry.
                source = world.source(world.type_of(function))
                function, args = world.read(method, Attr(source, "__call__")) if source else method, (function, *args)
            else:
                function = world.getattr(function, "__call__")

    def known_result(self, function: types.FunctionType, args: tuple, kwargs: dict) -> Any:
        """What a function gives that its author marked as having one result for given arguments: Python computes it, now."""
        args, kwargs = tuple(map(plain_number, args)), {key: plain_number(value) for key, value in kwargs.items()}
        if not all(type(value) in CONSTANTS for value in (*args, *kwargs.values())):
            return self.inline(function, args, kwargs)
        value = self.world.native(function, *args, **kwargs)
        return self.world.read(value, Pinned(value))

    def _mapping(self, value: dict) -> dict:
        return {key: self.world.getitem(value, key) for key in self.world.iterate(value)}

    def _generator_method(self, method: types.MethodType, args: tuple, kwargs: dict) -> Any:
        try:
            return method(*args, **kwargs)
        except StopIteration as stop:
            raise ProgramError(stop) from None

    def inline(self, function: types.FunctionType, args: tuple, kwargs: dict, direct: bool = False) -> Any:
        """Interpret a Python function: its result, or a Generator."""
        check_inlined(function)
        try:
            code = prepare(function.__code__)
        except CannotCapture as error:
            raise Break(error.reason) from None
        if code.is_async:
            raise break_here("async", f"{function.__qualname__} is a coroutine function",
                             "compile the synchronous function that does the tensor work")
        if len(self.frames) >= MAX_DEPTH:
            raise break_here("deep-recursion", f"more than {MAX_DEPTH} calls are nested", "turn the recursion into a loop")
        source = self.world.source(function)
        if source is not None and code.user_file:
            self.world.guard(Attr(source, "__code__"), "is", function.__code__)
        frame = self.new_frame(function, code, bind(self, function, code, args, kwargs))
        if code.is_generator:
            return Generator(self, frame, function, args, kwargs)
        frame.direct = direct
        return self.run(frame)

    def new_frame(self, function: types.FunctionType, code: Code, names: dict[str, Any]) -> Frame:
        closure = function.__closure__
        if closure:
            source = self.world.source(function)
            for index, (name, cell) in enumerate(zip(function.__code__.co_freevars, closure)):
                names[name] = cell
                if source is not None:
                    self.world.adopt_cell(cell, CellOf(source, index))
        return Frame(self, code, names, function.__globals__, function)

    # -- ending at a break ------------------------------------------------------------------------------------
    def suspendable(self) -> tuple[list[Frame], int | None]:
        """The active frames that a break can suspend, outermost first, and the step to restart from if it is not here.

        A frame is suspended at its call of the next one if the call's result is all it needs; where it handles an
        exception, the region must end before the instruction that raised it.
        """
        chain: list[Frame] = []
        for frame in self.frames:
            if chain and not frame.direct:
                return chain, chain[-1].step
            chain.append(frame)
            if frame.handling:
                return chain, frame.handling[0]
        return chain, None

    def break_position(self) -> int:
        """The step at which the region can end before what the program is doing now."""
        chain, step = self.suspendable()
        return chain[-1].step if step is None else step

    def touch(self) -> None:
        """The current instruction changes something (advances an iterator, writes): it cannot be executed a second time."""
        self.touched = self.steps

    def end_at(self, stop: Break) -> None:
        """End the region at the current instruction, or begin anew to end it before the call that led here."""
        reason = self.complete(stop.reason)
        chain, step = self.suspendable()
        if step is None and self.touched >= chain[-1].step:
            step = chain[-1].step
        if step is not None:
            raise RestartCapture(step, reason)
        try:
            states = [self.suspend(frame, frame is chain[-1]) for frame in reversed(chain)]
        except (Break, CannotCapture) as failure:
            # Something that lives in the innermost frame cannot be rebuilt: leave the whole call to Python.
            if len(chain) > 1:
                raise RestartCapture(chain[-2].step, reason) from None
            raise CannotCapture(self.complete(failure.reason)) from None
        raise RegionEnd(Broke(states, reason))

    def suspend(self, frame: Frame, innermost: bool) -> FrameState:
        """The frame as data: at its current instruction, or after the call that it waits for."""
        world, code = self.world, frame.code
        ins = frame.instructions[frame.at]
        stack = frame.stack if innermost else frame.stack[:len(frame.stack) - frame.pending]
        if any(type(v) is Generator and v.begun and not v.closed and v.may_clean_up() for v in stack):
            # The caller of the code that goes on would hold it: leaving the loop would not close it at once.
            raise CannotCapture(self.complete(GraphBreak("generator", "", "a generator with a try or with is iterated over at a break",
                                                         "consume the generator before, or build a list instead")))
        live = live_locals(code, frame.at if innermost else frame.at + 1)
        if not innermost and ins.catch is not None and live is not None:
            live |= live_locals(code, ins.catch[0]) or frozenset()
        cell_names = frozenset((*code.code.co_cellvars, *code.code.co_freevars))
        names, cells = {}, {}
        for name, value in frame.locals.items():
            if type(value) is Unread:
                if live is None or name in live:
                    names[name] = FromSource(value.source)
            elif name in cell_names and isinstance(value, types.CellType):
                cells[name] = world.recipe(value)
            elif live is None or name in live:
                names[name] = world.recipe(value)
        offset = ins.offset if innermost else frame.instructions[frame.at + 1].offset
        return FrameState(code.code, offset, [None if v is NULL else world.recipe(v) for v in stack], names, cells, frame.globals,
                          ins.kwnames if innermost else (), frame.builtins)

    # -- where we are -----------------------------------------------------------------------------------------
    def where(self) -> str:
        """The user's current line: "file.py:12"."""
        for frame in reversed(self.frames):
            if frame.code.user_file:
                return frame.where()
        return self.frames[-1].where() if self.frames else ""

    def complete(self, reason: GraphBreak) -> GraphBreak:
        """The reason with the place and the call stack filled in."""
        if not self.frames or (reason.where and reason.stack):
            return reason
        shown = [f for f in self.frames if f.code.user_file] or self.frames
        return replace(reason, where=reason.where or str(shown[-1]), stack=reason.stack or tuple(map(str, shown)))


def _python_call(kind: type) -> types.FunctionType | None:
    """The class's `__call__` if it is a Python function, else None."""
    for base in kind.__mro__:
        method = base.__dict__.get("__call__")
        if method is not None:
            return method if isinstance(method, types.FunctionType) else None
    return None


def build_class(interpreter: Interpreter, args: tuple, kwargs: dict) -> type:
    """`class` statements: the body is interpreted, the class made by its metaclass."""
    body, name, *bases = args
    resolved = types.resolve_bases(tuple(bases))
    meta, namespace, keywords = types.prepare_class(name, resolved, kwargs)
    _check_made_by_type(name, meta, resolved)
    frame = interpreter.new_frame(body, prepare(body.__code__), {})
    frame.namespace = dict(namespace)
    interpreter.run(frame)
    return _make_class(interpreter, name, resolved, frame.namespace, keywords)


def type_(interpreter: Interpreter, args: tuple, kwargs: dict) -> type:
    """`type(value)`, and `type(name, bases, namespace)`."""
    world = interpreter.world
    if len(args) != 3:
        return world.call(type, args, kwargs)
    name, bases, entries = args[0], tuple(world.iterate(args[1])), args[2]
    if not isinstance(name, str) or not all(isinstance(base, type) for base in bases) or not isinstance(entries, dict):
        return world.native(type, *args, **kwargs)
    _check_made_by_type(name, types.prepare_class(name, bases)[0], bases)
    namespace = dict(world.contents(entries))
    namespace.setdefault("__module__", interpreter.frames[-1].globals.get("__name__"))
    return _make_class(interpreter, name, bases, namespace, kwargs)


def _check_made_by_type(name: str, meta: type, bases: tuple) -> None:
    if meta is not type or any(_customises(base) for base in bases):
        raise break_here("class-definition", f"the class {name} is made by code of its metaclass or base class",
                         "define the class outside the compiled function")


def _make_class(interpreter: Interpreter, name: str, bases: tuple, namespace: dict, keywords: dict) -> type:
    """The class, for this region alone: one that must outlive it is made by Python."""
    world = interpreter.world
    named = {key: value for key, value in namespace.items() if is_python(type(value), "__set_name__")}
    made = world.native(type, name, bases, {key: None if key in named else value for key, value in namespace.items()}, **keywords)
    world.made_classes[id(made)] = made, interpreter.break_position()
    for key, value in named.items():
        type.__setattr__(made, key, value)
    for key, value in named.items():
        interpreter.call(world.special_method(value, "__set_name__"), (made, key), {})
    return made


def _customises(base: type) -> bool:
    return any("__init_subclass__" in b.__dict__ for b in base.__mro__ if b is not object)


SPECIAL[builtins.__build_class__] = build_class
SPECIAL[type] = type_
