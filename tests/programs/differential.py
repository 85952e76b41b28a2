"""Run a random program eagerly and compiled, several calls each, and say where they differ.

    python tests/programs/differential.py --first 0 --count 2000            # the torch-level graph runs in PyTorch: capture only
    python tests/programs/differential.py --first 0 --count 200 --backend fuseline
    python tests/programs/differential.py --first 17 --count 1 --shrink     # prints a smaller program with the same difference

Both sides have their own copy of the module and of the arguments. Compared after each call: value or exception (type and text),
printed output, all arguments and globals (values, types, strides, versions of aliasing: which objects and storages are the same),
grad mode, and the gradients of the leaves.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import io
import logging
import random
import re
import signal
import sys
import time
import traceback
import types
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from grammar import PRELUDE, program

import fuseline

SHAPES = ((3, 4), (3, 4), (4, 4), (2, 4), (3, 6), (1, 4))


@dataclass(frozen=True)
class Difference:
    """What differs first. `kind` is a short word that shrinking keeps."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.text}"


class Differs(Exception):
    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.difference = Difference(kind, text)


@dataclass
class Side:
    """One copy of the program: its module, the function to call, the arguments, the leaves that gradients are taken of."""

    module: types.ModuleType
    function: Any
    arguments: dict[str, Any]
    leaves: list[torch.Tensor]


def make_arguments(module: types.ModuleType, seed: int, noise: float = 0.0) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Arguments of a seed. `noise` changes the tensors by that much, relatively."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    shape = rng.choice(SHAPES)
    dtype = rng.choice([torch.float32] * 5 + [torch.float64])
    grad = rng.choice(["none", "none", "none", "derived", "derived", "leaf"])
    leaves: list[torch.Tensor] = []

    def tensor(like: tuple[int, ...] = shape) -> torch.Tensor:
        made = (torch.randn(like, generator=torch_rng, dtype=torch.float64) * (1 + noise)).to(dtype)
        if grad == "none":
            return made
        leaves.append(made.requires_grad_())
        return made if grad == "leaf" else made * 1

    x = tensor()
    y = rng.choice([tensor, tensor, tensor, lambda: x, lambda: x.detach(), lambda: x[:], lambda: tensor((shape[1], shape[0])).t()])()
    items = [tensor(), rng.choice([tensor, tensor, lambda: x, lambda: y, lambda: x[:]])()]
    if rng.random() < 0.3:
        items.append(items[0])
    table = {"a": rng.choice([tensor, lambda: x, lambda: items[0]])(), "b": tensor()}
    thing = getattr(module, rng.choice(["Thing", "Sub"]))(rng.choice([tensor, lambda: y])(), rng.choice([1, 2, 3]))
    if rng.random() < 0.2:
        thing.extra = items
    return {"x": x, "y": y, "n": rng.choice([0, 1, 2, 2, 3, 3, 4, 5, 5, True]), "scale": rng.choice([0.5, 1.5, -1.0, 2, 0.0]),
            "flag": rng.choice([True, False]),
            "word": rng.choice(["a", "b", "c"]), "items": items, "table": table, "obj": thing}, leaves


def change(side: Side, rng: random.Random) -> None:
    """A change between calls that guards must notice."""
    a, m = side.arguments, side.module
    kind = rng.choice(["none", "n", "scale", "flag", "word", "global", "obj", "append", "drop", "swap", "class", "function", "alias",
                       "grad", "dtype", "default", "attribute"])
    if kind == "n":
        a["n"] = rng.choice([0, 1, 2, 4, 7])
    elif kind == "scale":
        a["scale"] = rng.choice([0.25, 3.0, 1, 0.0, -0.0, float("nan"), float("inf")])
    elif kind == "flag":
        a["flag"] = not a["flag"]
    elif kind == "word":
        a["word"] = rng.choice(["a", "b", "d"])
    elif kind == "global":
        m.G_SCALE, m.G_COUNT = rng.choice([0.5, 2.5, 3]), rng.choice([0, 1, 9])
    elif kind == "obj":
        a["obj"].k = rng.choice([0, 2, 8])
    elif kind == "append":
        a["items"].append(a["x"].detach().clone())
    elif kind == "drop" and a["items"]:
        a["items"].pop()
    elif kind == "swap":
        a["x"], a["y"] = a["y"], a["x"]
    elif kind == "class":
        a["obj"].__class__ = getattr(m, rng.choice(["Thing", "Sub"]))
    elif kind == "function":
        m.Thing.shift = lambda self, by: self.t * by
    elif kind == "alias":
        a["y"] = a["x"]
    elif kind == "grad" and a["x"].is_leaf:
        a["x"] = a["x"].detach().clone().requires_grad_()
        side.leaves.append(a["x"])
    elif kind == "dtype":
        a["y"] = a["y"].detach().to(rng.choice([torch.float64, torch.float32, torch.float16]))
    elif kind == "attribute":
        a["obj"].late = rng.choice([1, 2])


