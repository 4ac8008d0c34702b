"""Where the first NaN or Inf of a trace comes from. No torch.

An operator *made* a NaN if a result has one and no input has; an Inf likewise. The first NaN is followed back through
the bad inputs to the operator that made the Inf behind it (an overflow, say), to a value that came from outside, or to
memory that nobody seen has written. Infinities that were written down on purpose, as for masks, are no cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrograd.core.schema import Record, Shown
from retrograd.trace import nan_reasons
from retrograd.trace.schema import Op, Stats, Trace

SCHEMA = "retrograd.provenance/1"
_MOST_STEPS = 12  # of the way that is told
MADE, OUTSIDE, UNSEEN, NOTHING = "made", "outside", "unseen", ""


@dataclass(frozen=True, slots=True)
class Provenance(Record, Shown):
    """What is known of the first NaN or Inf.

    Attributes:
        found: "nan", "inf" if there is no NaN, "" if there is neither.
        origin: "made" by `op`; "outside" if it came in with `tensor`, which `op` was the first to read; "unseen" if
            `op` read memory that no recorded operator had filled; "" if nothing was found.
        op: the operator, None if nothing was found.
        tensor: the bad input or result.
        reason: why, in a sentence; "" where it is not plain.
        way: operators from `op` to the first NaN, at most 12 of them.
        bad: how many operators have a bad result.
        total: how many operators there are.
        steps: how many steps.
        level: of the trace.
        notes: what limits the answer.
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
    schema: str = SCHEMA

    @property
    def exit_code(self) -> int:
        """1 if something was found, else 0; 3 if nobody counted."""
        return 1 if self.found else 3 if self.level == "names" else 0


def provenance(trace: Trace) -> Provenance:
    """The first NaN of a trace, or else the first Inf, and where it comes from."""
    facts: dict[str, Any] = {
        "bad": sum(any(s.bad for s in op.outputs) for op in trace.ops),
        "total": len(trace.ops),
        "steps": len({op.step for op in trace.ops}),
        "level": trace.level,
        "notes": tuple(_notes(trace)),
    }
    history = _History(trace.ops)
    for found in ("nan", "inf"):
        first = history.first(found)
        if first is not None:
            way = history.back(first, found)
            origin, op, tensor, reason = history.cause(way, found)
            facts["notes"] += tuple(history.earlier(way))
            return Provenance(found, origin, op, tensor, reason, tuple(way[:_MOST_STEPS]), **facts)
    return Provenance("", NOTHING, None, None, "", **facts)


def _notes(trace: Trace) -> list[str]:
    found = []
    if trace.level == "names":
        found.append("the trace has no statistics (level names); record it with level fast")
    for name in ("compiled", "raised", "lost"):
        if name in trace.meta:
            found.append(f"{name}: {trace.meta[name]}")
    return found + [text for name, text in trace.meta.items() if name.startswith("note ")]


def _has(stats: Stats, kind: str) -> bool:
    return bool(stats.nan) if kind == "nan" else bool(stats.inf)


