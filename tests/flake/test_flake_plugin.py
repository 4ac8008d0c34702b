"""The fixture `bwd`, the option --retrograd-flake-seed, and a plugin that costs nothing where neither is used."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import retrograd as rg
from retrograd.errors import UsageError

pytest_plugins = ["pytester"]

SUITE = """
import random

def test_rate(bwd):
    bwd.flake_rate(lambda seed: seed * 1e-3, seeds=300).assert_below(0.01, confidence=.95)

def test_too_often(bwd):
    bwd.flake_rate(lambda: random.random() < 0.9, seeds=100).assert_below(0.01)

def test_draw():
    assert random.random() == {draw}
"""


def test_fixture_and_seed(pytester):
    pytester.makepyfile(SUITE.format(draw=random.Random(17).random()))
    result = pytester.runpytest_subprocess("--retrograd-flake-seed", "17")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*VerificationError: *of 100 runs fail*"])
    result.stdout.fnmatch_lines(["*failing seeds: *"])


def test_unused_it_brings_no_numpy_and_no_torch(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # jaxtyping's plugin imports NumPy
    monkeypatch.setenv("PYTEST_PLUGINS", "_retrograd_pytest")
    pytester.makepyfile(
        "import sys\ndef test(): assert not {'torch', 'numpy', 'scipy', 'retrograd.flake'} & set(sys.modules)"
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "module", ["retrograd.flake", "retrograd.flake.examination", "retrograd.flake.in_process", "retrograd.cli.flake"]
)
def test_import_brings_no_torch_and_no_pytest(module):
    code = (
        f"import {module}, sys; print([m for m in ('torch', 'triton', 'numpy', 'scipy', 'pytest') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("blocked", "extra"), [("scipy", "flake"), ("numpy", "flake")])
def test_a_missing_package_names_its_extra(blocked, extra):
    code = f"import sys; sys.modules['{blocked}'] = None; import retrograd as rg; rg.flake_rate(lambda: 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        f"needs the package '{blocked}', which is not installed; run: pip install 'retrograd[{extra}]'" in done.stderr
    )


def test_flake_rate_gives_seeds_margins_and_restores_generators():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
    found = rg.flake_rate(lambda: float(torch.rand(()) + np.random.rand() + random.random()) / 3 * 1.2, seeds=60)  # noqa: NPY002
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected  # noqa: NPY002
    again = rg.flake_rate(lambda: float(torch.rand(()) + np.random.rand() + random.random()) / 3 * 1.2, seeds=60)  # noqa: NPY002
    assert [run.margins for run in found.runs] == [run.margins for run in again.runs]
    assert len({run.margins[0].worst for run in found.runs}) == 60
    assert found.tail is not None
    assert found.tail.supported


def test_seed_and_run_flake_are_told_apart():
    assert rg.flake_rate(lambda seed: seed % 5 > 0, seeds=20, repeats=2).kinds == ("seed",)
    calls = iter(range(1000))
    found = rg.flake_rate(lambda: next(calls) % 7 > 0, seeds=20, repeats=2)
    assert found.kinds == ("run",)
    assert (found.counting, found.rate.runs) == ("runs", 40)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (None, "steady"),
        (True, "steady"),
        (False, "broken"),
        (1.0, "steady"),
        (1.0001, "broken"),
        (float("nan"), "broken"),
        ("text", "steady"),
        (torch.tensor(0.5), "steady"),
    ],
)
def test_what_a_function_returns_decides(value, verdict):
    assert rg.flake_rate(lambda: value, seeds=3).verdict == verdict


def test_bad_arguments():
    with pytest.raises(UsageError, match="`function` is int"):
        rg.flake_rate(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`seeds` is 0"):
        rg.flake_rate(lambda: None, seeds=0)