def call(side: Side) -> tuple[Any, BaseException | None, str]:
    """Result, exception, printed text."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            return side.function(**side.arguments), None, printed.getvalue()
        except Exception as error:
            return None, error, printed.getvalue()


class Comparison:
    """Walks two structures side by side. Objects met twice on one side must be the same object on the other, also storages."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.partner: dict[int, int] = {}
        self.reverse: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.storages_back: dict[int, int] = {}
        self.alive: list[Any] = []

    def pair(self, a: Any, b: Any, at: str) -> bool:
        """Whether the pair is new."""
        self.alive += [a, b]
        known, back = self.partner.get(id(a)), self.reverse.get(id(b))
        if known is None and back is None:
            self.partner[id(a)], self.reverse[id(b)] = id(b), id(a)
            return True
        if known != id(b) or back != id(a):
            raise Differs("identity", f"{at}: eager {'has met this object before' if known else 'has a new object'}, "
                          f"compiled {'has met its object before' if back else 'has a new one'}")
        return False

    def walk(self, a: Any, b: Any, at: str) -> None:
        if type(a) is not type(b) and type(a).__qualname__ != type(b).__qualname__:
            raise Differs("type", f"{at}: eager {type(a).__name__} {str(a)[:80]}, compiled {type(b).__name__} {str(b)[:80]}")
        if isinstance(a, torch.Tensor):
            if self.pair(a, b, at):
                self.tensors(a, b, at)
        elif isinstance(a, dict):
            if self.pair(a, b, at):
                if [str(k) for k in a] != [str(k) for k in b]:
                    raise Differs("keys", f"{at}: eager {list(a)}, compiled {list(b)}")
                for key, p, q in zip(a, a.values(), b.values()):
                    self.walk(p, q, f"{at}[{key!r}]")
        elif isinstance(a, (list, tuple)):
            if isinstance(a, tuple) or self.pair(a, b, at):
                if len(a) != len(b):
                    raise Differs("length", f"{at}: eager {len(a)}, compiled {len(b)}")
                for i, (p, q) in enumerate(zip(a, b)):
                    self.walk(p, q, f"{at}[{i}]")
        elif isinstance(a, float):
            if repr(a) != repr(b) and (self.exact or not torch.allclose(torch.tensor(a), torch.tensor(b), 1e-3, 1e-4, equal_nan=True)):
                raise Differs("value", f"{at}: eager {a!r}, compiled {b!r}")
        elif isinstance(a, (int, str, bytes, bool, type(None), torch.dtype, torch.Size)):
            if a != b:
                raise Differs("value", f"{at}: eager {a!r}, compiled {b!r}")
        elif isinstance(a, types.FunctionType):
            if a.__name__ != b.__name__:
                raise Differs("value", f"{at}: eager {a!r}, compiled {b!r}")
        elif hasattr(a, "__dict__") and not isinstance(a, (type, types.ModuleType)) and self.pair(a, b, at):
            self.walk(a.__dict__, b.__dict__, f"{at}.__dict__")

    def tensors(self, a: torch.Tensor, b: torch.Tensor, at: str) -> None:
        facts = [_facts(t) for t in (a, b)]
        if facts[0] != facts[1]:
            raise Differs("facts", f"{at}: (dtype, shape, stride, offset, requires_grad, is_leaf) eager {facts[0]}, compiled {facts[1]}")
        if a.numel():
            p, q = a.untyped_storage()._cdata, b.untyped_storage()._cdata
            if self.storages.setdefault(p, q) != q or self.storages_back.setdefault(q, p) != p:
                raise Differs("storage", f"{at}: shares memory with other tensors than in eager mode")
        p, q = a.detach(), b.detach()
        if self.exact:
            same = torch.equal(*(torch.nan_to_num(t.double(), 12345.5, 23456.5, 34567.5) for t in (p, q)))
        else:
            tolerance = 2e-2 if p.dtype in (torch.float16, torch.bfloat16) else 1e-3
            same = torch.allclose(p.double(), q.double(), tolerance, tolerance / 10, equal_nan=True)
        if not same:
            raise Differs("value", f"{at}: eager {p.flatten()[:8].tolist()}, compiled {q.flatten()[:8].tolist()}")


