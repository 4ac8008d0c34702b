"""Provenance of the first NaN or Inf of a trace. No torch.

An operator *made* a NaN if a result has one and no input has; an Inf likewise. The first NaN is followed back through
the bad inputs to the operator that made the Inf behind it (an overflow, say), to a value that came from outside, or to
memory that nobody seen has written. What was written deliberately, as for masks, is no cause until it reaches the loss
or a gradient, nor is the overflow of gradients that GradScaler looks for and skips. What a collective makes came from
another rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.trace import nan_reasons
from retrograd.trace.nan_history import NOTHING, History, named
from retrograd.trace.schema import BACKWARD, Op, Stats, Trace
from retrograd.trace.trial_runs import without_trials

SCHEMA = "retrograd.provenance/1"
_MAX_PATH = 12  # operators of the path that are kept
_MAX_BIRTHS = 50


@dataclass(frozen=True, slots=True)
class Birth:
    """An operator that made a NaN or Inf of finite inputs, and how often it did.

    Attributes:
        op: the first time.
        reason: why; "" where it is not plain.
        count: how often, at this line.
        steps: in how many steps.
        scaled: whether each time is an overflow that GradScaler skips.
    """

    op: Op
    reason: str
    count: int
    steps: int
    scaled: bool


@dataclass(frozen=True, slots=True)
class Provenance(Record, Shown):
    """What is known of the first NaN or Inf.

    Attributes:
        found: "nan", "inf" if there is no NaN, "" if there is neither.
        origin: "made" by `op`; "outside" if it came in with `tensor`, which `op` was the first to read; "unseen" if
            `op` read memory that no recorded operator had filled; "received" if `op` is a collective to which this rank
            gave none; "" if nothing was found.
        op: the operator, None if nothing was found.
        tensor: the bad input or result.
        reason: why, in a sentence; "" where it is not plain.
        way: operators from `op` to the first NaN, at most 12 of them.
        bad: how many operators have a bad result.
        total: how many operators there are.
        steps: how many steps.
        level: of the trace.
        notes: what limits the answer.
        rank: on which it was made.
        ranks: whose traces were read.
        births: every operator that made one, where they were asked for; at most 50.
        schema: version of this form.
    """

    _noun: ClassVar[str] = "record of where a NaN comes from"

    found: str
    origin: str
    op: Op | None
    tensor: Stats | None
    reason: str
    way: tuple[Op, ...] = ()
    bad: int = 0
    total: int = 0
    steps: int = 0
    level: str = "fast"
    notes: tuple[str, ...] = field(default_factory=tuple)
    rank: int = 0
    ranks: tuple[int, ...] = ()
    births: tuple[Birth, ...] = ()
    schema: str = SCHEMA

    @property
    def exit_code(self) -> int:
        """1 if something was found, else 0; 3 if nobody counted."""
        return 1 if self.found else 3 if self.level == "names" else 0


def provenance(trace: Trace, *, step: int | None = None, begin: int = 0, births: bool = False) -> Provenance:
    """The first NaN of a trace, or else the first Inf, and where it comes from.

    Args:
        trace: where to look.
        step: only in this step; what is behind it may lie before.
        begin: from this step on.
        births: list every operator that made one, too.
    """
    trace = without_trials(trace)
    history = History(trace.ops, step, begin)
    facts: dict[str, Any] = {
        "bad": sum(any(s.bad for s in op.outputs) for op in trace.ops),
        "total": len(trace.ops),
        "steps": len({op.step for op in trace.ops}),
        "level": trace.level,
        "notes": tuple(_notes(trace)),
        "rank": trace.rank,
        "ranks": (trace.rank,),
        "births": tuple(map(_birth, history.births()[:_MAX_BIRTHS])) if births else (),
    }
    for kind in ("nan", "inf"):
        first = history.first(kind)
        if first is not None:
            path, loss = history.path_to(first, kind), None
            if kind == "nan" and (loss := history.bad_loss_before(path[0])) is not None:
                where = "in its backward, made" if path[0].phase == BACKWARD else "after its backward, read"
                facts["notes"] += (f"the first NaN that was counted is {where} by {named(path[0])}",)
            if loss is None:
                origin, op, tensor, reason = history.cause(path, kind)
            else:
                path, (origin, op, tensor, reason) = history.cause_of_loss(loss)
            facts["notes"] += (*history.earlier_infinity(path), *history.skipped_notes(), *history.left_out_notes())
            return Provenance(kind, origin, op, tensor, reason, tuple(path[:_MAX_PATH]), **facts)
    facts["notes"] += (*history.skipped_notes(), *history.left_out_notes())
    if (loss := next(history.bad_losses(), None)) is not None:
        path, told = history.cause_of_loss(loss)
        return Provenance("nan" if any(s.nan for s in loss.inputs) else "inf", *told, tuple(path[:_MAX_PATH]), **facts)
    return Provenance("", NOTHING, None, None, "", **facts)


def _birth(times: list[tuple[Op, bool]]) -> Birth:
    op = times[0][0]
    steps = len({other.step for other, _ in times})
    return Birth(op, nan_reasons.explain(op), len(times), steps, all(scaled for _, scaled in times))


def _notes(trace: Trace) -> list[str]:
    notes = ["the trace has no statistics (level names); record it with level fast"] * (trace.level == "names")
    notes += [f"{name}: {trace.meta[name]}" for name in ("compiled", "raised", "lost") if name in trace.meta]
    return notes + [text for name, text in trace.meta.items() if name.startswith("note ")]
