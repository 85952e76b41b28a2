"""The native launcher: one small machine-code function that runs a list of kernels, called from Python as a builtin.

A *segment* is a run of kernel launches without anything else between them. Its description is an array of i64 words; a call
passes the addresses of tensors and the values of sizes as Python ints, last the number of threads. The launcher computes each
kernel's buffer addresses, shares its work units out to torch's OpenMP threads where the kernel is worth it, and returns None.
If a kernel reports failed checks, those after it do not run and the result is (number of the launch << 32) + the kernel's bits.
It is a METH_FASTCALL function whose `self` is the description's address: calling it costs tens of nanoseconds, where ctypes
takes microseconds. The GIL is released while kernels run.

Words of a description (P buffers and S sizes in a launch):
    number of arguments without the thread count, number of launches, largest P, largest S, then for each launch
    kernel's address, units or -1, cost or -1, P, S, P pairs (argument, byte offset), S argument numbers,
and where units is -1 two more: the arguments that hold units and cost.
"""
from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuseline.codegen.llvm import compile as llvm_compile
from fuseline.codegen.llvm.host import host
from fuseline.errors import InternalError
from fuseline.runtime.cache import disk_cache
from fuseline.runtime.threads import openmp

# A parallel region costs about 5 us: kernels estimated below this (0.1 ns units) run on the calling thread.
WORTH_THREADS = 120_000


@dataclass(frozen=True, slots=True)
class NativeLaunch:
    """One kernel call of a segment: (argument, byte offset) of each buffer, arguments of the sizes, and how much work it is.

    units, cost    ints, or `("arg", k)`: argument k holds the number (it depends on sizes)
    """

    address: int
    buffers: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    units: int | tuple[str, int]
    cost: int | tuple[str, int]


