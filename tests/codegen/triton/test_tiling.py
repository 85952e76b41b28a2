"""Tilings as measured on the H200 (132 multiprocessors): which shape gets which."""
from __future__ import annotations

from fuseline.codegen.triton.tiling import choose
from fuseline.ir.dtypes import F32
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import Axis, Kernel, Load, Param, Phase, Reduce, Store


def sums(pieces: int, columns: int, rows: int) -> Kernel:
    """Sums over pieces of the rows of a [pieces * rows, columns] matrix."""
    p, i, j = Sym("p", pieces), Sym("i", columns), Sym("j", rows)
    return Kernel((Param("p0", F32), Param("p1", F32, True)), (), (Axis(p, pieces), Axis(i, columns)), (
        Phase((Axis(j, rows),), (Load("%0", "p0", (rows * columns) * p + columns * j + i, F32), Reduce(("%s",), "sum", ("%0",), F32))),
        Phase((), (Store("p1", columns * p + i, "%s"),))), "sums")


def copy(a: int, b: int, c: int, strides: tuple[int, int, int]) -> Kernel:
    i, j, k = (Sym(n, e) for n, e in zip("ijk", (a, b, c)))
    read = strides[0] * i + strides[1] * j + strides[2] * k
    return Kernel((Param("p0", F32), Param("p1", F32, True)), (), (Axis(i, a), Axis(j, b), Axis(k, c)), (
        Phase((), (Load("%0", "p0", read, F32), Store("p1", b * c * i + c * j + k, "%0"))),), "copy")


def test_columns() -> None:
    few = choose(sums(4, 256, 1568))
    assert (few.x, few.persistent, few.num_warps) == (8, True, 8)         # all of a block's loads at once
    far, close = choose(sums(4, 1024, 1568)), choose(sums(56, 64, 1792))
    assert (far.x, far.r) == (16, 128) and (close.x, close.r) == (32, 128)
    assert choose(sums(1, 64, 100352)).r > 0                              # rows too long to hold


def test_filters_change_layout_in_narrow_tiles() -> None:
    there, back = choose(copy(512, 9, 512, (4608, 1, 9))), choose(copy(512, 512, 9, (4608, 1, 512)))
    assert (there.x, there.y, there.x_axes) == (64, 16, 1) and (back.x, back.y, back.x_axes) == (16, 64, 1)
    assert choose(copy(32, 50176, 3, (150528, 1, 50176))).y == 0          # colours: flat
