"""Records what an executable launches as a CUDA graph and replays it, without changing anything a caller can see.

A replay reads and writes the same memory each time. What keeps that invisible:
  inputs    parameters are used in place, and their addresses checked on each call; other inputs are copied into memory of
            the graph's own. Tensors that a graph of the same pool handed out (saved for backward) are used in place as well.
  outputs   are copied into fresh tensors, or, where the caller of `wrap_executable` asked for it, *lent*: handed out as they
            are. Before a replay the reference counts of everything lent are looked at. If anyone still holds one (a
            gradient that accumulates, tensors saved by a second forward before the first backward) the call runs plainly,
            and an output that is not saved for backward is copied from then on.
  random    torch's generator is registered with the graph: each replay draws new numbers.
The first call with given sizes runs plainly, the second records. Whatever cannot be recorded runs plainly for good, with the
reason in `verdict` and in the log.
"""
from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fuseline import torch_internals
from fuseline.errors import InternalError
from fuseline.ir.kernels import Extern, Launch, LoopProgram
from fuseline.ir.verdict import Verdict
from fuseline.log import emit as log
from fuseline.log import warn_once
from fuseline.options import Options

MAX_RECORDINGS = 8            # graphs of one executable: one for each tuple of sizes
MAX_RERECORDINGS = 3          # because an address changed
MIN_LAUNCHES = 4              # machine G: a replay is 3.7 us but copying in and out is 8 us each; a direct launch is about 4 us

# Operators that wait for the device or whose result's size depends on data: a graph cannot hold them.
UNRECORDABLE = ("aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique",
                "aten.unique_dim", "aten.unique_consecutive", "aten.repeat_interleave.Tensor", "aten.is_nonzero", "aten.equal",
                "aten.bincount", "aten.histc", "aten.linalg_eig", "aten._linalg_eigh", "aten._linalg_svd", "aten.multinomial")


class Recorder(Protocol):
    """How work is recorded; the CUDA one below, a stand-in in tests."""

    def record(self, work: Callable[[], tuple], pool: Any) -> tuple[Callable[[], None], tuple]:
        """(replay, the outputs that each replay writes)"""

    def new_pool(self) -> Any: ...
    def busy(self) -> bool:
        """Whether the caller's own recording is under way."""

    def join(self, last: Any) -> Any:
        """Order the present stream after the stream of the last replay; returns the present one."""


class CudaRecorder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def join(self, last: Any) -> Any:
        present = torch.cuda.current_stream(self.device)
        if last is not None and last != present:
            present.wait_stream(last)
        return present

    def record(self, work: Callable[[], tuple], pool: Any) -> tuple[Callable[[], None], tuple]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        # What the collector frees may need calls that are illegal while a graph is recorded.
        collects = gc.isenabled()
        gc.disable()
        try:
            outputs = self._capture(graph, work, pool)
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return graph.replay, outputs

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], tuple], pool: Any) -> tuple:
        with torch.cuda.stream(self.stream):
            # thread_local: what other threads do (data loaders) does not disturb the recording.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = work()
            except BaseException:
                try:
                    graph.capture_end()
                except RuntimeError:
                    pass                                      # the first error is the one that says why
                raise
            graph.capture_end()
        return outputs


class GraphPool:
    """What the graphs of one function's forward and backward share: a lock, and the memory that they hand each other."""

    def __init__(self, device: str | torch.device, recorder: Recorder | None = None) -> None:
        self.device = torch.device(device)
        self.recorder: Recorder = recorder or CudaRecorder(self.device)
        self.lock = threading.RLock()
        self.outputs: dict[int, torch.Tensor] = {}            # what graphs of this pool write and lend, by address
        self.last_stream: Any = None


def wrap_executable(executable: Any, program: LoopProgram, options: Options, pool: GraphPool | None, *,
                    saved: frozenset[int] = frozenset(), lend: frozenset[int] = frozenset()) -> Any:
    """The executable, run through CUDA graphs where the options ask for it and it pays; else the executable itself.

    saved   positions of outputs that only the backward of the same call reads (tensors saved for it): lent, never copied
    lend    positions of outputs that may be lent (gradients: whoever accumulates them holds them, which is noticed)
    All other outputs are copied into fresh tensors.
    """
    if not options.uses_cudagraphs or pool is None:
        return executable
    verdict = recordable(program)
    if not verdict:
        log("cudagraphs", f"not recorded: {verdict}")
        return executable
    return GraphedExecutable(executable, program, pool, saved, lend)