_LAUNCHER = """
target triple = "{triple}"
declare ptr @PyLong_AsVoidPtr(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare void @Py_IncRef(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare void @PyErr_SetString(ptr, ptr)
@none_object = external global i8
@PyExc_SystemError = external global ptr
{declarations}

define internal void @worker(ptr %job) {{
entry:
  %t32 = call i32 {thread_num}()
  %n32 = call i32 {num_threads}()
  %t = sext i32 %t32 to i64
  %n = sext i32 %n32 to i64
  %fn = load ptr, ptr %job
  %p1 = getelementptr i64, ptr %job, i64 1
  %buffers = load ptr, ptr %p1
  %p2 = getelementptr i64, ptr %job, i64 2
  %sizes = load ptr, ptr %p2
  %p3 = getelementptr i64, ptr %job, i64 3
  %units = load i64, ptr %p3
  %b0 = mul i64 %units, %t
  %begin = udiv i64 %b0, %n
  %t1 = add i64 %t, 1
  %e0 = mul i64 %units, %t1
  %end = udiv i64 %e0, %n
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %work, label %done
work:
  %r = call i64 %fn(ptr %buffers, ptr %sizes, i64 %begin, i64 %end)
  %bad = icmp ne i64 %r, 0
  br i1 %bad, label %report, label %done
report:
  %failed = getelementptr i64, ptr %job, i64 4
  %before = atomicrmw or ptr %failed, i64 %r monotonic
  br label %done
done:
  ret void
}}

define i64 @run_segment(ptr %d, ptr %args, i64 %threads) {{
entry:
  %job = alloca [5 x i64]
  %d1 = getelementptr i64, ptr %d, i64 1
  %launches = load i64, ptr %d1
  %d2 = getelementptr i64, ptr %d, i64 2
  %maxp = load i64, ptr %d2
  %d3 = getelementptr i64, ptr %d, i64 3
  %maxs = load i64, ptr %d3
  %buffers = alloca ptr, i64 %maxp
  %sizes = alloca i64, i64 %maxs
  %first = getelementptr i64, ptr %d, i64 4
  br label %head
head:
  %k = phi i64 [0, %entry], [%k1, %next]
  %at = phi ptr [%first, %entry], [%after, %next]
  %more = icmp slt i64 %k, %launches
  br i1 %more, label %launch, label %done
launch:
  %fn = load ptr, ptr %at
  %a1 = getelementptr i64, ptr %at, i64 1
  %units0 = load i64, ptr %a1
  %a2 = getelementptr i64, ptr %at, i64 2
  %cost0 = load i64, ptr %a2
  %a3 = getelementptr i64, ptr %at, i64 3
  %np = load i64, ptr %a3
  %a4 = getelementptr i64, ptr %at, i64 4
  %ns = load i64, ptr %a4
  %pairs = getelementptr i64, ptr %at, i64 5
  br label %phead
phead:
  %p = phi i64 [0, %launch], [%p1, %pbody]
  %pmore = icmp slt i64 %p, %np
  br i1 %pmore, label %pbody, label %pdone
pbody:
  %w = mul i64 %p, 2
  %pair = getelementptr i64, ptr %pairs, i64 %w
  %slot = load i64, ptr %pair
  %offp = getelementptr i64, ptr %pair, i64 1
  %off = load i64, ptr %offp
  %argp = getelementptr i64, ptr %args, i64 %slot
  %base = load ptr, ptr %argp
  %addr = getelementptr i8, ptr %base, i64 %off
  %bp = getelementptr ptr, ptr %buffers, i64 %p
  store ptr %addr, ptr %bp
  %p1 = add i64 %p, 1
  br label %phead
pdone:
  %np2 = mul i64 %np, 2
  %ssrc = getelementptr i64, ptr %pairs, i64 %np2
  br label %shead
shead:
  %s = phi i64 [0, %pdone], [%s1, %sbody]
  %smore = icmp slt i64 %s, %ns
  br i1 %smore, label %sbody, label %sdone
sbody:
  %sp = getelementptr i64, ptr %ssrc, i64 %s
  %sslot = load i64, ptr %sp
  %sargp = getelementptr i64, ptr %args, i64 %sslot
  %size = load i64, ptr %sargp
  %sdst = getelementptr i64, ptr %sizes, i64 %s
  store i64 %size, ptr %sdst
  %s1 = add i64 %s, 1
  br label %shead
sdone:
  %after0 = getelementptr i64, ptr %ssrc, i64 %ns
  %dynamic = icmp slt i64 %units0, 0
  br i1 %dynamic, label %query, label %known
query:
  %uslot = load i64, ptr %after0
  %uargp = getelementptr i64, ptr %args, i64 %uslot
  %unitsq = load i64, ptr %uargp
  %q1 = getelementptr i64, ptr %after0, i64 1
  %cslot = load i64, ptr %q1
  %cargp = getelementptr i64, ptr %args, i64 %cslot
  %costq = load i64, ptr %cargp
  %after2 = getelementptr i64, ptr %after0, i64 2
  br label %known
known:
  %units = phi i64 [%units0, %sdone], [%unitsq, %query]
  %cost = phi i64 [%cost0, %sdone], [%costq, %query]
  %after = phi ptr [%after0, %sdone], [%after2, %query]
  %worth = icmp sgt i64 %cost, {worth}
  %several = icmp sgt i64 %threads, 1
  %enough = icmp sgt i64 %units, 1
  %w1 = and i1 %worth, %several
  %w2 = and i1 %w1, %enough
  br i1 %w2, label %maybe, label %serial
maybe:
{nested}
parallel:
  store ptr %fn, ptr %job
  %j1 = getelementptr i64, ptr %job, i64 1
  store ptr %buffers, ptr %j1
  %j2 = getelementptr i64, ptr %job, i64 2
  store ptr %sizes, ptr %j2
  %j3 = getelementptr i64, ptr %job, i64 3
  store i64 %units, ptr %j3
  %j4 = getelementptr i64, ptr %job, i64 4
  store i64 0, ptr %j4
  %fewer = icmp slt i64 %units, %threads
  %used = select i1 %fewer, i64 %units, i64 %threads
  %used32 = trunc i64 %used to i32
{fork}
  %rp = load i64, ptr %j4
  br label %next
serial:
  %rs = call i64 %fn(ptr %buffers, ptr %sizes, i64 0, i64 %units)
  br label %next
next:
  %r = phi i64 [%rp, %parallel], [%rs, %serial]
  %k1 = add i64 %k, 1
  %bad = icmp ne i64 %r, 0
  br i1 %bad, label %failed, label %head
failed:
  %which = shl i64 %k, 32
  %code = or i64 %which, %r
  ret i64 %code
done:
  ret i64 0
}}

define ptr @fastcall(ptr %self, ptr %args, i64 %n) {{
entry:
  %d = call ptr @PyLong_AsVoidPtr(ptr %self)
  %expected = load i64, ptr %d
  %expected1 = add i64 %expected, 1
  %right = icmp eq i64 %n, %expected1
  br i1 %right, label %convert, label %wrong
convert:
  %values = alloca i64, i64 %n
  br label %head
head:
  %k = phi i64 [0, %convert], [%k1, %body]
  %more = icmp slt i64 %k, %n
  br i1 %more, label %body, label %ready
body:
  %objp = getelementptr ptr, ptr %args, i64 %k
  %obj = load ptr, ptr %objp
  %v = call i64 @PyLong_AsLongLong(ptr %obj)
  %vp = getelementptr i64, ptr %values, i64 %k
  store i64 %v, ptr %vp
  %k1 = add i64 %k, 1
  br label %head
ready:
  %error = call ptr @PyErr_Occurred()
  %bad = icmp ne ptr %error, null
  br i1 %bad, label %failed, label %run
run:
  %tp = getelementptr i64, ptr %values, i64 %expected
  %threads = load i64, ptr %tp
  %state = call ptr @PyEval_SaveThread()
  %code = call i64 @run_segment(ptr %d, ptr %values, i64 %threads)
  call void @PyEval_RestoreThread(ptr %state)
  %reports = icmp ne i64 %code, 0
  br i1 %reports, label %report, label %fine
report:
  %number = call ptr @PyLong_FromLongLong(i64 %code)
  ret ptr %number
fine:
  call void @Py_IncRef(ptr @none_object)
  ret ptr @none_object
wrong:
  %kind = load ptr, ptr @PyExc_SystemError
  call void @PyErr_SetString(ptr %kind, ptr @message)
  ret ptr null
failed:
  ret ptr null
}}
@message = internal constant [43 x i8] c"a native segment got a wrong argument list\\00"
"""


