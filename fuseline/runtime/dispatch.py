"""What a compiled function is when it is called: check the guards of the entries made so far, run one, or compile another.

A `Dispatcher` serves one piece of code: a function of the user or a resume code. Its `stub` is a generated function with the
signature of the original, so that CPython binds the arguments and complains as it would; it tries the entry used last, in two
calls. All else (other entries, compiling, falling back to eager) is in `Dispatcher.miss`.
A `Program` is what one `fuseline.compile` call shares between its dispatchers: options, records, the compiler.
"""
from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any

import torch

from fuseline import log
from fuseline.errors import GraphBreakError, InternalError, NotSupported, RecompileLimit
from fuseline.ir.entry import Assembled, CompiledEntry, drive
from fuseline.ir.fetch import fetch, parameter
from fuseline.ir.record import CompileRecord
from fuseline.ir.region import Guard, Item, Local, Source
from fuseline.options import Options
from fuseline.runtime import control
from fuseline.runtime.fast_check import FastCheck
from fuseline.runtime.guards import FullCheck, failures

DYNAMIC_ATTRIBUTE = "_fuseline_dynamic"                    # set of axes that `mark_dynamic` marked, on the tensor
_MISSING = object()


class Program:
    """What the dispatchers of one `compile` call share.

    compile_frame  (start, options, dynamic, program, recompile reason) -> CompiledEntry; raises NotSupported for a frame
                   that must run eagerly
    make_start     the class of `start`: (code, globals, builtins, closure, arguments, function, name) by keyword
    resumer        makes the codes that go on after graph breaks, and remembers them
    """

    def __init__(self, options: Options, compile_frame: Callable[..., CompiledEntry], make_start: Callable[..., Any]) -> None:
        self.options, self.compile_frame, self.make_start = options, compile_frame, make_start
        self.resumer: Any = None
        self.records: list[CompileRecord] = []
        self.dispatchers: list[weakref.ref[Dispatcher]] = []

    def record(self, record: CompileRecord) -> None:
        self.records.append(record)
        control.announce(record)

    def resume_dispatcher(self, code: CodeType, namespace: dict) -> Callable[..., Any]:
        """(cells, *arguments) -> result or Continue, for a resume code: what `capture.resume.Resumer` wraps codes with."""
        return Dispatcher(self, code, namespace).resume_stub()


class Entry:
    """A compiled region in a dispatcher: `check(*values, C)` gives what `run` takes first, or None."""

    __slots__ = ("compiled", "full", "check", "run", "fast")

    def __init__(self, compiled: CompiledEntry, names: Sequence[str], freevars: Sequence[str], drives: bool) -> None:
        assembled: Assembled = compiled.run
        self.compiled = compiled
        self.full = FullCheck(compiled.guards, names, freevars, assembled.prefetch)
        self.check: Callable[..., tuple | None] = self.full.best()
        self.fast = FastCheck(compiled.guards, names, freevars, assembled.prefetch, self.full)
        self.run = _driven(assembled.function) if drives and assembled.continues else assembled.function


def _driven(function: Callable) -> Callable:
    def run(*values: Any) -> Any:
        return drive(function(*values))

    return run


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _is_our_bug(error: BaseException) -> bool:
    """Whether an exception from a compiled graph comes from a mistake in our Python code rather than from an operator."""
    if isinstance(error, InternalError):
        return True
    if not isinstance(error, (TypeError, AttributeError, NameError, AssertionError, KeyError)):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_filename.startswith(_PACKAGE)


def _reported(error: BaseException) -> bool:
    """Never refuses, in users' hands; but a mistake of ours is said, once."""
    if _is_our_bug(error):
        reason = f"{type(error).__name__}: {error}"
        log.warn_once(f"graph {reason}", f"a compiled graph failed and Python runs the call instead; please report it: {reason}")
    return False


def _never(*values: Any) -> None:
    """The check of a dispatcher without entries."""


