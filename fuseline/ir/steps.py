"""What the steps of a LoopProgram touch."""
from __future__ import annotations

from collections.abc import Iterator

from fuseline.ir.kernels import Launch, Load, LoopProgram, Ref, Step, Store, ViewOf


def reads(step: Step) -> tuple[str, ...]:
    """The buffers that a step may read, in order."""
    if isinstance(step, Launch):
        loaded = {s.buffer for p in step.kernel.phases for s in p.body if isinstance(s, Load)}
        loaded |= {s.buffer for p in step.kernel.phases for s in p.body if isinstance(s, Store) and s.mode != "set"}
        return tuple(b for b, p in zip(step.buffers, step.kernel.params) if p.name in loaded)
    arguments = (step.args, tuple(v for _, v in step.kwargs))
    return tuple(dict.fromkeys(a.buffer for a in leaves(arguments) if isinstance(a, (Ref, ViewOf))))


def writes(step: Step) -> tuple[str, ...]:
    """The buffers that a step writes, in order."""
    if isinstance(step, Launch):
        return tuple(b for b, p in zip(step.buffers, step.kernel.params) if p.writes)
    return tuple(o for o in step.outs if o is not None)


def touches(step: Step) -> tuple[str, ...]:
    """The buffers that a step needs memory of, each once: those that it reads, and those that it writes."""
    if isinstance(step, Launch):
        return tuple(dict.fromkeys(step.buffers))
    return tuple(dict.fromkeys((*reads(step), *writes(step))))


def leaves(arg: object) -> Iterator[object]:
    """An Extern's argument, tuples taken apart."""
    if isinstance(arg, (tuple, list)):
        for a in arg:
            yield from leaves(a)
    else:
        yield arg


def hoisted_results(program: LoopProgram) -> tuple[str, ...]:
    """Buffers that hoisted steps write and that the rest of the program, or an output, reads; sorted."""
    made = {n for step in program.hoisted for n in writes(step)}
    used = {n for step in program.steps for n in touches(step)} | {o.value for o in program.outputs if isinstance(o.value, str)}
    return tuple(sorted(made & used))


def hoisted_inputs(program: LoopProgram) -> tuple[int, ...]:
    """Positions of the inputs that hoisted steps read."""
    read = {n for step in program.hoisted for n in touches(step)}
    return tuple(i for i, name in enumerate(program.inputs) if isinstance(name, str) and name in read)
