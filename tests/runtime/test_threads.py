"""Our kernels run on torch's own threads, whatever other OpenMP runtimes the process has."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import torch
import sklearn.datasets                    # brings an OpenMP runtime of its own
from fuseline.runtime.threads import openmp
torch.set_num_threads(2)
x = torch.randn(1 << 22)
x + 1
import fuseline
y = fuseline.compile(lambda x: x.sin() * 2 + x, options={"strict": True, "cache": False})(x)
assert torch.allclose(y, x.sin() * 2 + x)
print(os.path.dirname(openmp().path) == os.path.join(os.path.dirname(torch.__file__), "lib"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_torch_s_own_openmp_is_used_beside_another():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent)
    assert done.stdout.strip() == "True", done.stderr
