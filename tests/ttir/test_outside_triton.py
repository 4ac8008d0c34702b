"""Specs of other libraries' Triton ops: they are there without the libraries, and our formulas run in float64."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "outside_triton" / "run.py"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN), *words], capture_output=True, text=True, check=False)


def test_a_hundred_ops_are_listed():
    done = _run("--list")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("liger_") for name in names) >= 50
    assert sum(name.startswith("fla_") for name in names) >= 50


def test_references_are_differentiable_in_float64():
    done = _run("--references")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
