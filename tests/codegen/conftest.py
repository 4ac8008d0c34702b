"""Kernels are compiled in a process of their own: this one executes them where there is no GPU."""

from __future__ import annotations

import json
import sys

import pytest
from gate_process import ROOT, SUMMARY, run

sys.path.insert(0, str(ROOT / "benchmarks"))


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


def _gated(request, tmp_path_factory, fixture: str, program: str, family: str) -> dict:
    """Facts and faults of a family's kernels, the covering set for every target that tests with this fixture ask for."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("gate") / "gate.json"
    asking = [item for item in request.session.items if fixture in getattr(item, "fixturenames", ())]
    wanted = sorted({item.callspec.params["target"] for item in asking})
    text = run(program, "--json", str(out), "--targets", *wanted, codes=(0, 1))
    SUMMARY.append(f"{family}, " + next(line for line in text.splitlines() if " kernels for " in line))
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def gate(request, tmp_path_factory) -> dict:
    """Facts and faults of the norm kernels."""
    return _gated(request, tmp_path_factory, "gate", "benchmarks/codegen_norm.py", "norm")


@pytest.fixture(scope="session")
def msda_gate(request, tmp_path_factory) -> dict:
    """Facts and faults of the kernels of deformable attention."""
    return _gated(request, tmp_path_factory, "msda_gate", "benchmarks/codegen_msda.py", "msda")


def pytest_terminal_summary(terminalreporter) -> None:
    """Say how much the gate covered."""
    for line in SUMMARY:
        terminalreporter.write_line(f"codegen gate: {line}")
