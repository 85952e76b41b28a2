"""The process that compiles Triton kernels: run as a script, so that it imports neither torch nor fuseline.

Reads requests from stdin, one JSON object a line, and writes answers to stdout likewise, in order of completion. It imports
Triton once and forks the workers from there. It ends when stdin does.

  request  {"id", "name", "text", "signature": [[argument, type]...], "divisible": [index...], "num_warps", "num_stages", "arch"}
  answer   {"id", "cubin": base64, "name", "shared", "num_warps", "scratch"}  or  {"id", "error": text}
"""
from __future__ import annotations

import base64
import concurrent.futures
import functools
import json
import linecache
import multiprocessing
import os
import sys
import threading
import traceback


def compile_kernel(request: dict) -> dict:
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        text, name = request["text"], request["name"]
        filename = f"<fuseline {name}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        namespace = {"__name__": "fuseline_kernel"}
        exec(compile(text, filename, "exec"), namespace)
        signature = {n: t for n, t in request["signature"]}
        attributes = {(i,): [["tt.divisibility", 16]] for i in request["divisible"]}
        source = ASTSource(namespace[name], signature, {}, attributes)
        # ftz off: subnormal numbers are computed as eager computes them.
        options = {"num_warps": request["num_warps"], "num_stages": request["num_stages"], "enable_reflect_ftz": False}
        built = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=options)
        meta = built.metadata
        return {"id": request["id"], "cubin": base64.b64encode(built.asm["cubin"]).decode(), "name": meta.name,
                "shared": meta.shared, "num_warps": meta.num_warps,
                "scratch": meta.global_scratch_size + getattr(meta, "profile_scratch_size", 0)}
    except Exception:
        return {"id": request["id"], "error": traceback.format_exc(limit=-6) + "\n" + request["text"]}


def main(workers: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                             # whatever a library prints must not get among the answers
    import triton  # noqa: F401  imported before the fork, once for all workers
    import triton.backends.compiler
    import triton.compiler  # noqa: F401
    lock = threading.Lock()

    def write(request_id: int, future: concurrent.futures.Future) -> None:
        try:
            answer = future.result()
        except Exception as error:                            # a worker died
            answer = {"id": request_id, "error": repr(error)}
        with lock:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    for line in sys.stdin:
        request = json.loads(line)
        pool.submit(compile_kernel, request).add_done_callback(functools.partial(write, request["id"]))
    pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
