"""Operations of Triton 3.9: kernels that wait for the one ahead, flags that are polled, approximate quotients."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_races import in_a_process


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    pytest.importorskip("triton")
    return dict(in_a_process(Path(__file__).resolve().parent / "newest_programs.py"))


def test_a_kernel_that_waits_for_the_one_ahead_runs(results):
    assert results["waits"] is True


def test_polls_end_as_on_a_gpu(results):
    if "in time" not in results:
        pytest.skip("this Triton has no tl.atomic_poll")
    assert results["found at once"] == [1]
    assert results["in time"] == [0]
    assert results["in time, two programs"] == [0, 0]


@pytest.mark.parametrize("name", ["nobody writes", "nobody writes, two programs"])
def test_a_poll_that_nobody_answers_is_named(results, name):
    if name not in results:
        pytest.skip("this Triton has no tl.atomic_poll")
    assert "newest_programs.py:30" in str(results[name])
    assert "wait" in str(results[name])


def test_approximate_quotients_are_those_of_ptx(results):
    """Of divisors above 2^126 it makes 0, or NaN of an infinity (PTX ISA, div)."""
    if "divides" not in results:
        pytest.skip("this Triton has no tl.fdiv(approx=True)")
    third = 0.3333333432674408
    assert results["divides"] == [str(third), "1.5", "2.0", "-0.0", "nan", "0.0", "nan", "-inf"]
