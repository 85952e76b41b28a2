"""Back ends by name: any `(GraphModule, example_inputs) -> callable`, as torch.compile takes them."""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Backend = Callable[[Any, list], Callable]

_lock = threading.Lock()
_backends: dict[str, Backend] = {"eager": lambda graph_module, example_inputs: graph_module.forward}


def register_backend(name: str, function: Backend) -> Backend:
    """Make `backend=name` mean this function. A name can be given again by its owner; "fuseline" and "eager" cannot."""
    if name in ("fuseline", "eager"):
        raise ValueError(f"the back end {name!r} is fuseline's own")
    if not callable(function):
        raise TypeError(f"back end {name!r} must be callable as (GraphModule, example_inputs) -> callable, not {type(function).__name__}")
    with _lock:
        _backends[name] = function
    return function


def list_backends() -> list[str]:
    """The names that `backend=` takes."""
    return sorted(["fuseline", *_backends])


def check_backend(backend: object) -> None:
    """Raise ValueError, listing the right ones, for a name that is none; TypeError for what is neither name nor callable."""
    if isinstance(backend, str):
        if backend not in list_backends():
            raise ValueError(f"unknown backend {backend!r}; there are {', '.join(map(repr, list_backends()))}")
    elif not callable(backend):
        raise TypeError(f"backend must be a name or a callable, not {type(backend).__name__}")


def find_backend(backend: object) -> Backend:
    """The function that a name or callable stands for."""
    check_backend(backend)
    return _backends[backend] if isinstance(backend, str) else backend      # type: ignore[return-value]
