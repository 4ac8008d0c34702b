"""Causes said once: those that stand in several computations, and numbers that changed in proportion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from retrograd.graph.diffing.consequences import Placed
from retrograd.graph.diffing.sizes import close, differing
from retrograd.graph.schema import Cause


def merged(causes: Iterable[Placed]) -> list[Cause]:
    """Equal sentences as one cause: "constant 1 -> 2, in the body of while.3 and 4 more places"."""
    groups: dict[tuple[str, str, str], list[Placed]] = {}
    for placed in causes:
        groups.setdefault((placed.cause.kind, placed.cause.what, placed.cause.where), []).append(placed)
    result: list[Placed] = []
    for alike in groups.values():
        first, places = alike[0].cause, list(dict.fromkeys(p.within for p in alike if p.within))
        text = f"in {places[0]}: {first.what}" if places else first.what
        if len(alike) > 1:
            text += f", and in {len(alike) - 1} more computation{'s' * (len(alike) > 2)}"
        names_a, names_b = (
            tuple(n for own in sides for n in own) for sides in ([p.cause.a for p in alike], [p.cause.b for p in alike])
        )
        total = sum(p.cause.count for p in alike)
        cause = replace(first, what=text, a=names_a, b=names_b, count=total)
        result.append(Placed(cause, changes=tuple(change for p in alike for change in p.changes)))
    return _in_proportion(_of_one_number(result))


def _of_one_number(causes: list[Placed]) -> list[Placed]:
    """Arguments of several operations in which the same numbers changed, as one cause: 5 -> 6 in a split and a sum."""
    leads: dict[tuple[tuple[float, float], ...], int] = {}
    result: list[Placed] = []
    for placed in causes:
        cause, numbers = placed.cause, _numbers(placed)
        lead = leads.setdefault(numbers, len(result)) if numbers else len(result)
        if lead == len(result):
            result.append(placed)
            continue
        first = result[lead].cause
        sides = first.a + cause.a, first.b + cause.b
        both = replace(
            first, what=f"{first.what}; and {cause.what}", a=sides[0], b=sides[1], count=first.count + cause.count
        )
        result[lead] = replace(result[lead], cause=both, changes=result[lead].changes + placed.changes)
    return result


def _numbers(placed: Placed) -> tuple[tuple[float, float], ...]:
    """The numbers that changed in arguments of operations of FX, each pair once; none if more did."""
    if placed.cause.kind != "attribute_changed" or not all(
        "args=" in side for change in placed.changes for side in change
    ):
        return ()
    pairs = {pair for before, after in placed.changes for pair in differing(before, after)}
    return tuple(sorted(pairs)) if (0.0, 1.0) not in pairs else ()


def _in_proportion(causes: list[Placed]) -> list[Cause]:
    """Constants that became another number by one factor, or its inverse, as one cause: 0.1 -> 0.2, and 10 -> 5."""
    ratios: list[tuple[float, int]] = []  # of the causes that lead, and where they stand in the result
    result: list[Cause] = []
    for placed in causes:
        cause, ratio = placed.cause, _ratio(placed)
        lead = next((k for other, k in ratios if ratio and (close(other, ratio) or close(other * ratio, 1.0))), -1)
        if lead >= 0:
            first, text = result[lead], cause.what.removeprefix("constant ")
            text = f"{first.what}; in proportion {text}"
            sides = first.a + cause.a, first.b + cause.b
            result[lead] = replace(first, what=text, a=sides[0], b=sides[1], count=first.count + cause.count)
            continue
        if ratio:
            ratios.append((ratio, len(result)))
        result.append(cause)
    return result


def _ratio(placed: Placed) -> float:
    """By which factor all constants of a cause became others; 0 if there is none."""
    if placed.cause.kind != "constant_changed" or not placed.changes:
        return 0.0
    pairs = [differing(before, after) for before, after in placed.changes]
    if any(len(own) != 1 or not own[0][0] for own in pairs):
        return 0.0
    ratios = [own[0][1] / own[0][0] for own in pairs]
    return ratios[0] if all(close(ratio, ratios[0]) for ratio in ratios) else 0.0
