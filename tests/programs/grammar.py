"""Random programs of Python and torch statements: text of a module with a function `f`, made from a seed.

The generator keeps the kinds of the variables in scope, so that most statements make sense; those that do not raise, and the
exception is part of what is compared. Kinds: M matrix (m, n), V vector (n,), S 0-d, I int64 matrix, B bool matrix;
i int, f float, b bool, s str, L list of M, D dict of M, O an object with attributes, C a callable (M) -> M.
"""
# ruff: noqa: E501  alternatives are rows of a table: one a line
from __future__ import annotations

import random
import re
from collections.abc import Callable

PRELUDE = '''\
import collections, contextlib, copy, dataclasses, functools, itertools, math, operator
import torch

G_COUNT = 0
G_SCALE = 1.5
G_LIST = []
G_TABLE = {}


class Thing:
    total = 0

    def __init__(self, t, k):
        self.t, self.k = t, k
        self.extra = []

    def shift(self, by):
        self.k += by
        return self.t + self.k

    @property
    def double(self):
        return self.t * 2

    def __len__(self):
        return 3

    def __add__(self, other):
        return self.t + other


class Sub(Thing):
    def shift(self, by):
        self.extra.append(by)
        return super().shift(by) - 1

    def __getattr__(self, name):
        if name.startswith("lazy"):
            return len(name)
        raise AttributeError(name)


@dataclasses.dataclass
class Pair:
    left: object
    right: object = 2


Point = collections.namedtuple("Point", "a b")


class Ctx:
    def __init__(self, log, swallow=False):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("in")
        return len(self.log)

    def __exit__(self, kind, value, trace):
        self.log.append("out" if kind is None else kind.__name__)
        return self.swallow and kind is not None and issubclass(kind, (ValueError, KeyError))


@contextlib.contextmanager
def managed(log):
    log.append("enter")
    try:
        yield log
    finally:
        log.append("leave")


class Oops(ValueError):
    pass
'''


class Scope:
    """Names by kind, of one function; `outer` are those a nested function sees of the functions around it."""

    def __init__(self, names: dict[str, str], outer: Scope | None = None) -> None:
        self.names, self.outer = dict(names), outer

    def of(self, kind: str) -> list[str]:
        found = [n for n, k in self.names.items() if k == kind]
        return found + ([n for n in self.outer.of(kind) if n not in self.names] if self.outer else [])


