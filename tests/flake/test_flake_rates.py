"""Intervals cover, known numbers come out, and tens of margins say what thousands of runs would count."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from retrograd.errors import UsageError, VerificationError
from retrograd.flake import binomial, rates
from retrograd.flake.in_process import flake_rate

# A test here may fail by chance with this probability, were its seed another.
CHANCE = 1e-6


@pytest.mark.parametrize(
    ("failures", "runs", "percent"),
    [(1, 20, (0.13, 24.9)), (5, 100, (1.64, 11.3)), (0, 30, (0, 11.6)), (30, 30, (88.4, 100))],
)
def test_intervals_are_the_published_ones(failures, runs, percent):
    assert [100 * end for end in binomial.interval(failures, runs)] == pytest.approx(percent, abs=0.05)


@pytest.mark.parametrize("runs", [1, 7, 30, 100])
@pytest.mark.parametrize("truth", [0.003, 0.02, 0.1, 0.37, 0.5, 0.95])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_covers_by_enumeration(runs, truth, level):
    counts = range(runs + 1)
    covered = [
        k for k in counts if binomial.interval(k, runs, level)[0] <= truth <= binomial.interval(k, runs, level)[1]
    ]
    assert stats.binom.pmf(covered, runs, truth).sum() >= level
    bounded = [k for k in counts if truth <= binomial.upper(k, runs, level)]
    assert stats.binom.pmf(bounded, runs, truth).sum() >= level


def test_the_interval_covers_in_experiments():
    """Whole examinations of a test that fails at 7 % of its seeds."""
    random = np.random.default_rng(1)
    experiments, covered = 80, 0
    for _ in range(experiments):
        bad = set(np.flatnonzero(random.random(30) < 0.07).tolist())
        found = flake_rate(lambda seed, bad=bad: seed not in bad, seeds=30).rate
        covered += found.low <= 0.07 <= found.high
    assert covered >= stats.binom.ppf(CHANCE, experiments, 0.95)


@pytest.mark.parametrize(
    ("probability", "runs"), [(0.09, 32), (0.045, 66), (0.02, 149), (0.01, 299), (0.001, 2995), (1, 1), (0, None)]
)
def test_smallest_number_of_runs(probability, runs):
    assert binomial.runs_to_show(probability) == runs


def test_the_rule_of_three():
    assert binomial.upper(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300))
    assert binomial.upper(0, 300) < 0.01


LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "largest of 1000 normal errors": lambda r, n: stats.halfnorm.ppf(r.random(n) ** 1e-3),
    "exponential": lambda r, n: r.exponential(size=n),
    "lognormal": lambda r, n: np.exp(0.3 * r.standard_normal(n)),
    "wide lognormal": lambda r, n: np.exp(r.standard_normal(n)),
    "error over a uniform number": lambda r, n: 1 / r.random(n),
    "cube root of that": lambda r, n: r.random(n) ** (-1 / 3),
    "half normal": lambda r, n: np.abs(r.standard_normal(n)),
    "beta": lambda r, n: r.beta(2, 5, n),
}


@pytest.mark.parametrize("truth", [0.05, 0.001])
@pytest.mark.parametrize("law", LAWS)
def test_the_tail_of_thirty_runs_knows_the_rate(law, truth):
    """Margins scaled so that the true rate is known; the interval is said to hold it in 87 % of samples or more."""
    random = np.random.default_rng(2)
    scale = np.quantile(LAWS[law](random, 200_000), 1 - truth)
    found = [rates.tail((LAWS[law](random, 30) / scale).tolist()) for _ in range(25)]
    known = [t for t in found if t.supported]
    assert len(known) >= 20
    assert sum(t.low <= truth <= t.high for t in known) >= stats.binom.ppf(CHANCE, len(known), 0.87)
    # Within a factor of ten in the middle, where counting 30 runs says nothing but "below 9.5 %".
    assert truth / 10 <= np.median([t.probability for t in known]) <= truth * 10


def test_the_tail_says_more_than_the_count():
    random = np.random.default_rng(3)
    law = LAWS["largest of 1000 normal errors"]
    scale = np.quantile(law(random, 100_000), 0.999)
    highest = [rates.tail((law(random, 30) / scale).tolist()).high for _ in range(25)]
    assert np.median(highest) < binomial.upper(0, 30) / 2


def test_bounded_errors_are_overestimated_never_missed():
    random = np.random.default_rng(4)
    found = [rates.tail((random.random(30) / 0.99).tolist()) for _ in range(25)]
    assert all(t.high >= 0.01 for t in found if t.supported)


def test_a_jump_is_no_tail():
    bulk = np.random.default_rng(5).uniform(0.01, 0.02, 29).tolist()
    for failing in (50.0, math.inf):
        found = rates.tail([*bulk, failing])
        assert not found.supported
        assert found.jumps
        assert "jump" in found.reason
    assert rates.tail(bulk).high <= 0.01


@pytest.mark.parametrize(
    ("margins", "reason"),
    [
        ([0.5] * 10, "10 passing runs"),
        ([0.5] * 40, "hardly differ"),
        ([0.0] * 40, "no error at all"),
        ([2.0] * 40, "0 passing runs"),
    ],
)
def test_what_cannot_be_extrapolated_says_why(margins, reason):
    found = rates.tail(margins)
    assert not found.supported
    assert not found.jumps
    assert reason in found.reason


def test_assert_below():
    flake_rate(lambda: None, seeds=300).assert_below(0.01)
    with pytest.raises(VerificationError, match=r"0 of 30 runs fail.*299 runs without a failure would"):
        flake_rate(lambda: None, seeds=30).assert_below(0.01)
    with pytest.raises(VerificationError, match=r"failing seeds: 7\nfirst failure: .*AssertionError: no"):
        flake_rate(_fails_at_seven, seeds=300).assert_below(0.01)
    flake_rate(_fails_at_seven, seeds=300).assert_below(0.03)
    with pytest.raises(UsageError, match="`limit` is 0"):
        flake_rate(lambda: None).assert_below(0)
    with pytest.raises(UsageError, match="`confidence` is 95"):
        flake_rate(lambda: None).assert_below(0.01, confidence=95)


def _fails_at_seven(seed):
    assert seed != 7, "no"
