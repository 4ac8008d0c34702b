"""Without Triton, as on a laptop: everything but Triton kernels works, and these name the extra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# As the import system sees a package that is not installed.
_BLOCK = """
import importlib.machinery as machinery
stock = machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else stock(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(_BLOCK)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)

    assert start("-c", "import triton").returncode == 1
    return start


def test_ops_modules_and_a_verification(run) -> None:
    code = """
import torch, retrograd as rg
from retrograd import nn, ops, patch
x = torch.randn(4, 8, requires_grad=True)
ops.rms_norm(x).sum().backward()
nn.LayerNorm(8)(x).sum().backward()
assert patch.norms(torch.nn.Sequential(torch.nn.RMSNorm(8))).names == ("0",)
report = rg.verify(rg.op(lambda x: x.sin(), reference=torch.sin, inputs=dict(x=rg.tensor("M", "N"))), level="full")
print(report.verdict, [(stage.id, stage.reason) for stage in report.stages if stage.status == "undecided"])
"""
    done = run("-c", code)
    assert (done.stdout, done.returncode) == ("proved []\n", 0), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "rms_norm", "--level", "quick"],
        ["codegen", "rms_norm"],
        ["run-kernel", "-c", "print()"],
    ],
    ids=lambda arguments: "-".join(arguments[:2]),
)
def test_what_needs_triton_names_the_extra(arguments: list[str], run) -> None:
    done = run("-m", "retrograd", *arguments)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("pip install 'retrograd[triton]'")
