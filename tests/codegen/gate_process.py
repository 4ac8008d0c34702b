"""Processes that compile, for the gates: a conftest of another folder may be the one that is called `conftest`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUMMARY: list[str] = []


def run(*arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Standard output of a Python process that compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in codes, done.stderr[-4000:]
    return done.stdout
