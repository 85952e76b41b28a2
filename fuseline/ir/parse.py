"""Text to Graph, Kernel and LoopProgram: the inverse of `str(graph)` and `fuseline.ir.print`. Used by tests and tools.

Size symbols come into being where they are first named, with a lower bound of 2 unless the text gives another (`s0>=0`).
Leading and common indentation do not matter. Errors raise ParseError with the text around the offending place.
"""
from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from fuseline.errors import FuselineError
from fuseline.ir import dtypes
from fuseline.ir.dtypes import DType
from fuseline.ir.expr import Int, Sym, floor_div, maximum, modulo
from fuseline.ir.graph import Graph, Node, ScalarType, TensorType, Type, contiguous
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
    Stmt,
    Store,
    Value,
    ViewOf,
)


class ParseError(FuselineError):
    """The text is not in the form that the printers give."""


_TOKEN = re.compile(r"""
    (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<name>%\w[\w.]*|[A-Za-z_][\w.]*(?:::[\w.]+)*)
  | (?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?j?)
  | (?P<punct>//|>=|[-+*%()\[\]<>,:;=@&])
  | (?P<space>\s+)
""", re.VERBOSE)
_CONSTANTS = {"None": None, "none": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


def parse_expr(text: str, names: dict[str, Sym] | None = None) -> Int:
    """An index expression; symbols that `names` lacks become sizes."""
    reader = _Reader(text, names)
    e = reader.expr()
    reader.end()
    return e


def parse_graph(text: str) -> Graph:
    return _Reader(text).graph()


def parse_kernel(text: str) -> Kernel:
    reader = _Reader(text)
    kernel = reader.kernel()
    reader.end()
    return kernel


def parse_program(text: str) -> LoopProgram:
    return _Reader(text).program()


class _Reader:
    """A token list, a position in it, and the symbols known so far."""

    def __init__(self, text: str, names: dict[str, Sym] | None = None) -> None:
        self.text, self.position = text, 0
        self.symbols: dict[str, Sym] = dict(names or {})
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ParseError(f"unexpected character {text[at]!r} in: {text[at - 40 if at > 40 else 0:at + 40]!r}")
            if match.lastgroup != "space":
                self.tokens.append((match.lastgroup or "", match.group(), at))
            at = match.end()
        self.tokens.append(("end", "", len(text)))

    # -- tokens ---------------------------------------------------------------------------------------------
    def peek(self, ahead: int = 0) -> str:
        i = self.position + ahead
        return self.tokens[i][1] if i < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.position][0]

    def take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1][1]

    def accept(self, text: str) -> bool:
        if self.kind() != "string" and self.peek() == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}")

    def fail(self, what: str) -> None:
        _, token, at = self.tokens[min(self.position, len(self.tokens) - 1)]
        line = self.text.count("\n", 0, at)
        context = self.text.split("\n")[line].strip()
        raise ParseError(f"{what}, found {token!r} in line {line + 1}: {context}")

    def end(self) -> None:
        if self.kind() != "end":
            self.fail("expected the end")

    def name(self) -> str:
        if self.kind() != "name":
            self.fail("expected a name")
        return self.take()

    def many(self, item, close: str) -> tuple:
        """Items separated by commas up to and including `close`."""
        found = []
        while not self.accept(close):
            found.append(item())
            if not self.accept(","):
                self.expect(close)
                break
        return tuple(found)

    # -- expressions and arguments --------------------------------------------------------------------------
    def expr(self):
        total = self.term()
        while self.peek() in ("+", "-") and self.kind() == "punct":
            sign = self.take()
            term = self.term()
            total = total + term if sign == "+" else total - term
        return total

    def term(self):
        total = self.factor()
        while self.kind() == "punct" and self.peek() in ("*", "//", "%"):
            op = self.take()
            factor = self.factor()
            total = total * factor if op == "*" else floor_div(total, factor) if op == "//" else modulo(total, factor)
        return total

    def factor(self):
        if self.accept("-"):
            return -self.factor()
        if self.accept("("):
            inner = self.expr()
            self.expect(")")
            return inner
        if self.kind() == "number":
            return _number(self.take())
        name = self.name()
        if name == "max" and self.accept("("):
            a = self.expr()
            self.expect(",")
            b = self.expr()
            self.expect(")")
            return maximum(a, b)
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        return self.symbol(name)

    def symbol(self, name: str) -> Sym:
        if name not in self.symbols:
            self.symbols[name] = Sym(name, None, -(1 << 62)) if name.startswith("%") else Sym(name, None, 2)
        return self.symbols[name]

    def argument(self, nodes: dict[str, Node] | None = None):
        if self.kind() == "string":
            return _string(self.take())
        if self.accept("["):
            return self.many(lambda: self.argument(nodes), "]")
        if self.accept("&"):
            return Ref(self.name())
        if self.peek() == "view" and self.peek(1) == "(":
            self.position += 2
            self.expect("&")
            buffer = self.name()
            self.expect(",")
            shape = self.argument()
            self.expect(",")
            stride = self.argument()
            self.expect(",")
            offset = self.expr()
            self.expect(")")
            return ViewOf(buffer, shape, stride, offset)
        if nodes is not None and self.peek().startswith("%") and self.kind() == "name":
            name = self.take()[1:]
            if name not in nodes:
                self.fail(f"%{name} is not defined above")
            return nodes[name]
        if self.kind() == "name" and self.peek() in dtypes.BY_NAME and self.peek(1) in (",", ")", "]"):
            return dtypes.BY_NAME[self.take()]
        return self.expr()

    def arguments(self, nodes: dict[str, Node] | None = None) -> tuple[tuple, tuple]:
        args, kwargs = [], []
        while not self.accept(")"):
            if self.kind() == "name" and self.peek(1) == "=":
                key = self.take()
                self.take()
                kwargs.append((key, self.argument(nodes)))
            else:
                args.append(self.argument(nodes))
            if not self.accept(","):
                self.expect(")")
                break
        return tuple(args), tuple(kwargs)

    # -- types ----------------------------------------------------------------------------------------------
    def dtype(self) -> DType:
        name = self.name()
        if name not in dtypes.BY_NAME:
            self.position -= 1
            self.fail(f"expected a dtype (one of {', '.join(dtypes.BY_NAME)})")
        return dtypes.BY_NAME[name]

    def type(self) -> Type:
        if self.accept("("):
            return self.many(self.type, ")")
        if self.accept("none"):
            return None
        if self.peek() in ("int", "float", "bool"):
            kind = self.take()
            return ScalarType(kind, self.expr() if self.accept("=") else None)
        dtype = self.dtype()
        shape, stride = self.layout()
        return TensorType(dtype, shape, stride, self.device())

    def layout(self) -> tuple[tuple, tuple]:
        self.expect("[")
        shape, strides = [], None
        while not self.accept("]"):
            shape.append(self.expr())
            if self.accept(";"):
                strides = self.many(self.expr, "]")
                break
            if not self.accept(","):
                self.expect("]")
                break
        return tuple(shape), contiguous(tuple(shape)) if strides is None else strides

    def device(self) -> str:
        if not self.accept("@"):
            return "cpu"
        device = self.name()
        return f"{device}:{self.take()}" if self.accept(":") else device

    # -- graph ----------------------------------------------------------------------------------------------
    def graph(self) -> Graph:
        graph_name = self.name()
        self.expect("(")
        nodes: dict[str, Node] = {}

        def one_input() -> Node:
            name = self.name().removeprefix("%")
            self.expect(":")
            node = Node(name, "input", type=self.type(), static=self.accept("static"))
            nodes[name] = node
            return node
        inputs = self.many(one_input, ")")
        self.expect(":")
        body = []
        while not self.accept("return"):
            name = self.name().removeprefix("%")
            self.expect(":")
            type_ = self.type()
            self.expect("=")
            op = self.name()
            self.expect("(")
            args, kwargs = self.arguments(nodes)
            if name in nodes:
                self.fail(f"%{name} is defined twice")
            nodes[name] = Node(name, op, args, kwargs, type_)
            body.append(nodes[name])
        outputs = []
        while self.kind() != "end":
            outputs.append(self.argument(nodes))
            if not self.accept(","):
                break
        self.end()
        return Graph(inputs, tuple(body), tuple(outputs), graph_name)

    # -- kernels --------------------------------------------------------------------------------------------
    def kernel(self) -> Kernel:
        self.expect("kernel")
        label = self.name()
        self.expect("(")
        outer_symbols = dict(self.symbols)

        def param() -> Param:
            name = self.name()
            self.expect(":")
            dtype = self.dtype()
            return Param(name, dtype, self.accept("out"))
        params = self.many(param, ")")
        sizes: list[Sym] = []
        while self.accept("sizes") or (sizes and self.accept(",")):
            sizes.append(self.size())
        axes = self.axes("axes")
        phases = []
        while self.accept("phase"):
            inner = self.axes(None)
            body: list[Stmt] = []
            while self.peek().startswith("%") or self.peek() == "store":
                body.append(self.stmt())
            phases.append(Phase(inner, tuple(body)))
        self.symbols = {**outer_symbols, **{s.name: s for s in sizes}}
        written = {s.buffer for p in phases for s in p.body if isinstance(s, Store)}
        params = tuple(replace(p, writes=p.writes or p.name in written) for p in params)
        return Kernel(params, tuple(sizes), axes, tuple(phases), label)

    def size(self) -> Sym:
        name = self.name()
        lo = 2
        if self.accept(">="):
            lo = int(self.take())
        self.symbols[name] = Sym(name, None, lo)
        return self.symbols[name]

    def axes(self, head: str | None) -> tuple[Axis, ...]:
        if head is not None:
            if not self.accept(head):
                return ()
        elif self.peek(1) != "<":
            return ()
        axes = []
        while True:
            name = self.name()
            self.expect("<")
            extent = self.expr()
            self.expect(">")
            self.symbols[name] = Sym(name, extent)
            axes.append(Axis(self.symbols[name], extent))
            if not self.accept(","):
                return tuple(axes)

    def value(self) -> Value:
        if self.peek().startswith("%"):
            return self.take()
        sign = -1 if self.accept("-") else 1
        number: Any
        if self.kind() == "number":
            number = _number(self.take())
        else:
            name = self.name()
            if name not in _CONSTANTS:
                self.fail("expected a value")
            number = _CONSTANTS[name]
        return number if sign == 1 else -number

    def values(self) -> tuple[Value, ...]:
        found = [self.value()]
        while self.accept(","):
            found.append(self.value())
        return tuple(found)

    def indexed(self) -> tuple[str, Int]:
        buffer = self.name()
        self.expect("[")
        index = self.expr()
        self.expect("]")
        return buffer, index

    def mask(self) -> str | None:
        return str(self.value()) if self.accept("if") else None

    def stmt(self) -> Stmt:
        if self.accept("store"):
            mode = "set"
            if self.peek(1) != "[":
                mode = self.name()
            buffer, index = self.indexed()
            self.expect("=")
            value = self.value()
            return Store(buffer, index, value, self.mask(), mode)
        names = [self.take()]
        while self.accept(","):
            names.append(self.take())
        self.expect("=")
        op = self.name()
        if op == "load":
            buffer, index = self.indexed()
            mask = self.mask()
            other: Value = 0
            if mask is not None:
                self.expect("else")
                other = self.value()
            self.expect(":")
            return Load(names[0], buffer, index, self.dtype(), mask, other)
        if op == "index":
            e = self.expr()
            self.expect(":")
            return Index(names[0], e, self.dtype())
        if op == "reduce":
            op = self.name()
            args = self.values()
            self.expect(":")
            return Reduce(tuple(names), op, args, self.dtype())
        args = self.values() if self.peek() != ":" else ()
        self.expect(":")
        return Op(names[0], op, args, self.dtype())

    # -- programs -------------------------------------------------------------------------------------------
    def program(self) -> LoopProgram:
        self.expect("program")
        self.expect("on")
        device = self.name()
        if self.accept(":"):
            device = f"{device}:{self.take()}"
        self.expect("inputs")
        inputs: list[str | Sym] = []
        heads = ("buffer", "kernel", "launch", "extern", "hoisted", "arena", "return")
        while self.peek() == "&" or (self.kind() == "name" and self.peek() not in heads):
            inputs.append(self.name() if self.accept("&") else self.size())
            if not self.accept(","):
                break
        buffers: dict[str, Buffer] = {}
        plan: dict[str, Int] = {}
        kernels: dict[str, Kernel] = {}
        steps: dict[bool, list] = {False: [], True: []}
        arena: Int = 0
        while not self.accept("return"):
            hoisted = self.accept("hoisted")
            if self.accept("buffer"):
                buffer = self.buffer()
                buffers[buffer.name] = buffer
                if self.accept("at"):
                    plan[buffer.name] = self.expr()
            elif self.peek() == "kernel":
                name = self.peek(1)
                del self.tokens[self.position + 1]
                kernels[name] = self.kernel()
            elif self.accept("launch"):
                name = self.name()
                self.expect("(")
                refs = self.many(self.argument, ")")
                ops = self.argument() if self.accept("ops") else ()
                origins = self.argument() if self.accept("from") else ()
                steps[hoisted].append(Launch(kernels[name], tuple(r.buffer for r in refs), ops, origins))
            elif self.accept("extern"):
                steps[hoisted].append(self.extern())
            elif self.accept("arena"):
                arena = self.expr()
            else:
                self.fail("expected buffer, kernel, launch, extern, arena or return")
        outputs = []
        while self.kind() != "end":
            outputs.append(self.output())
            if not self.accept(","):
                break
        self.end()
        return LoopProgram(tuple(inputs), buffers, tuple(steps[False]), tuple(outputs), device, tuple(steps[True]), arena, plan)

    def buffer(self) -> Buffer:
        name = self.name()
        self.expect(":")
        dtype = self.dtype()
        shape, stride = self.layout()
        device = self.device()
        kind = self.name()
        return Buffer(name, dtype, shape, stride, device, kind, self.accept("static"), self.accept("opaque"))

    def extern(self) -> Extern:
        outs: list[str | None] = []
        while True:
            outs.append(None if self.accept("none") else self.argument().buffer)
            if not self.accept(","):
                break
        self.expect("=")
        op = self.name()
        self.expect("(")
        args, kwargs = self.arguments()
        variant = self.name() if self.accept("out") else None
        origin = self.argument() if self.accept("from") else ""
        return Extern(op, args, kwargs, tuple(outs), variant, origin)

    def output(self) -> Output:
        value = self.argument()
        if isinstance(value, Ref):
            return Output(value.buffer)
        if isinstance(value, ViewOf):
            return Output(value.buffer, value.shape, value.stride, value.offset)
        return Output(value)


def _number(text: str) -> int | float | complex:
    if text.endswith("j"):
        return complex(text)
    return int(text) if text.isdigit() else float(text)


def _string(text: str) -> str:
    return ast.literal_eval(text)


__all__ = ["ParseError", "parse_expr", "parse_graph", "parse_kernel", "parse_program"]
