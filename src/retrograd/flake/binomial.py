"""Binomial statistics: exact intervals for counts, and how many runs show a failure.

SciPy's special functions do the mathematics; they are imported when a number is asked for (extra `flake`).
"""

# SciPy has no stubs.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
from typing import Any

from retrograd.errors import MissingExtraError, UsageError

LEVEL = 0.95


def special_functions() -> Any:
    """scipy.special; MissingExtraError without SciPy or NumPy."""
    try:
        import numpy as np  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from scipy import special
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("scipy", "numpy"):
            raise
        raise MissingExtraError(missing, "flake", "a failure rate with its interval") from None
    return special


def interval(failures: int, runs: int, level: float = LEVEL) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval: holds the true probability at least at this level, for any n."""
    confidence = (1 + level) / 2
    _check(failures, runs, confidence)
    low = 0.0 if failures == 0 else float(special_functions().betaincinv(failures, runs - failures + 1, 1 - confidence))
    return low, upper(failures, runs, confidence)


def upper(failures: int, runs: int, confidence: float = LEVEL) -> float:
    """The one-sided upper bound: after no failure in n runs 1 - (1 - confidence)^(1/n), about 3/n at 95 %."""
    _check(failures, runs, confidence)
    return 1.0 if failures == runs else float(special_functions().betaincinv(failures + 1, runs - failures, confidence))


def _check(failures: int, runs: int, confidence: float) -> None:
    if runs < 0 or not 0 <= failures <= runs:
        raise UsageError(f"`failures` is {failures} of {runs} runs, expected a count from 0 to the number of runs")
    if not 0 < confidence < 1:
        raise UsageError(f"`confidence` is {confidence}, expected a probability between 0 and 1, such as 0.95")


def runs_to_show(probability: float, confidence: float = LEVEL) -> int | None:
    """Smallest n for which n runs fail at least once with this confidence; None if the probability is 0."""
    if probability <= 0:
        return None
    return 1 if probability >= 1 else math.ceil(math.log1p(-confidence) / math.log1p(-probability))
