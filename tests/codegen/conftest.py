"""Kernels are compiled in a process of their own: this one interprets them where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUMMARY: list[str] = []


def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a Python process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in codes, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def probes() -> dict:
    """Facts of the probe kernels."""
    pytest.importorskip("triton")
    return json.loads(run("tests/codegen/probes.py"))


@pytest.fixture(scope="session")
def examined() -> dict:
    """What codegen says of the specimens, by their names, and what the compilers say themselves."""
    pytest.importorskip("triton")
    return json.loads(run("tests/codegen/examine.py"))


@pytest.fixture(scope="session")
def gate(tmp_path_factory) -> dict:
    """Facts and faults of the norm kernels, the covering set for every target."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("gate") / "gate.json"
    text = run("benchmarks/codegen_norm.py", "--json", str(out), codes=(0, 1))
    SUMMARY.append("norm, " + next(line for line in text.splitlines() if " kernels for " in line))
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def msda_gate(tmp_path_factory) -> dict:
    """Facts and faults of the kernels of deformable attention, the covering set for every target."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("gate") / "msda.json"
    text = run("benchmarks/codegen_msda.py", "--json", str(out), codes=(0, 1))
    SUMMARY.append("msda, " + next(line for line in text.splitlines() if " kernels for " in line))
    return json.loads(out.read_text())


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how much the gate covered."""
    for line in SUMMARY:
        terminalreporter.write_line(f"codegen gate: {line}")
