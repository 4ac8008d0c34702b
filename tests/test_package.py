"""Importing costs no torch, names load lazily, the plugin gives one test a stage."""

from __future__ import annotations

import subprocess
import sys

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
        "retrograd.record",
        "retrograd.report",
        "retrograd.cli",
        "retrograd.trace",
        "_retrograd_pytest",
    ],
)
def test_import_brings_neither_torch_nor_triton(module):
    code = f"import {module}, sys; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    assert _fresh(code).strip() == "[]"


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
