"""Importing costs no torch, names load lazily, the plugin gives one test a stage."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import retrograd

pytest_plugins = ["pytester"]
VERSIONING = (Path(__file__).resolve().parents[1] / "docs" / "versioning.md").read_text()


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


def test_a_name_is_looked_for_once():
    code = "from retrograd import ops; first = ops.rms_norm; print(vars(ops).get('rms_norm') is first)"
    assert _fresh(code).strip() == "True"


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


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import retrograd.nn", "torch"),
        ("import retrograd.patch", "torch"),
        ("import retrograd.testing", "torch"),
        ("import retrograd; retrograd.nn", "torch"),
        ("import retrograd; retrograd.verify", "torch"),
        ("import retrograd; retrograd.assert_backward", "torch"),
        ("from retrograd.ops import rms_norm", "torch"),
        ("from retrograd.fsdp import fixed_order", "torch"),
        ("from retrograd.trace import record", "torch"),
        ("import retrograd; retrograd.flake_rate(lambda seed: 0.1, seeds=3)", "flake"),
    ],
)
def test_without_torch_names_say_which_extra_brings_it(code, extra, tmp_path):
    block = """
import importlib.machinery as machinery
stock = machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in ("torch", "numpy", "scipy", "triton") else stock(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""
    (tmp_path / "sitecustomize.py").write_text(block)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("retrograd.errors.MissingExtraError: "), last
    assert last.endswith(f"is not installed; run: pip install 'retrograd[{extra}]'")


def test_what_versioning_promises_is_there():
    promised = re.search(r"names in `__all__` of `retrograd`, (.*?): all that", VERSIONING)[1]
    names = re.findall(r"`([\w.]+)`", promised)
    assert len(names) > 8
    for name in names:
        module = importlib.import_module(f"retrograd.{name.lstrip('.')}")
        assert getattr(module, "__all__", True)
        if "." not in name.lstrip("."):
            assert getattr(retrograd, name.lstrip(".")) is module


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