class Generator:
    """Makes one program. `text()` gives the module."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fresh = 0
        self.helpers: list[tuple[str, str]] = []          # name, kind of helper
        self.loops = 0                                    # loops around the statement
        self.generating = False                           # in a generator function
        self.returns = True                               # whether statements may return M
        self.scope = Scope({})
        self.writable_outer: list[str] = []
        self.breaking = self.random.random() < 0.6        # programs that read tensors' values in Python

    # -- small tools ----------------------------------------------------------------------------------------
    def pick(self, *options: object) -> object:
        return self.random.choice(options)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def new(self, prefix: str = "v") -> str:
        self.fresh += 1
        return f"{prefix}{self.fresh}"

    def name(self, kind: str) -> str | None:
        names = self.scope.of(kind)
        return self.random.choice(names) if names else None

    def choose(self, options: list[Callable[[], str | None]]) -> str:
        for _ in range(8):
            made = self.random.choice(options)()
            if made is not None:
                return made
        return "0"

    # -- expressions ----------------------------------------------------------------------------------------
    def expr(self, kind: str, depth: int = 2) -> str:
        if depth <= 0 or self.chance(0.25):
            name = self.name(kind)
            if name is not None:
                return name
        return getattr(self, "expr_" + kind)(max(depth, 0))

    def expr_M(self, d: int) -> str:
        e = self.expr
        if d <= 0:
            return self.name("M") or "torch.ones(3, 4)"
        return self.choose([
            lambda: f"({e('M', d - 1)} {self.pick('+', '-', '*')} {e('M', d - 1)})",
            lambda: f"({e('M', d - 1)} {self.pick('+', '-', '*')} {e('f', d - 1)})",
            lambda: f"({e('i', d - 1)} {self.pick('+', '-', '*')} {e('M', d - 1)})",
            lambda: f"torch.{self.pick('tanh', 'sin', 'relu', 'sigmoid', 'neg', 'abs', 'cos', 'sign', 'floor')}({e('M', d - 1)})",
            lambda: f"{e('M', d - 1)}.{self.pick('tanh()', 'relu()', 'clone()', 'detach()', 'flip(0)', 'roll(1, 0)', 'double()')}",
            lambda: f"{e('M', d - 1)}.{self.pick('softmax(-1)', 'cumsum(1)', 't().contiguous().t()', 'sort(1).values', 'clamp(-1, 1)')}",
            lambda: f"({e('M', d - 1)} @ {e('M', d - 1)}.t() @ {e('M', d - 1)}).tanh()",
            lambda: f"torch.where({e('B', d - 1)}, {e('M', d - 1)}, {e('M', d - 1)})",
            lambda: f"torch.cat([{e('M', d - 1)}, {e('M', d - 1)}])[:{self.name('M') or 'x'}.shape[0]]",
            lambda: f"torch.stack([{e('M', d - 1)}, {e('M', d - 1)}]).{self.pick('sum(0)', 'mean(0)', 'amax(0)')}",
            lambda: f"({e('M', d - 1)} {self.pick('+', '*')} {e('V', d - 1)})",
            lambda: f"({e('M', d - 1)} {self.pick('+', '*', '/')} (1 + {e('S', d - 1)}.abs()))",
            lambda: f"({e('M', d - 1)} + {e('I', d - 1)})",
            lambda: f"({e('M', d - 1)} - {e('M', d - 1)}.mean(1, keepdim=True))",
            lambda: f"({e('M', d - 1)} if {e('b', d - 1)} else {e('M', d - 1)})",
            lambda: f"{self.indexed()}" if self.name("L") else None,
            lambda: f"{self.name('D')}[{self.key()}]" if self.name("D") else None,
            lambda: f"{self.name('D')}.get({self.key()}, {e('M', d - 1)})" if self.name("D") else None,
            lambda: f"{self.name('O')}.{self.pick('t', 't', 'double', 'shift(1)', 'shift(' + e('i', 0) + ')')}" if self.name("O") else None,
            lambda: f"{self.name('C')}({e('M', d - 1)})" if self.name("C") else None,
            lambda: self.call_helper(d),
            lambda: f"sum(({e('M', 0)} * j for j in range({self.pick(1, 2, 3)})), {e('M', d - 1)})",
            lambda: f"sum([t * 0.5 for t in {self.name('L')} if {self.pick('t.dim() == 2', 'True', 't is not x')}], {e('M', d - 1)})"
            if self.name("L") else None,
            lambda: f"functools.reduce(lambda p, q: p {self.pick('+', '-')} q, {self.name('L')}, {e('M', 0)})" if self.name("L") else None,
            lambda: f"({self.new('w')} := {e('M', d - 1)})",
            lambda: f"Pair({e('M', d - 1)}, {e('i', 0)}).{self.pick('left', 'left', 'right')}",
            lambda: f"Point({e('M', d - 1)}, {e('M', 0)}){self.pick('.a', '[1]', '[0]', '._replace(a=1).b')}",
            lambda: f"max({self.name('L')}, key=lambda t: t.sum().item())" if self.name("L") and self.breaking else None,
            lambda: f"{self.name('L')}.pop({self.pick('', '0', '-1')})" if self.name("L") else None,
            lambda: f"{self.name('D')}.setdefault({self.key()}, {e('M', 0)})" if self.name("D") else None,
            lambda: f"{e('M', d - 1)}.{self.pick('add_', 'mul_', 'sub_')}({self.pick(e('f', 0), '1', e('M', 0))})",
            lambda: f"{e('M', d - 1)}.to({self.pick('torch.float32', 'torch.float64', 'x.dtype', 'torch.float16')})",
            lambda: f"torch.{self.pick('zeros_like', 'ones_like')}({e('M', 0)})",
            lambda: f"{self.name('I')}.{self.pick('float()', 'double()')}" if self.name("I") else None,
            lambda: f"{e('B', d - 1)}.float()",
            lambda: f"operator.{self.pick('add', 'mul', 'sub')}({e('M', d - 1)}, {e('M', 0)})",
        ])

    def indexed(self) -> str:
        index = self.pick("0", "0", "-1", "-1", self.expr("i", 1) + " % 2", "1", "5" if self.chance(0.2) else "0")
        return f"{self.name('L')}[{index}]"

    def key(self) -> str:
        return str(self.pick("'a'", "'b'", "'a'", self.expr("s", 1), "'a' if " + self.expr("b", 0) + " else 'b'"))

    def call_helper(self, d: int) -> str | None:
        if not self.helpers:
            return None
        name, kind = self.random.choice(self.helpers)
        a = self.expr("M", d - 1)
        if kind == "plain":
            return f"{name}({a}, {self.expr('i', 0)}{self.pick('', ', scale=' + self.expr('f', 0))})"
        if kind == "variadic":
            return f"{name}({a}, {self.expr('M', 0)}, {self.pick('k=1', '*[' + self.expr('M', 0) + '], u=2', '**dict(k=3)')})"
        return f"sum(({a}, *{name}({self.expr('M', 0)}, {self.pick(0, 1, 2, 3)})))"

    def expr_V(self, d: int) -> str:
        return self.choose([
            lambda: f"{self.expr('M', d - 1)}[{self.pick('0', '-1', self.expr('i', 0) + ' % 2')}]",
            lambda: f"{self.expr('M', d - 1)}.{self.pick('sum(0)', 'mean(0)', 'amax(0)', 'max(0).values', 'prod(0)')}",
            lambda: f"({self.expr('V', d - 1)} + {self.expr('f', 0)})" if d > 0 else None,
            lambda: f"torch.arange({self.expr('M', 0)}.shape[1])",
        ])

    def expr_S(self, d: int) -> str:
        return self.choose([
            lambda: f"{self.expr('M', d - 1)}.{self.pick('sum()', 'mean()', 'amax()', 'norm()', 'min()')}",
            lambda: f"{self.expr('M', d - 1)}[0, {self.pick(0, 1, -1)}]",
            lambda: f"({self.expr('M', d - 1)} * {self.expr('M', 0)}).sum()",
            lambda: f"torch.tensor({self.expr('f', 0)})",
            lambda: f"({self.expr('S', d - 1)} {self.pick('+', '*')} {self.expr('f', 0)})" if d > 0 else None,
        ])

    def expr_I(self, d: int) -> str:
        return self.choose([
            lambda: f"{self.expr('M', d - 1)}.argsort(1)",
            lambda: f"({self.expr('M', d - 1)}.tanh() * 3).{self.pick('long()', 'int()')}",
            lambda: f"({self.expr('I', d - 1)} {self.pick('+', '*', '-', '//', '%')} {self.pick(2, 3, 5)})" if d > 0 else None,
            lambda: f"{self.expr('B', d - 1)}.{self.pick('long()', 'cumsum(0)')}",
        ])

    def expr_B(self, d: int) -> str:
        return self.choose([
            lambda: f"({self.expr('M', d - 1)} {self.pick('>', '<', '>=')} {self.expr('f', 0)})",
            lambda: f"({self.expr('M', d - 1)} > {self.expr('M', 0)})",
            lambda: f"(~{self.expr('B', d - 1)})" if d > 0 else None,
            lambda: f"({self.expr('B', d - 1)} {self.pick('&', '|', '^')} {self.expr('B', 0)})" if d > 0 else None,
        ])

    def expr_i(self, d: int) -> str:
        e = self.expr
        if d <= 0 and self.chance(0.6):
            return self.name("i") or str(self.random.randrange(-2, 5))
        return self.choose([
            lambda: str(self.random.randrange(-2, 5)),
            lambda: f"({e('i', d - 1)} {self.pick('+', '-', '*')} {e('i', 0)})" if d > 0 else None,
            lambda: f"({e('i', d - 1)} {self.pick('//', '%')} {self.pick(2, 3)})" if d > 0 else None,
            lambda: f"len({self.name('L') or 'items'})",
            lambda: f"{e('M', 0)}.shape[{self.pick(0, 1, -1)}]",
            lambda: f"{e('M', 0)}.{self.pick('dim()', 'numel()', 'size(0)', 'stride(0)')}",
            lambda: self.pick("G_COUNT", "len(G_LIST)"),
            lambda: f"{self.name('O')}.k" if self.name("O") else None,
            lambda: f"len({e('s', 0)})",
            lambda: f"int({e('b', 0)})",
            lambda: f"int({e('M', 0)}.tanh().sum().item())" if self.breaking and self.chance(0.4) else None,
            lambda: f"({self.new('w')} := {e('i', 0)})" if self.chance(0.2) else None,
            lambda: f"{self.pick('max', 'min')}({e('i', 0)}, {e('i', 0)})",
            lambda: f"sum(j for j in range({self.pick(2, 3)}) if j != {e('i', 0)})",
            lambda: f"len({self.name('O')})" if self.name("O") else None,
        ])

    def expr_f(self, d: int) -> str:
        e = self.expr
        if d <= 0 and self.chance(0.6):
            return self.name("f") or "0.5"
        return self.choose([
            lambda: str(self.pick(0.5, -0.25, 1.0, 2.0, 0.0, 1.25)),
            lambda: f"({e('f', d - 1)} {self.pick('+', '-', '*')} {e('f', 0)})" if d > 0 else None,
            lambda: f"({e('f', d - 1)} {self.pick('+', '*')} {e('i', 0)})" if d > 0 else None,
            lambda: f"float({e('i', 0)})",
            lambda: f"({e('i', 0)} / {self.pick(2, 4, e('i', 0))})",
            lambda: "G_SCALE",
            lambda: f"math.{self.pick('sqrt', 'sin', 'exp')}(min(abs({e('f', 0)}), 3))",
            lambda: f"{self.pick('max', 'min')}({e('f', 0)}, {e('f', 0)})",
            lambda: f"round({e('f', 0)}, 1)",
            lambda: f"{e('M', 0)}.tanh().mean().item()" if self.breaking and self.chance(0.4) else None,
            lambda: f"({e('f', 0)} if {e('b', 0)} else {e('f', 0)})",
        ])

    def expr_b(self, d: int) -> str:
        e = self.expr
        return self.choose([
            lambda: f"{e('i', d - 1)} {self.pick('>', '<', '==', '!=', '>=')} {e('i', 0)}",
            lambda: f"{e('f', d - 1)} {self.pick('>', '<', '<=')} {e('f', 0)}",
            lambda: f"not {e('b', d - 1)}" if d > 0 else None,
            lambda: self.name("b"),
            lambda: f"({e('b', d - 1)} {self.pick('and', 'or')} {e('b', 0)})" if d > 0 else None,
            lambda: f"{self.key()} in {self.name('D')}" if self.name("D") and d > 0 else None,
            lambda: f"({e('S', d - 1)} > {e('f', 0)})" if self.breaking and self.chance(0.5) else None,
            lambda: f"{e('M', 0)} is {self.pick('', 'not ')}{e('M', 0)}",
            lambda: f"isinstance({self.pick(e('i', 0), e('M', 0), e('f', 0))}, {self.pick('int', 'torch.Tensor', '(int, float)')})",
            lambda: f"{e('M', 0)}.{self.pick('requires_grad', 'is_contiguous()', 'is_floating_point()', 'is_leaf')}",
            lambda: f"{e('M', 0)}.dtype == torch.{self.pick('float32', 'float64')}",
            lambda: f"bool({self.name('L') or 'G_LIST'})",
            lambda: f"hasattr({self.name('O')}, {self.pick(repr('k'), repr('lazy'), repr('nope'), repr('late'))})" if self.name("O") else None,
            lambda: f"{self.pick('any', 'all')}(j > {e('i', 0)} for j in range(3))",
            lambda: "torch.is_grad_enabled()",
        ])

    def expr_s(self, d: int) -> str:
        e = self.expr
        return self.choose([
            lambda: self.pick("'a'", "'b'", "'zz'"),
            lambda: f"f'k{{{e('i', 0)}}}'",
            lambda: f"f'{{{e('f', 0)}:.3f}}'",
            lambda: f"str({e('i', 0)})",
            lambda: f"({e('s', d - 1)} + {e('s', 0)})[:6]" if d > 0 else None,
            lambda: f"{e('s', d - 1)}.{self.pick('upper()', 'strip()', 'replace(' + repr('a') + ', ' + repr('b') + ')')}" if d > 0 else None,
            lambda: f"str({e('M', 0)}.dtype)",
            lambda: f"str(tuple({e('M', 0)}.shape))",
            lambda: f"type({self.pick(e('M', 0), e('i', 0), self.name('O') or '1')}).__name__",
            lambda: f"','.join({self.name('D')})" if self.name("D") else None,
            lambda: self.name("s"),
        ])

    def expr_L(self, d: int) -> str:
        e = self.expr
        return self.choose([
            lambda: f"[{e('M', d - 1)}, {e('M', 0)}]",
            lambda: f"[t {self.pick('+', '*')} {e('f', 0)} for t in {self.name('L')}]" if self.name("L") else None,
            lambda: f"list({self.name('D')}.values())" if self.name("D") else None,
            lambda: f"{self.name('L')}[{self.pick('::-1', ':1', '1:', ':')}]" if self.name("L") else None,
            lambda: f"{self.name('L')} + [{e('M', 0)}]" if self.name("L") else None,
            lambda: f"[{e('M', 0)}] * {self.pick(1, 2)}",
            lambda: f"list(map(lambda t: t * {e('i', 0)}, {self.name('L')}))" if self.name("L") else None,
            lambda: f"list({e('M', 0)}.chunk(1))",
            lambda: f"sorted({self.name('L')}, key=lambda t: t.shape[0])" if self.name("L") else None,
            lambda: "copy.copy(items)",
        ])

    def expr_D(self, d: int) -> str:
        e = self.expr
        return self.choose([
            lambda: f"{{'a': {e('M', d - 1)}, 'b': {e('M', 0)}}}",
            lambda: f"{{k: v * {e('f', 0)} for k, v in {self.name('D')}.items()}}" if self.name("D") else None,
            lambda: f"dict({self.name('D')}, c={e('M', 0)})" if self.name("D") else None,
            lambda: f"{{**{self.name('D')}, 'a': {e('M', 0)}}}" if self.name("D") else None,
            lambda: f"collections.OrderedDict(a={e('M', 0)}, b={e('M', 0)})",
            lambda: f"{self.name('D')}.copy()" if self.name("D") else None,
            lambda: f"dict(zip('ab', {self.name('L')}))" if self.name("L") else None,
            lambda: f"collections.defaultdict(lambda: {e('M', 0)}, a={e('M', 0)})",
        ])

    def expr_O(self, d: int) -> str:
        return f"{self.pick('Thing', 'Sub')}({self.expr('M', d - 1)}, {self.expr('i', 0)})"

    def expr_C(self, d: int) -> str:
        return self.choose([
            lambda: f"(lambda t, c={self.expr('i', 0)}: t * c + {self.expr('M', 0)})",
            lambda: f"functools.partial(operator.{self.pick('add', 'mul')}, {self.expr('M', 0)})",
            lambda: self.pick("torch.tanh", "torch.neg", "torch.Tensor.relu"),
            lambda: f"{self.name('O')}.__add__" if self.name("O") else None,
        ])

    # -- statements -----------------------------------------------------------------------------------------
    def block(self, indent: int, depth: int, count: int) -> list[str]:
        lines: list[str] = []
        for _ in range(count):
            lines += self.statement(indent, depth)
        return lines or ["    " * indent + "pass"]

    def assign(self, kind: str, pad: str) -> list[str]:
        value = self.expr(kind, 3 if kind == "M" else 2)
        existing = [n for n, k in self.scope.names.items() if k == kind]
        name = self.random.choice(existing) if existing and self.chance(0.4) else self.new()
        line = f"{pad}{name} = {value}" if self.chance(0.93) else f"{pad}{name} = {self.new()} = {value}"
        self.scope.names[name] = kind
        return [line]

    def statement(self, indent: int, depth: int) -> list[str]:
        pad = "    " * indent
        simple = [self.simple_assign, self.simple_assign, self.simple_assign, self.tensor_write, self.tensor_write, self.container_write,
                  self.container_write, self.object_write, self.global_write, self.augmented, self.unpack, self.show, self.leave,
                  self.outer_write, self.give, self.fail]
        nested = [self.if_, self.if_, self.for_, self.for_, self.while_, self.try_, self.try_, self.with_, self.def_, self.generator_,
                  self.match_, self.class_]
        make = self.random.choice(nested if depth > 0 and self.chance(0.4) else simple)
        return make(pad, indent, depth) or self.assign("M", pad)

    def simple_assign(self, pad: str, indent: int, depth: int) -> list[str]:
        return self.assign(self.random.choice("MMMMMVSIBiiffbsLDOC"), pad)

    def tensor_write(self, pad: str, indent: int, depth: int) -> list[str]:
        e, m = self.expr, self.name("M") or "x"
        v = self.new()
        return self.random.choice([
            lambda: [f"{pad}{m}.{self.pick('add_', 'mul_', 'sub_', 'copy_')}({self.pick(e('M', 1), e('S', 1))})"],
            lambda: [f"{pad}{m}.{self.pick('mul_(0.5)', 'tanh_()', 'zero_()', 'relu_()', 'add_(1)', 'clamp_(-1, 2)', 'fill_(0.5)')}"],
            lambda: [f"{pad}{m}[{self.pick('0', '-1', '1', e('i', 0) + ' % 2')}] {self.pick('=', '+=', '*=')} {self.pick(e('V', 1), e('f', 0))}"],
            lambda: [f"{pad}{m}[:, {self.pick('0', '1:', '::2', '-1')}] {self.pick('=', '+=', '*=')} {e('f', 1)}"],
            lambda: [f"{pad}{m}[{e('B', 1)}] = {e('f', 0)}"] if self.breaking else [f"{pad}{m}.masked_fill_({e('B', 1)}, {e('f', 0)})"],
            lambda: [f"{pad}{v} = {m}[{self.pick('0', '1', '-1')}]", f"{pad}{v}.{self.pick('mul_(2)', 'add_(1)', 'zero_()')}"],
            lambda: [f"{pad}{v} = {m}.{self.pick('t()', 'view(-1)', 'detach()', '[:, 1:]'.replace('[', '__getitem__((slice(None), slice(1, None)))#'))}",
                     f"{pad}{v}.{self.pick('mul_(2)', 'add_(1)', 'tanh_()')}"],
            lambda: [f"{pad}{m}.t().add_({e('S', 0)})"],
            lambda: [f"{pad}{m}.view(-1)[{self.pick(0, 1, -1)}] = {e('f', 0)}"],
            lambda: [f"{pad}{m}.index_add_(0, torch.tensor([0, {m}.shape[0] - 1]), {e('M', 1)}[:1].clone().expand(2, -1).to({m}.dtype))"],
            lambda: [f"{pad}torch.{self.pick('add', 'mul')}({e('M', 0)}, {e('M', 0)}, out={m})"],
            lambda: [f"{pad}{m}.requires_grad_({self.pick('', 'False')})"] if self.chance(0.2) else [f"{pad}{m}.neg_()"],
        ])()

    def container_write(self, pad: str, indent: int, depth: int) -> list[str] | None:
        e = self.expr
        if self.chance(0.5):
            name = self.name("L")
            if name is None:
                return None
            return self.random.choice([
                lambda: [f"{pad}{name}.append({e('M', 1)})"],
                lambda: [f"{pad}{name}[{self.pick('0', '-1', e('i', 0))}] = {e('M', 1)}"],
                lambda: [f"{pad}{name}[{self.pick('0', '-1')}] {self.pick('+=', '*=', '-=')} {self.pick(e('M', 1), e('f', 0))}"],
                lambda: [f"{pad}{name}.{self.pick('pop()', 'reverse()', 'insert(0, ' + e('M', 0) + ')')}"],
                lambda: [f"{pad}{name}.extend({self.pick(self.expr('L', 1), '[]', '(t for t in ' + name + '[:1])')})"],
                lambda: [f"{pad}del {name}[{self.pick('0', '-1', ':1', '2:')}]"],
                lambda: [f"{pad}{name}[:] = {e('L', 1)}"],
                lambda: [f"{pad}{name} += {e('L', 1)}"] if name in self.scope.names else [f"{pad}{name}.clear()"],
            ])()
        name = self.name("D")
        if name is None:
            return None
        return self.random.choice([
            lambda: [f"{pad}{name}[{self.key()}] = {e('M', 1)}"],
            lambda: [f"{pad}{name}[{self.key()}] {self.pick('+=', '*=')} {self.pick(e('M', 1), e('f', 0))}"],
            lambda: [f"{pad}{name}.update({self.pick('a=' + e('M', 0), e('D', 1))})"],
            lambda: [f"{pad}{name}.pop({self.key()}{self.pick('', ', None')})"],
            lambda: [f"{pad}del {name}[{self.key()}]"],
            lambda: [f"{pad}{name}.{self.pick('clear()', 'popitem()')}"],
        ])()

    def object_write(self, pad: str, indent: int, depth: int) -> list[str] | None:
        name = self.name("O")
        if name is None:
            return None
        e = self.expr
        return self.random.choice([
            lambda: [f"{pad}{name}.t = {e('M', 2)}"],
            lambda: [f"{pad}{name}.k {self.pick('=', '+=', '-=')} {e('i', 1)}"],
            lambda: [f"{pad}{name}.extra.append({self.pick(e('i', 0), e('M', 0), e('s', 0))})"],
            lambda: [f"{pad}setattr({name}, {self.pick(repr('late'), repr('k'))}, {e('i', 1)})"],
            lambda: [f"{pad}{name}.t.{self.pick('add_(1)', 'mul_(0.5)')}"],
            lambda: [f"{pad}{name}.t {self.pick('+=', '*=')} {self.pick(e('f', 0), e('M', 0))}"],
            lambda: [f"{pad}Thing.total += {e('i', 0)}"],
            lambda: [f"{pad}{name}.__dict__['k'] = {e('i', 0)}"],
            lambda: [f"{pad}del {name}.{self.pick('late', 'k')}"] if self.chance(0.3) else [f"{pad}{name}.shift({e('i', 0)})"],
        ])()

    def global_write(self, pad: str, indent: int, depth: int) -> list[str]:
        e = self.expr
        return self.random.choice([
            lambda: [f"{pad}G_COUNT += {self.pick('1', e('i', 0))}"],
            lambda: [f"{pad}G_SCALE = {self.pick(e('f', 1), 'G_SCALE * 0.5')}"],
            lambda: [f"{pad}G_LIST.append({self.pick(e('M', 0), e('i', 0), e('s', 0))})"],
            lambda: [f"{pad}G_TABLE[{e('s', 0)}] = {self.pick(e('M', 1), e('i', 0))}"],
            lambda: [f"{pad}G_TABLE[{self.key()}] = G_TABLE.get({self.key()}, 0) + 1"],
        ])()

    def augmented(self, pad: str, indent: int, depth: int) -> list[str] | None:
        kind = self.random.choice("MMif")
        own = [n for n, k in self.scope.names.items() if k == kind]
        if not own:
            return None
        operator = self.pick("+=", "-=", "*=")
        value = self.pick(self.expr("M", 1), self.expr("f", 0)) if kind == "M" else self.expr(kind, 1)
        return [f"{pad}{self.random.choice(own)} {operator} {value}"]

    def unpack(self, pad: str, indent: int, depth: int) -> list[str]:
        e, a, b, c = self.expr, self.new(), self.new(), self.new()
        values = self.random.choice([
            lambda: ([f"{pad}{a}, {b} = {e('M', 1)}, {e('M', 1)}"], {a: "M", b: "M"}),
            lambda: ([f"{pad}{a}, *{b} = {self.name('L') or 'items'}"], {a: "M", b: "L"}),
            lambda: ([f"{pad}({a}, {b}), {c} = ({e('i', 0)}, {e('M', 1)}), {e('f', 0)}"], {a: "i", b: "M", c: "f"}),
            lambda: ([f"{pad}{a}, {b} = divmod({e('i', 1)}, {self.pick(2, 3)})"], {a: "i", b: "i"}),
            lambda: ([f"{pad}{a}, {b} = {e('M', 1)}.shape"], {a: "i", b: "i"}),
            lambda: ([f"{pad}{a}, {b} = {e('M', 1)}.split({self.name('M') or 'x'}.shape[1] // 2, 1)[:2]"], {}),
            lambda: ([f"{pad}{a}, {b}, *{c} = {e('M', 1)}"], {a: "V", b: "V"}),
            lambda: ([f"{pad}{a}, {b} = {e('M', 1)}.max(1)"], {}),
            lambda: ([f"{pad}{a}, {b} = {{**{self.name('D') or '{}'}, 'q': 0, 'r': 1}}.popitem()"], {a: "s", b: "i"}),
        ])()
        own = [n for n, k in self.scope.names.items() if k == "M"]
        if len(own) > 1 and self.chance(0.2):
            p, q = self.random.sample(own, 2)
            return [f"{pad}{p}, {q} = {q}, {p}"]
        self.scope.names.update(values[1])
        return values[0]

    def show(self, pad: str, indent: int, depth: int) -> list[str]:
        what = self.pick(self.expr("i", 1), self.expr("s", 1), self.expr("b", 0), f"{self.expr('M', 0)}.shape", "G_COUNT",
                         "len(items), list(table)")
        if self.breaking and self.chance(0.1):
            what = f"{self.expr('M', 0)}.tanh().sum().round()"
        return [f"{pad}print({what})"]

    def leave(self, pad: str, indent: int, depth: int) -> list[str] | None:
        """break, continue, return, raise or assert; mostly under a condition."""
        condition = self.expr("b", 1)
        if self.loops and self.chance(0.7):
            return [f"{pad}if {condition}:", f"{pad}    {self.pick('break', 'continue')}"]
        if self.chance(0.4):
            return [f"{pad}assert {condition}, {self.expr('s', 0)}"] if self.chance(0.3) else [
                f"{pad}if {condition}:", f"{pad}    {self.raise_()}"]
        if not self.returns or self.chance(0.5):
            return None
        return [f"{pad}if {condition}:", f"{pad}    return {self.expr('M', 1)}"]

    def give(self, pad: str, indent: int, depth: int) -> list[str] | None:
        if not self.generating:
            return None
        if self.chance(0.3):
            got = self.new()
            return [f"{pad}{got} = yield {self.expr('M', 1)}"]
        return [f"{pad}yield {self.expr('M', 1)}"]

    def fail(self, pad: str, indent: int, depth: int) -> list[str] | None:
        return [pad + self.raise_()] if depth < 1 and self.chance(0.15) else None

    def raise_(self) -> str:
        kind = self.pick("ValueError", "KeyError", "Oops", "RuntimeError", "ZeroDivisionError")
        return f"raise {kind}({self.pick(self.expr('s', 1), self.expr('i', 0), '')})"

    def outer_write(self, pad: str, indent: int, depth: int) -> list[str] | None:
        if not self.writable_outer:
            return None
        name = self.random.choice(self.writable_outer)
        kind = self.scope.outer.names.get(name) if self.scope.outer else None
        if kind is None or name in self.scope.names:
            return None
        return [f"{pad}{name} = {self.expr(kind, 1)}"]

    # -- compound statements --------------------------------------------------------------------------------
    def inside(self, indent: int, depth: int, loop: int = 0, count: int | None = None) -> list[str]:
        """A nested block; what it defines stays in scope half of the time (then it may be unbound afterwards)."""
        before = dict(self.scope.names)
        self.loops += loop
        lines = self.block(indent + 1, depth - 1, count or self.random.choice([1, 1, 1, 2, 2, 3]))
        self.loops -= loop
        if not self.chance(0.03):
            self.scope.names = {n: k for n, k in self.scope.names.items() if before.get(n) == k}
        return lines

    def if_(self, pad: str, indent: int, depth: int) -> list[str]:
        lines = [f"{pad}if {self.expr('b', 2)}:", *self.inside(indent, depth)]
        if self.chance(0.25):
            lines += [f"{pad}elif {self.expr('b', 1)}:", *self.inside(indent, depth)]
        if self.chance(0.5):
            lines += [f"{pad}else:", *self.inside(indent, depth)]
        return lines

    def for_(self, pad: str, indent: int, depth: int) -> list[str]:
        e, a, b = self.expr, self.new(), self.new()
        head, names = self.random.choice([
            lambda: (f"{a} in range({self.pick(2, 3, 'min(3, ' + e('i', 0) + ')')})", {a: "i"}),
            lambda: (f"{a} in {self.name('L') or 'items'}[:3]", {a: "M"}),
            lambda: (f"{a} in list({self.name('L') or 'items'})", {a: "M"}),
            lambda: (f"{a}, {b} in enumerate({self.name('L') or 'items'}[:2], {self.pick(0, 1)})", {a: "i", b: "M"}),
            lambda: (f"{a}, {b} in list({self.name('D') or 'table'}.items())", {a: "s", b: "M"}),
            lambda: (f"{a}, {b} in zip({self.name('L') or 'items'}[:2], range(3))", {a: "M", b: "i"}),
            lambda: (f"{a} in {e('M', 1)}", {a: "V"}),
            lambda: (f"{a} in sorted({self.name('D') or 'table'})", {a: "s"}),
            lambda: (f"{a}, {b} in itertools.product(range(2), [{e('f', 0)}, 2.0])", {a: "i", b: "f"}),
            lambda: (f"{a} in {self.name('D') or 'table'}", {a: "s"}),
        ])()
        self.scope.names.update(names)
        lines = [f"{pad}for {head}:", *self.inside(indent, depth, 1)]
        for n in names:
            if not self.chance(0.05):
                self.scope.names.pop(n, None)
        if self.chance(0.25):
            lines += [f"{pad}else:", *self.inside(indent, depth)]
        return lines

    def while_(self, pad: str, indent: int, depth: int) -> list[str]:
        counter = self.new("c")
        condition = f"{counter} < {self.pick(2, 3)}" + (f" and {self.expr('b', 1)}" if self.chance(0.5) else "")
        lines = [f"{pad}{counter} = 0", f"{pad}while {condition}:", f"{pad}    {counter} += 1", *self.inside(indent, depth, 1)]
        if self.chance(0.25):
            lines += [f"{pad}else:", *self.inside(indent, depth)]
        return lines

    def try_(self, pad: str, indent: int, depth: int) -> list[str]:
        body = self.inside(indent, depth)
        if self.chance(0.5):
            body.append(f"{pad}    if {self.expr('b', 1)}:")
            body.append(f"{pad}        {self.raise_()}")
        lines = [f"{pad}try:", *body]
        final = self.chance(0.4)
        if not final or self.chance(0.6):
            kind = self.pick("ValueError", "(KeyError, ValueError)", "Exception", "RuntimeError", "Oops", "IndexError")
            name = self.new("e")
            lines += [f"{pad}except {kind} as {name}:", *([f"{pad}    print(type({name}).__name__, {name})"] if self.chance(0.5) else []),
                      *self.inside(indent, depth)]
            if self.chance(0.15):
                lines.append(f"{pad}    raise{self.pick('', ' Oops(1) from ' + name, ' RuntimeError(str(' + name + '))')}")
            if self.chance(0.2):
                lines += [f"{pad}else:", *self.inside(indent, depth)]
        if final:
            lines += [f"{pad}finally:", *self.inside(indent, depth)]
        return lines

    def with_(self, pad: str, indent: int, depth: int) -> list[str]:
        head = self.pick("torch.no_grad()", "torch.enable_grad()", "Ctx(G_LIST)", "Ctx(G_LIST, True)", "managed(G_LIST)",
                         "contextlib.suppress(ValueError, KeyError)", "torch.set_grad_enabled(" + self.expr("b", 0) + ")",
                         "contextlib.nullcontext()", "Ctx(obj.extra) as " + self.new(), "torch.no_grad(), Ctx(G_LIST)",
                         "torch.autocast('cpu', torch.bfloat16)" if self.chance(0.2) else "torch.no_grad()")
        return [f"{pad}with {head}:", *self.inside(indent, depth)]

    def function(self, name: str, parameters: dict[str, str], head: str, indent: int, depth: int, count: int, generating: bool = False,
                 outer: Scope | None = None, declare: list[str] | None = None) -> list[str]:
        """A function's lines with the body at indent + 1. `outer` is the scope that it closes over."""
        saved = self.scope, self.loops, self.generating, self.returns, self.writable_outer
        self.scope, self.loops, self.generating, self.returns = Scope(parameters, outer), 0, generating, not generating
        self.writable_outer = declare or []
        pad = "    " * (indent + 1)
        body = self.block(indent + 1, depth, count)
        if generating:
            body.append(f"{pad}yield {self.expr('M', 1)}")
        else:
            body.append(f"{pad}return {self.expr('M', 2)}")
        self.scope, self.loops, self.generating, self.returns, self.writable_outer = saved
        first = [f"{pad}global G_COUNT, G_SCALE"] + ([f"{pad}nonlocal {', '.join(declare)}"] if declare else [])
        return ["    " * indent + f"def {name}({head}):", *first, *body]

    def def_(self, pad: str, indent: int, depth: int) -> list[str]:
        name, t = self.new("g"), self.new("p")
        declare = [n for n, k in self.scope.names.items() if k in "Mif" and self.chance(0.25)] if self.scope.names else []
        declare = [n for n in declare if not n.startswith("e")][:2]
        lines = self.function(name, {t: "M"}, t + self.pick("", ", extra=" + self.expr("i", 0)), indent, depth - 1, self.random.randrange(1, 4),
                              outer=self.scope, declare=declare)
        self.scope.names[name] = "C"
        if self.chance(0.3):
            lines[0:0] = [f"{pad}@{self.pick('functools.wraps(torch.tanh)', '(lambda fn: fn)', '(lambda fn: lambda t: fn(t) * 2)')}"]
        return lines

    def generator_(self, pad: str, indent: int, depth: int) -> list[str]:
        name, t = self.new("gen"), self.new("p")
        lines = self.function(name, {t: "M"}, t, indent, depth - 1, self.random.randrange(1, 4), True, outer=self.scope)
        item = self.new()
        e = self.expr
        lines += self.random.choice([
            lambda: [f"{pad}for {item} in {name}({e('M', 1)}):", f"{pad}    {self.name('L') or 'items'}.append({item})",
                     f"{pad}    if {e('b', 1)}:", f"{pad}        break"],
            lambda: [f"{pad}{item} = {name}({e('M', 1)})", f"{pad}print(next({item}).shape)", f"{pad}{self.name('L') or 'items'}.extend({item})"],
            lambda: [f"{pad}{item} = sum({name}({e('M', 0)}), 0)"],
            lambda: [f"{pad}{item} = [q * 2 for q in {name}({e('M', 0)})]"],
            lambda: [f"{pad}{item} = {name}({e('M', 0)})", f"{pad}next({item})", f"{pad}{item}.{self.pick('close()', 'send(None)', 'send(3)')}"],
            lambda: [f"{pad}{item} = dict(enumerate({name}({e('M', 0)})))"],
        ])()
        return lines

    def match_(self, pad: str, indent: int, depth: int) -> list[str]:
        e = self.expr
        subject = self.pick(e("i", 1), f"({e('i', 0)}, {e('M', 0)})", f"{{'op': {e('s', 0)}, 'v': {e('M', 0)}}}", self.name("O") or "obj")
        lines = [f"{pad}match {subject}:"]
        for case in self.random.sample(["0 | 1", "int(q)", "(0, q)", "(int(), torch.Tensor())", "{'op': 'a', 'v': q}", "Sub(k=2)", "Thing(t=q)"], 3):
            lines += [f"{pad}    case {case}:", *self.inside(indent + 1, depth)]
        return [*lines, f"{pad}    case _:", *self.inside(indent + 1, depth)]

    def class_(self, pad: str, indent: int, depth: int) -> list[str] | None:
        if not self.chance(0.4):
            return None
        name, made = self.new("K"), self.new()
        lines = [f"{pad}class {name}({self.pick('Thing', 'Sub')}):", f"{pad}    factor = {self.expr('i', 0)}",
                 f"{pad}    def shift(self, by):", f"{pad}        return self.t * self.factor + by",
                 f"{pad}{made} = {name}({self.expr('M', 1)}, {self.expr('i', 0)})"]
        self.scope.names[made] = "O"
        return lines

    # -- the module -----------------------------------------------------------------------------------------
    def text(self) -> str:
        lines = [PRELUDE]
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            name, kind = self.new("h"), self.random.choice(["plain", "plain", "variadic", "generator"])
            head, names = {"plain": ("t, n, scale=0.5", {"t": "M", "n": "i", "scale": "f"}),
                           "variadic": ("t, *rest, k=2, **more", {"t": "M", "k": "i", "rest": "L"}),
                           "generator": ("t, n", {"t": "M", "n": "i"})}[kind]
            body = self.function(name, names, head, 0, 1, self.random.randrange(1, 4), kind == "generator")
            lines += [*self.local_names(body), ""]
            self.helpers.append((name, kind))
        names = {"x": "M", "y": "M", "n": "i", "scale": "f", "flag": "b", "word": "s", "items": "L", "table": "D", "obj": "O"}
        lines += self.function("f", names, "x, y, n, scale, flag, word, items, table, obj", 0, self.pick(1, 2, 2, 3), self.random.randrange(2, 7))
        result = self.pick("", ", items", ", obj.t", ", table", ", [x, y]", ", n", ", x[0]", ", {'s': scale}", ", items, table, obj")
        last = lines[-1]
        lines[-1] = f"{last.replace('return ', 'return (', 1)}{result or ','})"
        return "\n".join(lines) + "\n"

    def local_names(self, lines: list[str]) -> list[str]:
        """Helpers outside of f have no items, table, obj, x: take others."""
        swap = {"items": "G_LIST", "table": "G_TABLE", "obj.extra": "G_LIST", "x": "t"}
        made = []
        for line in lines:
            for old, new in swap.items():
                line = re.sub(rf"(?<![\w.'\"]){re.escape(old)}\b(?!\(\))(?!=)", new, line)
            made.append(line)
        return made


def program(seed: int) -> str:
    """The text of the program of a seed; always compiles."""
    for attempt in range(20):
        text = Generator(seed * 1000 + attempt).text()
        try:
            compile(text, f"<program {seed}>", "exec")
        except SyntaxError:
            continue
        return text
    raise ValueError(f"no valid program from seed {seed}")