class Dispatcher:
    """The entries of one piece of code. Thread-safe: compiling holds a lock; running does not."""

    def __init__(self, program: Program, code: CodeType, namespace: dict, function: FunctionType | None = None,
                 name: str = "") -> None:
        self.program, self.code, self.namespace, self.function = program, code, namespace, function
        self.name = name or code.co_qualname
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
        self.names: tuple[str, ...] = code.co_varnames[:count]
        self.is_resume = function is None
        self.entries: list[Entry] = []
        self.dynamic: frozenset[tuple[Source, int | None]] = frozenset()
        self.recompile_reasons: list[str] = []
        self.eager_reason = ""
        self._lock = threading.RLock()
        self._stub_namespace: dict[str, Any] = {}
        self._head_name = "head"
        self._eager = self._make_eager()
        program.dispatchers.append(weakref.ref(self))
        control.forget_on_reset(self)

    # -- generated parts ------------------------------------------------------------------------------------
    def _make_eager(self) -> Callable[..., Any]:
        """(*bound locals, C) -> what the original gives."""
        if self.function is None:
            code, namespace = self.code, self.namespace

            def run_resume_code(*values: Any) -> Any:
                return FunctionType(code, namespace, code.co_name, None, values[-1] or None)(*values[:-1])

            return run_resume_code
        parameters = ", ".join([*map(parameter, self.names), "C"])
        namespace = {"original": self.function}
        exec(f"def eager({parameters}): return original({', '.join(self._call_arguments())})", namespace)
        return namespace["eager"]

    def _call_arguments(self) -> list[str]:
        code = self.code
        positional, keyword_only = code.co_argcount, code.co_kwonlyargcount
        arguments = [parameter(n) for n in self.names[:positional]]
        rest = positional + keyword_only
        if code.co_flags & 0x04:
            arguments.append(f"*{parameter(self.names[rest])}")
            rest += 1
        arguments += [f"{n}={parameter(n)}" for n in self.names[positional:positional + keyword_only]]
        if code.co_flags & 0x08:
            arguments.append(f"**{parameter(self.names[rest])}")
        return arguments

    def resume_stub(self) -> Callable[..., Any]:
        """The callable (cells, *arguments) of a resume code."""
        parameters = [parameter(n) for n in self.names]
        values = ", ".join([*parameters, "C"])
        head = ", ".join(["C", *parameters])
        return self._finish_stub(head, [], values, ())

    def stub(self) -> FunctionType:
        """A function like the original that dispatches. Defaults are looked up in the original on each call."""
        function = self.function
        if function is None:
            raise InternalError("a resume code has no stub with a signature")
        code = self.code
        positional, keyword_only, defaults = code.co_argcount, code.co_kwonlyargcount, len(function.__defaults__ or ())
        head, lines = [], []
        for i, name in enumerate(self.names[:positional]):
            optional = i >= positional - defaults
            head.append(f"{name}=$missing" if optional else name)
            if optional:
                lines.append(f"if {name} is $missing: {name} = $default($original, {name!r}, {i - positional})")
            if code.co_posonlyargcount == i + 1:
                head.append("/")
        rest = positional + keyword_only
        if code.co_flags & 0x04:
            head.append(f"*{self.names[rest]}")
            rest += 1
        elif keyword_only:
            head.append("*")
        for name in self.names[positional:positional + keyword_only]:
            optional = name in (function.__kwdefaults__ or {})
            head.append(f"{name}=$missing" if optional else name)
            if optional:
                lines.append(f"if {name} is $missing: {name} = $keyword_default($original, {name!r})")
        if code.co_flags & 0x08:
            head.append(f"**{self.names[rest]}")
        return self._finish_stub(", ".join(head), lines, ", ".join([*self.names, "$cells"]), self.names)

    def _finish_stub(self, head: str, lines: Sequence[str], values: str, taken: Sequence[str]) -> FunctionType:
        """The stub's code; `$name` in the text is one of our names, under a prefix that no parameter has."""
        prefix = "_fl_"
        while any(name.startswith(prefix) for name in taken):
            prefix += "_"
        body = [*lines, f"if $switch.off and $is_off(): return $eager({values})", "$check, $run = $head", f"$p = $check({values})",
                f"if $p is not None: return $run($p, {values})", f"return $miss({values})"]
        source = f"def $stub({head}):\n" + "".join(f"    {line}\n" for line in body)
        ours = {"switch": control.switch, "is_off": control.is_off, "eager": self._eager, "miss": self.miss, "missing": _MISSING,
                "original": self.function, "default": _default, "keyword_default": _keyword_default,
                "cells": (self.function.__closure__ or ()) if self.function is not None else ()}
        self._stub_namespace = {prefix + name: value for name, value in ours.items()}
        self._head_name = prefix + "head"
        self._set_head(_never, _never)
        exec(compile(source.replace("$", prefix), f"<fuseline dispatch of {self.name}>", "exec"), self._stub_namespace)
        return self._stub_namespace[prefix + "stub"]

    def _set_head(self, check: Callable, run: Callable) -> None:
        """What the stub tries first: one tuple, so that another thread never sees the check of one entry and the run of another."""
        self._stub_namespace[self._head_name] = (check, run)

    # -- running --------------------------------------------------------------------------------------------
    def miss(self, *values: Any) -> Any:
        """The entry used last does not fit: try the others, then compile, or run eagerly."""
        found = self._find(values)
        if found is None and self.eager_reason:
            return self._eager(*values)
        if found is None:
            with self._lock:
                found = self._find(values)                # another thread may have compiled it meanwhile
                if found is None and not self.eager_reason:
                    found = self._compile(values)
        if found is None:
            return self._eager(*values)
        prefetched, entry = found
        return entry.run(prefetched, *values)

    def _find(self, values: Sequence[Any]) -> tuple[tuple, Entry] | None:
        for entry in tuple(self.entries):
            prefetched = entry.check(*values)
            if prefetched is not None:
                self._to_front(entry, values)
                return prefetched, entry
        return None

    def _to_front(self, entry: Entry, values: Sequence[Any]) -> None:
        """Make an entry the one that is tried first, with its cheap check if it can have one."""
        with self._lock:
            if entry in self.entries:
                self.entries.remove(entry)
                self.entries.insert(0, entry)
            entry.check = entry.fast.prepare(values) or entry.full.best()
            self._set_head(entry.check, entry.run)

    def forget(self) -> None:
        """Drop all entries and what was learned about sizes."""
        with self._lock:
            self.entries.clear()
            self.dynamic, self.eager_reason = frozenset(), ""
            self.recompile_reasons.clear()
            self._set_head(_never, _never)

    # -- compiling ------------------------------------------------------------------------------------------
    def _compile(self, values: Sequence[Any]) -> tuple[tuple, Entry] | None:
        """Compile for these arguments; None where the frame runs eagerly, with `eager_reason` set."""
        options = self.program.options
        if control.is_strict() and not options.fullgraph:
            options = replace(options, fullgraph=True)
        arguments = dict(zip(self.names, values))
        cells = dict(zip(self.code.co_freevars, values[-1]))
        reason = self._reason(arguments, cells)
        if len(self.entries) >= options.recompile_limit:
            self._limit_reached(options, reason)
            return None
        self._widen(arguments, cells, options)
        start = self.program.make_start(code=self.code, globals=self.namespace, builtins=self.namespace.get("__builtins__"),
                                        closure=values[-1] or None, arguments=arguments, function=self.function, name=self.name)
        try:
            with control.capturing():
                compiled = self.program.compile_frame(start, options, self.dynamic, self.program, reason)
                entry = Entry(compiled, self.names, self.code.co_freevars, drives=not self.is_resume)
            recovery = compiled.run.recovery
            if recovery is not None:
                recovery.eager, recovery.refused = self._eager, _is_our_bug if options.strict else _reported
        except NotSupported as refusal:
            if options.fullgraph:
                if isinstance(refusal, GraphBreakError):
                    raise
                raise GraphBreakError(getattr(refusal, "reason", None), refusal.what, at=refusal.at, hint=refusal.hint) from refusal
            self._run_eagerly(str(refusal), reason)
            return None
        except Exception as error:
            if options.strict:
                raise
            log.warn_once(f"internal {self.name} {type(error).__name__}",
                          f"{self.name} runs eagerly because of an error in fuseline ({type(error).__name__}: {error}); "
                          "please report it. options={'strict': True} raises it.")
            log.logger.debug("traceback of the above", exc_info=error)
            self._run_eagerly(f"internal error: {type(error).__name__}: {error}", reason)
            return None
        if compiled.record is not None:
            self.program.record(compiled.record)
        if reason:
            self.recompile_reasons.append(reason)
            log.emit("recompiles", lambda: f"{self.name}: recompiled because {reason}")
        log.emit("guards", lambda: f"{self.name}: {len(compiled.guards)} guards")
        prefetched = entry.check(*values)
        if prefetched is None:
            failed = failures(compiled.guards, arguments, cells)
            message = f"the guards of {self.name} do not hold for the call that was compiled: {failed[0][1] if failed else 'unknown guard'}"
            if options.strict:
                raise InternalError(message)
            log.warn_once(f"guards {self.name}", message)
            self._run_eagerly(message, reason)
            return None
        self.entries.insert(0, entry)
        self._to_front(entry, values)
        return prefetched, entry

    def _run_eagerly(self, why: str, reason: str) -> None:
        self.eager_reason = why
        log.warn_once(f"eager {self.name} {self.code.co_filename}:{self.code.co_firstlineno}", f"{self.name} runs eagerly: {why}")
        self.program.record(CompileRecord(self.name, f"{self.code.co_filename}:{self.code.co_firstlineno}", fallback=why,
                                          recompile_reason=reason))

    def _limit_reached(self, options: Options, reason: str) -> None:
        message = (f"{self.name} was compiled {len(self.entries)} times, the limit (option recompile_limit); "
                   f"the last time because {reason}")
        if options.fullgraph:
            raise RecompileLimit(message, at=f"{self.code.co_filename}:{self.code.co_firstlineno}",
                                 hint="dynamic=True or fuseline.mark_dynamic makes a size symbolic from the start")
        self._run_eagerly(message, reason)

    # -- what became dynamic --------------------------------------------------------------------------------
    def _closest(self, arguments: Mapping[str, Any], cells: Mapping[str, Any]) -> list:
        """The failures of the entry that fails least: sizes and numbers are less than types, keys and lengths."""
        found = [failures(e.compiled.guards, arguments, cells) for e in self.entries]
        return min(found, key=lambda failed: (sum(map(_is_structural, failed)), len(failed))) if found else []

    def _reason(self, arguments: Mapping[str, Any], cells: Mapping[str, Any]) -> str:
        failed = self._closest(arguments, cells)
        return failed[0][1] if failed else ""

    def _widen(self, arguments: Mapping[str, Any], cells: Mapping[str, Any], options: Options) -> None:
        """Decide which sizes and numbers the next compilation takes as symbols: those that changed, and those marked."""
        found: set[tuple[Source, int | None]] = set(self.dynamic)
        for source, tensor in _tensors(arguments):
            marked = getattr(tensor, DYNAMIC_ATTRIBUTE, ())
            axes = range(tensor.dim()) if options.dynamic else marked
            found |= {(source, axis) for axis in axes if axis < tensor.dim() and tensor.shape[axis] > 1}
        if options.dynamic:
            found |= {(Local(n), None) for n, v in arguments.items() if type(v) is float or type(v) is int and v not in (0, 1)}
        if options.dynamic is not False:
            for guard, _ in self._closest(arguments, cells):
                try:
                    now = fetch(guard.source, arguments, cells) if guard.source is not None else None
                except Exception:                         # what cannot be read any more has no size
                    continue
                if guard.kind == "tensor" and isinstance(now, torch.Tensor) and len(guard.value.shape) == now.dim():
                    for axis, (was, size) in enumerate(zip(guard.value.shape, now.shape)):
                        if was is not None and was != size and was > 1 and size > 1:
                            found.add((guard.source, axis))
                elif guard.kind == "equals" and type(guard.value) is int and type(now) is int and now not in (0, 1) or (
                        guard.kind == "equals" and type(guard.value) is float and type(now) is float):
                    found.add((guard.source, None))
        self.dynamic = frozenset(found)


