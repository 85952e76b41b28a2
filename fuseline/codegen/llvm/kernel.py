"""One Kernel as the text of an LLVM function.

    i64 name(ptr buffers, ptr sizes, i64 begin, i64 end)

It returns 0, or a bit for each Op "check" that failed: bit k for the kernel's k-th one, see `check_bit`.
`buffers` points to the addresses of the kernel's params, `sizes` to the values of its size symbols (i64). The function does the
work units begin <= u < end of the kernel's `units`, which are independent: callers share them out to threads as they like.
In the "inner" arrangement a unit is one outer point, in the "outer" one a block of lanes * unroll points along the lanes' axis.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseline.codegen.llvm import choose, mathlib, reductions, scalars
from fuseline.codegen.llvm.choose import Plan
from fuseline.codegen.llvm.emit import Builder, Loop, Val
from fuseline.codegen.llvm.nests import blocks, simplify_axes
from fuseline.errors import InternalError, NotSupported
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Atom, Div, Int, Max, Mod, Sym, linear_in, nonnegative, product, symbols
from fuseline.ir.kernels import Axis, Index, Kernel, Load, Op, Phase, Reduce, Stmt, Store, Value

ATTRIBUTES = ('attributes #0 = {{ nounwind "prefer-vector-width"="{0}" "min-legal-vector-width"="{0}" }}\n'
              'attributes #1 = {{ nounwind noinline "prefer-vector-width"="{0}" "min-legal-vector-width"="{0}" }}')
MAX_BITS = 31                                                # failed checks in a result; all later ones share the last bit
ON_STACK = 1 << 15                                           # larger row buffers come from malloc: threads' stacks are small


@dataclass(frozen=True, slots=True)
class KernelText:
    """`text` of the function, the math functions and declarations that it needs, the number of work units and what they cost.

    units   work units, an expression over the sizes
    cost    estimated time of the whole kernel on one thread, in units of 0.1 ns; 0 for kernels that must run on one thread
    """

    name: str
    text: str
    functions: frozenset[tuple[str, int, str]]
    declarations: frozenset[str]
    units: Int
    cost: Int


def generate(kernel: Kernel, name: str, vector_bytes: int) -> KernelText:
    """Raises NotSupported for dtypes and operations that kernels cannot have."""
    return _Generator(simplify_axes(kernel), name, vector_bytes).run()


def measure(kernel: Kernel, vector_bytes: int) -> tuple[Int, Int]:
    """(units, cost) of the kernel as `generate` would state them, without generating (for code that comes from a cache)."""
    made = _Generator(simplify_axes(kernel), "", vector_bytes)
    return made.units(), made._cost()


class _Generator:
    def __init__(self, kernel: Kernel, name: str, vector_bytes: int) -> None:
        self.kernel, self.name = kernel, name
        self.plan: Plan = choose.choose(kernel, vector_bytes)
        self.b = Builder("work", avx512=vector_bytes == 64)
        self.params = {p.name: p for p in kernel.params}
        self.written = {p.name for p in kernel.params if p.writes} | {s.buffer for s in choose.statements(kernel) if isinstance(s, Store)}
        self.pointer: dict[str, Val] = {}
        self.binding: dict[str, Val] = {}                    # loop variables and sizes that have a scalar value now
        self.home: dict[str, tuple[int, Stmt]] = {}          # value name -> phase, statement
        self.dtype_of: dict[str, DType] = {}
        for number, phase in enumerate(kernel.phases):
            for stmt in phase.body:
                self._register(number, stmt)
        self.phase = -1
        # where the lanes are now: the vector axis' variable (None: scalar code), the value at lane 0, valid lanes (None: all)
        self.vector: Sym | None = None
        self.base: Val | None = None
        self.mask: Val | None = None
        self.lanes = 1
        self.tag: object = None                              # tells apart values of one name in different surroundings
        self.row_buffers: dict[str, Val] = {}
        self.heap: list[Val] = []

    def _register(self, number: int, stmt: Stmt) -> None:
        if isinstance(stmt, (Load, Op, Index)):
            self.home[stmt.name] = (number, stmt)
            self.dtype_of[stmt.name] = stmt.dtype.compute
        elif isinstance(stmt, Reduce):
            for name in stmt.names:
                self.home[name] = (number, stmt)
                self.dtype_of[name] = stmt.dtype.compute

    # ---------------------------------------------------------------- the function
    def run(self) -> KernelText:
        b, kernel = self.b, self.kernel
        for k, p in enumerate(kernel.params):
            slot = b.address(Val("%buffers", "ptr", 1, 0), b.const(k, "i64"), "ptr")
            self.pointer[p.name] = self._load_pointer(slot)
        for k, s in enumerate(kernel.sizes):
            self.binding[s.name] = b.load(b.address(Val("%sizes", "ptr", 1, 0), b.const(k, "i64"), "i64"), "i64", 1, pinned=False)
        self.spare = b.emit("ptr", 1, "alloca [8 x i64], align 64", [], pinned=True)      # where masked-off scalar accesses go
        b.effect(f"store i64 0, ptr {self.spare.text}, align 8")
        self._make_check_slots()
        self._make_row_buffers()
        begin, end = Val("%begin", "i64", 1, 0), Val("%end", "i64", 1, 0)
        if self.plan.outer is None:
            self._run_inner(begin, end)
        else:
            self._run_outer(begin, end, self.plan.outer)
        for memory in self.heap:
            b.declarations.add("declare void @free(ptr)")
            b.effect(f"call void @free(ptr {memory.text})")
        failed = self._failed()
        lines = [f"define i64 @{self.name}(ptr %buffers, ptr %sizes, i64 %begin, i64 %end) #0 {{", "work:", *b.text(),
                 f"  ret {failed.typed}", "}"]
        return KernelText(self.name, "\n".join(lines), frozenset(b.functions), frozenset(b.declarations), self.units(), self._cost())

    def _load_pointer(self, slot: Val) -> Val:
        return self.b.emit("ptr", 1, f"load ptr, ptr {slot.text}, align 8", [slot])

    def units(self) -> Int:
        """See `KernelText`."""
        axes, outer = self.kernel.axes, self.plan.outer
        others = product(tuple(a.extent for a in axes if a is not outer and a is not self.plan.sweep))
        return others if outer is None else others * blocks(outer.extent, self.plan.lanes * self.plan.unroll)

    def _cost(self) -> Int:
        if any(isinstance(s, Store) and s.mode == "add" for s in choose.statements(self.kernel)):
            return 0                                         # two threads could add to one element
        outer = product(tuple(a.extent for a in self.kernel.axes))
        total: Int = 0
        for phase in self.kernel.phases:
            weight = 0
            for s in phase.body:
                if isinstance(s, Op) and s.op in choose.HEAVY:
                    weight += 5
                elif isinstance(s, (Load, Store)):
                    weight += 2
                else:
                    weight += 1
            total = total + product(tuple(a.extent for a in phase.axes)) * weight
        return outer * total

    def _make_row_buffers(self) -> None:
        """Memory for the values that one phase leaves to another, one row for each call of the function."""
        width = self.plan.lanes * self.plan.unroll if self.plan.outer is not None else 1
        for name in sorted(self.plan.kept):
            phase = self.kernel.phases[self.home[name][0]]
            points = product(tuple(a.extent for a in phase.axes))
            elem = _row_elem(self.dtype_of[name])
            count = points * width + self.plan.lanes * self.plan.unroll
            nbytes = count * self.dtype_of[name].size
            if isinstance(nbytes, int) and nbytes <= ON_STACK:
                self.row_buffers[name] = self.b.emit("ptr", 1, f"alloca {elem}, i64 {count}, align 64", [], pinned=True)
                continue
            size = self.uniform(nbytes)
            self.b.declarations.add("declare ptr @malloc(i64)")
            made = self.b.emit("ptr", 1, f"call ptr @malloc({size.typed})", [size], pinned=True)
            self.row_buffers[name] = made
            self.heap.append(made)

    # ---------------------------------------------------------------- the two arrangements
    def _decode(self, axes: Sequence[Axis], point: Val) -> None:
        """Bind the variables of axes to the coordinates of a flat row-major number."""
        b = self.b
        rest = point
        for axis in reversed(axes[1:]):
            extent = self.uniform(axis.extent)
            self.binding[axis.sym.name] = b.binary("urem", rest, extent)
            rest = b.binary("udiv", rest, extent)
        if axes:
            self.binding[axes[0].sym.name] = rest

    def _run_inner(self, begin: Val, end: Val) -> None:
        axes = self.kernel.axes
        with self.b.loop(begin, end, self.b.const(1, "i64")) as row:
            self._decode(axes, row.index)
            for number, phase in enumerate(self.kernel.phases):
                self.phase = number
                self._run_phase(phase)

    def _run_outer(self, begin: Val, end: Val, axis: Axis) -> None:
        b = self.b
        width = self.plan.lanes * self.plan.unroll
        sweep = self.plan.sweep
        others = tuple(a for a in self.kernel.axes if a is not axis and a is not sweep)
        count = blocks(axis.extent, width)
        if sweep is not None:
            blocks_in_row = self.uniform(count)
            with b.loop(begin, end, b.const(1, "i64")) as unit:
                row = b.binary("udiv", unit.index, blocks_in_row)
                first = b.binary("sub", unit.index, b.binary("mul", row, blocks_in_row))
                self._decode(others, row)
                with b.loop(b.const(0, "i64"), self.uniform(sweep.extent), b.const(1, "i64")) as along:
                    self.binding[sweep.sym.name] = along.index
                    self._run_lanes(axis, first, b.binary("add", first, b.const(1, "i64")))
            return
        if not others:
            self._run_lanes(axis, begin, end)
            return
        blocks_in_row = self.uniform(count)
        with b.loop(begin, end, b.const(1, "i64")) as unit:
            row = b.binary("udiv", unit.index, blocks_in_row)
            first = b.binary("sub", unit.index, b.binary("mul", row, blocks_in_row))
            left = b.binary("sub", end, unit.index)
            here = b.binary("sub", blocks_in_row, first)
            here = b.select(b.compare("slt", here, left), here, left)
            self._decode(others, row)
            self._run_lanes(axis, first, b.binary("add", first, here))
            unit.step = here

    def _run_lanes(self, axis: Axis, first: Val, last: Val) -> None:
        """Blocks first <= k < last of the lanes' axis: whole blocks, then single vectors under a mask."""
        b, lanes, unroll = self.b, self.plan.lanes, self.plan.unroll
        width = b.const(lanes * unroll, "i64")
        extent = self.uniform(axis.extent)
        start, stop = b.binary("mul", first, width), b.binary("mul", last, width)
        whole = axis.extent // (lanes * unroll) * (lanes * unroll) if isinstance(axis.extent, int) else None
        if whole is None:
            rest = b.binary("urem", extent, width)
            full = b.binary("sub", extent, rest)
        else:
            full = b.const(whole, "i64")
        full_stop = b.select(b.compare("slt", stop, full), stop, full)
        self.vector, self.lanes = axis.sym, lanes
        if whole != 0:
            with b.loop(start, full_stop, width) as block:
                self.base, self.mask = block.index, None
                self._run_phases(unroll)
        if whole is None or whole != axis.extent:
            tail = b.select(b.compare("sgt", start, full), start, full)
            end = b.select(b.compare("slt", stop, extent), stop, extent)
            with b.loop(tail, end, b.const(lanes, "i64")) as block:
                self.base = block.index
                self.mask = self._tail_mask(block.index, extent)
                self._run_phases(1)
        self.vector, self.lanes, self.base, self.mask = None, 1, None, None

    def _run_phases(self, unroll: int) -> None:
        for number, phase in enumerate(self.kernel.phases):
            self.phase = number
            self._run_phase_outer(phase, unroll)

    def _tail_mask(self, at: Val, extent: Val) -> Val:
        b = self.b
        left = b.binary("sub", extent, at)
        if self.plan.lanes == 1:
            return b.compare("sgt", left, b.const(0, "i64"))
        # i32 lanes: what is left in this row is compared after a bound, so that it fits
        most = b.const(self.plan.lanes, "i64")
        left = b.select(b.compare("slt", left, most), left, most)
        narrow = b.convert("trunc", left, "i32")
        return b.compare("slt", b.iota("i32", self.plan.lanes), b.splat(narrow, self.plan.lanes))

    # ---------------------------------------------------------------- a phase
    def _reductions(self, phase: Phase) -> list[reductions.Reduction]:
        found = []
        for stmt in phase.body:
            if isinstance(stmt, Reduce):
                named = [self.dtype_of[a] for a in stmt.args if isinstance(a, str)]
                found.append(reductions.Reduction(stmt, named[0] if named else stmt.dtype))
        return found

    def _shifts(self, phase: Phase, reduces: Sequence[reductions.Reduction], unrolled: Sequence[int]) -> list[dict[int, Val | None]]:
        """For each reduction that needs one: the first element of the row, by evaluating its argument there."""
        b = self.b
        found: list[dict[int, Val | None]] = []
        empty = any(not (nonnegative(a.extent - 1)) for a in phase.axes)
        saved = dict(self.binding)
        for a in phase.axes:
            self.binding[a.sym.name] = b.const(0, "i64")
        inside = self.vector
        if self.plan.outer is None:
            self.vector, self.lanes = None, 1
        for r in reduces:
            shifts: dict[int, Val | None] = {}
            for u in unrolled:
                if r.op not in reductions.NEEDS_SHIFT:
                    shifts[u] = None
                elif empty:
                    shifts[u] = b.const(0.0, "double")
                else:
                    self.tag = ("first", self.phase)
                    first = self.operand(r.stmt.args[0], r.arg_dtype, u)
                    self.tag = None
                    shifts[u] = reductions.finite_or_zero(b, scalars.cast(b, first, r.arg_dtype, dtypes.F64))
            found.append(shifts)
        self.binding = saved
        self.vector = inside
        if self.plan.outer is not None:
            self.lanes = self.plan.lanes
        return found

    def _run_phase_outer(self, phase: Phase, unroll: int) -> None:
        """Lanes are outer points: the phase's loops are scalar loops around `unroll` vectors."""
        b = self.b
        unrolled = range(unroll)
        reduces = self._reductions(phase)
        shifts = self._shifts(phase, reduces, unrolled) if reduces else []
        carried = [v for u in unrolled for r in reduces for v in r.initial(b, self.plan.lanes)]

        def body(values: list[Val]) -> list[Val]:
            out: list[Val] = []
            at = 0
            for u in unrolled:
                states = []
                for r in reduces:
                    states.append(values[at:at + len(r.accumulators)])
                    at += len(r.accumulators)
                new = self._run_body(phase, u, reduces, states, [s[u] for s in shifts])
                out += [v for state in new for v in state]
            return out

        result = self._nest(list(phase.axes), carried, body)
        count = self.uniform(product(tuple(a.extent for a in phase.axes)))
        at = 0
        for u in unrolled:
            for r, s in zip(reduces, shifts, strict=True):
                acc = result[at:at + len(r.accumulators)]
                at += len(r.accumulators)
                for name, v in zip(r.stmt.names, r.finish(b, acc, count, s[u]), strict=True):
                    b.remember((name, u), v, b.depth)

    def _run_phase(self, phase: Phase) -> None:
        """One outer point: lanes run along one of the phase's own axes."""
        b = self.b
        if not phase.axes:
            self.vector, self.lanes, self.base, self.mask = None, 1, None, None
            reduces = self._reductions(phase)
            shifts = self._shifts(phase, reduces, (0,)) if reduces else []
            states = [r.initial(b, 1) for r in reduces]
            states = self._run_body(phase, 0, reduces, states, [s[0] for s in shifts])
            self._finish_inner(phase, reduces, states, shifts)
            return
        reduces = self._reductions(phase)
        shifts = self._shifts(phase, reduces, (0,)) if reduces else []
        lanes, unroll = self.plan.lanes, self.plan.unroll
        axis = self.plan.inner[phase.axes]
        unrolled = range(unroll)
        sizes = [len(r.accumulators) for r in reduces]
        carried = [v for _ in unrolled for r in reduces for v in r.initial(b, lanes)]
        each = sum(sizes)

        def step(values: Sequence[Val], u: int) -> list[Val]:
            states, at = [], 0
            for n in sizes:
                states.append(list(values[at:at + n]))
                at += n
            return [v for s in self._run_body(phase, u, reduces, states, [s[0] for s in shifts]) for v in s]

        def along_lanes(values: list[Val]) -> list[Val]:
            extent = self.uniform(axis.extent)
            width = lanes * unroll
            zero = b.const(0, "i64")
            self.vector, self.lanes = axis.sym, lanes
            fixed = axis.extent if isinstance(axis.extent, int) else None
            if fixed is not None:
                full = b.const(fixed - fixed % width, "i64")
            else:
                full = b.binary("sub", extent, b.binary("urem", extent, b.const(width, "i64")))
            if full.const != 0:
                with b.loop(zero, full, b.const(width, "i64"), values) as block:
                    self.base, self.mask = block.index, None
                    block.next = [v for u in unrolled for v in step(block.phis[u * each:(u + 1) * each], u)]
                values = block.results
            if fixed is None or fixed % width:
                with b.loop(full, extent, b.const(lanes, "i64"), values[:each]) as block:
                    self.base, self.mask = block.index, self._tail_mask(block.index, extent)
                    block.next = step(block.phis, 0)
                values = block.results + values[each:]
            self.vector, self.lanes, self.base, self.mask = None, 1, None, None
            return values

        result = self._nest([a for a in phase.axes if a is not axis], carried, along_lanes)
        states, at = [], 0
        for r, n in zip(reduces, sizes, strict=True):
            sets = [result[u * each + at:u * each + at + n] for u in unrolled]
            at += n
            while len(sets) > 1:
                sets = [r.merge(b, sets[k], sets[k + 1]) if k + 1 < len(sets) else sets[k] for k in range(0, len(sets), 2)]
            states.append(r.across_lanes(b, sets[0]))
        self._finish_inner(phase, reduces, states, shifts)

    def _finish_inner(self, phase: Phase, reduces: Sequence[reductions.Reduction], states: Sequence[Sequence[Val]],
                      shifts: Sequence[dict[int, Val | None]]) -> None:
        b = self.b
        count = self.uniform(product(tuple(a.extent for a in phase.axes)))
        for r, state, s in zip(reduces, states, shifts, strict=True):
            for name, v in zip(r.stmt.names, r.finish(b, state, count, s[0]), strict=True):
                for u in range(max(1, self.plan.unroll)):
                    b.remember((name, u), v, b.depth)

    def _nest(self, axes: list[Axis], carried: list[Val], body: object) -> list[Val]:
        """Scalar loops over axes around body(values) -> values."""
        if not axes:
            return body(carried)                             # type: ignore[operator]
        b = self.b
        axis, rest = axes[0], axes[1:]
        loop: Loop
        with b.loop(b.const(0, "i64"), self.uniform(axis.extent), b.const(1, "i64"), carried) as loop:
            self.binding[axis.sym.name] = loop.index
            loop.next = self._nest(rest, loop.phis, body)
        del self.binding[axis.sym.name]
        return loop.results

    def _run_body(self, phase: Phase, u: int, reduces: Sequence[reductions.Reduction], states: Sequence[list[Val]],
                  shifts: Sequence[Val | None]) -> list[list[Val]]:
        """Every statement in order, for vector u; returns the reductions' new accumulators."""
        b = self.b
        new: list[list[Val]] = []
        number = 0
        for stmt in phase.body:
            if isinstance(stmt, Store):
                self.store(stmt, u)
            elif isinstance(stmt, Reduce):
                r, acc = reduces[number], states[number]
                args = [self.operand(a, r.arg_dtype, u) for a in stmt.args]
                args = [b.splat(a, self.lanes) for a in args]
                position = self._position(phase, u) if r.op in ("argmax", "argmin") else None
                after = r.step(b, acc, args, position, shifts[number])
                if self.mask is not None and self.plan.outer is None:
                    after = [b.select(self.mask, x, y) for x, y in zip(after, acc, strict=True)]
                new.append(after)
                number += 1
            else:
                self.value(stmt.name, u)
        return new

    def _position(self, phase: Phase, u: int) -> Val:
        place: Int = 0
        for a in phase.axes:
            place = place * a.extent + a.sym
        return self.b.splat(self.index_value(place, u), self.lanes)

    # ---------------------------------------------------------------- values
    def operand(self, value: Value, dtype: DType, u: int) -> Val:
        return self.value(value, u) if isinstance(value, str) else scalars.number(self.b, value, dtype)

    def value(self, name: str, u: int) -> Val:
        """The value now: remembered, from a row buffer, or computed again where an earlier phase computed it."""
        b = self.b
        if name not in self.home:
            raise InternalError(f"{name} is read but never defined", node=self.kernel.label)
        number, stmt = self.home[name]
        keys: list[tuple] = [(name, u, self.tag, id(self.mask))] if not isinstance(stmt, Reduce) else [(name, u)]
        if number != self.phase and not self.kernel.phases[number].axes and not isinstance(stmt, Reduce):
            keys.append((name, u, None, id(self.mask)) if self.plan.outer is not None else (name, 0, None, id(None)))
        for key in keys:
            found = b.recall(key)
            if found is not None:
                return found                                 # type: ignore[return-value]
        if isinstance(stmt, Reduce):
            raise InternalError(f"{name} is read before its reduction ends", node=self.kernel.label)
        if number != self.phase and name in self.plan.kept:
            made = self._from_row(name, number, u)
        else:
            made = self.compute(stmt, u)
            if number == self.phase and name in self.plan.kept and self.tag is None:
                self._to_row(name, number, made, u)
        b.remember(keys[0], made, made.level)
        return made

    def _row_place(self, number: int, u: int) -> Val:
        """Address offset (elements) of this point in a row buffer: the lanes are next to each other."""
        b, phase = self.b, self.kernel.phases[number]
        if self.plan.outer is not None:
            place: Int = 0
            for a in phase.axes:
                place = place * a.extent + a.sym
            width = self.plan.lanes * self.plan.unroll
            return self.uniform(place * width + u * self.plan.lanes)
        axis = self.plan.inner[phase.axes]
        place = 0
        for a in phase.axes:
            if a is not axis:
                place = place * a.extent + a.sym
        rest = self.uniform(place * axis.extent)
        along = self.binding.get(axis.sym.name, self.base)   # bound when the first element is evaluated in scalar code
        if along is None:
            raise InternalError("a row buffer is used outside of its loop", node=self.kernel.label)
        return b.binary("add", b.binary("add", rest, along), b.const(u * self.lanes, "i64"))

    def _to_row(self, name: str, number: int, v: Val, u: int) -> None:
        b = self.b
        stored = b.convert("zext", v, "i8") if v.elem == "i1" else v
        pointer = b.address(self.row_buffers[name], self._row_place(number, u), stored.elem)
        b.store(b.splat(stored, self.lanes), pointer)

    def _from_row(self, name: str, number: int, u: int) -> Val:
        b, elem = self.b, _row_elem(self.dtype_of[name])
        pointer = b.address(self.row_buffers[name], self._row_place(number, u), elem)
        v = b.load(pointer, elem, self.lanes, pinned=True)
        return b.compare("ne", v, b.const(0, "i8", v.lanes)) if self.dtype_of[name] == dtypes.BOOL else v

    def compute(self, stmt: Stmt, u: int) -> Val:
        b = self.b
        if isinstance(stmt, Load):
            return self.load(stmt, u)
        if isinstance(stmt, Index):
            return scalars.cast(b, self.index_value(stmt.expr, u), dtypes.I64, stmt.dtype)
        if not isinstance(stmt, Op):
            raise InternalError(f"no value: {stmt}")
        named = [self.dtype_of[a] for a in stmt.args if isinstance(a, str)]
        if stmt.op == "cast":
            if not named:
                return scalars.number(b, stmt.args[0], stmt.dtype)
            return scalars.cast(b, self.value(stmt.args[0], u), named[0], stmt.dtype)      # type: ignore[arg-type]
        if stmt.op == "check":
            return self._check(stmt, u)
        if stmt.op == "where":
            dtype = stmt.dtype.compute
            condition = self.operand(stmt.args[0], dtypes.BOOL, u)
            return b.select(condition, self.operand(stmt.args[1], dtype, u), self.operand(stmt.args[2], dtype, u))
        dtype = named[0] if named else stmt.dtype.compute
        args = [self.operand(a, dtype, u) for a in stmt.args]
        return scalars.emit_op(b, stmt.op, args, dtype)

    # ---------------------------------------------------------------- checks
    def _make_check_slots(self) -> None:
        """Memory for each bit of the result: a failed check stores there, which costs less than carrying the bits along."""
        b = self.b
        self.check_bit = check_bits(self.kernel)
        self.check_slots = []
        for _ in range(max(self.check_bit.values(), default=-1) + 1):
            slot = b.emit("ptr", 1, "alloca i64, align 8", [], pinned=True)
            b.store(b.const(0, "i64"), slot)
            self.check_slots.append(slot)

    def _failed(self) -> Val:
        """The function's result."""
        b = self.b
        failed = b.const(0, "i64")
        for slot in self.check_slots:
            failed = b.binary("or", failed, b.load(slot, "i64", 1, pinned=True))
        return failed

    def _check(self, stmt: Op, u: int) -> Val:
        """The checked value. Failures are noted as far out as its operands allow; lanes past the end do not count."""
        b = self.b
        holds = self.operand(stmt.args[0], dtypes.BOOL, u)
        wrong = b.binary("xor", holds, b.const(True, "i1", holds.lanes))
        if stmt.args[1] is not True:
            wrong = b.binary("and", *b.same_lanes(wrong, self.operand(stmt.args[1], dtypes.BOOL, u)))
        if wrong.lanes > 1:
            if self.mask is not None:
                wrong = b.binary("and", *b.same_lanes(wrong, self.mask))
            wrong = b.call(f"llvm.vector.reduce.or.v{wrong.lanes}i1", "i1", 1, [wrong])
        bit = self.check_bit[stmt.name]
        known = ("check", bit, wrong.text)
        if known not in b.levels[wrong.level].memo:
            b.remember(known, True, wrong.level)
            place = b.select(wrong, self.check_slots[bit], self.spare)
            b.levels[wrong.level].lines.append(f"  store i64 {1 << bit}, ptr {place.text}, align 8")
        return holds

    # ---------------------------------------------------------------- index expressions
    def uniform(self, e: Int) -> Val:
        """A scalar i64; every symbol in e must have one."""
        v = self.index_value(e, 0)
        if v.lanes != 1:
            raise InternalError(f"{e} is not the same for all lanes", node=self.kernel.label)
        return v

    def index_value(self, e: Int, u: int) -> Val:
        """The value of e as i64, a scalar or one for each lane. Terms are added from the outermost level inwards."""
        b = self.b
        if isinstance(e, int):
            return b.const(e, "i64")
        terms = []
        for monomial, coefficient in e.terms:
            factors = sorted((self._atom(a, u) for a in monomial), key=lambda v: (v.lanes, v.level))
            term = b.const(coefficient, "i64")
            for f in factors:
                term = b.binary("mul", term, f)
            terms.append(term)
        terms.sort(key=lambda v: (v.lanes, v.level))
        total = terms[0]
        for t in terms[1:]:
            total = b.binary("add", total, t)
        return total

    def _atom(self, atom: Atom, u: int) -> Val:
        b = self.b
        if isinstance(atom, Sym):
            if self.vector is not None and atom == self.vector:
                if self.base is None:
                    raise InternalError("the vector axis has no position", node=self.kernel.label)
                first = b.binary("add", self.base, b.const(u * self.lanes, "i64"))
                return first if self.lanes == 1 else b.binary("add", first, b.iota("i64", self.lanes))
            if atom.name in self.binding:
                return self.binding[atom.name]
            if atom.name in self.home:
                return scalars.cast(b, self.value(atom.name, u), self.dtype_of[atom.name], dtypes.I64)
            raise InternalError(f"symbol {atom} has no value", node=self.kernel.label)
        if isinstance(atom, Max):
            x, y = b.same_lanes(self.index_value(atom.a, u), self.index_value(atom.b, u))
            return b.select(b.compare("sgt", x, y), x, y)
        if not isinstance(atom, (Div, Mod)):
            raise InternalError(f"unknown atom {atom!r}")
        x, y = self.index_value(atom.numerator, u), self.index_value(atom.denominator, u)
        if x.lanes == 1 and y.lanes == 1:
            return self._divide(x, y, isinstance(atom, Div), nonnegative(atom.numerator))
        # By lanes through f64: exact below 2**50, as x + 1/2 is at least 1/(2y) away from a multiple of y.
        x, y = b.same_lanes(x, y)
        shifted = b.binary("fadd", b.convert("sitofp", x, "double"), b.const(0.5, "double", x.lanes))
        if y.is_const:
            quotient = b.binary("fmul", shifted, b.const(1.0 / y.const, "double", x.lanes))      # type: ignore[operator]
        else:
            quotient = b.binary("fdiv", shifted, b.convert("sitofp", y, "double"))
        q = b.convert("fptosi", b.intrinsic("llvm.floor", "double", x.lanes, [quotient]), "i64")
        return q if isinstance(atom, Div) else b.binary("sub", x, b.binary("mul", q, y))

    def _divide(self, x: Val, y: Val, quotient: bool, unsigned: bool) -> Val:
        b = self.b
        if unsigned:
            return b.binary("udiv" if quotient else "urem", x, y)
        r = b.binary("srem", x, y)
        zero = b.const(0, "i64")
        low = b.compare("slt", r, zero)
        if quotient:
            return b.select(low, b.binary("sub", b.binary("sdiv", x, y), b.const(1, "i64")), b.binary("sdiv", x, y))
        return b.select(low, b.binary("add", r, y), r)

    # ---------------------------------------------------------------- memory
    def _address(self, buffer: str, e: Int, u: int, elem: str) -> tuple[Val, bool]:
        """(address, contiguous): one address where all lanes use the same or neighbouring elements, else one for each lane."""
        b = self.b
        pointer = self.pointer[buffer]
        by_lane = [s for s in symbols(e) if s.name in self.home and s.name not in self.binding and self.value(s.name, u).lanes > 1]
        if not by_lane and self.vector is not None and self.lanes > 1 and self.vector in symbols(e):
            along = linear_in(e, self.vector)
            if along is not None and self.base is not None:
                step, rest = along
                at = b.address(pointer, self.index_value(rest, u), elem)
                first = b.binary("add", self.base, b.const(u * self.lanes, "i64")) if step != 1 else self.base
                at = b.address(at, b.binary("mul", first, self.uniform(step)), elem)
                if step == 1:
                    return b.address(at, b.const(u * self.lanes, "i64"), elem), True
                steps = b.binary("mul", b.splat(self.uniform(step), self.lanes), b.iota("i64", self.lanes))
                return b.address(at, steps, elem), False
        index = self.index_value(e, u)
        one_lane = index.lanes == 1 and self.lanes == 1 and self.vector is not None and self.vector in symbols(e)
        return b.address(pointer, index, elem), one_lane

    def _lane_mask(self, mask: str | None, u: int) -> Val | None:
        """The statement's mask and the tail's, or None if every lane counts; a scalar if it is one for all lanes."""
        if mask is None:
            return self.mask
        own = self.value(mask, u)
        if self.mask is None:
            return own
        own, tail = self.b.same_lanes(own, self.mask)
        return self.b.binary("and", own, tail)

    def load(self, stmt: Load, u: int) -> Val:
        b = self.b
        dtype = self.params[stmt.buffer].dtype
        elem = scalars.memory_elem(dtype)
        pinned = stmt.buffer in self.written
        address, contiguous = self._address(stmt.buffer, stmt.index, u, elem)
        own_mask = None if stmt.mask is None else self.value(stmt.mask, u)
        if address.lanes == 1 and not contiguous:
            raw = self._load_one(address, elem, own_mask, pinned)
        else:
            mask = self._lane_mask(stmt.mask, u)
            if mask is not None:
                mask = b.splat(mask, self.lanes)
            nothing = Val("zeroinitializer", elem, self.lanes, 0) if self.lanes > 1 else b.const(0, elem)
            if self.lanes == 1:
                raw = self._load_one(address, elem, mask, pinned)
            elif contiguous:
                raw = b.masked_load(address, mask, nothing, pinned=pinned) if mask is not None else b.load(
                    address, elem, self.lanes, pinned=pinned)
            else:
                raw = b.gather(address, b.const(True, "i1", self.lanes) if mask is None else mask, nothing, pinned=pinned)
        value = scalars.cast(b, scalars.from_memory(b, raw, dtype), dtype, stmt.dtype)
        if own_mask is None:
            return value
        return b.select(own_mask, value, self.operand(stmt.other, stmt.dtype.compute, u))

    def _load_one(self, address: Val, elem: str, mask: Val | None, pinned: bool) -> Val:
        """One element for all lanes. Masked off: it is read from spare memory instead (the result is not used)."""
        b = self.b
        if mask is None:
            return b.load(address, elem, 1, pinned=pinned)
        if mask.lanes > 1:
            mask = b.call(f"llvm.vector.reduce.or.v{mask.lanes}i1", "i1", 1, [mask])
        return b.load(b.select(mask, address, self.spare), elem, 1, pinned=pinned)

    def _is_rounded(self, value: Value, dtype: DType) -> bool:
        """True if the value already is one of the half type."""
        stmt = self.home[value][1] if isinstance(value, str) and value in self.home else None
        return isinstance(stmt, Op) and stmt.op == f"round_{dtype}" or isinstance(stmt, Load) and stmt.dtype == dtype and stmt.mask is None

    def store(self, stmt: Store, u: int) -> None:
        b = self.b
        dtype = self.params[stmt.buffer].dtype
        elem = scalars.memory_elem(dtype)
        if isinstance(stmt.value, str):
            value = scalars.cast(b, self.value(stmt.value, u), self.dtype_of[stmt.value], dtype)
        else:
            value = scalars.number(b, stmt.value, dtype.compute)
        address, contiguous = self._address(stmt.buffer, stmt.index, u, elem)
        mask = self._lane_mask(stmt.mask, u)
        if stmt.mode == "add":
            self._store_add(value, address, contiguous, mask, dtype, elem)
            return
        if stmt.mode != "set":
            raise NotSupported(f"store mode {stmt.mode!r} has no CPU code")
        raw = scalars.to_memory(b, value, dtype, rounded=self._is_rounded(stmt.value, dtype))
        if self.lanes == 1:
            b.store(raw, address if mask is None else b.select(mask, address, self.spare))
            return
        raw = b.splat(raw, self.lanes)
        if contiguous:
            if mask is None:
                b.store(raw, address)
            else:
                b.masked_store(raw, address, b.splat(mask, self.lanes))
            return
        address = b.splat(address, self.lanes)
        b.scatter(raw, address, b.const(True, "i1", self.lanes) if mask is None else b.splat(mask, self.lanes))

    def _store_add(self, value: Val, address: Val, contiguous: bool, mask: Val | None, dtype: DType, elem: str) -> None:
        """memory += value. Lanes that may meet at one element go one after the other."""
        b = self.b

        def plus(raw: Val, v: Val) -> Val:
            old = scalars.from_memory(b, raw, dtype)
            op = "or" if dtype == dtypes.BOOL else "fadd" if dtype.is_float else "add"
            return scalars.to_memory(b, b.binary(op, old, v), dtype)

        if self.lanes > 1 and contiguous:
            value = b.splat(value, self.lanes)
            if mask is None:
                b.store(plus(b.load(address, elem, self.lanes, pinned=True), value), address)
            else:
                wide = b.splat(mask, self.lanes)
                nothing = Val("zeroinitializer", elem, self.lanes, 0)
                b.masked_store(plus(b.masked_load(address, wide, nothing, pinned=True), value), address, wide)
            return
        for k in range(self.lanes):
            one = b.lane(address, k)
            if mask is not None:
                one = b.select(b.lane(mask, k), one, self.spare)
            b.store(plus(b.load(one, elem, 1, pinned=True), b.lane(value, k)), one)


