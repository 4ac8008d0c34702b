"""Programs that are asked one question: found on PATH, ended if they do not answer."""

from __future__ import annotations

import shutil
import subprocess

_SECONDS = 10.0


def find(program: str) -> str | None:
    """Its path, None if it is not on PATH."""
    return shutil.which(program)


def answer(command: list[str]) -> str | None:
    """What it prints; None if it cannot be run, fails, or says nothing in ten seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, errors="replace", check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
