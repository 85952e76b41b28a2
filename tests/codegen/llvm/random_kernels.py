"""Random kernels with buffers to run them on: shapes, layouts, dtypes, phases and reductions that lowering could produce."""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from fuseline import torch_internals
from fuseline.ir import dtypes
from fuseline.ir.dtypes import BF16, BOOL, F16, F32, F64, I32, I64, U8, DType
from fuseline.ir.expr import Int, Sym, evaluate
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Op, Param, Phase, Reduce, Stmt, Store

FLOATS = (F32, F32, F32, F64, F16, BF16)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 33, 49, 64, 70)
UNARY = ("neg", "abs", "exp", "tanh", "sigmoid", "sin", "erf", "sqrt", "floor", "sign", "log1p", "reciprocal")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "div")
REDUCE = ("sum", "sum", "max", "min", "argmax", "argmin", "welford", "prod")


@dataclass
class Case:
    kernel: Kernel
    buffers: list[torch.Tensor]
    sizes: dict[str, int]
    outputs: list[int]


@dataclass
class _State:
    rng: random.Random
    sizes: dict[str, int]
    params: list[Param] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    count: int = 0

    def name(self) -> str:
        self.count += 1
        return f"%{self.count - 1}"


def make(seed: int) -> Case:
    rng = random.Random(seed)
    sizes = {"s0": rng.choice((2, 3, 17, 40))} if rng.random() < 0.4 else {}
    st = _State(rng, sizes)
    symbolic = [Sym("s0", None, 2)] if sizes else []

    def axis(name: str) -> Axis:
        extent: Int = symbolic[0] if symbolic and rng.random() < 0.4 else rng.choice(EXTENTS)
        return Axis(Sym(name, extent), extent)

    outer = tuple(axis(f"i{k}") for k in range(rng.choice((0, 1, 1, 2, 2, 3))))
    if len(outer) == 3:
        outer = tuple(Axis(Sym(a.sym.name, 3), 3) if k == 0 else a for k, a in enumerate(outer))
    inner = tuple(axis(f"j{k}") for k in range(rng.choice((0, 0, 1, 1, 2))))
    phases = []
    known: list[tuple[str, DType]] = []                      # values of the outer point
    element: list[tuple[str, DType]] = []                    # values of earlier phases, one for each element
    if inner:
        for _ in range(rng.choice((1, 1, 2))):
            body: list[Stmt] = []
            values = _values(st, body, outer + inner, known, element)
            element = element + values
            new = []
            for _ in range(rng.choice((1, 1, 2))):
                value = rng.choice([v for v in values if v[1] != BOOL] or [None])
                if value is None:
                    continue
                new += _reduce(st, body, value)
            phases.append(Phase(inner, tuple(body)))
            known += new
        if known and rng.random() < 0.5:                     # a phase of one point, then the elements again
            body = []
            values = _values(st, body, outer, known, [])
            _store(st, body, outer, rng.choice(values))
            phases.append(Phase((), tuple(body)))
            known += values
        body = []
        if rng.random() < 0.6:
            values = _values(st, body, outer + inner, known, element)
            _store(st, body, outer + inner, rng.choice(values))
            phases.append(Phase(inner, tuple(body)))
        else:
            values = _values(st, body, outer, known, [])
            for value in known[:3]:
                _store(st, body, outer, value)
            _store(st, body, outer, values[-1])
            phases.append(Phase((), tuple(body)))
    else:
        body = []
        values = _values(st, body, outer, [], [])
        for value in rng.sample(values, min(2, len(values))):
            _store(st, body, outer, value)
        phases.append(Phase((), tuple(body)))
    kernel = Kernel(tuple(st.params), tuple(symbolic), outer, tuple(phases), f"random{seed}")
    return Case(kernel, st.buffers, sizes, st.outputs)


def _layout(st: _State, axes: tuple[Axis, ...], whole: bool) -> tuple[Int, int]:
    """(index, elements): the axes in some order with dense or padded strides; not `whole`: some are broadcast."""
    order = list(axes)
    if st.rng.random() < 0.4:
        st.rng.shuffle(order)
    if not whole and st.rng.random() < 0.35:
        order = [a for a in order if st.rng.random() < 0.6]
    index: Int = 0
    step: Int = 1
    for a in reversed(order):
        index = index + a.sym * step
        step = step * (a.extent + (1 if st.rng.random() < 0.15 else 0))
    offset = st.rng.choice((0, 0, 3))
    return index + offset, evaluate(step, st.sizes) + offset + 1