def check_bits(kernel: Kernel) -> dict[str, int]:
    """Op "check" (by its name) -> its bit in the function's result, in the order of the kernel's statements."""
    names = [s.name for s in choose.statements(kernel) if isinstance(s, Op) and s.op == "check"]
    return {name: min(k, MAX_BITS - 1) for k, name in enumerate(names)}


def _row_elem(dtype: DType) -> str:
    return "i8" if dtype == dtypes.BOOL else scalars.value_elem(dtype)


def module_text(kernels: Sequence[KernelText], triple: str, vector_bytes: int) -> str:
    """A whole module: the kernels, the math functions that they call, tables and declarations."""
    declarations: set[str] = set()
    functions: set[tuple[str, int, str]] = set()
    for k in kernels:
        declarations |= k.declarations
        functions |= k.functions
    bodies = []
    for f in sorted(functions):
        text, needed = mathlib.definition(*f, vector_bytes == 64)
        bodies.append(text)
        declarations |= needed
    tables = mathlib.tables() if any(f[0] in ("sin", "cos", "tan") and f[2] == "float" for f in functions) else ""
    return "\n".join([f'target triple = "{triple}"', tables, *sorted(declarations), *bodies, *(k.text for k in kernels),
                      ATTRIBUTES.format(vector_bytes * 8)])
