"""What a compiled region is to the dispatcher, and the request by which compiled code asks it to go on elsewhere."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuseline.ir.record import CompileRecord
from fuseline.ir.region import Guard, Source


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The code of an entry.

    function   (prefetched, *bound locals in co_varnames order, closure cells) -> the result, or a Continue
    prefetch   the sources whose objects `function` takes as its first argument, a tuple; the dispatcher fetches them
               after the guards passed and may keep them as long as nothing on the way to them has changed
    continues  whether `function` may return a Continue
    """

    function: Callable
    prefetch: tuple[Source, ...] = ()
    continues: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CompiledEntry:
    """One compiled region of a piece of code: valid while the guards hold. `record` says what was compiled."""

    guards: tuple[Guard, ...]
    run: Assembled
    record: CompileRecord | None = None


class Continue:
    """Returned by code that a graph break ended: go on by calling `target(cells, *arguments)`.

    A loop (`drive`) makes the call, so that a break in a loop's body does not nest deeper with each iteration.
    """

    __slots__ = ("target", "arguments")

    def __init__(self, target: Callable[..., Any], arguments: tuple) -> None:
        self.target, self.arguments = target, arguments


def drive(result: Any) -> Any:
    """Make the calls that Continues ask for until there is a value. Exceptions pass through."""
    while type(result) is Continue:
        target, arguments = result.target, result.arguments
        result = None
        result = target(*arguments)
    return result
