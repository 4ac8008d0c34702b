"""Operators of a trace, selected by filters, as a record that can be shown. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import ClassVar

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.errors import UsageError
from retrograd.trace.schema import PHASES, Op, Trace

SCHEMA = "retrograd.trace-listing/1"


@dataclass(frozen=True, slots=True)
class Listing(Record, Shown):
    """Some operators of a trace.

    Attributes:
        ops: those that are listed.
        matching: how many fit the filters.
        total: how many the trace has.
        steps: how many steps it has.
        level: of the trace.
        rank: of its process.
        meta: versions, device, seed, start.
        schema: version of this form.
    """

    _noun: ClassVar[str] = "listing of a trace"

    ops: tuple[Op, ...]
    matching: int
    total: int
    steps: int
    level: str
    rank: int
    meta: dict[str, str]
    schema: str = SCHEMA


def listing(
    trace: Trace,
    *,
    step: int | None = None,
    phase: str | None = None,
    op: str | None = None,
    module: str | None = None,
    bad: bool = False,
    most: int | None = None,
) -> Listing:
    """The operators that fit every filter.

    Args:
        trace: where to look.
        step: only this step.
        phase: "forward", "backward" or "other".
        op: a pattern with * and ? of the name; without a star it may be any part of it.
        module: likewise of the module's path.
        bad: only those with NaN or Inf in a result.
        most: list so many at most.

    Raises:
        UsageError: the phase is unknown.
    """
    if phase is not None and phase not in PHASES:
        raise UsageError(f"`phase` is {phase!r}, expected one of {', '.join(map(repr, PHASES))}")

    def matches(pattern: str | None, text: str) -> bool:
        return pattern is None or fnmatchcase(text, pattern if "*" in pattern else f"*{pattern}*")

    def fits(o: Op) -> bool:
        fitting = step in (None, o.step) and phase in (None, o.phase)
        return (
            fitting and matches(op, o.name) and matches(module, o.module) and (not bad or any(s.bad for s in o.outputs))
        )

    matching = sum(map(fits, trace.ops))
    steps = len({o.step for o in trace.ops})
    return Listing(
        tuple(islice(filter(fits, trace.ops), most)),
        matching,
        len(trace.ops),
        steps,
        trace.level,
        trace.rank,
        trace.meta,
    )
