"""`cls.__dict__` of a class from outside: read entry by entry, each guarded."""
from __future__ import annotations

import types
from typing import Any, NoReturn

from fuseline.capture.errors import break_here


class ClassEntries:
    """What the program sees as the mappingproxy of a class. Raises Break where it is looked at as a whole."""

    symbolic_type = types.MappingProxyType

    def __init__(self, world: Any, cls: type) -> None:
        self.world, self.cls = world, cls

    def get(self, name: Any, default: Any = None) -> Any:
        return self.world.class_entry(self.cls, name, default)

    def whole(self) -> NoReturn:
        raise break_here("introspection", "the __dict__ of a class is looked at as a whole", "ask for the attributes by name")

    def recipe(self, world: Any) -> NoReturn:
        self.whole()
