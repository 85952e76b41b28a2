"""`fuseline explain PROGRAM.py:FUNCTION`, `fuseline bench PROGRAM.py:FUNCTION`: the reports, from the command line.

The function named takes no arguments and returns (callable, args): the program to compile and what to call it with.
"""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
import typer

import fuseline
from fuseline import torch_internals
from fuseline.report.measure import compare, print_table

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


def load(target: str) -> tuple:
    """The (callable, args) that `FILE.py:FUNCTION` gives. Exits with a message where it cannot."""
    path, _, name = target.partition(":")
    if not name or not Path(path).is_file():
        raise typer.BadParameter(f"{target!r} is not FILE.py:FUNCTION with a file that exists")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise typer.BadParameter(f"{path} has no {name!r}")
    made = getattr(module, name)()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise typer.BadParameter(f"{name}() must return (callable, args), not {type(made).__name__}")
    return made


@app.command()
def explain(target: str) -> None:
    """Compile the program, call it once, and print what was done."""
    program, args = load(target)
    print(fuseline.explain(program)(*args))


@app.command()
def bench(target: str, mode: str = "default", iterations: int = 20) -> None:
    """Time the program against eager PyTorch and say whether compiling pays."""
    program, args = load(target)
    compiled = fuseline.compile(program, mode=mode)
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")

    def tensor(out: object) -> torch.Tensor:
        leaves = torch_internals.tree_leaves(out)
        return next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    with torch.no_grad():
        print_table([compare(target, lambda: tensor(program(*args)), lambda: tensor(compiled(*args)), device=device,
                             iterations=iterations)])


if __name__ == "__main__":
    app()
