from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from retrograd.cli import main

BROKEN = """
import torch
from retrograd import op, tensor

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 4 * g * ctx.saved_tensors[0]

spec = op(Doubled.apply, lambda x: x * x, dict(x=tensor("M", "N")), dtypes=["float32"], name="doubled")
"""


def _run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a broken op and its report."""
    here = tmp_path_factory.mktemp("repro")
    (here / "op.py").write_text(BROKEN)
    command = ["-m", "retrograd", "verify", "op.py:spec", "--only", "oracle", "--level", "quick", "-o", "r.json"]
    done = subprocess.run([sys.executable, *command], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "2 times the right one" in done.stdout
    return here


def test_the_finding_is_there_again(folder: Path) -> None:
    command = [sys.executable, "-m", "retrograd", "repro", "r.json#1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "resolve('op.py:spec')" in done.stdout
    assert "grad x" in done.stdout.splitlines()
    assert "2 times the right one" in done.stdout


def test_a_mended_op_exits_with_0(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(BROKEN.replace("4 * g", "2 * g"))
    command = [sys.executable, "-m", "retrograd", "repro", str(folder / "r.json")]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_the_script_alone(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    assert _run("repro", str(folder / "r.json#1"), "-o", str(script)).exit_code == 0
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert len(script.read_text().splitlines()) < 20


@pytest.mark.parametrize("number", ["0", "2", "x", ""])
def test_findings_that_do_not_exist(folder: Path, number: str) -> None:
    result = _run("repro", f"{folder / 'r.json'}#{number}", "--no-run")
    if number:
        assert result.exit_code == 2
        assert "expected a number from 1 to 1" in result.output
    else:
        assert result.exit_code == 0


def test_no_such_file() -> None:
    result = _run("repro", "none.json#1")
    assert result.exit_code == 2
    assert "cannot read 'none.json'" in result.output
