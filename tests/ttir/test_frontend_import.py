"""An op that imports Triton first inside of itself, through a module of ours, finds that module whole."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

OP = textwrap.dedent("""
    import sys, torch, retrograd as rg

    def op(x):
        from retrograd.runtime.triton.launch import gpu_of

        return x * x

    assert "triton" not in sys.modules
    report = rg.verify(rg.op(op, lambda x: x * x, dict(x=rg.tensor("N"))), level="quick", only=["oracle"])
    assert report, report.findings
    assert "triton" in sys.modules
""")


def test_triton_may_be_imported_first_by_the_op():
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", OP], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
