"""What a compiled region is to the dispatcher, and the request by which compiled code asks it to go on elsewhere."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fuseline.ir.record import CompileRecord
from fuseline.ir.region import Guard, Source


class Recovery:
    """What an entry does when its graph raises: nothing that the program can see has happened yet, so Python itself runs the code
    from the entry on, and the program's effects, handlers and exception come out in their order.

    eager    (*bound locals, closure cells) -> result; the dispatcher sets it, None: the exception passes through
    restore  puts back the state of the process that the graph changes (grad mode), None: it changes none
    refused  (exception) -> whether it is raised nevertheless, because it shows a bug of ours
    """

    __slots__ = ("eager", "restore", "refused")

    def __init__(self, restore: Callable[[], None] | None = None) -> None:
        self.eager: Callable[..., Any] | None = None
        self.restore = restore
        self.refused: Callable[[BaseException], bool] | None = None

    def prepare(self, error: BaseException, versions: Sequence[int] | None, inputs: Sequence[Any]) -> bool:
        """Whether `eager` may run now. versions: of the inputs before the graph, where it writes to them; if it did, it is too late."""
        if self.restore is not None:
            self.restore()
        if self.eager is None or versions is not None and list(versions) != input_versions(inputs):
            return False
        return self.refused is None or not self.refused(error)


def input_versions(inputs: Sequence[Any]) -> list[int]:
    """The versions of tensors, by which a write shows; -1 for other inputs and for those of inference mode."""
    return [t._version if hasattr(t, "_version") and not t.is_inference() else -1 for t in inputs]


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """The code of an entry.

    function   (prefetched, *bound locals in co_varnames order, closure cells) -> the result, or a Continue
    prefetch   the sources whose objects `function` takes as its first argument, a tuple; the dispatcher fetches them
               after the guards passed and may keep them as long as nothing on the way to them has changed
    continues  whether `function` may return a Continue
    recovery   what happens when the graph raises; None where there is no graph
    """

    function: Callable
    prefetch: tuple[Source, ...] = ()
    continues: bool = False
    recovery: Recovery | None = None


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