class _MethodDef(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


METH_FASTCALL = 0x0080

_lock = threading.Lock()
_method: _MethodDef | None = None


def launcher_ir(parallel: bool) -> str:
    """The launcher's LLVM IR. parallel: there is an OpenMP runtime, whose functions are the symbols `omp_*` below."""
    if not parallel:
        declarations = "define internal i32 @omp_thread_num() { ret i32 0 }\ndefine internal i32 @omp_num_threads() { ret i32 1 }"
        nested, fork = "  br label %serial", "  call void @worker(ptr %job)"
    else:
        declarations = ("declare i32 @omp_thread_num()\ndeclare i32 @omp_num_threads()\ndeclare i32 @omp_inside()\n"
                        "declare void @omp_parallel(ptr, ptr, i32, i32)")
        nested = ("  %inside = call i32 @omp_inside()\n  %outside = icmp eq i32 %inside, 0\n"
                  "  br i1 %outside, label %parallel, label %serial")
        fork = "  call void @omp_parallel(ptr @worker, ptr %job, i32 %used32, i32 0)"
    return _LAUNCHER.format(triple=host().triple, declarations=declarations, worth=WORTH_THREADS, nested=nested, fork=fork,
                            thread_num="@omp_thread_num", num_threads="@omp_num_threads")


def _method_definition() -> _MethodDef:
    """The launcher compiled, once per process."""
    global _method
    with _lock:
        if _method is None:
            omp = openmp()
            symbols = {"none_object": id(None)}
            if omp is not None:
                symbols.update(omp_parallel=omp.parallel, omp_thread_num=omp.thread_num, omp_num_threads=omp.num_threads,
                               omp_inside=omp.in_parallel)
            for name in ("PyLong_AsVoidPtr", "PyLong_AsLongLong", "PyErr_Occurred", "PyEval_SaveThread", "PyEval_RestoreThread",
                         "Py_IncRef", "PyLong_FromLongLong", "PyErr_SetString"):
                symbols[name] = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0
            symbols["PyExc_SystemError"] = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.pythonapi, "PyExc_SystemError"))
            (address,) = llvm_compile.load_helper(launcher_ir(omp is not None), ["fastcall"], symbols, disk_cache())
            _method = _MethodDef(b"segment", address, METH_FASTCALL, None)
        return _method


class Segment:
    """A compiled run of launches: `call(*addresses and sizes, threads)` runs them in order; see the module for the result."""

    __slots__ = ("call", "_words", "launches")

    def __init__(self, arguments: int, launches: Sequence[NativeLaunch]) -> None:
        words = array("q", [arguments, len(launches), max(len(x.buffers) for x in launches), max([1, *(len(x.sizes) for x in launches)])])
        for x in launches:
            fixed = isinstance(x.units, int) and isinstance(x.cost, int)
            words.extend([x.address, x.units if fixed else -1, x.cost if fixed else -1, len(x.buffers), len(x.sizes)])   # type: ignore[list-item]
            for slot, offset in x.buffers:
                words.extend([slot, offset])
            words.extend(x.sizes)
            if not fixed:
                if isinstance(x.units, int) or isinstance(x.cost, int):
                    raise InternalError("units and cost of a launch are both numbers or both arguments")
                words.extend([x.units[1], x.cost[1]])
        self._words, self.launches = words, len(launches)
        self.call = _builtin(words)


def _builtin(words: array) -> Callable[..., int | None]:
    """A builtin function whose self is the address of words (the Segment keeps them alive)."""
    make = ctypes.pythonapi.PyCMethod_New
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p]
    return make(ctypes.addressof(_method_definition()), words.buffer_info()[0], None, None)
