"""`make demo`, the first command of the README, from anywhere: both verdicts, both pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
DEMO = Path(__file__).resolve().parent.parent.parent / "examples" / "demo.py"


def test_the_demo_proves_the_shipped_norm_and_catches_the_broken_one(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(DEMO)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shipped RMSNorm: proved    broken RMSNorm: finding" in done.stdout
    assert "like   computed with ones instead of weight" in done.stdout
    pages = [path.name for path in sorted((tmp_path / "out").glob("*.html"))]
    assert pages == ["broken_rms_norm.html", "rms_norm.html"]
