"""Importing costs no torch, names load lazily, the plugin gives one test a stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import retrograd

pytest_plugins = ["pytester"]


def _fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "module",
    [
        "retrograd",
        "retrograd.check.spec",
        "retrograd.check.schema",
        "retrograd.report",
        "retrograd.cli",
        "retrograd.trace",
        "_retrograd_pytest",
    ],
)
def test_import_brings_neither_torch_nor_triton(module):
    code = f"import {module}, sys; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    assert _fresh(code).strip() == "[]"


WITHOUT_TORCH = {
    "help": ["--help"],
    "help-of-a-group": ["graph", "--help"],
    "help-of-verify": ["verify", "--help"],
    "graph-diff": ["graph", "diff", "base.hlo.txt.gz", "perm.hlo.txt.gz"],
    "graph-unique": ["graph", "unique", "base.hlo.txt.gz", "again.hlo.txt.gz"],
    "report": ["report", "REPORT"],
}
HEAVY = ("torch", "triton", "numpy", "scipy", "jax", "jaxlib", "vl_convert", "tensorboard", "pytest", "sqlite3")


@pytest.mark.parametrize("arguments", WITHOUT_TORCH.values(), ids=WITHOUT_TORCH)
def test_a_command_that_needs_no_torch_loads_nothing_heavy(arguments, tmp_path):
    """docs/install.md says how long they take; what would make them slow is what they import."""
    record = tmp_path / "r.json"
    record.write_text(retrograd.Report("op", "proved", "quick", 0, ("float32",), "cpu", ()).to_json())
    arguments = [str(record) if a == "REPORT" else a for a in arguments]
    code = (
        f"import sys\nfrom retrograd.cli import main\nmain({arguments!r}, standalone_mode=False)\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    dumps = Path(__file__).parent / "graph" / "data" / "jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=dumps)
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr


def test_every_public_name_resolves():
    for name in retrograd.__all__:
        assert getattr(retrograd, name) is not None
    with pytest.raises(AttributeError, match="verifi"):
        _ = retrograd.verifi


SUITE = """
import pytest, torch
import retrograd as rg

spec = rg.op({fn}, lambda x: x * x, dict(x=rg.tensor("M", "N")))

@pytest.mark.retrograd(spec, level="quick")
def test_op(retrograd_stage):
    retrograd_stage.assert_passes()
"""


def test_plugin_gives_one_test_a_stage(pytester):
    from retrograd.check.stages import load

    pytester.makepyfile(SUITE.format(fn="lambda x: x * x"))
    result = pytester.runpytest_subprocess("-v")
    result.assert_outcomes(passed=len(load()))
    result.stdout.fnmatch_lines(["*test_op?oracle? PASSED*"])


def test_plugin_fails_with_what_where_repro(pytester):
    pytester.makepyfile(SUITE.format(fn="lambda x: x * x * 1.001"))
    result = pytester.runpytest_subprocess()
    assert result.ret == 1
    # The command finds the spec in the test module.
    wanted = [
        "*times the attainable error*",
        "*like: 1.001 times the right one*",
        "*repro: retrograd verify test_*.py:spec *",
    ]
    result.stdout.fnmatch_lines(wanted)
