"""State of the process that programs change and capture must leave as it was: grad mode, inference mode, autocast, default dtype."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fuseline import torch_internals
from fuseline.ir.region import Const, Effect

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ProcessState:
    """The state at one moment: pairs of a setter (with its leading arguments) and the value it would be given."""

    settings: tuple[tuple[Callable, tuple, Any], ...]
    transforms: int = 0                                    # active transforms of torch.func

    @classmethod
    def now(cls) -> ProcessState:
        found: list[tuple[Callable, tuple, Any]] = [
            (torch_internals.set_grad_enabled, (), torch.is_grad_enabled()),
            (torch.set_default_dtype, (), torch.get_default_dtype()),
            (torch.set_autocast_cache_enabled, (), torch.is_autocast_cache_enabled()),
        ]
        for device in _DEVICES:
            found.append((torch.set_autocast_enabled, (device,), torch.is_autocast_enabled(device)))
            found.append((torch.set_autocast_dtype, (device,), torch.get_autocast_dtype(device)))
        return cls(tuple(found), torch_internals.transform_depth())

    def restore(self) -> None:
        """Make the process as it was."""
        torch_internals.leave_transforms(self.transforms)
        for setter, where, value in self.changed():
            setter(*where, value)

    def changed(self) -> list[tuple[Callable, tuple, Any]]:
        """The settings of this moment that differ from those of now."""
        return [old for old, new in zip(self.settings, ProcessState.now().settings) if old[2] is not new[2]]

    def effects(self) -> tuple[Effect, ...]:
        """What the compiled code does after its graph to leave the process in the state of now."""
        now = ProcessState.now().settings
        return tuple(Effect("call", None, values=(Const(setter), *map(Const, where), Const(value)))
                     for (setter, where, value), old in zip(now, self.settings) if value is not old[2])
