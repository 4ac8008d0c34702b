"""The smallest failing case, and in words which cases fail.

Own code rather than hypothesis: the search starts from a known failure (hypothesis.find cannot), and the
cases that pass on the way are wanted too, since they say where the border of the failure runs.
"""

from __future__ import annotations

from collections.abc import Callable

from retrograd.check.inputs import allows
from retrograd.check.spec import OpSpec
from retrograd.record import Case, Size

_LADDER = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
_MOST_TRIES = 24


def shrink(spec: OpSpec, case: Case, fails: Callable[[Case], bool]) -> tuple[Case, dict[Case, bool]]:
    """Lower one size after the other, and drop layouts, while the case still fails. Returns it and all tries."""
    tried: dict[Case, bool] = {case: True}

    def still(candidate: Case) -> bool:
        if candidate not in tried and len(tried) < _MOST_TRIES:
            tried[candidate] = fails(candidate)
        return tried.get(candidate, False)

    for name, size in case.sizes:
        for smaller in _smaller(size):
            if allows(spec, name, smaller) and still(case.with_size(name, smaller)):
                case = case.with_size(name, smaller)
                break
    for layout in case.layouts:
        plain = case.but(layouts=tuple(item for item in case.layouts if item != layout))
        if still(plain):
            case = plain
    return case, tried


def _smaller(size: Size) -> list[Size]:
    if isinstance(size, int):
        return [n for n in _LADDER if n < size]
    flat = 1
    for n in size:
        flat *= n
    return [(n,) for n in _LADDER if n < flat or (n == flat and len(size) != 1)]


def where(tried: dict[Case, bool]) -> str:
    """Which of the cases fail, as the simplest rule that fits: layout, values, a threshold, a divisor; else counts."""
    bad = [c for c, failed in tried.items() if failed]
    good = [c for c, failed in tried.items() if not failed]
    if not good:
        return f"every case tried ({len(bad)})" if len(bad) > 1 else "the one case tried"
    layouts = {item for c in bad for item in c.layouts}
    if layouts and all(c.layouts for c in bad) and not layouts & {item for c in good for item in c.layouts}:
        return "only with " + ", ".join(f"{k}:{v}" for k, v in sorted(layouts))
    held = {item for c in bad for item in c.values}
    if held and all(c.values for c in bad) and not held & {item for c in good for item in c.values}:
        return "only with " + ", ".join(f"{k}@{v}" for k, v in sorted(held))
    for name, _ in bad[0].sizes:
        rule = _size_rule(name, [_flat(c.size(name)) for c in bad], [_flat(c.size(name)) for c in good])
        if rule:
            return rule
    for key, _ in bad[0].params:
        values = {repr(dict(c.params)[key]) for c in bad}
        if not values & {repr(dict(c.params)[key]) for c in good}:
            return f"only with {key} = {', '.join(sorted(values))}"
    return f"{len(bad)} of {len(tried)} cases tried, passing at: {good[0].text()}"


def _flat(size: Size) -> int:
    total = 1
    for n in size if isinstance(size, tuple) else (size,):
        total *= n
    return total


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
