"""Scheduling: a LoopProgram of one small kernel per operator becomes one of few fused kernels with a memory plan."""
from __future__ import annotations

from dataclasses import replace

from fuseline.ir.kernels import Extern, Launch, LoopProgram, Step
from fuseline.ir.steps import reads, writes
from fuseline.ir.target import Target
from fuseline.ir.verdict import Verdict
from fuseline.schedule.canonical import to_launch
from fuseline.schedule.fuse import Fusion
from fuseline.schedule.memory import plan
from fuseline.schedule.order import has_effect
from fuseline.schedule.split import split_reductions


def schedule(program: LoopProgram, target: Target) -> LoopProgram:
    """The program with kernels fused, in an order that keeps every dependence, unused buffers gone, and memory planned.

    Outputs, inputs and the meaning of every step that remains are unchanged; f16 and bf16 values that no longer pass
    through memory keep f32's precision. Refused fusions are appended to the program's verdicts.
    """
    outputs = {o.value for o in program.outputs if isinstance(o.value, str)}
    buffers = dict(program.buffers)
    between = {name for step in program.steps for name in reads(step)}
    hoisted, first = _fused(program.hoisted, buffers, outputs | between, target)
    steps, second = _fused(program.steps, buffers, outputs, target)
    used = {name for step in (*hoisted, *steps) for name in (*reads(step), *writes(step))}
    used |= outputs | {i for i in program.inputs if isinstance(i, str)}
    buffers = {name: b for name, b in buffers.items() if name in used}
    persistent = {name for step in hoisted for name in (*reads(step), *writes(step))}
    offsets, arena = plan(steps, buffers, persistent | outputs)
    return replace(program, buffers=buffers, steps=steps, hoisted=hoisted, plan=offsets, arena_bytes=arena,
                   verdicts=(*program.verdicts, *first, *second))


def _fused(steps: tuple[Step, ...], buffers: dict, kept: set, target: Target) -> tuple[tuple[Step, ...], list[Verdict]]:
    """Fuse a list of steps; `buffers` gains those that splitting reductions needs."""
    if not steps:
        return (), []
    live = _live(steps, kept)
    fusion = Fusion(live, buffers, kept, target)
    done: list[Step] = []
    for item in fusion.run():
        if isinstance(item, Extern):
            done.append(item)
            continue
        for part in split_reductions(item, fusion.context, buffers):        # type: ignore[arg-type]
            done.append(to_launch(part, fusion.context.dtypes))
    return tuple(done), [*fusion.refusals.values(), *fusion.context.verdicts]


def _live(steps: tuple[Step, ...], kept: set) -> list[Step]:
    """The steps whose results somebody reads, in order; operators with an effect stay."""
    wanted = set(kept)
    live: list[Step] = []
    for step in reversed(steps):
        effect = isinstance(step, Extern) and has_effect(step.op)
        if effect or any(name in wanted for name in writes(step)) or not writes(step):
            live.append(step)
            wanted.update(reads(step))
            if isinstance(step, Launch):
                wanted.update(writes(step))
    return live[::-1]


