"""Triton's own interpreter as a second opinion: what cannot be looked at there is said, and nothing of it is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import retrograd as rg
from retrograd.errors import InterpreterError

HERE = Path(__file__).resolve().parent
PROGRAM = """
from corpus import load_module
from pathlib import Path
import retrograd as rg
specs = load_module(Path("mutants/triton_bounds.py"))
report = rg.verify(specs.{spec}, level="quick", dtypes=["float32"], only=["bounds", "races", "oracle"])
print(report.verdict, *report.notes, *(note for stage in report.stages for note in stage.notes), sep="\\n")
from triton.runtime import interpreter
print(sorted({{kind.__module__.split(".")[0] for kind in vars(interpreter.InterpreterBuilder).values() if callable(kind)}}))
"""


def second_opinion(spec: str) -> str:
    pytest.importorskip("triton")
    path = os.pathsep.join(map(str, (HERE.parent, *filter(None, sys.path))))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM.format(spec=spec)]
    return subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_healthy_kernel_is_proved_and_what_was_not_looked_at_is_said():
    told = second_opinion('HEALTHY["masked"]').splitlines()
    assert told[0] == "proved"
    assert any("wrong in bfloat16 and at NaN; races and addresses are not looked at" in line for line in told)
    assert any(line.startswith("races were not looked for") for line in told)
    assert told[-1] == "['triton']"


def test_a_store_outside_is_found_by_the_bands():
    assert second_opinion("OB06").startswith("finding\n")


def test_kernels_are_not_executed_where_they_are_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InterpreterError, match="unset it to have them executed"), rg.cpu_triton():
        pass


def test_a_reference_may_be_what_imports_triton():
    # Its operators run in float64, and with it what is made in the default dtype; Triton's parts are tested as it comes.
    code = """if True:
        import sys, torch, retrograd as rg
        softplus = torch.nn.functional.softplus
        def reference(x):
            import triton
            return softplus(x)
        assert "triton" not in sys.modules
        report = rg.verify(softplus, reference=reference, inputs=dict(x=rg.tensor("N")), level="quick", only=["contract"])
        assert report.verdict == "proved", report
        assert "triton" in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