def _facts(t: torch.Tensor) -> tuple:
    try:
        return t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.is_leaf
    except RuntimeError as error:                            # a view of several whose base was written cannot even be asked
        return t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), str(error)


def tensors_in(value: Any, seen: set[int]) -> list[torch.Tensor]:
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (
        vars(value).values() if type(value).__name__ in ("Thing", "Sub") else ())
    return [t for p in parts for t in tensors_in(p, seen)]


def backward(side: Side, result: Any) -> str:
    """Gradients of all that came out; the type of an exception."""
    roots = [t for t in tensors_in(result, set()) + tensors_in(side.arguments, set())
             if len(_facts(t)) == 6 and t.requires_grad and not t.is_leaf and t.is_floating_point()]
    if not roots:
        return ""
    try:
        with torch.enable_grad():
            sum(t.double().tanh().sum() for t in roots).backward(retain_graph=True)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def text_of(error: BaseException | None) -> str:
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    # A variable in a cell that is unbound after a graph break: a NameError, not an UnboundLocalError.
    text = re.sub("NameError: cannot access free variable (.*) in enclosing scope",
                  r"UnboundLocalError: cannot access local variable \1", text)
    return re.sub(r"0x[0-9a-f]+", "0x", text)


GLOBALS = ("G_COUNT", "G_SCALE", "G_LIST", "G_TABLE")


def compare(eager: Side, other: Side, outcomes: list[tuple[Any, BaseException | None, str]], exact: bool) -> None:
    """Raise Differs where the two sides differ after a call."""
    (value, error, printed), (value2, error2, printed2) = outcomes
    printed, printed2 = (re.sub(r"grad_fn=<\w+>", "grad_fn", text) for text in (printed, printed2))       # the compiled one is ours
    if (error is None) != (error2 is None) or text_of(error).partition(":")[0] != text_of(error2).partition(":")[0]:
        raise Differs("exception", f"eager {text_of(error) or 'returns'}, compiled {text_of(error2) or 'returns'}")
    if exact and text_of(error) != text_of(error2):
        raise Differs("text", f"eager {text_of(error)}, compiled {text_of(error2)}")
    if printed != printed2 and (exact or re.sub(r"[\d.e+-]+", "", printed) != re.sub(r"[\d.e+-]+", "", printed2)):
        raise Differs("printed", f"eager {printed!r}, compiled {printed2!r}")
    states = [{"result": v, "arguments": s.arguments, "globals": {n: getattr(s.module, n) for n in GLOBALS}, "total": s.module.Thing.total}
              for s, v in ((eager, value), (other, value2))]
    Comparison(exact).walk(*states, at="")
    failed = [backward(s, v) for s, v in ((eager, value), (other, value2))]
    if failed[0] != failed[1]:
        if exact:
            raise Differs("backward", f"eager {failed[0] or 'works'}, compiled {failed[1] or 'works'}")
        return
    if not failed[0]:
        for i, (p, q) in enumerate(zip(eager.leaves, other.leaves)):
            if (p.grad is None) != (q.grad is None):
                raise Differs("gradient", f"leaf {i}: eager {p.grad}, compiled {q.grad}")
            if p.grad is not None:
                try:
                    Comparison(exact).tensors(p.grad, q.grad, f"gradient of leaf {i}")
                except Differs as differs:
                    if differs.difference.kind == "value":
                        raise Differs("gradient", differs.difference.text) from None


