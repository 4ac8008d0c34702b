"""How often: exact intervals for counts, and what the tail of the margins says about failures not seen yet.

SciPy's special functions and NumPy do the mathematics; they are imported when a number is asked for (extra `flake`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from retrograd.errors import MissingExtraError, UsageError, VerificationError
from retrograd.flake.schema import Flake, Rate, Tail

LEVEL = 0.95
# The tail is fitted to the upper half of the margins, and to no fewer than this many: with fewer the interval is
# hardly narrower than that of the count.
FEWEST = 10
# How far beyond n runs the tail may speak: 30 runs say what 3000 would, no more.
REACH = 100
# How the tail bends, from lighter than exponential over exponential (0) and log-linear (1) to heavier. Measured
# over nine laws from maxima of Gaussians to 1 / uniform (tests/flake/test_rates.py), the interval of 30 runs then
# holds the truth in 88 to 100 % of the samples; steeper ends are met by bounded laws only, where it lies too high.
_BENDS = (-0.75, 1.25)


def _special() -> Any:
    try:
        import numpy as np  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from scipy import special
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("scipy", "numpy"):
            raise
        raise MissingExtraError(missing, "flake", "a failure rate with its interval") from None
    return special


def require() -> None:
    """Raise MissingExtraError unless the packages that compute rates are there."""
    _special()


def interval(failures: int, runs: int, level: float = LEVEL) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval: holds the true probability at least at this level, for any n.

    Raises:
        UsageError: the counts or the level make no sense.
        MissingExtraError: SciPy is not installed.
    """
    confidence = (1 + level) / 2
    _check(failures, runs, confidence)
    low = 0.0 if failures == 0 else float(_special().betaincinv(failures, runs - failures + 1, 1 - confidence))
    return low, upper(failures, runs, confidence)


def upper(failures: int, runs: int, confidence: float = LEVEL) -> float:
    """The one-sided upper bound: after no failure in n runs 1 - (1 - confidence)^(1/n), about 3/n at 95 %.

    Raises:
        UsageError: the counts or the confidence make no sense.
        MissingExtraError: SciPy is not installed.
    """
    _check(failures, runs, confidence)
    return 1.0 if failures == runs else float(_special().betaincinv(failures + 1, runs - failures, confidence))


def _check(failures: int, runs: int, confidence: float) -> None:
    if runs < 0 or not 0 <= failures <= runs:
        raise UsageError(f"`failures` is {failures} of {runs} runs, expected a count from 0 to the number of runs")
    if not 0 < confidence < 1:
        raise UsageError(f"`confidence` is {confidence}, expected a probability between 0 and 1, such as 0.95")


def rate(failures: int, runs: int, level: float = LEVEL) -> Rate:
    """Failures of independent runs with the interval that they support; no runs know nothing."""
    return Rate(failures, runs, *(interval(failures, runs, level) if runs else (0.0, 1.0)), level)


def runs_to_show(probability: float, confidence: float = LEVEL) -> int | None:
    """Smallest n for which n runs fail at least once with this confidence; None if the probability is 0."""
    if probability <= 0:
        return None
    return 1 if probability >= 1 else math.ceil(math.log1p(-confidence) / math.log1p(-probability))


def shows(found: Rate) -> tuple[int | None, int | None, int | None]:
    """`runs_to_show` at the estimate, and at the upper and the lower end of the interval."""
    return tuple(runs_to_show(p) if found.failures else None for p in (found.share, found.high, found.low))  # type: ignore[return-value]


def require_below(flake: Flake, limit: float, confidence: float) -> None:
    """`Flake.assert_below`."""
    if not 0 < limit <= 1:
        raise UsageError(f"`limit` is {limit}, expected a probability above 0, such as 0.01")
    found = flake.rate
    most = upper(found.failures, found.runs, confidence) if found.runs else 1.0
    if most < limit:
        return
    said = f"{flake.target}: {found.failures} of {found.runs} runs fail; at {confidence:.0%} that proves less than "
    said += f"{most:.3g} only, not less than {limit:g}"
    if found.failures:
        said += f"; failing seeds: {', '.join(map(str, flake.failing_seeds[:10]))}"
        said += f"\nfirst failure: {flake.message}" if flake.message else ""
    else:
        said += f"; {runs_to_show(limit, confidence)} runs without a failure would"
    raise VerificationError(said)


def tail(margins: Sequence[float], level: float = LEVEL) -> Tail:
    """P(margin > 1), from how the upper half of the margins falls off (peaks over their median).

    A generalised Pareto tail is fitted by likelihood, its shape tied between lighter than exponential and a little
    heavier than log-linear in the margin; the interval is that of the profile likelihood over shape, scale and the
    share of peaks. First the passing margins are asked, with a likelihood that knows that they passed, whether they
    lead to as many failures as were seen. If not, failures are jumps (a kink, a race), and no tail shows those.

    Args:
        margins: largest err / tol of each independent run, failing runs included; inf where it is not known.
        level: of the interval.

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
        reason = f"{_runs(failing)} beyond what the errors of the passing runs lead to: a jump, which no tail foretells"
        return Tail(0.0, 0.0, 1.0, level, n, False, reason, jumps=True)
    threshold = ranked[n // 2]
    found = _fit([m for m in ranked if m > threshold], threshold, level, n)
    floor = 1 / (REACH * n)
    low = found[1] if found[1] > floor else 0.0
    known = runs_to_show(found[0]) if found[0] > floor else None
    return Tail(max(found[0], floor), low, max(found[2], floor), level, n, True, shows=known)


def _runs(count: int) -> str:
    return f"{count} failing run lies" if count == 1 else f"{count} failing runs lie"


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
    return float(_special().betainc(failing, len(passing) + 1, odds / (1 + odds))) > (1 - level) / 2


def _fit(peaks: list[float], threshold: float, level: float, n: int = 0) -> tuple[float, float, float]:
    """Estimate and interval of P(margin > 1) among n runs; n = 0: among peaks, which are known to have passed."""
    special = _special()
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
