"""Write README's benchmark table from benchmarks/results/*.json, between its two marker comments."""
from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- benchmarks: made by benchmarks/table.py -->", "<!-- end of benchmarks -->"


def steady_rows(result: dict) -> list[str]:
    lines = [f"Steady state on {result['device']} ({result['date']}, torch {result['versions']['torch']}); ratios below 1 are faster.", "",
             "| workload | engine | ms per step | vs eager | vs torch.compile |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        if "stream_ms" not in row or not row["engine"].startswith("fuseline"):
            continue
        mode = row["engine"].partition(":")[2]
        rival = row.get(f"stream_vs_torch:{mode}" if mode else "stream_vs_torch", row.get("stream_vs_torch", ""))
        lines.append(f"| {row['workload']} | {row['engine']} | {row['stream_ms']} | {row.get('stream_vs_eager', '')} | {rival} |")
    return lines


def first_rows(result: dict) -> list[str]:
    by_load: dict[str, dict] = {}
    for row in result["rows"]:
        if "first_s" in row:
            by_load.setdefault(row["workload"], {})[row["engine"].partition(":")[0], row["caches"]] = row["first_s"] + row["rest_s"]
    lines = [f"First calls on {result['device']} ({result['date']}), seconds in a fresh process.", "",
             "| workload | fuseline cold | torch.compile cold | ratio | fuseline warm | torch.compile warm |", "|---|---|---|---|---|---|"]
    for name, times in by_load.items():
        ours, theirs = times.get(("fuseline", "cold")), times.get(("torch", "cold"))
        if ours is None or theirs is None:
            continue
        warm = [f"{times[e, 'warm']:.2f}" if (e, "warm") in times else "" for e in ("fuseline", "torch")]
        lines.append(f"| {name} | {ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} | {warm[0]} | {warm[1]} |")
    return lines


def capture_rows(result: dict) -> list[str]:
    lines = [f"Call overhead and capture time on {result['device']} ({result['date']}), against torch.compile(backend=\"eager\").", "",
             "| what | workload | fuseline | torch.compile | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {row['what']} | {row['workload']} | {row['fuseline']} {row['unit']} | {row['torch']} {row['unit']} | {row['ratio']} |"
              for row in result["rows"]]
    return lines


WRITERS = {"steady": steady_rows, "first": first_rows, "capture": capture_rows}


def main() -> None:
    parts = []
    for path in sorted((HERE / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "rows" in result and result.get("what") in WRITERS:
            parts.append("\n".join(WRITERS[result["what"]](result)))
    readme = HERE.parent / "README.md"
    text = readme.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    readme.write_text(head + BEGIN + "\n" + "\n\n".join(parts) + "\n" + END + tail)


if __name__ == "__main__":
    main()
