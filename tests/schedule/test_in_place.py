"""New values of inputs are written over the old ones only where nobody can tell."""
from __future__ import annotations

from fuseline.ir.dtypes import F32
from fuseline.ir.expr import Sym
from fuseline.ir.kernels import Axis, Buffer, Extern, Kernel, Launch, Load, LoopProgram, Op, Output, Param, Phase, Ref, Store
from fuseline.ir.verify import verify_program
from fuseline.schedule.in_place import write_in_place

I, J = Sym("i", 4), Sym("j", 3)


def update(read_at: object = I, axes: tuple = (Axis(I, 4),)) -> Launch:
    """n[i] = w[read_at] * x[i]"""
    body = (Load("%0", "p0", read_at, F32), Load("%1", "p1", I, F32), Op("%2", "mul", ("%0", "%1"), F32), Store("p2", I, "%2"))
    kernel = Kernel((Param("p0", F32), Param("p1", F32), Param("p2", F32, True)), (), axes, (Phase((), body),), "update")
    return Launch(kernel, ("w", "x", "n"))


def program(*steps: Launch | Extern, static: bool = True, outputs: tuple = (Output("n"), Output("y"))) -> LoopProgram:
    buffers = {n: Buffer(n, F32, (4,), (1,), "cuda:0", kind, static and n == "w") for n, kind in
               (("w", "input"), ("x", "input"), ("n", "output"), ("y", "output"))}
    return LoopProgram(("w", "x"), buffers, steps, outputs, "cuda:0")


def relu(source: str) -> Extern:
    return Extern("aten.relu.default", (Ref(source),), (), ("y",))


def in_place(before: LoopProgram) -> bool:
    after = write_in_place(before, [(0, 0)])
    verify_program(after)
    assert len(after.outputs) == len(before.outputs)
    return after.outputs[0].value is None


def test_an_update_reads_and_writes_one_buffer() -> None:
    after = write_in_place(program(update(), relu("x")), [(0, 0)])
    verify_program(after)
    step = after.steps[0]
    assert isinstance(step, Launch) and step.buffers == ("w", "x") and [p.writes for p in step.kernel.params] == [True, False]
    assert "n" not in after.buffers and after.outputs == (Output(None), Output("y"))


def test_the_old_value_stays_where_it_is_needed() -> None:
    assert in_place(program(update(), relu("x")))
    assert not in_place(program(relu("w"), update()))                      # the operator's result might be a view
    assert not in_place(program(update(), relu("w")))
    assert not in_place(program(update(), relu("n")))
    assert not in_place(program(update(), relu("x"), static=False))
    assert not in_place(program(update(), relu("x"), outputs=(Output("n"), Output("n"))))
    assert not in_place(program(update(), relu("x"), outputs=(Output("n"), Output("w"))))
    assert not in_place(program(update(3 - I), relu("x")))                 # another point's value
    assert not in_place(program(update(0), relu("x")))
    assert not in_place(program(update(axes=(Axis(J, 3), Axis(I, 4))), relu("x")))       # three points read and write each element
