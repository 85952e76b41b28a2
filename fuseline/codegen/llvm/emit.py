"""A writer of LLVM IR text in SSA form that places each instruction in the outermost loop that its operands allow.

Text and not llvmlite's IR objects: a kernel has a few hundred instructions, and building objects for them takes longer
than LLVM takes to compile them. Invariant code motion happens here, while writing, so no pass of LLVM has to prove
aliasing: a `Builder` keeps a stack of `Level`s (function entry, row loop, ..., innermost loop), every value knows its level,
and a pure instruction goes to the deepest level among its operands. Equal instructions of one level are written once.
"""
from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache

from fuseline.errors import InternalError

FLOATS = ("float", "double", "half")
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64, "half": 16}


@cache
def type_text(elem: str, lanes: int) -> str:
    return elem if lanes == 1 else f"<{lanes} x {elem}>"


def _mangled(elem: str, lanes: int) -> str:
    """The suffix that an overloaded intrinsic's name has for a type: v16f32."""
    short = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}.get(elem, elem)
    return short if lanes == 1 else f"v{lanes}{short}"


def _literal(value: object, elem: str) -> str:
    return _literal_of(value, elem, type(value) is float and str(value) == "-0.0")


@lru_cache(maxsize=4096)
def _literal_of(value: object, elem: str, negative_zero: bool) -> str:
    """The cache takes 0.0 and -0.0 for equal, so the latter says so."""
    if elem in ("float", "double"):
        number = float(value)                              # type: ignore[arg-type]
        if elem == "float":                                # LLVM wants a float written as the double of the same value
            number = to_f32(number)
        return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
    if elem == "i1":
        return "true" if value else "false"
    bits = BITS[elem]
    whole = int(value) & ((1 << bits) - 1)                 # type: ignore[call-overload]
    return str(whole - (1 << bits) if whole >> (bits - 1) else whole)


def to_f32(number: float) -> float:
    """The nearest f32 (round to even), infinite where it overflows."""
    try:
        return struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


class Val:
    """An SSA value or a constant: `text` as an operand, element type, lanes (1: a scalar), level; `const` the number of a constant."""

    __slots__ = ("text", "elem", "lanes", "level", "const")

    def __init__(self, text: str, elem: str, lanes: int, level: int, const: object = None) -> None:
        self.text, self.elem, self.lanes, self.level, self.const = text, elem, lanes, level, const

    @property
    def type(self) -> str:
        return type_text(self.elem, self.lanes)

    @property
    def typed(self) -> str:
        return f"{type_text(self.elem, self.lanes)} {self.text}"

    @property
    def is_const(self) -> bool:
        return self.const is not None


class Level:
    """One loop body being written: its lines, the block they end in, instructions already there, values computed there."""

    __slots__ = ("lines", "label", "cse", "memo")

    def __init__(self, label: str) -> None:
        self.lines: list[str] = []
        self.label = label
        self.cse: dict[str, Val] = {}
        self.memo: dict[object, object] = {}


class Loop:
    """`for index in range(start, stop, step)`; `phis` are the carried values inside, `next` must be set, `results` come out."""

    __slots__ = ("index", "phis", "next", "results", "step")

    def __init__(self, index: Val, phis: list[Val], step: Val) -> None:
        self.index, self.phis, self.step = index, phis, step
        self.next: list[Val] = phis
        self.results: list[Val] = []


