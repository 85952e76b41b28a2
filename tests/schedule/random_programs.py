"""Random small loop programs, as lower would make them: one kernel per operator, reads of views as index expressions."""
from __future__ import annotations

import random
from dataclasses import dataclass

from fuseline.ir.dtypes import BOOL, F16, F32, F64, I64, DType
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import (
    Axis,
    Buffer,
    Extern,
    Index,
    Kernel,
    Launch,
    Load,
    LoopProgram,
    Op,
    Output,
    Param,
    Phase,
    Reduce,
    Ref,
    Store,
)


@dataclass(frozen=True)
class View:
    """A buffer seen through shape, stride and offset."""
    buffer: str
    shape: tuple
    stride: tuple
    offset: int = 0

    def at(self, index):
        place = self.offset
        for i, step in zip(index, self.stride):
            place = place + i * step
        return place


class Maker:
    """Collects buffers and launches. Sizes are small; `size` gives the symbols for them when the program is symbolic."""

    def __init__(self, seed: int, symbolic: bool = False, dtype: DType = F64) -> None:
        self.random, self.dtype = random.Random(seed), dtype
        self.buffers: dict[str, Buffer] = {}
        self.steps: list = []
        self.values: list[View] = []
        self.inputs: list[str] = []
        self.sizes = {n: (Sym(f"s{n}", None, 2) if symbolic and n > 2 else n) for n in (1, 2, 3, 4, 5, 6)}
        self.extents = {s: n for n, s in self.sizes.items()}

    # -- buffers ----------------------------------------------------------------------------------------------
    def buffer(self, shape: tuple, kind: str = "temp", dtype: DType | None = None, shuffle: bool = True) -> View:
        order = list(range(len(shape)))
        if shuffle and self.random.random() < 0.3:
            self.random.shuffle(order)
        stride = [0] * len(shape)
        step = 1
        for axis in reversed(order):
            stride[axis] = step
            step = step * shape[axis]
        name = f"b{len(self.buffers)}"
        self.buffers[name] = Buffer(name, dtype or self.dtype, tuple(shape), tuple(stride), "cpu", kind)
        if kind == "input":
            self.inputs.append(name)
        return View(name, tuple(shape), tuple(stride))

    def view(self, value: View) -> View:
        """A random view of a value."""
        pick = self.random.random()
        shape, stride, offset = list(value.shape), list(value.stride), value.offset
        if pick < 0.25 and len(shape) > 1:
            order = list(range(len(shape)))
            self.random.shuffle(order)
            shape, stride = [shape[i] for i in order], [stride[i] for i in order]
        elif pick < 0.35 and shape:
            axis = self.random.randrange(len(shape))
            if isinstance(shape[axis], int) and shape[axis] > 1:
                cut = self.random.randrange(1, shape[axis])
                offset, shape[axis] = offset + cut * stride[axis], shape[axis] - cut
        elif pick < 0.45 and shape:
            axis = self.random.randrange(len(shape))
            offset += (self.random.choice([0, 1]) if shape[axis] != 1 else 0) * stride[axis]
            del shape[axis], stride[axis]
        elif pick < 0.65 and len(shape) > 1:                # flatten two axes that lie next to each other
            axis = self.random.randrange(len(shape) - 1)
            if stride[axis] == stride[axis + 1] * shape[axis + 1]:
                shape[axis:axis + 2] = [shape[axis] * shape[axis + 1]]
                del stride[axis]
        elif pick < 0.75:
            axis = self.random.randrange(len(shape) + 1)
            shape.insert(axis, 1)
            stride.insert(axis, 0)
        return View(value.buffer, tuple(shape), tuple(stride), offset)

    # -- kernels ----------------------------------------------------------------------------------------------
    def axes(self, shape: tuple, letter: str) -> tuple[tuple[Axis, ...], list]:
        axes = tuple(Axis(Sym(f"{letter}{i}", n), n) for i, n in enumerate(shape))
        return axes, [a.sym for a in axes]

    def launch(self, axes, phases, bound: dict[str, str], label: str) -> None:
        written = {s.buffer for p in phases for s in p.body if isinstance(s, Store)}
        params = tuple(Param(p, self.buffers[b].dtype, p in written) for b, p in bound.items())
        sizes = tuple(sorted((s for s in self.sizes.values() if isinstance(s, Sym)), key=lambda s: s.name))
        kernel = Kernel(params, sizes, axes, tuple(phases), label)
        self.steps.append(Launch(kernel, tuple(bound), (f"aten.{label}.default",)))

    def pointwise(self, op: str, args: list[View | float], shape: tuple, out: View | None = None) -> View:
        """op of args, broadcast to shape (an arg's axes align at the right)."""
        axes, index = self.axes(shape, "i")
        body, bound, names = [], {}, []
        for a in args:
            if not isinstance(a, View):
                names.append(a)
                continue
            own = index[len(shape) - len(a.shape):]
            at = a.at([0 if n == 1 else i for i, n in zip(own, a.shape)])
            param = bound.setdefault(a.buffer, f"p{len(bound)}")
            names.append(f"%{len(body)}")
            body.append(Load(names[-1], param, at, self.buffers[a.buffer].dtype))
        compute = self.dtype.compute
        if op == "select":                                    # where(a > b, a, index-dependent number)
            body.append(Op("%c", "gt", (names[0], names[-1] if len(names) > 1 else 0.5), BOOL))
            body.append(Index("%i", sum(index) if index else 0, I64))
            body.append(Op("%f", "cast", ("%i",), compute))
            body.append(Op("%r", "where", ("%c", names[0], "%f"), compute))
        else:
            body.append(Op("%r", op, tuple(names), compute))
        out = out or self.buffer(shape)
        bound[out.buffer] = f"p{len(bound)}"
        body.append(Store(bound[out.buffer], out.at(index), "%r"))
        self.launch(axes, [Phase((), tuple(body))], bound, op)
        return out

    def reduction(self, op: str, a: View, over: set[int], keep: bool) -> View:
        kept = [i for i in range(len(a.shape)) if i not in over]
        axes, outer = self.axes(tuple(a.shape[i] for i in kept), "i")
        inner_axes, inner = self.axes(tuple(a.shape[i] for i in sorted(over)), "j")
        index = dict(zip(kept, outer)) | dict(zip(sorted(over), inner))
        shape = tuple((1 if keep else None) if i in over else n for i, n in enumerate(a.shape))
        out = self.buffer(tuple(n for n in shape if n is not None))
        at = out.at([0 if i in over else index[i] for i, n in enumerate(shape) if n is not None])
        compute = self.dtype.compute
        body = [Load("%x", "p0", a.at([index[i] for i in range(len(a.shape))]), self.buffers[a.buffer].dtype)]
        if op == "var":
            body.append(Reduce(("%m", "%r"), "welford", ("%x",), compute))
            tail = [Op("%t", "add", ("%m", "%r"), compute), Store("p1", at, "%t")]
        elif op == "argmax":
            body.append(Reduce(("%m",), "argmax", ("%x",), I64))
            tail = [Op("%t", "cast", ("%m",), compute), Store("p1", at, "%t")]
        else:
            body.append(Reduce(("%r",), op, ("%x",), compute))
            tail = [Store("p1", at, "%r")]
        self.launch(axes, [Phase(inner_axes, tuple(body)), Phase((), tuple(tail))], {a.buffer: "p0", out.buffer: "p1"}, op)
        return out

    def pad(self, a: View) -> View:
        """One element of 0.5 before and after the first axis."""
        shape = (a.shape[0] + 2, *a.shape[1:])
        axes, index = self.axes(shape, "i")
        compute = self.dtype.compute
        out = self.buffer(shape)
        body = (
            Index("%i", index[0] - 1, I64), Op("%low", "ge", ("%i", 0), BOOL), Index("%n", a.shape[0] - index[0], I64),
            Op("%high", "gt", ("%n", 0), BOOL), Op("%in", "and", ("%low", "%high"), BOOL),
            Load("%x", "p0", a.at([index[0] - 1, *index[1:]]), self.buffers[a.buffer].dtype, "%in", 0.5),
            Op("%r", "mul", ("%x", 3.0), compute), Store("p1", out.at(index), "%r"))
        self.launch(axes, [Phase((), body)], {a.buffer: "p0", out.buffer: "p1"}, "pad")
        return out

    def gather(self, a: View) -> View:
        """Elements of the last axis, picked by a value that is computed from another element; out of range gives -1."""
        shape = a.shape[:-1]
        axes, index = self.axes(shape, "i")
        compute = self.dtype.compute
        out = self.buffer(shape)
        first = a.at([*index, 0])
        body = (
            Load("%k", "p0", first, self.buffers[a.buffer].dtype), Op("%k2", "mul", ("%k", 3.0), compute),
            Op("%t", "trunc", ("%k2",), compute), Op("%i", "cast", ("%t",), I64), Index("%n", a.shape[-1], I64),
            Op("%low", "ge", ("%i", 0), BOOL), Op("%high", "lt", ("%i", "%n"), BOOL), Op("%in", "and", ("%low", "%high"), BOOL),
            Load("%x", "p0", a.at([*index, Sym("%i", a.shape[-1])]), self.buffers[a.buffer].dtype, "%in", -1.0),
            Store("p1", out.at(index), "%x"))
        self.launch(axes, [Phase((), body)], {a.buffer: "p0", out.buffer: "p1"}, "gather")
        return out

    def cat(self, a: View) -> View:
        """The value twice, one after the other along the first axis: two kernels that write parts of one buffer."""
        out = self.buffer((a.shape[0] * 2, *a.shape[1:]))
        for part in range(2):
            target = View(out.buffer, a.shape, out.stride, a.shape[0] * out.stride[0] * part)
            self.pointwise("mul", [a, 1.0 + part], a.shape, target)
        return out

    # -- programs ---------------------------------------------------------------------------------------------
    def build(self, length: int) -> LoopProgram:
        choose = self.random
        for _ in range(choose.choice([1, 2, 2, 3])):
            shape = tuple(self.sizes[choose.choice([2, 3, 4, 5])] for _ in range(choose.choice([1, 2, 2, 3, 4])))
            self.values.append(self.buffer(shape, "input"))
        for _ in range(length):
            recent = self.values[-4:] if choose.random() < 0.7 else self.values
            a = choose.choice(recent)
            while choose.random() < 0.3:
                a = self.view(a)
            pick = choose.random()
            if pick < 0.45 or not a.shape:
                fitting = [v for v in self.values if self.broadcasts(v.shape, a.shape)]
                args = [a, choose.choice(fitting)] if fitting and choose.random() < 0.8 else [a, choose.choice([0.5, 2.0, -1.0])]
                self.values.append(self.pointwise(choose.choice(["add", "sub", "mul", "maximum", "select"]), args, a.shape))
            elif pick < 0.6:
                self.values.append(self.pointwise(choose.choice(["neg", "abs", "tanh", "exp_"]).replace("exp_", "sigmoid"), [a],
                                                  a.shape))
            elif pick < 0.9:
                over = {i for i in range(len(a.shape)) if choose.random() < 0.5} or {len(a.shape) - 1}
                op = choose.choice(["sum", "max", "min", "var", "sum", "argmax"])
                self.values.append(self.reduction(op, a, over, choose.random() < 0.6))
            elif pick < 0.92 and len(a.shape) < 5:
                self.values.append(choose.choice([self.pad, self.cat])(a))
            elif pick < 0.94:
                self.values.append(self.gather(a))
            elif pick < 0.97:                                # broadcast to more axes
                extra = choose.choice([2, 3])
                self.values.append(self.pointwise("mul", [a, 2.0], (extra, *a.shape)))
            else:
                out = self.buffer(self.buffers[a.buffer].shape, shuffle=False)
                self.steps.append(Extern("aten.neg.default", (Ref(a.buffer),), (), (out.buffer,),
                                         choose.choice([None, "aten.neg.out"])))
                self.values.append(out)
        made = [v for v in self.values if self.buffers[v.buffer].kind == "temp"]
        wanted = {choose.choice(made[-3:]).buffer for _ in range(choose.choice([1, 2, 3]))} if made else set()
        for name in wanted:
            b = self.buffers[name]
            self.buffers[name] = Buffer(b.name, b.dtype, b.shape, b.stride, b.device, "output")
        return LoopProgram(tuple(self.inputs), self.buffers, tuple(self.steps), tuple(Output(n) for n in sorted(wanted)), "cpu")

    @staticmethod
    def broadcasts(a: tuple, to: tuple) -> bool:
        return len(a) <= len(to) and all(x in (1, y) for x, y in zip(a, to[len(to) - len(a):]))


DTYPES = (F64, F32, F16)
