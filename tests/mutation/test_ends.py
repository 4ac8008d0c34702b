"""Mutants that never end or end their process: each ends alone, in the search and in the user's tests."""

from __future__ import annotations

import sys

import pytest
import torch

import retrograd as rg
from retrograd.mutation import judges
from retrograd.mutation.functions import named

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU")
NAME = "guarded:twice"
GUARDED = """
import os

def twice(dims):
    while dims > 9:
        pass
    if dims > 9:
        os.abort()
    return 2
"""


@pytest.fixture
def twice(tmp_path, monkeypatch):
    (tmp_path / "guarded.py").write_text(GUARDED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guarded", raising=False)
    from guarded import twice

    return twice


def test_a_loop_without_end_and_a_crash_cost_one_mutant_each(twice):
    op = rg.op(lambda x: twice(x.ndim) * x.sin(), lambda x: 2 * x.sin(), dict(x=rg.tensor("M")), dtypes=["float64"])
    mutated = rg.mutate(op, functions=[NAME], count=99, timeout=5)  # CPU seconds
    ends = {r.fate: r for r in mutated.results if r.mutant.operator == "comparison turned"}
    assert set(ends) == {"timed out", "crashed"}
    assert "SIGABRT" in ends["crashed"].difference
    assert any(r.fate == "differs" and r.killed("verify") for r in mutated.results)


def test_tests_that_never_end_or_crash_notice_it_and_say_which(twice, tmp_path):
    (tmp_path / "calls.py").write_text("import guarded\nassert guarded.twice(1) == 2\n")
    tests = judges.Tests(f"{sys.executable} calls.py")
    (target,) = named([NAME])
    said = [tests.judge(target, edit) for edit in target.edits() if edit.operator == "comparison turned"]
    assert all(judgement.killed for judgement in said)
    assert {judgement.why.split(" after ")[0] for judgement in said} == {"timed out", "killed by SIGABRT"}