class Builder:
    """Writes the body of one function. `declarations` and `functions` collect what the module must declare and define."""

    def __init__(self, label: str = "work", avx512: bool = False) -> None:
        self.avx512 = avx512                                       # the host has AVX-512's instruction for x * 2**n
        self.levels = [Level(label)]
        self.declarations: set[str] = set()
        self.functions: set[tuple[str, int, str]] = set()          # (name, lanes, elem) of math functions that are called
        self._count = 0

    # ---------------------------------------------------------------- values
    def const(self, number: object, elem: str, lanes: int = 1) -> Val:
        one = _literal(number, elem)
        text = one if lanes == 1 else "<" + ", ".join([f"{elem} {one}"] * lanes) + ">"
        return Val(text, elem, lanes, 0, number)

    def iota(self, elem: str, lanes: int) -> Val:
        if lanes == 1:
            return self.const(0, elem)
        return Val("<" + ", ".join(f"{elem} {_literal(k, elem)}" for k in range(lanes)) + ">", elem, lanes, 0)

    def fresh(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    @property
    def depth(self) -> int:
        return len(self.levels) - 1

    def emit(self, elem: str, lanes: int, rhs: str, operands: Sequence[Val], *, pinned: bool = False) -> Val:
        """A value of the instruction `rhs`. pinned: it stays in the innermost loop and is never merged with an equal one."""
        level = self.depth if pinned else max((v.level for v in operands), default=0)
        at = self.levels[level]
        if not pinned:
            known = at.cse.get(rhs)
            if known is not None:
                return known
        made = Val(self.fresh(), elem, lanes, level)
        at.lines.append(f"  {made.text} = {rhs}")
        if not pinned:
            at.cse[rhs] = made
        return made

    def effect(self, text: str) -> None:
        self.levels[-1].lines.append("  " + text)

    def recall(self, key: object) -> object | None:
        for level in reversed(self.levels):
            if key in level.memo:
                return level.memo[key]
        return None

    def remember(self, key: object, value: object, level: int) -> None:
        self.levels[level].memo[key] = value

    # ---------------------------------------------------------------- loops
    @contextmanager
    def loop(self, start: Val, stop: Val, step: Val, carried: Sequence[Val] = ()) -> Iterator[Loop]:
        """Runs zero or more times. Inside, set `loop.next` (one value for each carried); after it, read `loop.results`."""
        parent = self.levels[-1]
        self._count += 1
        tag = self._count
        level = Level(f"body{tag}")
        self.levels.append(level)
        depth = self.depth
        made = Loop(Val(self.fresh(), start.elem, 1, depth), [Val(self.fresh(), c.elem, c.lanes, depth) for c in carried], step)
        yield made
        following = self.binary("add", made.index, made.step)
        if following.level != depth:
            raise InternalError("a loop's counter does not move")
        again = self.emit("i1", 1, f"icmp slt {start.elem} {following.text}, {stop.text}", [following, stop])
        if len(made.next) != len(carried):
            raise InternalError("a loop was given another number of values than it carries")
        self.levels.pop()
        before, latch = parent.label, level.label
        some = self.fresh()
        head = [f"  {some} = icmp slt {start.elem} {start.text}, {stop.text}", f"  br i1 {some}, label %body{tag}, label %exit{tag}",
                f"body{tag}:", f"  {made.index.text} = phi {start.elem} [{start.text}, %{before}], [{following.text}, %{latch}]"]
        for phi, init, after in zip(made.phis, carried, made.next, strict=True):
            head.append(f"  {phi.text} = phi {phi.type} [{init.text}, %{before}], [{after.text}, %{latch}]")
        parent.lines += head
        parent.lines += level.lines
        parent.lines += [f"  br i1 {again.text}, label %body{tag}, label %exit{tag}", f"exit{tag}:"]
        for init, after in zip(carried, made.next, strict=True):
            out = Val(self.fresh(), init.elem, init.lanes, depth - 1)
            parent.lines.append(f"  {out.text} = phi {init.type} [{init.text}, %{before}], [{after.text}, %{latch}]")
            made.results.append(out)
        parent.label = f"exit{tag}"

    def seldom(self, condition: Val, compute: Callable[[], Sequence[Val]], otherwise: Sequence[Val]) -> list[Val]:
        """compute() under a branch that is rarely taken, else the given values (one for each result)."""
        level = self.levels[-1]
        self._count += 1
        tag, before = self._count, level.label
        saved = dict(level.cse)
        self.effect(f"br i1 {condition.text}, label %seldom{tag}, label %after{tag}")
        level.lines.append(f"seldom{tag}:")
        level.label = f"seldom{tag}"
        rare = compute()
        last = level.label
        self.effect(f"br label %after{tag}")
        level.lines.append(f"after{tag}:")
        level.label = f"after{tag}"
        level.cse = saved                                    # what the branch computed does not dominate what follows
        results = []
        for a, c in zip(rare, otherwise, strict=True):
            out = Val(self.fresh(), c.elem, c.lanes, self.depth)
            level.lines.append(f"  {out.text} = phi {c.type} [{c.text}, %{before}], [{a.text}, %{last}]")
            results.append(out)
        return results

    # ---------------------------------------------------------------- shapes of values
    def splat(self, v: Val, lanes: int) -> Val:
        if v.lanes == lanes:
            return v
        if v.lanes != 1:
            raise InternalError(f"{v.lanes} lanes cannot become {lanes}")
        if v.is_const:
            return self.const(v.const, v.elem, lanes)
        wide = type_text(v.elem, lanes)
        first = self.emit(v.elem, lanes, f"insertelement {wide} poison, {v.typed}, i32 0", [v])
        return self.emit(v.elem, lanes, f"shufflevector {first.typed}, {wide} poison, <{lanes} x i32> zeroinitializer", [first])

    def same_lanes(self, *values: Val) -> list[Val]:
        lanes = max(v.lanes for v in values)
        return [self.splat(v, lanes) for v in values]

    def lane(self, v: Val, k: int) -> Val:
        if v.lanes == 1:
            return v
        return self.emit(v.elem, 1, f"extractelement {v.typed}, i32 {k}", [v])

    def half_of(self, v: Val, upper: bool) -> Val:
        """The lower or upper half of the lanes."""
        n = v.lanes // 2
        picks = ", ".join(f"i32 {k + (n if upper else 0)}" for k in range(n))
        if n == 1:
            return self.lane(v, 1 if upper else 0)
        return self.emit(v.elem, n, f"shufflevector {v.typed}, {v.type} poison, <{n} x i32> <{picks}>", [v])

    # ---------------------------------------------------------------- arithmetic
    def binary(self, op: str, a: Val, b: Val) -> Val:
        a, b = self.same_lanes(a, b)
        if a.elem != b.elem:
            raise InternalError(f"{op} of {a.elem} and {b.elem}")
        if a.elem.startswith("i") and (a.is_const or b.is_const):
            folded = self._fold(op, a, b)
            if folded is not None:
                return folded
        return self.emit(a.elem, a.lanes, f"{op} {a.typed}, {b.text}", [a, b])

    def _fold(self, op: str, a: Val, b: Val) -> Val | None:
        if op == "add":
            if a.is_const and b.is_const:
                return self.const(a.const + b.const, a.elem, a.lanes)      # type: ignore[operator]
            if a.const == 0:
                return b
            return a if b.const == 0 else None
        if op == "mul":
            if a.is_const and b.is_const:
                return self.const(a.const * b.const, a.elem, a.lanes)      # type: ignore[operator]
            if a.const == 1:
                return b
            return a if b.const == 1 else None
        return None

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        a, b, c = self.same_lanes(a, b, c)
        return self.intrinsic("llvm.fma", a.elem, a.lanes, [a, b, c])

    def polynomial(self, x: Val, coefficients: Sequence[float]) -> Val:
        """sum of coefficients[k] * x**k by Horner's rule with fused multiply-adds."""
        total = self.const(coefficients[-1], x.elem, x.lanes)
        for c in reversed(coefficients[:-1]):
            total = self.fma(total, x, self.const(c, x.elem, x.lanes))
        return total

    def intrinsic(self, name: str, elem: str, lanes: int, args: Sequence[Val], extra: str = "") -> Val:
        """A call of an intrinsic that is overloaded on its result type alone."""
        full = f"{name}.{_mangled(elem, lanes)}{extra}"
        return self.call(full, elem, lanes, args)

    def call(self, name: str, elem: str, lanes: int, args: Sequence[Val], *, declare: bool = True) -> Val:
        """A call of a pure function."""
        result = type_text(elem, lanes)
        if declare:
            self.declarations.add(f"declare {result} @{name}({', '.join(a.type for a in args)})")
        return self.emit(elem, lanes, f"call {result} @{name}({', '.join(a.typed for a in args)})", list(args))

    def compare(self, op: str, a: Val, b: Val) -> Val:
        """op: an LLVM predicate ("ogt", "slt"); floats and integers by the operand's type."""
        a, b = self.same_lanes(a, b)
        kind = "fcmp" if a.elem in FLOATS else "icmp"
        return self.emit("i1", a.lanes, f"{kind} {op} {a.typed}, {b.text}", [a, b])

    def select(self, c: Val, a: Val, b: Val) -> Val:
        if a.elem != b.elem:
            raise InternalError(f"select between {a.elem} and {b.elem}")
        if c.lanes == 1:
            a, b = self.same_lanes(a, b)
        else:
            c, a, b = self.same_lanes(c, a, b)
        return self.emit(a.elem, a.lanes, f"select {c.typed}, {a.typed}, {b.typed}", [c, a, b])

    def convert(self, op: str, v: Val, elem: str) -> Val:
        return self.emit(elem, v.lanes, f"{op} {v.typed} to {type_text(elem, v.lanes)}", [v])

    def negate(self, v: Val) -> Val:
        return self.emit(v.elem, v.lanes, f"fneg {v.typed}", [v])

    def absolute(self, v: Val) -> Val:
        return self.intrinsic("llvm.fabs", v.elem, v.lanes, [v])

    def scale_by_power(self, x: Val, n: Val) -> Val | None:
        """x * 2**n for whole-valued f32 n, rounded once, by one instruction of AVX-512; None where the host has none."""
        bits = 32 * x.lanes
        if not self.avx512 or x.elem != "float" or bits not in (128, 256, 512):
            return None
        x, n = self.same_lanes(x, n)
        mask = "i16" if x.lanes == 16 else "i8"
        name = f"llvm.x86.avx512.mask.scalef.ps.{bits}"
        rounding = (", i32", ", i32 4") if bits == 512 else ("", "")
        self.declarations.add(f"declare {x.type} @{name}({x.type}, {x.type}, {x.type}, {mask}{rounding[0]})")
        return self.emit("float", x.lanes, f"call {x.type} @{name}({x.typed}, {n.typed}, {x.typed}, {mask} -1{rounding[1]})", [x, n])

    # ---------------------------------------------------------------- memory
    def address(self, pointer: Val, index: Val, elem: str) -> Val:
        """pointer + index elements; a vector of addresses for a vector of indices."""
        if index.const == 0 and index.lanes == 1:
            return pointer
        return self.emit("ptr", max(index.lanes, pointer.lanes), f"getelementptr {elem}, {pointer.typed}, {index.typed}", [pointer, index])

    def load(self, pointer: Val, elem: str, lanes: int, *, pinned: bool) -> Val:
        size = max(1, BITS[elem] // 8)
        return self.emit(elem, lanes, f"load {type_text(elem, lanes)}, ptr {pointer.text}, align {size}", [pointer], pinned=pinned)

    def store(self, v: Val, pointer: Val) -> None:
        self.effect(f"store {v.typed}, ptr {pointer.text}, align {max(1, BITS[v.elem] // 8)}")

    def masked_load(self, pointer: Val, mask: Val, other: Val, *, pinned: bool) -> Val:
        name = f"llvm.masked.load.{_mangled(other.elem, other.lanes)}.p0"
        self.declarations.add(f"declare {other.type} @{name}(ptr, i32, {mask.type}, {other.type})")
        rhs = f"call {other.type} @{name}(ptr {pointer.text}, i32 {BITS[other.elem] // 8}, {mask.typed}, {other.typed})"
        return self.emit(other.elem, other.lanes, rhs, [pointer, mask, other], pinned=pinned)

    def masked_store(self, v: Val, pointer: Val, mask: Val) -> None:
        name = f"llvm.masked.store.{_mangled(v.elem, v.lanes)}.p0"
        self.declarations.add(f"declare void @{name}({v.type}, ptr, i32, {mask.type})")
        self.effect(f"call void @{name}({v.typed}, ptr {pointer.text}, i32 {BITS[v.elem] // 8}, {mask.typed})")

    def gather(self, pointers: Val, mask: Val, other: Val, *, pinned: bool) -> Val:
        name = f"llvm.masked.gather.{_mangled(other.elem, other.lanes)}.v{other.lanes}p0"
        self.declarations.add(f"declare {other.type} @{name}({pointers.type}, i32, {mask.type}, {other.type})")
        rhs = f"call {other.type} @{name}({pointers.typed}, i32 {BITS[other.elem] // 8}, {mask.typed}, {other.typed})"
        return self.emit(other.elem, other.lanes, rhs, [pointers, mask, other], pinned=pinned)

    def scatter(self, v: Val, pointers: Val, mask: Val) -> None:
        name = f"llvm.masked.scatter.{_mangled(v.elem, v.lanes)}.v{v.lanes}p0"
        self.declarations.add(f"declare void @{name}({v.type}, {pointers.type}, i32, {mask.type})")
        self.effect(f"call void @{name}({v.typed}, {pointers.typed}, i32 {BITS[v.elem] // 8}, {mask.typed})")

    def text(self) -> list[str]:
        if len(self.levels) != 1:
            raise InternalError("a loop is still open")
        return self.levels[0].lines
