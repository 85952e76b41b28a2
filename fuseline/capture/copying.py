"""copy.deepcopy during capture: the standard one keys its memo by id(), which compiled code cannot promise for new objects."""
from __future__ import annotations

import collections
import copy
import types
from typing import TYPE_CHECKING, Any

import torch

from fuseline.capture.errors import break_here
from fuseline.capture.provenance import CONSTANTS, IDENTITIES, is_python
from fuseline.capture.special import special

if TYPE_CHECKING:
    from fuseline.capture.interpret import Interpreter


@special(copy.deepcopy)
def deepcopy(interpreter: Interpreter, args: tuple, kwargs: dict) -> Any:
    """As copy.deepcopy for constants, functions, classes, plain containers and instances of plain classes; a Break for others."""
    if len(args) != 1 or kwargs:
        raise break_here("deepcopy", "copy.deepcopy with a memo is not captured", "copy it outside the compiled function")
    return _copied(interpreter, args[0], {})


def _copied(interpreter: Interpreter, value: Any, memo: dict[int, tuple[Any, Any]]) -> Any:
    """The copy. `memo`: id of an original -> (original, copy)."""
    world, kind = interpreter.world, type(value)
    if kind in CONSTANTS or isinstance(value, IDENTITIES) and not isinstance(value, (types.ModuleType, classmethod, staticmethod)):
        return value
    if id(value) in memo:
        return memo[id(value)][1]

    def remembered(made: Any) -> Any:
        memo[id(value)] = (value, made)
        return made

    def again(part: Any) -> Any:
        return _copied(interpreter, part, memo)
    if kind is list:
        made = remembered([])
        made.extend(map(again, world.contents(value)))
        return made
    if kind in (dict, collections.OrderedDict):
        made = remembered(kind())
        for key, item in world.contents(value).items():
            made[again(key)] = again(item)
        return made
    if kind is tuple:
        inside = world.contents(value)
        items = tuple(map(again, inside))
        return value if all(a is b for a, b in zip(items, inside)) else items
    if kind is set or kind is frozenset:
        return remembered(kind(map(again, world.contents(value))))
    if isinstance(value, torch.Tensor) or is_python(kind, "__deepcopy__") or is_python(kind, "__setstate__"):
        raise break_here("deepcopy", f"copy.deepcopy of a {world.type_of(value).__name__} is not captured",
                         "copy it outside the compiled function")
    _, _, state, _, _ = world.reduced(value)
    made = remembered(world.native(object.__new__, kind))
    for name, item in (world.contents(state) if state else {}).items():
        made.__dict__[name] = again(item)
    return made
