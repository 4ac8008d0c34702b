"""`pytest --retrograd-mutate`: one more test of a marked module, which fails with the survivors and is cached."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest_plugins = ["pytester"]
pytestmark = [
    pytest.mark.dealt(2, whole_file=True),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch runs no backward in a fork beside a GPU"),
]

MARKED = """
import pytest
import retrograd as rg
from mine import spec

pytestmark = pytest.mark.retrograd_mutate(spec, count=2, functions=["input_grad"])

def test_backward():
    {body}
"""


@pytest.fixture
def marked(pytester):
    shutil.copy(Path(__file__).parent / "norm_op.py", pytester.path / "mine.py")

    def run(body, *options):
        (pytester.path / "test_mine.py").write_text(MARKED.format(body=body))
        return pytester.runpytest_inprocess("test_mine.py", *options)

    return run


def test_only_where_it_is_asked_for(marked):
    marked("pass").assert_outcomes(passed=1)


def test_tests_that_look_at_nothing_fail_with_the_survivors_and_again_from_the_cache(marked):
    weak = marked("pass", "--retrograd-mutate", "-v")
    weak.assert_outcomes(passed=1, failed=1)
    weak.stdout.fnmatch_lines(["* of 2: *tests notice NOTHING*", "*SURVIVES * in input_grad", "*def test_*"])
    again = marked("pass", "--retrograd-mutate", "-v")
    again.assert_outcomes(passed=1, failed=1)
    again.stdout.no_fnmatch_line("* of 2: *")
    again.stdout.fnmatch_lines(["*SURVIVES * in input_grad"])


def test_tests_that_notice_all_pass(marked):
    strong = marked("rg.verify(spec, level='quick', only=['oracle']).raise_if_failed()", "--retrograd-mutate", "-rA")
    strong.assert_outcomes(passed=2)
    strong.stdout.fnmatch_lines(["*NOTICED by the tests*"])


def test_no_time_is_a_skip_and_a_spec_without_a_name_an_error(marked):
    late = marked("pass", "--retrograd-mutate", "--retrograd-mutate-budget", "0s", "-rs")
    late.assert_outcomes(passed=1, skipped=1)
    late.stdout.fnmatch_lines(["*the budget ended after 0 of 2 mutants*"])
    soon = marked("pass", "--retrograd-mutate", "--retrograd-mutate-budget", "soon")
    soon.stdout.fnmatch_lines(["*`--budget` is 'soon'*"])
    unnamed = marked("pass\npytestmark = pytest.mark.retrograd_mutate(object())", "--retrograd-mutate")
    unnamed.stdout.fnmatch_lines(["*retrograd_mutate needs what retrograd.op returned*"])
