"""Ratio of two measurements and how far it scatters: medians and quartiles, nothing else. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Quartiles of fewer numbers are hardly more than their ends.
FEWEST = 4


@dataclass(frozen=True)
class Ratio:
    """A ratio of times: the median, and the quartiles where there were rounds enough (None otherwise)."""

    median: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired(upper: Sequence[float], lower: Sequence[float]) -> Ratio | None:
    """The ratios of rounds that were run in turn: round i of one over round i of the other; None without any.

    What slows the machine down for a while slows both halves of a pair, so it leaves the ratio alone.
    """
    return _of([a / b for a, b in zip(upper, lower, strict=False)], min(len(upper), len(lower)))


def crossed(upper: Sequence[float], lower: Sequence[float]) -> Ratio | None:
    """The ratios of all rounds of one run with all of another, which have nothing to do with each other."""
    return _of([a / b for a in upper for b in lower], min(len(upper), len(lower)))


def apart(now: Sequence[float], earlier: Sequence[float]) -> int:
    """1 if times have grown beyond what the rounds scatter, -1 if they have shrunk, 0 if neither or unknown.

    Beyond: every round now is above every round then. Of rounds that are drawn alike that happens once in 70 with four
    of them each, once in 48,620 with nine. Quartiles that do not touch would be too little: two runs differ more than
    the rounds of one (on a busy machine the same code was 1.19 of itself beside torch, and quartiles said slower).
    """
    if min(len(now), len(earlier)) < FEWEST:
        return 0
    return (min(now) > max(earlier)) - (max(now) < min(earlier))


def _of(ratios: list[float], rounds: int) -> Ratio | None:
    if not ratios:
        return None
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds >= FEWEST else (None, None, None)
    return Ratio(statistics.median(ratios), low, high)
