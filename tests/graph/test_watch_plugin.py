"""The mark retrograd_graphs and the fixture retrograd_watch."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest, torch

def train(batches, watch=None):
    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(4, 2), backend="aot_eager")
    for batch in batches:
        compiled(torch.randn(batch, 4)).sum().backward()
        if watch:
            watch.step()

@pytest.mark.retrograd_graphs(max=2)
def test_steady(retrograd_watch):
    train((8, 8), retrograd_watch)
    assert retrograd_watch.report().steps == 2

@pytest.mark.retrograd_graphs(2)
def test_without_the_fixture():
    train((8, 8))

@pytest.mark.retrograd_graphs(max=2)
def test_two_sizes():
    train((8, 5))

@pytest.mark.retrograd_graphs(warmup=1)
def test_late(retrograd_watch):
    train((8, 5), retrograd_watch)

@pytest.mark.retrograd_graphs(max=0)
def test_its_own_failure():
    train((8,))
    assert False, "own"

@pytest.mark.retrograd_graphs(lock="{lock}")
def test_locked():
    train((8,))

@pytest.mark.retrograd_graphs()
def test_no_limit():
    pass

def test_unmarked(retrograd_watch):
    pass
"""


@pytest.mark.dealt(2)
def test_marked_tests(pytester):
    lock = pytester.path / "graphs.lock"
    pytester.makepyfile(SUITE.format(lock=lock))
    result = pytester.runpytest_subprocess("-rfE", "--tb=short")
    result.assert_outcomes(passed=3, failed=4, errors=1)
    assert lock.exists()
    result.stdout.fnmatch_lines_random(
        [
            "*GraphChangedError: step 0: a new forward graph was compiled (expected at most 2, this makes 3)*",
            "*GraphChangedError: step 1: a new forward graph was compiled (after the warm-up)*",
            "*size mismatch at index 0. expected 8, actual 5*",
            "*AssertionError: own*",
            "*retrograd_graphs needs max=N*",
            "*retrograd_watch needs @pytest.mark.retrograd_graphs*",
        ]
    )
    lock.write_text(lock.read_text().replace('"key": "', '"key": "0'))
    result = pytester.runpytest_subprocess("-k", "locked")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*2 of 2 graphs are not as locked*"])


def test_unused_it_imports_nothing(pytester):
    pytester.makepyfile("import sys\ndef test(): assert not {'torch', 'retrograd.graph'} & set(sys.modules)")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
