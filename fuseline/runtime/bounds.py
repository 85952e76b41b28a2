"""The exceptions for indices outside of their axis, which kernels report by Op "check"."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from fuseline.codegen.llvm.kernel import check_bits
from fuseline.ir.expr import Sym, substitute, symbols
from fuseline.ir.kernels import Bounds, Kernel, Op


class IndexOutOfBounds(IndexError, RuntimeError):
    """An index outside of its axis, for operators where PyTorch raises either class, depending on layouts and callers."""


ERRORS: dict[str, type[Exception]] = {"IndexError": IndexError, "RuntimeError": RuntimeError, "either": IndexOutOfBounds}


class Failures:
    """Makes the exception for the result of a native segment that is not None."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._checks: list[list[tuple[int, Bounds | None]]] = []          # for each launch: (bit, what is checked)
        for kernel in kernels:
            bits = check_bits(kernel)
            stmts = (s for p in kernel.phases for s in p.body)
            self._checks.append([(bits[s.name], s.bounds) for s in stmts if isinstance(s, Op) and s.name in bits])

    def __bool__(self) -> bool:
        """True if a kernel checks something."""
        return any(self._checks)

    def sizes(self) -> list[Sym]:
        """The size symbols of the axes in question."""
        found = {s for checks in self._checks for _, about in checks if about is not None for s in symbols(about.extent)}
        return sorted(found, key=lambda s: s.name)

    def error(self, code: int, sizes: Mapping[str, int]) -> Exception:
        """code: see `runtime.native`. sizes: the values of the symbols, by name."""
        checks = self._checks[code >> 32]
        about = next((about for bit, about in checks if code >> bit & 1 and about is not None), None)
        if about is None:
            return IndexError("an index is out of bounds in a compiled kernel")
        extent = substitute(about.extent, {s: sizes[s.name] for s in symbols(about.extent)})
        where = f"{about.operator}, {about.origin}" if about.origin else about.operator
        return ERRORS[about.error](f"index out of bounds for dimension {about.axis} with size {extent} ({where})")
