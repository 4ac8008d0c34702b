"""Shrinking of a failing case to the smallest that fails, and in words which cases fail.

Own code rather than hypothesis, which was measured beside it (docs/diagnosis.md): the search starts from a known
failure, and the cases that pass on the way are wanted too, since they say where the border of the failure runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from retrograd.check.inputs import allows, fitted
from retrograd.check.schema import Case, Size
from retrograd.check.sizes import elements
from retrograd.check.spec import OpSpec

_LADDER = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 257, 512)
_MOST_TRIES = 40
# A failure that comes only sometimes is looked for again until it would have been seen with this risk.
_RISK = 0.01
_MOST_RUNS = 30
ENOUGH_FAILURES = 3  # after which its rate is known well enough: three of three count as always
_MOST_SPENT = 400  # runs in search of a failure that comes sometimes


class RepeatedCheck:
    """Whether cases fail, each run as often as a failure needs to show, and how often that is.

    Args:
        fails: whether a case fails, this time.
        case: one that has failed.
        again: whether it has failed in a further run, which is counted here.
        enough: failures after which its rate is known well enough.

    Attributes:
        failures, runs: of `case`, when it was run again to learn the rate.
        repeats: runs of a case after which it counts as one that passes.
    """

    def __init__(self, fails: Callable[[Case], bool], case: Case, again: bool, enough: int = ENOUGH_FAILURES) -> None:
        self.fails = fails
        self.failures, self.runs, self.spent = int(again), 1, 0
        while self.failures < enough and self.runs < _MOST_RUNS:
            self.failures += fails(case)
            self.runs += 1
        rate = max(self.failures, 1) / self.runs
        often = math.log(_RISK) / math.log1p(-rate) if rate < 1 else 1.0
        self.repeats = min(math.ceil(often), _MOST_RUNS)

    def __call__(self, case: Case) -> bool:
        for _ in range(self.repeats):
            if self.repeats > 1 and self.spent >= _MOST_SPENT:
                return False
            self.spent += 1
            if self.fails(case):
                return True
        return False

    def text(self) -> str:
        """How often the failure comes, where it does not always."""
        return f"not always: in {self.failures} of {self.runs} further runs" if self.repeats > 1 else ""


def shrink(spec: OpSpec, case: Case, fails: Callable[[Case], bool]) -> tuple[Case, dict[Case, bool]]:
    """The smallest case found that still fails, and all that were tried.

    Options get their first value, layouts and extreme values are dropped; then one size after the other is lowered, to
    the first of a ladder that fails and by halves from there, and once more for what the others made possible.
    """
    tried: dict[Case, bool] = {case: True}

    def still(candidate: Case) -> bool:
        if candidate not in tried and len(tried) < _MOST_TRIES:
            tried[candidate] = fails(candidate)
        return tried.get(candidate, False)

    plain = {name: values[0] for name, values in spec.params.items()}
    for name, value in case.params:
        easier = case.but(params=dict(case.params) | {name: plain.get(name, value)})
        case = easier if easier != case and still(easier) else case
    for kind in ("layouts", "values"):
        for item in getattr(case, kind):
            easier = case.but(**{kind: tuple(i for i in getattr(case, kind) if i != item)})
            case = easier if still(easier) else case
    if case.draw and still(case.but(draw=0)):
        case = case.but(draw=0)
    for _ in range(2):
        before = case
        for name, _size in case.sizes:
            case = _lowest(spec, case, name, still)
        if case == before:
            break
    return case, tried


def _lowest(spec: OpSpec, case: Case, name: str, still: Callable[[Case], bool]) -> Case:
    """The case with one size as low as it goes."""
    passed = 0  # the largest smaller size that is known to pass
    for smaller in _smaller(case.size(name)):
        if not allows(spec, name, smaller):
            continue
        lower = fitted(spec, case.with_size(name, smaller), name)
        if lower is not None and still(lower):
            case = lower
            break
        passed = smaller
    flat = elements(case.size(name))
    while passed and flat - passed > 1:
        middle = (passed + flat) // 2
        candidate = fitted(spec, case.with_size(name, middle), name)
        if candidate is not None and allows(spec, name, middle) and still(candidate):
            case, flat = candidate, middle
        else:
            passed = middle
    return case


def _smaller(size: Size) -> list[int]:
    flat, other_rank = elements(size), isinstance(size, tuple) and len(size) != 1
    return [n for n in _LADDER if n < flat or (n == flat and other_rank)]


def where(tried: dict[Case, bool]) -> str:
    """Which of the cases fail, as the simplest rule that fits: layout, values, a threshold, a divisor; else counts."""
    bad = [c for c, failed in tried.items() if failed]
    good = [c for c, failed in tried.items() if not failed]
    if not good:
        return f"every case tried ({len(bad)})" if len(bad) > 1 else "the one case tried"
    layouts = {item for c in bad for item in c.layouts}
    if layouts and all(c.layouts for c in bad) and not layouts & {item for c in good for item in c.layouts}:
        return "only with " + ", ".join(f"{k}:{v}" for k, v in sorted(layouts))
    extremes = {item for c in bad for item in c.values}
    if extremes and all(c.values for c in bad) and not extremes & {item for c in good for item in c.values}:
        return "only with " + ", ".join(f"{k}@{v}" for k, v in sorted(extremes))
    for name, _ in bad[0].sizes:
        rule = _size_rule(name, [elements(c.size(name)) for c in bad], [elements(c.size(name)) for c in good])
        if rule:
            return rule
    for key, _ in bad[0].params:
        values = {repr(dict(c.params)[key]) for c in bad}
        if not values & {repr(dict(c.params)[key]) for c in good}:
            return f"only with {key} = {', '.join(sorted(values))}"
    return f"{len(bad)} of {len(tried)} cases tried, passing at: {good[0].text()}"


def _size_rule(name: str, bad: list[int], good: list[int]) -> str:
    if set(bad) & set(good):
        return ""
    if min(bad) > max(good):
        return f"only {name} > {max(good)} ({min(bad)} fails, {max(good)} passes)"
    if max(bad) < min(good):
        return f"only {name} < {min(good)} ({max(bad)} fails, {min(good)} passes)"
    for k in (2, 4, 8, 16, 32, 64, 128):
        if all(b % k for b in bad) and not any(g % k for g in good):
            return f"only {name} not a multiple of {k} ({', '.join(map(str, sorted(set(good))))} pass)"
    return f"{name} in {sorted(set(bad))} (passes at {sorted(set(good))})"