def _load(st: _State, body: list[Stmt], axes: tuple[Axis, ...]) -> tuple[str, DType]:
    rng = st.rng
    dtype = rng.choice((*FLOATS, I64, I32, U8, BOOL))
    index, count = _layout(st, axes, False)
    kind = rng.random()
    if kind < 0.12 and axes:                                 # repeats: a division in the index
        index = index // rng.choice((2, 3, 4, 7, 8))
    elif kind < 0.2 and axes:
        index = index % rng.choice((2, 3, 4, 7, 8))
    buffer = _random(rng, dtype, max(1, count))
    mask: str | None = None
    other: object = 0
    if rng.random() < 0.15 and axes:
        i, m = st.name(), st.name()
        a = rng.choice(axes)
        body.append(Index(i, a.sym, I64))
        body.append(Op(m, "lt", (i, rng.choice((0, 1, 2, 5))), BOOL))
        mask, other = m, rng.choice((0, 1))
        other = bool(other) if dtype == BOOL else other
    elif kind > 0.92 and axes:                               # through an index that is itself loaded
        table = torch.randint(0, max(1, count), (max(1, count),), generator=_generator(rng))
        st.params.append(Param(f"p{len(st.params)}", I64))
        st.buffers.append(table)
        through = st.name()
        body.append(Load(through, st.params[-1].name, index, I64))
        index = Sym(through, None, 0)
    st.params.append(Param(f"p{len(st.params)}", dtype))
    st.buffers.append(buffer)
    name = st.name()
    body.append(Load(name, st.params[-1].name, index, dtype, mask, other))
    return name, dtype.compute


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def _random(rng: random.Random, dtype: DType, count: int) -> torch.Tensor:
    g = _generator(rng)
    wanted = torch_internals.to_torch_dtype(dtype)
    if dtype == BOOL:
        return torch.randint(0, 2, (count,), generator=g).to(wanted)
    if dtype.is_integer:
        return torch.randint(0 if dtype == U8 else -3, 5, (count,), generator=g).to(wanted)
    values = torch.randn(count, generator=g)
    if rng.random() < 0.15:
        values[rng.randrange(count)] = rng.choice((float("nan"), float("inf"), 0.0, -0.0))
    return values.to(wanted)


def _values(st: _State, body: list[Stmt], axes: tuple[Axis, ...], known: list, element: list) -> list[tuple[str, DType]]:
    rng = st.rng
    fresh: list[tuple[str, DType]] = []
    pool = list(known) + list(element)
    for _ in range(rng.choice((1, 2, 3))):
        fresh.append(_load(st, body, axes))
    pool += fresh
    for _ in range(rng.choice((1, 2, 4, 6))):
        name, dtype = rng.choice(pool)
        if dtype == BOOL:
            target = rng.choice((F32, I64))
            new = st.name()
            body.append(Op(new, "cast", (name,), target))
            made = (new, target)
        elif dtype.is_integer:
            kind = rng.random()
            new = st.name()
            if kind < 0.5:
                body.append(Op(new, "cast", (name,), F32))
                made = (new, F32)
            else:
                body.append(Op(new, rng.choice(("add", "mul", "maximum")), (name, rng.choice((1, 2, 3))), dtype))
                made = (new, dtype)
        else:
            kind = rng.random()
            new = st.name()
            same = [n for n, d in pool if d == dtype]
            if kind < 0.4:
                body.append(Op(new, rng.choice(UNARY), (name,), dtype))
                made = (new, dtype)
            elif kind < 0.85:
                body.append(Op(new, rng.choice(BINARY), (name, rng.choice([*same, 1.5])), dtype))
                made = (new, dtype)
            else:
                body.append(Op(new, rng.choice(("lt", "ge", "ne")), (name, rng.choice([*same, 0.25])), BOOL))
                chosen = st.name()
                body.append(Op(chosen, "where", (new, name, rng.choice([*same, 0.5])), dtype))
                made = (chosen, dtype)
        fresh.append(made)
        pool.append(made)
    return fresh


def _reduce(st: _State, body: list[Stmt], value: tuple[str, DType]) -> list[tuple[str, DType]]:
    name, dtype = value
    op = st.rng.choice(REDUCE)
    if dtype.is_integer and op in ("welford", "prod"):
        op = "sum"
    if op == "welford":
        mean, m2 = st.name(), st.name()
        body.append(Reduce((mean, m2), op, (name,), dtype))
        return [(mean, dtype), (m2, dtype)]
    result = I64 if op in ("argmax", "argmin") or (dtype.is_integer and op == "sum") else dtype
    new = st.name()
    body.append(Reduce((new,), op, (name,), result))
    return [(new, result)]


def _store(st: _State, body: list[Stmt], axes: tuple[Axis, ...], value: tuple[str, DType]) -> None:
    name, dtype = value
    target = st.rng.choice((F16, BF16, F32)) if dtype == F32 else dtype
    index, count = _layout(st, axes, True)
    st.params.append(Param(f"p{len(st.params)}", target, True))
    st.outputs.append(len(st.buffers))
    st.buffers.append(torch.zeros(count, dtype=torch_internals.to_torch_dtype(target)))
    body.append(Store(st.params[-1].name, index, name))


assert dtypes.ALL
