"""Rules of the code that a machine can check: forbidden imports, private parts of torch, one-way layers, module sizes."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fuseline"
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch._functorch._aot_autograd", "torch._export")
LAYERS = {  # package or module -> what of fuseline it may import
    "base": set(),
    "ir": {"base"},
    "stage": {"base", "ir"},
    "pipeline": {"base", "ir", "stage", "report"},
    "api": {"base", "ir", "stage", "pipeline", "report"},
    "report": {"base", "ir"},
    "cli": {"base", "ir", "stage", "pipeline", "api", "report"},
}
BASE = {"errors", "options", "log", "backends", "__init__"}
MAY_IMPORT = {("runtime", "codegen")}  # stages otherwise never import each other; loading a program includes compiling its kernels
STAGES = {"capture", "trace", "passes", "autodiff", "lower", "schedule", "codegen", "runtime"}


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names of all modules imported, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_private(name: str) -> bool:
    """Whether a dotted name goes through a private part of torch: torch._C.x, torch.utils._pytree (torch.__version__ is public)."""
    head, *parts = name.split(".")
    return head == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_compiler_is_ours(path: Path):
    tree = parse(path)
    found = [f"{name}:{line}" for name, line in imports(tree) if name.startswith(FORBIDDEN)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node).startswith((*FORBIDDEN, "torch._C._dynamo")):
            found.append(f"{dotted(node)}:{node.lineno}")
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.compile":
            found.append(f"torch.compile:{node.lineno}")
        if isinstance(node, ast.Constant) and node.value in FORBIDDEN and path.name != "torch_internals.py":
            found.append(f"{node.value!r}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "torch_internals.py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_parts_of_torch_are_touched_in_one_module(path: Path):
    tree = parse(path)
    found = {f"{name}:{line}" for name, line in imports(tree) if is_private(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(dotted(node)):
            found.add(f"{dotted(node)}:{node.lineno}")
    assert not found


def layer(parts: tuple[str, ...]) -> str:
    head = parts[0]
    if head in STAGES:
        return "stage"
    if head == "plugin":
        return "api"
    if head == "torch_internals":                          # knows our names of dtypes, and is known to the stages only
        return "ir"
    return "base" if head in BASE else head


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    mine, wrong = layer(parts), []
    for name, line in imports(parse(path)):
        if not name.startswith("fuseline."):
            continue
        theirs = tuple(name.split(".")[1:])
        allowed = LAYERS[mine] | ({mine} if mine in ("base", "api", "ir") else set())
        if theirs[0] == parts[0] or (parts[0], theirs[0]) in MAY_IMPORT or layer(theirs) in allowed:
            continue
        wrong.append(f"{name}:{line}")
    assert not wrong


def test_no_module_is_called_utils_and_none_is_huge():
    assert [p for p in MODULES if p.stem in ("utils", "util", "misc", "helpers")] == []
    assert [(p.name, n) for p in MODULES if (n := len(p.read_text().splitlines())) > 900] == []
