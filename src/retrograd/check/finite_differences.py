"""Derivatives from function values alone, each with the error it may have. No op and no tensor lives here.

Ridders' tableau of central differences (Ridders 1982) with the noise of the function in its error estimate: the tableau
alone is too sure of itself, covering the true error in little more than half of all trials. The noise itself comes from
a difference table of values at close points (ECnoise; More & Wild, SIAM J. Sci. Comput. 33, 2011).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrograd.check import tolerance

POINTS = 9  # values that `noise` wants; of seven, one estimate in two hundred is five times too low
_ROWS = 5  # of the tableau, which are made however noisy they are: those that `_smooth` looks at around one


@dataclass(frozen=True)
class Estimate:
    """A derivative and how far it may be off; `step` is the step that it mostly rests on."""

    value: float
    error: float
    step: float


def noise(values: Sequence[float]) -> float:
    """Standard deviation of the noise in function values at equally spaced, close points.

    Differences of order k of a smooth function vanish, those of noise grow by a known factor: the level is right from
    where on the estimates of three orders agree, and the largest of them counts, as few points say little.
    """
    table = list(values)
    if not all(map(math.isfinite, table)):
        return math.inf
    levels: list[float] = []
    for k in range(1, len(values)):
        table = [b - a for a, b in itertools.pairwise(table)]
        gamma = math.factorial(k) ** 2 / math.factorial(2 * k)
        levels.append(math.sqrt(gamma * sum(d * d for d in table) / len(table)))
    for few in zip(levels, levels[1:], levels[2:], strict=False):
        if max(few) <= 4 * min(few):
            return max(few)
    return max(levels[-3:])


def extrapolate(
    difference: Callable[[float], float], steps: Sequence[float], sigma: float, size: float = math.inf
) -> Estimate:
    """The limit of `difference` for a step going to zero, when its error is even in the step.

    Args:
        difference: the central difference quotient at a step; not finite where it cannot be had.
        steps: falling, each half of the one before.
        sigma: noise of one function value; a quotient has sigma / (sqrt(2) step) of it.
        size: of the derivative. A step whose noise is larger, and larger than the first quotient, says nothing, and
            smaller ones say less: they are not asked for.

    Returns:
        The entry of the tableau with the smallest error. Where the function has a bend the tableau may seem to converge
        and does not, so its error holds the disagreement with all smaller steps, and it counts only where the plain
        quotients around it come together as those of a smooth function do. An infinite error where none does.
    """
    rows: list[Estimate] = []
    plain: list[tuple[float, float]] = []  # each row's quotient and its noise
    before: list[float] = []
    for step in steps:
        row = [difference(step)]
        if not math.isfinite(row[0]):
            rows, plain, before = [], [], []  # the range of the function ends here: only smaller steps count
            continue
        rounding = _rounding(sigma, step)
        best = Estimate(row[0], math.inf, step)
        for k, old in enumerate(before):
            row.append(row[k] + (row[k] - old) / (4 ** (k + 1) - 1))
            error = max(abs(row[-1] - row[k]), abs(row[-1] - old)) + rounding
            if error < best.error:
                best = Estimate(row[-1], error, step)
        rows.append(best)
        plain.append((row[0], rounding))
        before = row
        if len(rows) >= _ROWS and rounding > max(size, abs(plain[0][0])):
            break
    limit = Estimate(0.0, math.inf, math.nan)
    for k, row in enumerate(rows[:-1]):  # the last has no smaller step beside it
        apart = max(abs(row.value - finer.value) - finer.error for finer in rows[k + 1 :])
        error = max(row.error, apart)
        if error < limit.error and _smooth(plain[max(k - 2, 0) : k + 3]):
            limit = Estimate(row.value, error, row.step)
    return limit


def _rounding(sigma: float, step: float) -> float:
    return tolerance.NOISE_SIGMAS * sigma / (math.sqrt(2) * step)


def _smooth(quotients: Sequence[tuple[float, float]]) -> bool:
    """Whether neighbouring quotients differ by half at most of what the two before do, noise apart.

    The error of a central difference is quartered when the step is halved; at a bend it may even grow.
    """
    gaps = [(abs(a - b), max(na, nb)) for (a, na), (b, nb) in itertools.pairwise(quotients)]
    return all(after <= before / 2 + 2 * noise for (before, _), (after, noise) in itertools.pairwise(gaps))


def sides(difference: Callable[[float], float], steps: Sequence[float], sigma: float) -> tuple[float, float]:
    """The interval of one-sided quotients, each with its noise: it holds zero at a bend between right slopes.

    Args:
        difference: the one-sided quotient less the claimed slope, at a step of either sign.
        steps: as in `extrapolate`.
        sigma: noise of one function value.

    Returns:
        The narrowest interval over the steps, lowest and highest.
    """
    best = (-math.inf, math.inf)
    for step in steps:
        pair = difference(step), difference(-step)
        rounding = tolerance.NOISE_SIGMAS * sigma * math.sqrt(2) / step
        low, high = min(pair) - rounding, max(pair) + rounding
        if math.isfinite(high - low) and high - low < best[1] - best[0]:
            best = (low, high)
    return best


def bend(difference: Callable[[float], float], steps: Sequence[float], sigma: float) -> Estimate:
    """How far the slope above a point is from the one below it; arguments as those of `sides`.

    Of a smooth function the two quotients differ by odd powers of the step, the first of which two steps cancel.
    """

    def apart(step: float) -> float:
        here, nearer = (difference(h) - difference(-h) for h in (step, step / 2))
        return 2 * nearer - here

    # Three values with weights of up to 8 / step: sqrt(6) (4 + 1) of a value's noise at most, where `extrapolate`
    # counts on 1 / sqrt(2).
    return extrapolate(apart, steps, math.sqrt(12) * 5 * sigma)