def recordable(program: LoopProgram) -> Verdict:
    """Whether a CUDA graph of the program is possible and pays."""
    if not program.device.startswith("cuda"):
        return Verdict.no("the program does not run on a CUDA device", program.device)
    externs = [s for s in program.steps if isinstance(s, Extern)]
    for step in externs:
        if step.op.startswith(UNRECORDABLE):
            return Verdict.no("the operator waits for the device or its result's size depends on data", step.op)
    passed = next((name for name, buffer in program.buffers.items() if buffer.opaque and buffer.kind == "input"), None)
    if passed is not None:
        return Verdict.no("a float that may change is an argument of a PyTorch operator", passed)
    for name, buffer in program.buffers.items():
        if torch.device(buffer.device) != torch.device(program.device) and buffer.device != "cuda":
            return Verdict.no(f"a tensor is on {buffer.device}", name)
    if len(program.steps) < MIN_LAUNCHES and not externs:
        return Verdict.no(f"{len(program.steps)} kernels are launched faster directly")
    return Verdict.yes()


def _mutated_inputs(program: LoopProgram) -> frozenset[int]:
    """Inputs that a step writes: they are used in place."""
    written = {b for s in program.steps if isinstance(s, Launch) for b, p in zip(s.buffers, s.kernel.params) if p.writes}
    written |= {o for s in program.steps if isinstance(s, Extern) for o in s.outs if o is not None}
    return frozenset(i for i, name in enumerate(program.inputs) if isinstance(name, str) and name in written)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill a stretch of memory, each place once."""
    expected = 1
    for size, stride in sorted(((n, s) for n, s in zip(tensor.shape, tensor.stride()) if n != 1), key=lambda x: x[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that the tensor spans, as one axis."""
    span = 0 if tensor.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _fresh_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory with the tensor's sizes and strides, also where places coincide (stride 0)."""
    if _dense(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    flat = _flat(tensor)
    return torch.empty(flat.shape, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, tensor.stride(), 0)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """targets[i] = sources[i], equal in shape, stride and type; many tensors of one type in one kernel."""
    groups: dict[torch.dtype, tuple[list, list]] = {}
    for target, source in zip(targets, sources):
        if not _dense(target):
            target, source = _flat(target), _flat(source)
        to, of = groups.setdefault(target.dtype, ([], []))
        to.append(target)
        of.append(source)
    for to, of in groups.values():
        if len(to) == 1:
            to[0].copy_(of[0], non_blocking=True)
        else:
            torch_internals.foreach_copy(to, of)


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors with their strides, with few kernels and little Python."""
    copies: list[torch.Tensor | None] = [None] * len(tensors)
    groups: dict[torch.dtype, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(position)
    for dtype, positions in groups.items():
        group = [tensors[p] for p in positions]
        if len(group) > 1 and not dtype.is_complex and dtype is not torch.bool and all(_dense(t) for t in group):
            made = torch_internals.foreach_clone(group)
            if any(m.stride() != t.stride() for m, t in zip(made, group)):
                made = [t.clone() for t in group]
        else:
            made = [t.clone() if _dense(t) else _flat(t).clone().as_strided(t.shape, t.stride(), 0) for t in group]
        for position, copy in zip(positions, made):
            copies[position] = copy
    return copies                                             # type: ignore[return-value]


@dataclass(eq=False)
class _Lent:
    """An output whose memory callers get: held while anyone refers to its storage besides this recording."""
    position: int
    tensor: torch.Tensor
    storage: Any
    baseline: int = 0

    def held(self) -> bool:
        return torch_internals.storage_references(self.storage) > self.baseline


@dataclass(eq=False)
class _Recording:
    replay: Callable[[], None]
    inputs: tuple                                             # what the graph reads, in calling order
    in_place: tuple[tuple[int, int], ...]                     # (position, address) of inputs used where they are
    copied_in: tuple[int, ...]
    outputs: tuple
    lent: dict[int, _Lent] = field(default_factory=dict)
    copied_out: list[int] = field(default_factory=list)
    hoisted: tuple[int, ...] = ()
    generation: int = 0


class GraphedExecutable:
    """See `wrap_executable`. `verdict` says why it runs plainly, when it does; `replays` and `plain` count calls."""

    def __init__(self, executable: Any, program: LoopProgram, pool: GraphPool, saved: frozenset[int], lend: frozenset[int]) -> None:
        self.executable, self.program, self.pool = executable, program, pool
        self.saved, self.lend = saved, set(lend) | set(saved)
        self.verdict = Verdict.yes()
        self.replays = self.plain = 0
        self.recordings: dict[tuple, _Recording] = {}         # in the order of recording
        self._seen: set[tuple] = set()
        self._rerecordings = 0
        self._mismatches = 0
        self._never_in_place: set[int] = set()
        self._memory = None
        self._waiting: list[_Lent] = []                       # no longer lent, but not given back yet
        positions = {name: i for i, name in enumerate(program.inputs) if isinstance(name, str)}
        self._tensors = tuple(positions.values())
        self._numbers = tuple(i for i in range(len(program.inputs)) if i not in positions.values())
        self._static = frozenset(i for n, i in positions.items() if program.buffers[n].static) | _mutated_inputs(program)
        self._from_inputs = {i: positions[o.value] for i, o in enumerate(program.outputs)
                             if isinstance(o.value, str) and o.value in positions}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executable, name)

    # -- calls ------------------------------------------------------------------------------------------------
    def __call__(self, *inputs: Any) -> tuple:
        if not self.verdict or self.pool.recorder.busy():
            return self._plainly(inputs)
        if self.pool.device.type == "cuda" and torch.cuda.current_device() != self.pool.device.index:
            with torch.cuda.device(self.pool.device):
                return self._call(inputs)
        return self._call(inputs)

    def _call(self, inputs: tuple) -> tuple:
        with self.pool.lock:
            key = (*self.executable.sizes(inputs), *(inputs[i] for i in self._numbers))
            recording = self.recordings.get(key)
            if recording is not None and not self._usable(recording, inputs):
                recording = self._moved(key, recording, inputs)
                if recording is None:
                    return self._plainly(inputs)
            if recording is None:
                if key not in self._seen:
                    self._seen.add(key)
                    return self._plainly(inputs)
                if len(self.recordings) >= MAX_RECORDINGS:
                    log("cudagraphs", f"more than {MAX_RECORDINGS} sizes: {key} runs plainly")
                    return self._plainly(inputs)
                recording = self._record(key, inputs)
                if recording is None:
                    return self._plainly(inputs)
            elif self._anything_held(recording):
                return self._plainly(inputs)
            self.pool.last_stream = self.pool.recorder.join(self.pool.last_stream)
            if recording.copied_in:
                copy_all([recording.inputs[i] for i in recording.copied_in], [inputs[i] for i in recording.copied_in])
            recording.replay()
            self.replays += 1
            self._mismatches = 0
            return self._hand_out(recording, inputs)

    def _plainly(self, inputs: tuple) -> tuple:
        self.plain += 1
        return self.executable(*inputs)

    def _usable(self, recording: _Recording, inputs: tuple) -> bool:
        for position, address in recording.in_place:
            if inputs[position].data_ptr() != address:
                return False
        if self.program.hoisted:
            self.executable.refresh(inputs)
            if self.executable.generation != recording.generation:
                if _addresses(self.executable.hoisted) != recording.hoisted:
                    return False
                recording.generation = self.executable.generation
        return True

    def _moved(self, key: tuple, recording: _Recording, inputs: tuple) -> _Recording | None:
        """Something that the graph uses in place is elsewhere now: run plainly, and record anew if it keeps happening."""
        moved = [i for i, address in recording.in_place if inputs[i].data_ptr() != address]
        lent_by_us = [i for i in moved if i not in self._static]
        self._mismatches += 1
        if lent_by_us and len(lent_by_us) == len(moved) and self._mismatches < 3:
            return None                                       # the forward of this call ran plainly
        if self._rerecordings >= MAX_RERECORDINGS:
            self._refuse("the address of an input that is used in place keeps changing")
            return None
        self._rerecordings += 1
        self._mismatches = 0
        self._never_in_place.update(lent_by_us)
        del self.recordings[key]
        for lent in recording.lent.values():
            if self.pool.outputs.get(lent.tensor.data_ptr()) is lent.tensor:
                del self.pool.outputs[lent.tensor.data_ptr()]
        log("cudagraphs", f"recording again: {len(moved)} inputs moved")
        return self._record(key, inputs)

    def _refuse(self, reason: str, subject: str = "") -> None:
        self.verdict = Verdict.no(reason, subject)
        log("cudagraphs", f"runs plainly: {self.verdict}")
        self.recordings.clear()

    def _anything_held(self, recording: _Recording) -> bool:
        """Whether a caller holds memory that a replay would overwrite.

        A graph's temporary memory may be that of outputs of graphs recorded later from the same memory pool, never of
        earlier ones, which were alive when it was recorded.
        """
        held = reached = False
        for other in self.recordings.values():
            reached = reached or other is recording
            if not reached:
                continue
            for lent in list(other.lent.values()):
                if lent.held():
                    held = True
                    if lent.position not in self.saved:
                        del other.lent[lent.position]         # its memory stays with whoever holds it until the next replay
                        other.copied_out.append(lent.position)
                        self.lend.discard(lent.position)
                        self._waiting.append(lent)
        self._waiting = [w for w in self._waiting if w.held()]
        return held or bool(self._waiting)

    # -- recording --------------------------------------------------------------------------------------------
    def _record(self, key: tuple, inputs: tuple) -> _Recording | None:
        own: list = list(inputs)
        in_place, copied_in = [], []
        for i in self._tensors:
            address = inputs[i].data_ptr()
            ours = None if i in self._never_in_place else self.pool.outputs.get(address)
            if i in self._static:
                in_place.append((i, address))
            elif ours is not None and ours.shape == inputs[i].shape and ours.stride() == inputs[i].stride():
                own[i] = ours                                 # not the tensor that was handed out: that one must be able to die
                in_place.append((i, address))
            else:
                own[i] = _fresh_like(inputs[i])
                copied_in.append(i)
        try:
            self.executable.prepare(own)
            if self._memory is None:
                self._memory = self.pool.recorder.new_pool()
            replay, outputs = self.pool.recorder.record(lambda: self.executable(*own), self._memory)
        except torch.OutOfMemoryError as error:
            warn_once("cudagraphs-memory", "not enough memory to record a CUDA graph; this function runs without one")
            self._refuse("out of memory while recording", str(error).splitlines()[0])
            return None
        except (RuntimeError, InternalError) as error:        # the plain run that follows raises it again if it is not about graphs
            reason = str(error).partition("\n")[0]
            warn_once(f"cudagraphs-{reason}", f"a function runs without a CUDA graph, for it could not be recorded: {reason}")
            self._refuse("could not be recorded", reason)
            return None
        recording = _Recording(replay, tuple(own), tuple(in_place), tuple(copied_in), tuple(outputs))
        recording.generation = getattr(self.executable, "generation", 0)
        recording.hoisted = _addresses(getattr(self.executable, "hoisted", ()))
        for i, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor) or i in self._from_inputs:
                continue
            if i in self.lend:
                recording.lent[i] = _Lent(i, out, out.untyped_storage())
                self.pool.outputs[out.data_ptr()] = out
            else:
                recording.copied_out.append(i)
        for lent in recording.lent.values():
            lent.baseline = torch_internals.storage_references(lent.storage)
        self.recordings[key] = recording
        return recording

    def _hand_out(self, recording: _Recording, inputs: tuple) -> tuple:
        results = list(recording.outputs)
        for i, lent in recording.lent.items():
            results[i] = lent.tensor.detach()
        if recording.copied_out:
            for i, copy in zip(recording.copied_out, clone_all([recording.outputs[i] for i in recording.copied_out])):
                results[i] = copy
        for i, source in self._from_inputs.items():
            output, tensor = self.program.outputs[i], inputs[source]
            if output.shape is None:
                results[i] = tensor
            else:
                fetch = recording.outputs[i]                  # sizes, strides and offset as numbers, of another base
                base = recording.inputs[source]
                results[i] = tensor.as_strided(fetch.shape, fetch.stride(),
                                               tensor.storage_offset() + fetch.storage_offset() - base.storage_offset())
        return tuple(results)


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)
