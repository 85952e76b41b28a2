"""What was compiled and why anything was not, in plain English: the text of `fuseline.explain` and of `verbose=True`."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fuseline.ir.record import CompileRecord, GraphRecord
from fuseline.ir.region import GraphBreak


@dataclass(frozen=True)
class Explanation:
    """The records of a call's compilations, with the questions that users and tests ask. Prints as a report.

    result  what the call returned
    """

    records: tuple[CompileRecord, ...]
    result: object = None

    @property
    def graph_count(self) -> int:
        """Regions that contain tensor operators."""
        return sum(1 for r in self.records if r.operators)

    @property
    def breaks(self) -> tuple[GraphBreak, ...]:
        return tuple(r.graph_break for r in self.records if r.graph_break is not None)

    @property
    def graph_break_count(self) -> int:
        return len(self.breaks)

    @property
    def op_count(self) -> int:
        return sum(r.operators for r in self.records)

    @property
    def kernels(self) -> tuple:
        return tuple(k for r in self.records for k in r.kernels)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        return tuple(r.fallback for r in self.records if r.fallback)

    @property
    def compile_seconds(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for record in self.records:
            total.update(record.seconds)
        return dict(total)

    def __str__(self) -> str:
        return explain_records(self.records)


def explain_records(records: Sequence[CompileRecord]) -> str:
    """The whole report: a summary, then each region, then each break with its remedy."""
    if not records:
        return "Nothing was compiled: every call was served by code that had been compiled before, or fuseline is disabled."
    whole = Explanation(tuple(records))
    lines = [f"{_count(whole.graph_count, 'graph')} with {_count(whole.op_count, 'operator')}, "
             f"{_count(whole.graph_break_count, 'graph break')}, {_count(len(whole.kernels), 'kernel launch', 'kernel launches')}"]
    if whole.compile_seconds:
        times = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in whole.compile_seconds.items() if seconds >= 0.005)
        lines.append(f"compile time {sum(whole.compile_seconds.values()):.2f} s" + (f": {times}" if times else ""))
    for number, record in enumerate(records, 1):
        lines += ["", *_region(number, record)]
    if whole.breaks:
        lines += ["", "Graph breaks"]
        for number, reason in enumerate(whole.breaks, 1):
            lines += [f"  {number}. {reason.where}: {reason.explanation}", f"     kind {reason.kind}; to avoid it: {reason.remedy}"]
            lines += [f"     called from {frame}" for frame in reversed(reason.stack[:-1])]
    return "\n".join(lines)


def _region(number: int, record: CompileRecord) -> list[str]:
    lines = [f"Region {number}: {record.function} ({record.where}), {_count(record.operators, 'operator')}"]
    if record.recompile_reason:
        lines.append(f"  compiled because {record.recompile_reason}")
    if record.fallback:
        lines.append(f"  runs in eager PyTorch: {record.fallback}")
    if record.graph_break is not None:
        lines.append(f"  ends at {record.graph_break.where}: {record.graph_break.explanation}")
    for graph in record.graphs:
        lines += _graph(graph)
    if record.guards:
        lines.append(f"  {_count(len(record.guards), 'guard')}, among them")
        lines += [f"    {guard}" for guard in record.guards[:8]]
    return lines


def _graph(graph: GraphRecord) -> list[str]:
    lines = [f"  {graph.direction} on {graph.device}: {_count(graph.operators, 'ATen operator')} became "
             f"{_count(len(graph.kernels), 'kernel')} and {_count(len(graph.externs), 'library call')}"
             + (f"; {_count(graph.hoisted, 'step')} computed once from parameters" if graph.hoisted else "")]
    for label, count in Counter((k.label, k.ops) for k in graph.kernels).items():
        name, ops = label
        lines.append(f"    kernel {name}" + (f" x{count}" if count > 1 else "") + f"  <- {_ops(ops)}")
    for op, count in Counter(graph.externs).items():
        lines.append(f"    library {op}" + (f" x{count}" if count > 1 else ""))
    lines += [f"    not fused or lowered: {reason}" for reason in list(dict.fromkeys(graph.refusals))[:6]]
    return lines


def fusion_text(graph: GraphRecord) -> str:
    """What each kernel fuses, and every refusal, for the log."""
    lines = [f"{graph.direction} {k.label} <- {_ops(k.ops)}" for k in graph.kernels]
    return "\n".join(lines + [f"{graph.direction} {reason}" for reason in dict.fromkeys(graph.refusals)])


def _ops(ops: Sequence[str]) -> str:
    counts = Counter(op.removeprefix("aten.").removesuffix(".default") for op in ops)
    return ", ".join(op if n == 1 else f"{op} x{n}" for op, n in counts.items())


def _count(n: int, noun: str, plural: str = "") -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {plural or noun + 's'}"


def verbose_text(record: CompileRecord) -> str:
    """What `verbose=True` prints after a region was compiled: the captured graph, and which operators were fused."""
    lines = [f"fuseline: compiled {record.function} ({record.where})"]
    if record.torch_graph:
        lines += ["captured graph:", *("  " + line for line in record.torch_graph.strip().splitlines())]
    lines += _region(1, record)[1:]
    return "\n".join(lines)