class _History:
    """Who made which value."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.maker: dict[int, Op] = {}
        self.writers: dict[int, list[Op]] = {}
        self.deliberate: set[int] = set()  # values with infinities that were meant
        for op in ops:
            meant = nan_reasons.writes_infinity(op) or any(self._is_mask(s) for s in op.inputs)
            for stats in op.outputs:
                if all(stats.tensor != given.tensor for given in op.inputs):
                    self.maker.setdefault(stats.tensor, op)
                    self.writers.setdefault(stats.storage, []).append(op)
                if meant and stats.inf and not stats.nan:
                    self.deliberate.add(stats.tensor)

    def first(self, kind: str) -> Op | None:
        """The first operator that has or reads such a value; not one that only handles masks."""
        for op in self.ops:
            # Memory that nobody has written holds anything; that counts where it is read.
            for stats in op.inputs if nan_reasons.makes_memory(op) else (*op.inputs, *op.outputs):
                if _has(stats, kind) and not (kind == "inf" and self._is_mask(stats)):
                    return op
        return None

    def back(self, last: Op, kind: str) -> list[Op]:
        """The way from where the bad values behind an operator begin to the operator itself."""
        way, here = [last], last
        seen = {last.index}
        while True:
            given = self._bad_input(here, kind)
            maker = None if given is None else self._maker(given, here)
            if maker is None or maker.index in seen:
                return way[::-1]
            seen.add(maker.index)
            way.append(maker)
            here = maker

    def earlier(self, way: list[Op]) -> list[str]:
        """What made an Inf before all of this, though it is not on the way."""
        first = self.first("inf")
        if first is None or first.index >= way[0].index or self._bad_input(first, "inf") is not None:
            return []
        said = nan_reasons.why(first)
        return [f"an Inf was made before, by {first.name}{_at(first)}" + (f": {said}" if said else "")]

    def cause(self, way: list[Op], kind: str) -> tuple[str, Op, Stats | None, str]:
        """Origin, operator, tensor and reason, for the way that `back` found."""
        op = way[0]
        given = self._bad_input(op, kind)
        if given is None:
            made = next((s for s in op.outputs if s.bad), None)
            return MADE, op, made, nan_reasons.why(op)
        fresh = self._unwritten(given, op)
        if fresh is not None:
            return UNSEEN, op, given, (
                f"it read memory that `{fresh.name}`{_at(fresh)} made and no recorded operator has filled: it is "
                "uninitialised, or a kernel that is launched beside operators wrote it"
            )  # fmt: skip
        return OUTSIDE, op, given, _outside(given, op)

    def _bad_input(self, op: Op, kind: str) -> Stats | None:
        """The input that brought the bad values: NaN before Inf, and no mask."""
        for wanted in dict.fromkeys((kind, "nan", "inf")):
            for stats in op.inputs:
                if _has(stats, wanted) and not (wanted == "inf" and self._is_mask(stats)):
                    return stats
        # Nobody counts a tensor of which only a view is read.
        shown = {s.storage for s in op.outputs if _has(s, kind)} - {-1}
        return next((s for s in op.inputs if s.storage in shown and s.nan is None and s.low is None), None)

    def _maker(self, given: Stats, reader: Op) -> Op | None:
        """The operator that made a value; of a part of a tensor, the last that wrote bad values into its memory."""
        maker = self.maker.get(given.tensor)
        if maker is not None and maker.index < reader.index:
            return None if nan_reasons.makes_memory(maker) else maker
        if given.storage < 0:
            return None
        before = [op for op in self.writers.get(given.storage, ()) if op.index < reader.index]
        return next(
            (op for op in reversed(before) if any(s.bad and s.storage == given.storage for s in op.outputs)), None
        )

    def _unwritten(self, given: Stats, reader: Op) -> Op | None:
        """The operator that made the memory of a value without filling it."""
        if given.storage < 0:
            return None
        before = [op for op in self.writers.get(given.storage, ()) if op.index < reader.index]
        return before[0] if before and nan_reasons.makes_memory(before[0]) else None

    def _is_mask(self, stats: Stats) -> bool:
        """Infinities that were meant: written as such, or between zeros, as an additive mask that came in."""
        if not stats.inf or stats.nan:
            return False
        foreign = stats.tensor not in self.maker and stats.storage not in self.writers
        return stats.tensor in self.deliberate or (foreign and stats.low == stats.high == 0)


def _at(op: Op) -> str:
    return f" ({op.place})" if op.place else ""


def _outside(given: Stats, op: Op) -> str:
    what = " and ".join(
        f"{number} {name}" for number, name in ((given.nan, "NaN"), (given.inf, "Inf")) if number
    )  # fmt: skip
    if op.node == "AccumulateGrad":
        return (
            f"the gradient that the new one was added to already had {what}, from a backward before the recording began"
        )
    if given.name:
        when = f"before step {op.step}" if op.step else "before the recording began"
        return f"the parameter or buffer `{given.name}` already had {what} {when}"
    made = f"a tensor of shape {list(given.shape)} that no recorded operator made"
    return f"{made} already had {what} when it was first read"
