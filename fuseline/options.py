"""The choices of one `compile` call, checked once and passed down; part of every cache key."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, slots=True)
class Options:
    """mode, fullgraph, dynamic, backend, verbose: as `fuseline.compile` has them. The rest is set through `options=`.

    recompile_limit  compilations of one function after which it runs eagerly (and says so once)
    cudagraphs       record CUDA graphs; None: as the mode says
    max_autotune     measure alternatives; None: as the mode says
    eager_random     draw random numbers exactly as eager would, at the price of fusion
    fold_constants   in inference compute once what depends on parameters only (folds batch norm into convolutions)
    channels_last    lay out convolutional networks channels-last; None: where it pays
    cache            use the disk cache
    strict           raise our own internal errors instead of falling back to eager (the tests set it)
    """

    mode: str = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    backend: object = "fuseline"
    verbose: bool = False
    recompile_limit: int = 8
    cudagraphs: bool | None = None
    max_autotune: bool | None = None
    eager_random: bool = False
    fold_constants: bool = True
    channels_last: bool | None = None
    cache: bool = True
    strict: bool = False

    @property
    def uses_cudagraphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune") if self.cudagraphs is None else self.cudagraphs

    @property
    def tunes(self) -> bool:
        return self.mode.startswith("max-autotune") if self.max_autotune is None else self.max_autotune


CALL_ARGUMENTS = ("mode", "fullgraph", "dynamic", "backend", "verbose")
SETTABLE = tuple(f.name for f in fields(Options) if f.name not in CALL_ARGUMENTS)


def make_options(mode: str | None, fullgraph: bool, dynamic: bool | None, backend: object, options: Mapping | None,
                 verbose: bool) -> Options:
    """Options from the arguments of `compile`. Raises ValueError that lists what is allowed, for a wrong mode or option."""
    if mode is not None and mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; the modes are {', '.join(map(repr, MODES))}")
    given = dict(options or {})
    wrong = [name for name in given if name not in SETTABLE]
    if wrong:
        raise ValueError(f"unknown option {wrong[0]!r}; the options are {', '.join(map(repr, SETTABLE))}")
    made = Options(mode or "default", bool(fullgraph), dynamic, backend, bool(verbose))
    for name, value in given.items():
        wanted = type(getattr(made, name))
        if wanted in (bool, int) and not isinstance(value, wanted):
            raise ValueError(f"option {name!r} takes {wanted.__name__}, not {value!r}")
    return replace(made, **given)


def cache_key(options: Options) -> dict[str, object]:
    """The options that generated code depends on, as plain data."""
    return {k: v for k, v in asdict(options).items() if k not in ("backend", "verbose", "fullgraph", "cache", "strict")}
