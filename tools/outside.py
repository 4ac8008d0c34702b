"""Suite of ops that other libraries have: sets up .venv-outside with the pinned versions and runs it there.

    python tools/outside.py [options of benchmarks/outside/suite.py]

Then the proofs of docs/gallery.md run for the libraries that are there. The environment is as of tools/versions.py,
with the torch of constraints.txt and benchmarks/outside/requirements.txt. A run that is stopped goes on where it was;
--results names another file for a fresh one. Exit code: the suite's, or that of the proofs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from versions import ROOT, UV, python

FOLDER = ROOT / "benchmarks" / "outside"
REPORT = ROOT / "benchmarks" / "results" / "outside.md"


def environment() -> Path:
    """The interpreter of the environment, brought up to date."""
    folder = ROOT / ".venv-outside"
    interpreter = folder / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([UV, "venv", "-q", "-p", python("oldest"), folder], check=True)
    links = os.environ.get("PIP_FIND_LINKS")
    install = [UV, "pip", "install", "-q", "-p", folder, *(["--find-links", links] if links else [])]
    pins = ["-c", ROOT / "constraints.txt", "-r", FOLDER / "requirements.txt"]
    subprocess.run([*install, *pins, "-e", f"{ROOT}[triton,pytest]"], check=True)
    return interpreter


def main() -> int:
    """Set up the environment and run the suite."""
    command = [environment(), FOLDER / "suite.py", "--report", REPORT, *sys.argv[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    proofs = [command[0], "-m", "pytest", "-q", "tests/docs/test_gallery.py"]
    return code or subprocess.run(proofs, cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
