"""Run the anchor benchmark and keep its figures: benchmarks/results/<device>-<what>.json, from which README's table is made.

  python benchmarks/anchors.py steady|first [--names ...] [--anchors PATH]    default anchors: ../shared/bench/anchors.py
"""
from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def versions() -> dict[str, str]:
    """What the figures depend on besides the code."""
    import llvmlite
    found = {"python": platform.python_version(), "torch": torch.__version__, "llvmlite": llvmlite.__version__}
    try:
        import triton
        found["triton"] = triton.__version__
    except ImportError:
        pass
    return found


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steady", "first"], nargs="?", default="steady")
    parser.add_argument("--names")
    parser.add_argument("--engines")
    parser.add_argument("--seconds", default="2.0")
    parser.add_argument("--anchors", default=str(HERE.parent.parent / "shared" / "bench" / "anchors.py"))
    parser.add_argument("--out", default=str(HERE / "results"))
    a = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.NamedTemporaryFile(suffix=".json") as rows:
        command = [sys.executable, a.anchors, a.what, "--json", rows.name, "--seconds", a.seconds]
        command += ["--names", a.names] if a.names else []
        command += ["--engines", a.engines] if a.engines else []
        checkout = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])   # this tree, installed or not
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": checkout})
        result = {"what": a.what, "date": datetime.date.today().isoformat(), "device": device_name(), "kind": kind,
                  "versions": versions(), "rows": json.loads(Path(rows.name).read_text())}
    if failed := [row for row in result["rows"] if "error" in row]:
        sys.exit(f"nothing written: {len(failed)} measurements failed, the first with {failed[0]['error']}")
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{a.what}.json"
    if path.exists() and a.names:                          # a partial run renews its workloads and leaves the others
        names = set(a.names.split(","))
        old = json.loads(path.read_text())
        result["rows"] = [r for r in old["rows"] if r.get("workload") not in names] + result["rows"]
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