_late: list[bool] = []             # the graph raised after it had written to an input: with PyTorch's own operators nothing undoes that


def in_pytorch(graph_module: Any, example_inputs: list) -> Any:
    """A back end that runs the graph as it is, and notes where it raises after a write."""
    def run(*inputs: Any) -> Any:
        before = [t._version if isinstance(t, torch.Tensor) else 0 for t in inputs]
        try:
            return graph_module.forward(*inputs)
        except Exception:
            if before != [t._version if isinstance(t, torch.Tensor) else 0 for t in inputs]:
                _late.append(True)
            raise

    return run


def make_side(text: str, number: int, backend: object, strict: bool) -> Side:
    name = f"random_program_{number}"
    sys.modules[name] = made = types.ModuleType(name)
    exec(compile(text, "<program>", "exec"), made.__dict__)
    function = made.f
    if number == 1:
        function = fuseline.compile(made.f, backend=in_pytorch if backend == "eager" else backend, options={"strict": strict})
    return Side(made, function, {}, [])


def check(text: str, seed: int, backend: object = "eager", strict: bool = True, calls: int = 4,
          statistics: dict | None = None) -> Difference | None:
    """The first difference between eager and compiled calls of the program, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _check(text, seed, backend, strict, calls, statistics)


def _check(text: str, seed: int, backend: object, strict: bool, calls: int, statistics: dict | None) -> Difference | None:
    exact = backend == "eager"
    _late.clear()
    sides = [make_side(text, number, backend, strict) for number in range(2 if exact else 3)]
    rng = random.Random(seed)
    for number in range(calls):
        fresh = number == 0 or rng.random() < 0.4
        changed = rng.random() < 0.7
        state = rng.randrange(1 << 30)
        outcomes = []
        grad_mode = rng.random() < 0.9
        for i, side in enumerate(sides):
            if fresh:
                side.arguments, side.leaves = make_arguments(side.module, seed * 10 + number // 2, 1e-6 if i == 2 else 0.0)
            if changed and number:
                change(side, random.Random(state))
            with torch.set_grad_enabled(grad_mode):
                outcomes.append(call(side))
                if torch.is_grad_enabled() != grad_mode:
                    return Difference("grad mode", f"call {number}: is {not grad_mode} after the call")
        if statistics is not None:
            statistics["calls"] += 1
            statistics["raised"] += outcomes[0][1] is not None
        if _late:
            return None
        internal = outcomes[1][1]
        if internal is not None and outcomes[0][1] is None and _is_ours(internal):
            where = traceback.extract_tb(internal.__traceback__)[-1]
            return Difference(f"internal {type(internal).__name__} {where.name}", f"call {number}: {text_of(internal)}\n"
                              + "".join(traceback.format_exception(internal)[-12:]))
        try:
            compare(sides[0], sides[1], outcomes[:2], exact)
        except Differs as differs:
            if not exact and ill_conditioned(sides, outcomes):
                return None
            return Difference(differs.difference.kind, f"call {number}: {differs.difference.text}")
        if not exact and ill_conditioned(sides, outcomes):
            return None
    return None


def _is_ours(error: BaseException) -> bool:
    """Whether a line of fuseline raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return "fuseline" in last and not last.startswith("<")


def ill_conditioned(sides: list[Side], outcomes: list) -> bool:
    """Whether eager mode gives something else when its inputs change by a rounding error."""
    try:
        compare(sides[0], sides[2], [outcomes[0], outcomes[2]], False)
    except Differs:
        return True
    return False


# ---------------------------------------------------------------- shrinking

