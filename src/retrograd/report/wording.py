"""Wording that the text and the HTML report share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from retrograd.check.schema import Case, Finding, StageResult

VERDICTS = {"proved": "PROVED", "finding": "FINDING", "undecided": "CANNOT DECIDE"}
MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip", "undecided": "??"}


def verdict(name: str) -> str:
    """The verdict as a headline."""
    return VERDICTS.get(name, str(name).upper())


def number(value: float) -> str:
    """A value with the nine digits that tell any two float32 apart."""
    return f"{value:.9g}"


def times(excess: float) -> str:
    """ "940x attainable": how many times the attainable error was exceeded."""
    if not math.isfinite(excess):
        return "infinitely beyond attainable"
    return f"{excess:.0f}x attainable" if 10 <= excess < 1e6 else f"{excess:.2g}x attainable"


def duration(seconds: float) -> str:
    """Seconds for reading: "0.42 s", "12.3 s", "3 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def case(value: Case) -> str:
    """The case with its dtype, on one line."""
    return " ".join(part for part in (value.dtype, value.text()) if part)


def evidence(finding: Finding) -> str:
    """Tensor, index, got, want, excess and the count of wrong elements; what is unknown is left out."""
    place = finding.tensor
    if finding.index is not None:
        place += f"[{', '.join(map(str, finding.index))}]"
    facts = [] if finding.got is None else [f"got {number(finding.got)}"]
    facts += [] if finding.want is None else [f"want {number(finding.want)}"]
    facts += [] if finding.excess is None else [times(finding.excess)]
    if finding.wrong is not None:
        of = "" if finding.total is None else f" of {finding.total}"
        facts.append(f"{finding.wrong}{of} elements wrong")
    return ": ".join(part for part in (place, ", ".join(facts)) if part)


def power(stage: StageResult) -> str:
    """What the stage would have caught."""
    if stage.power_text or stage.power is None:
        return stage.power_text
    return f"catches relative errors from {stage.power:.1e}" if stage.power else "exact"


def count(number: int, noun: str) -> str:
    """ "1 output", "2 outputs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: Sequence[str], most: int | None) -> str:
    """Names with commas; of more than `most` the first, and how many more."""
    shown = names[:most]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def at(where: str) -> str:
    """A source line behind a text, if there is one."""
    return f"  at {where}" if where else ""


def shares(finding: Finding) -> list[tuple[str, str, float]]:
    """The terms of the attainable error: name, size, share of the whole in percent; empty if they are not known."""
    total = sum(size for _, size in finding.terms)
    if not math.isfinite(total) or total <= 0:
        return []
    return [(name, f"{size:.2g}", 100 * size / total) for name, size in finding.terms]


def before_after(finding: Finding) -> list[tuple[str, str, str]]:
    """What shrinking changed: name, at the first failing case, at the smallest one; what is equal is left out."""
    if finding.first is None:
        return []
    rows: list[tuple[str, str, str]] = []
    old, new = finding.first.case, finding.case
    for held in ("sizes", "params", "layouts", "values"):
        before: dict[str, object] = dict(getattr(old, held))
        after: dict[str, object] = dict(getattr(new, held))
        rows += [(k, _held(before.get(k)), _held(after.get(k))) for k in {**before, **after}]
    rows.append(("draw", str(old.draw), str(new.draw)))
    first = finding.first
    rows.append(("elements wrong", _of(first.wrong, first.total), _of(finding.wrong, finding.total)))
    excesses = [e for e in (finding.first.excess, finding.excess) if e is not None]
    if len(excesses) == 2:
        rows.append(("error", times(excesses[0]), times(excesses[1])))
    return [row for row in rows if row[1] != row[2]]


def _held(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, cast(tuple[object, ...], value))) or "()"
    return "plain" if value is None else str(value)


def _of(wrong: int | None, total: int | None) -> str:
    return "" if wrong is None else f"{wrong} of {total}" if total is not None else str(wrong)
