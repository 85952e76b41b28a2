"""The state of the process: whether compiled functions compile, what is being captured in this thread, observers."""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fuseline.ir.record import CompileRecord


class _Switch:
    """`off` is true while any thread has disabled compilation or captures: stubs look at it first, then at their thread."""

    __slots__ = ("off",)

    def __init__(self) -> None:
        self.off = 0


class _Thread(threading.local):
    disabled = 0
    capturing = 0


switch = _Switch()
_thread = _Thread()
_lock = threading.Lock()
_strict = False
_resettable: weakref.WeakSet[Any] = weakref.WeakSet()
_observers: list[Callable[[CompileRecord], None]] = []


def _change_off(by: int) -> None:
    with _lock:
        switch.off += by


@contextmanager
def disabled() -> Iterator[None]:
    """Run the block without compiled code, in this thread."""
    _thread.disabled += 1
    _change_off(1)
    try:
        yield
    finally:
        _thread.disabled -= 1
        _change_off(-1)


@contextmanager
def capturing() -> Iterator[None]:
    """While a region is captured in this thread, compiled functions that are reached behave like their originals."""
    _thread.capturing += 1
    _change_off(1)
    try:
        yield
    finally:
        _thread.capturing -= 1
        _change_off(-1)


def is_off() -> bool:
    """Whether compiled functions run their originals in this thread."""
    return bool(_thread.disabled or _thread.capturing)


def is_disabled() -> bool:
    return bool(_thread.disabled)


def is_capturing() -> bool:
    return bool(_thread.capturing)


def set_strict(value: bool) -> None:
    """Strict: a graph break is an error, in every compiled function, as under `fullgraph=True`. Turning it on compiles anew."""
    global _strict
    turned_on = bool(value) and not _strict
    _strict = bool(value)
    if turned_on:
        reset()


def is_strict() -> bool:
    return _strict


def forget_on_reset(dispatcher: Any) -> None:
    """Have `dispatcher.forget()` called by `reset`, as long as it lives."""
    with _lock:
        _resettable.add(dispatcher)


def reset() -> None:
    """Have all dispatchers drop what they compiled."""
    with _lock:
        dispatchers = list(_resettable)
    for dispatcher in dispatchers:
        dispatcher.forget()


@contextmanager
def observe(observer: Callable[[CompileRecord], None]) -> Iterator[None]:
    """Tell an observer of every region compiled (or refused) in the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def announce(record: CompileRecord) -> None:
    for observer in tuple(_observers):
        observer(record)