def _is_structural(failed: tuple[Guard, str]) -> bool:
    """Whether a failed guard says more than that a tensor or a number is another one."""
    guard = failed[0]
    return guard.kind != "tensor" and not (guard.kind == "equals" and type(guard.value) in (int, float))


def _default(function: FunctionType, name: str, index: int) -> Any:
    """The default of a positional parameter now; complains as CPython does if it was taken away."""
    defaults = function.__defaults__ or ()
    if -index > len(defaults):
        raise TypeError(f"{function.__qualname__}() missing 1 required positional argument: {name!r}")
    return defaults[index]


def _keyword_default(function: FunctionType, name: str) -> Any:
    defaults = function.__kwdefaults__ or {}
    if name not in defaults:
        raise TypeError(f"{function.__qualname__}() missing 1 required keyword-only argument: {name!r}")
    return defaults[name]


def _tensors(arguments: Mapping[str, Any]) -> list[tuple[Source, torch.Tensor]]:
    """The tensors among the arguments and in the containers that they are, with their sources."""
    found: list[tuple[Source, torch.Tensor]] = []

    def visit(source: Source, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found.append((source, value))
        elif depth < 4 and type(value) in (tuple, list):
            for i, v in enumerate(value):
                visit(Item(source, i), v, depth + 1)
        elif depth < 4 and type(value) is dict:
            for k, v in value.items():
                visit(Item(source, k), v, depth + 1)

    for name, value in arguments.items():
        visit(Local(name), value, 0)
    return found
