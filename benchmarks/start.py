"""Seconds until commands that need no torch have ended: least wall time of ten processes each, as a Markdown table.

python benchmarks/start.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DUMPS = ROOT / "tests" / "graph" / "data" / "jax"
COMMANDS = {
    "retrograd --help": ["--help"],
    "retrograd graph --help": ["graph", "--help"],
    "retrograd graph diff A B": ["graph", "diff", "base.hlo.txt.gz", "perm.hlo.txt.gz"],
    "retrograd report r.json": ["report", "REPORT"],
}
REPORT = {
    "target": "op", "verdict": "proved", "level": "quick", "seed": 0, "dtypes": ["float32"], "device": "cpu",
    "stages": [], "environment": {}, "schema": "retrograd.report/1",
}  # fmt: skip


def seconds(arguments: list[str]) -> float:
    """Least of ten runs; RuntimeError if the command fails."""
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "retrograd", *arguments], cwd=DUMPS, capture_output=True)
        best = min(best, time.perf_counter() - begin)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr.decode())
    return best


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "r.json"
        record.write_text(json.dumps(REPORT))
        rows = [("python -c pass", _nothing())]
        for name, arguments in COMMANDS.items():
            rows.append((name, seconds([str(record) if a == "REPORT" else a for a in arguments])))
    print("| | s |\n|---|---|")
    for name, least in rows:
        print(f"| `{name}` | {least:.2f} |")


def _nothing() -> float:
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