def shrink(text: str, seed: int, backend: object, strict: bool, wanted: str, seconds: float = 60) -> str:
    """A smaller program with a difference of the same kind: statements are dropped or replaced by their bodies."""
    end = time.monotonic() + seconds
    body = text[len(PRELUDE):]

    def fails(candidate: str) -> bool:
        try:
            compile(PRELUDE + candidate, "x", "exec")
        except SyntaxError:
            return False
        try:
            with limit(20):
                found = check(PRELUDE + candidate, seed, backend, strict)
        except Exception:
            return False
        return found is not None and found.kind == wanted

    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in _smaller(body):
            if time.monotonic() > end:
                break
            if len(candidate) < len(body) and fails(candidate):
                body, progress = candidate, True
                break
    return body


def _smaller(body: str) -> Any:
    count = sum(isinstance(n, ast.stmt) for n in ast.walk(ast.parse(body)))
    for index in range(count):
        for how in ("drop", "body", "orelse", "handler", "finalbody"):
            tree = ast.parse(body)
            edited = _edit(tree, index, how)
            if edited:
                try:
                    yield ast.unparse(ast.fix_missing_locations(tree))
                except Exception:
                    continue
    expressions = sum(isinstance(n, ast.expr) for n in ast.walk(ast.parse(body)))
    for index in range(expressions):
        for which in range(3):
            tree = ast.parse(body)
            if _replace_expression(tree, index, which):
                yield ast.unparse(ast.fix_missing_locations(tree))


def _edit(tree: ast.AST, index: int, how: str) -> bool:
    seen = -1
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(parent, field, None)
            if not isinstance(statements, list):
                continue
            for i, statement in enumerate(statements):
                seen += 1
                if seen != index:
                    continue
                if how == "drop":
                    new: list = []
                elif how == "handler":
                    if not getattr(statement, "handlers", None):
                        return False
                    new = statement.handlers[0].body
                else:
                    new = getattr(statement, how, None) or []
                    if not new or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                        return False
                statements[i:i + 1] = new
                if not statements and field == "body":
                    statements.append(ast.Pass())
                return True
    return False


def _replace_expression(tree: ast.AST, index: int, which: int) -> bool:
    seen = -1
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            for i, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.expr):
                    continue
                seen += 1
                if seen != index:
                    continue
                inner = [n for n in ast.iter_child_nodes(child) if isinstance(n, ast.expr)]
                if which >= len(inner) or not isinstance(getattr(child, "ctx", ast.Load()), ast.Load):
                    return False
                if isinstance(value, list):
                    value[i] = inner[which]
                else:
                    setattr(parent, field, inner[which])
                return True
    return False


# ---------------------------------------------------------------- many

class Hangs(Exception):
    pass


@contextlib.contextmanager
def limit(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise Hangs(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--shrink", type=int, default=0, help="seconds to spend on each difference")
    parser.add_argument("--lenient", action="store_true", help="not strict: our own errors fall back")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--stop", type=int, default=10**9, help="stop after that many differences")
    parser.add_argument("--show", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("torch._subclasses.fake_tensor", "fuseline"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    statistics = {"calls": 0, "raised": 0}
    start, done, found = time.monotonic(), 0, []
    for seed in range(chosen.first, chosen.first + chosen.count):
        if time.monotonic() - start > chosen.seconds or len(found) >= chosen.stop:
            break
        text = program(seed)
        if chosen.show:
            print(text[len(PRELUDE):])
        try:
            with limit(60):
                difference = check(text, seed, chosen.backend, not chosen.lenient, statistics=statistics)
        except Exception as error:
            difference = Difference(f"harness {type(error).__name__}", "".join(traceback.format_exception(error)[-6:]))
        done += 1
        if difference is not None:
            found.append(seed)
            print(f"=== seed {seed}: {difference}", flush=True)
            if chosen.shrink:
                print(shrink(text, seed, chosen.backend, not chosen.lenient, difference.kind, chosen.shrink), flush=True)
    print(f"{done} programs, {statistics['calls']} calls, of which {statistics['raised']} raised; {len(found)} differ: {found[:40]}; "
          f"{time.monotonic() - start:.0f} s; {fuseline.compile_count()} regions")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
