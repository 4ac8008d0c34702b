"""The programs that judge the checker of races: enough of them, each with a name of its own, and Triton takes them all."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from programs import Check

HERE = Path(__file__).resolve().parent
REGISTRY = {"racy": "kernels_racy", "healthy": "kernels_healthy"}
# What a program needs of the language where not every Triton has it. In 3.9 `tl.make_block_ptr` is a name that refuses.
NEEDS = {
    **dict.fromkeys(("map_elementwise", "elements_that_return_early", "pairs_that_go_round"), "map_elementwise"),
    "block_pointers": "semantic.TritonSemantic.make_block_ptr",
    **dict.fromkeys(("flag_stored_and_loaded", "flag_stored_relaxed", "flag_loaded_relaxed"), "atomic_load"),
    **dict.fromkeys(("flag_polled", "flags_polled_together", "flag_polled_relaxed"), "atomic_poll"),
}


def _registered(decorator: str) -> list[str]:
    """Names of the functions under this decorator, in the order of files and lines."""
    names = []
    for path in sorted((HERE / REGISTRY[decorator]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            calls = [d for d in getattr(node, "decorator_list", []) if isinstance(d, ast.Call)]
            if any(getattr(call.func, "id", "") == decorator for call in calls):
                names.append(node.name)
    return names


def of_this_triton(name: str) -> None:
    """Skip the test of a program that this Triton cannot say."""
    language = pytest.importorskip("triton.language")
    if name in NEEDS:
        try:
            attrgetter(NEEDS[name])(language)
        except AttributeError:
            pytest.skip(f"this Triton has no tl.{NEEDS[name]}")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], dict]:
    """What Triton's frontend said of each program, by kind and name."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in [str(HERE), *sys.path] if path)
    run = subprocess.run(
        [sys.executable, str(HERE / "frontend.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    read = [json.loads(line) for line in run.stdout.splitlines()]
    return {(row["kind"], row["name"]): row for row in read}


@pytest.mark.parametrize(("decorator", "least"), [("racy", 34), ("healthy", 64)])
def test_there_are_enough(decorator, least):
    names = _registered(decorator)
    assert len(names) >= least
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("decorator", "name"), [(d, name) for d in REGISTRY for name in _registered(d)])
def test_it_compiles_to_ttir(rows, decorator, name):
    of_this_triton(name)
    row = rows[decorator, name]
    assert "error" not in row, row["error"]
    assert row["kernels"]


def test_a_wrong_result_is_told():
    x = torch.tensor([1.0, float("nan"), 3.0])
    wrong = torch.tensor([1.0, float("nan"), 3.5])
    assert Check(x, x.clone()).difference() == ""
    assert Check(wrong, x).difference().startswith("1 of 3 elements, first (2,)")
    assert Check(wrong[[0, 2]], x[[0, 2]].double(), 0.5).difference() == ""
    assert Check(wrong, x.double(), 0.5).difference()  # NaN is within no bound
    assert "shape" in Check(x[:2], x).difference()
    assert "dtype" in Check(x, x.double()).difference()
