"""The rooms without torch under the other Python that the package promises."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "tools" / "other_python.py"
spec = importlib.util.spec_from_file_location("other_python", SCRIPT)
other_python = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other_python)


def test_every_file_it_runs_is_there():
    assert [name for name in (*other_python.QUICK, *other_python.MORE) if not (other_python.ROOT / name).exists()] == []


def test_rooms_without_torch_under_the_other_python():
    version, python = other_python.other()
    if not python:
        pytest.skip(f"there is no Python {version} here that runs")
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Python {version}" in done.stdout
    assert " passed" in done.stdout
