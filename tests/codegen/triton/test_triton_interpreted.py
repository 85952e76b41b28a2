"""Runs `interpreted_*.py` in a process of its own: Triton decides at its import whether it interprets."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
HERE = pathlib.Path(__file__).parent
CASES = sorted(p for folder in (HERE, HERE.parents[1] / "runtime") for p in folder.glob("interpreted_*.py"))


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_generated_source_computes_what_the_loop_interpreter_does(path: pathlib.Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=interpreted_*.py", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[2])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
