"""Runs programs through capture, assembly and resume functions with the graphs executed eagerly: no compiler, no dispatcher.

`Simulated(fn)` is called like fn. Each piece of code keeps the entries made for it; an entry is used if its guards hold, which
is checked one by one, slowly. `regions` are all regions captured so far.
"""
from __future__ import annotations

import inspect
import types

import torch

from fuseline.capture.assemble import assemble, parameter_names
from fuseline.capture.errors import CannotCapture
from fuseline.capture.frame import FrameStart
from fuseline.capture.interpret import interpret
from fuseline.capture.resume import Resumer
from fuseline.errors import NotSupported
from fuseline.ir.entry import drive
from fuseline.ir.fetch import fetch
from fuseline.ir.region import Broke
from fuseline.options import Options
from fuseline.runtime.guards import failures


class Simulated:
    def __init__(self, fn, options=None, dynamic=frozenset()):
        self.fn, self.options, self.dynamic = fn, options or Options(), dynamic
        self.regions, self.refusals = [], []
        self.entries = {}
        self.resumer = Resumer(self.wrap)
        self.function, self.receiver = self._target(fn)
        self.__name__ = getattr(fn, "__name__", "simulated")

    @staticmethod
    def _target(fn):
        if isinstance(fn, types.FunctionType):
            return fn, ()
        if isinstance(fn, types.MethodType):
            return fn.__func__, (fn.__self__,)
        return type(fn).__call__, (fn,)

    def __getattr__(self, name):
        return getattr(self.__dict__["fn"], name)

    def __call__(self, *args, **kwargs):
        function = self.function
        if function.__code__.co_flags & (0x20 | 0x80):
            return function(*self.receiver, *args, **kwargs)
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            bound = signature.bind(*self.receiver, *args, **kwargs)
        except TypeError:
            return function(*self.receiver, *args, **kwargs)
        bound.apply_defaults()
        return drive(self.run(function.__code__, function.__globals__, function.__closure__ or (), dict(bound.arguments), function))

    def wrap(self, code, namespace):
        def target(cells, *values):
            return self.run(code, namespace, cells, dict(zip(parameter_names(code), values)), None)
        return target

    def run(self, code, namespace, cells, arguments, function):
        by_name = dict(zip(code.co_freevars, cells))
        for guards, entry in self.entries.setdefault(code, []):
            if not failures(guards, arguments, by_name):
                return self.enter(entry, code, arguments, cells)
        try:
            start = FrameStart(code, namespace, None, tuple(cells), arguments, function, code.co_name)
            region = interpret(start, self.options, self.dynamic)
            if self.options.fullgraph and isinstance(region.end, Broke):
                raise AssertionError(f"broke: {region.end.reason}")
            entry = assemble(region, self.graph(region), self.resumer.factory)
        except (CannotCapture, NotSupported) as refusal:
            self.refusals.append(refusal)
            if self.options.fullgraph:
                raise AssertionError(f"refused: {refusal}") from refusal
            return types.FunctionType(code, namespace, code.co_name, None, tuple(cells) or None)(
                **arguments) if function is None else self.eagerly(function, arguments)
        wrong = failures(region.guards, arguments, by_name)
        if wrong:
            raise AssertionError(f"a guard fails right after capture: {wrong[0]}")
        self.regions.append(region)
        self.entries[code].append((region.guards, entry))
        return self.enter(entry, code, arguments, cells)

    @staticmethod
    def eagerly(function, arguments):
        code = function.__code__
        n = code.co_argcount
        positional = [arguments[name] for name in code.co_varnames[:n]]
        at = n + code.co_kwonlyargcount
        rest = arguments[code.co_varnames[at]] if code.co_flags & 4 else ()
        more = arguments[code.co_varnames[at + bool(code.co_flags & 4)]] if code.co_flags & 8 else {}
        return function(*positional, *rest, **{k: arguments[k] for k in code.co_varnames[n:at]}, **more)

    @staticmethod
    def graph(region):
        if region.graph is None:
            return None

        def compiled(*inputs):
            grad = torch.is_grad_enabled()
            try:
                return tuple(region.graph(*inputs))
            finally:
                torch.set_grad_enabled(grad)
        return compiled

    def enter(self, entry, code, arguments, cells):
        by_name = dict(zip(code.co_freevars, cells))
        prefetched = tuple(fetch(s, arguments, by_name) for s in entry.prefetch)
        return entry.function(prefetched, *(arguments[n] for n in parameter_names(code)), tuple(cells))


def simulate(fn, **options):
    """As fuseline.compile: only fullgraph and dynamic are taken."""
    return Simulated(fn, Options(fullgraph=options.get("fullgraph", False), dynamic=options.get("dynamic")))
