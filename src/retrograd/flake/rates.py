"""Rates of failure: counts with their intervals, and what the tail of the margins says of failures not seen yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from retrograd.flake.binomial import LEVEL, interval, runs_to_show, special_functions
from retrograd.flake.schema import Rate, Tail

# The tail is fitted to the upper half of the margins, and to no fewer than this many: with fewer the interval is
# hardly narrower than that of the count.
FEWEST = 10
# How far beyond n runs the tail may speak: 30 runs say what 3000 would, no more.
REACH = 100
# How the tail bends, from lighter than exponential over exponential (0) and log-linear (1) to heavier. Measured
# over nine laws from maxima of Gaussians to 1 / uniform (tests/flake/test_rates.py), the interval of 30 runs then
# holds the truth in 88 to 100 % of the samples; steeper ends are met by bounded laws only, where it lies too high.
_BENDS = (-0.75, 1.25)


def rate(failures: int, runs: int, level: float = LEVEL) -> Rate:
    """Failures of independent runs with the interval that they support; no runs know nothing."""
    return Rate(failures, runs, *(interval(failures, runs, level) if runs else (0.0, 1.0)), level)


def shows(rate: Rate) -> tuple[int | None, int | None, int | None]:
    """`runs_to_show` at the estimate, and at the upper and the lower end of the interval."""
    return tuple(runs_to_show(p) if rate.failures else None for p in (rate.share, rate.high, rate.low))  # type: ignore[return-value]


def tail(margins: Sequence[float], level: float = LEVEL) -> Tail:
    """P(margin > 1), from how the upper half of the margins falls off (peaks over their median).

    A generalised Pareto tail is fitted by likelihood, its shape tied between lighter than exponential and a little
    heavier than log-linear in the margin; the interval is that of the profile likelihood over shape, scale and the
    share of peaks. First the passing margins are asked, with a likelihood that knows that they passed, whether they
    lead to as many failures as were seen. If not, failures are jumps (a kink, a race), and no tail shows those.
    Margins are the largest err / tol of each independent run, failing ones included; inf where it is not known.

    Returns:
        The Tail; where the margins cannot be extrapolated, `supported` is False and `reason` says why.

    Raises:
        MissingExtraError: SciPy or NumPy is not installed.
    """
    n = len(margins)
    ranked = sorted(margins)
    passing = [m for m in ranked if m <= 1]
    lacking = _lacking(ranked, passing)
    if lacking:
        return Tail(0.0, 0.0, 1.0, level, n, False, lacking)
    failing = n - len(passing)
    if failing and (ranked[-1] == math.inf or not _joined(failing, passing, level)):
        lie = "1 failing run lies" if failing == 1 else f"{failing} failing runs lie"
        reason = f"{lie} beyond what the errors of the passing runs lead to: a jump, which no tail foretells"
        return Tail(0.0, 0.0, 1.0, level, n, False, reason, jumps=True)
    threshold = ranked[n // 2]
    fitted = _fit([m for m in ranked if m > threshold], threshold, level, n)
    floor = 1 / (REACH * n)
    low = fitted[1] if fitted[1] > floor else 0.0
    known = runs_to_show(fitted[0]) if fitted[0] > floor else None
    return Tail(max(fitted[0], floor), low, max(fitted[2], floor), level, n, True, shows=known)


def _lacking(ranked: list[float], passing: list[float]) -> str:
    """Why these margins cannot be extrapolated; "" if they can."""
    if len(passing) < 2 * FEWEST:
        return f"{len(passing)} passing runs have a margin, {2 * FEWEST} are needed"
    threshold = max(passing[len(passing) // 2], ranked[len(ranked) // 2])
    above = {m for m in passing if m > threshold}
    if threshold <= 0:
        return "most runs have no error at all"
    if len(above) < FEWEST // 2:
        return f"the margins hardly differ ({len(above)} values between the median and 1)"
    return ""


def _joined(failing: int, passing: list[float], level: float) -> bool:
    """Whether so many failures may come from the tail of the passing margins."""
    threshold = passing[len(passing) // 2]
    peaks = [m for m in passing if m > threshold]
    _, _, most = _fit(peaks, threshold, level)
    # q / (1 - q) failures come with each passing peak.
    odds = len(peaks) / len(passing) * most / (1 - most)
    return float(special_functions().betainc(failing, len(passing) + 1, odds / (1 + odds))) > (1 - level) / 2


def _fit(peaks: list[float], threshold: float, level: float, n: int = 0) -> tuple[float, float, float]:
    """Estimate and interval of P(margin > 1) among n runs; n = 0: among peaks, which are known to have passed."""
    special = special_functions()
    import numpy as np

    y = np.asarray(peaks) - threshold
    log_q = np.linspace(math.log(1e-12), math.log(0.95), 500)[:, None]  # [Q, 1] P(peak > 1)
    lightest = _BENDS[0] * min(1.0, threshold / (1 - threshold))  # else the law ends before 1
    bend = np.linspace(lightest, _BENDS[1], 60)[None, :]  # [1, B]
    bend = np.where(np.abs(bend) < 1e-6, 1e-6, bend)
    # P(peak > y) = (1 + bend y / threshold)^(-1 / shape) with shape = bend scale / threshold is q where y ends at 1.
    shape = np.log1p(bend * (1 - threshold) / threshold) / -log_q
    inside = 1 + bend[..., None] * y / threshold  # [1, B, peaks]
    with np.errstate(invalid="ignore", divide="ignore"):
        grid = -len(y) * np.log(shape * threshold / bend) - (1 / shape + 1) * np.log(inside).sum(-1)
    finite: Any = np.where(np.isnan(grid), -np.inf, grid)  # NumPy leaves the type of where open
    likelihood: Any = finite.max(1)
    log_q = log_q[:, 0]
    if n:
        share = np.linspace(0.25, 0.75, 51)[:, None]  # of the peaks; their count is as uncertain as any
        count = len(y) * np.log(share) + (n - len(y)) * np.log1p(-share)
        spread = cast(Any, count + np.interp(log_q - np.log(share), log_q, likelihood, right=-np.inf))
        likelihood = spread.max(0)
    else:
        likelihood = likelihood - len(y) * np.log1p(-np.exp(log_q))
    best = int(likelihood.argmax())
    kept = np.exp(log_q[likelihood >= likelihood[best] - float(special.chdtri(1, 1 - level)) / 2])
    return math.exp(log_q[best]), float(kept[0]), float(kept[-1])
