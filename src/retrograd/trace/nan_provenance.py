"""Provenance of the first NaN or Inf of a trace. No torch.

An operator *made* a NaN if a result has one and no input has; an Inf likewise. The first NaN is followed back through
the bad inputs to the operator that made the Inf behind it (an overflow, say), to a value that came from outside, or to
memory that nobody seen has written. Infinities that were written deliberately, as for masks, are no cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.trace import nan_reasons
from retrograd.trace.schema import Op, Stats, Trace

SCHEMA = "retrograd.provenance/1"
_MAX_PATH = 12  # operators of the path that are kept
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
    for kind in ("nan", "inf"):
        first = history.first(kind)
        if first is not None:
            path = history.path_to(first, kind)
            origin, op, tensor, reason = history.cause(path, kind)
            facts["notes"] += tuple(history.earlier_infinity(path))
            return Provenance(kind, origin, op, tensor, reason, tuple(path[:_MAX_PATH]), **facts)
    return Provenance("", NOTHING, None, None, "", **facts)


def _notes(trace: Trace) -> list[str]:
    notes = ["the trace has no statistics (level names); record it with level fast"] * (trace.level == "names")
    notes += [f"{name}: {trace.meta[name]}" for name in ("compiled", "raised", "lost") if name in trace.meta]
    return notes + [text for name, text in trace.meta.items() if name.startswith("note ")]


def _has(stats: Stats, kind: str) -> bool:
    return bool(stats.nan) if kind == "nan" else bool(stats.inf)


class _History:
    """The operator that made each value."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.producers: dict[int, Op] = {}
        self.writers: dict[int, list[Op]] = {}
        self.deliberate: set[int] = set()  # values with infinities that were written as such
        for op in ops:
            deliberate = nan_reasons.writes_infinity(op) or any(self._is_mask(s) for s in op.inputs)
            for stats in op.outputs:
                if all(stats.tensor != source.tensor for source in op.inputs):
                    self.producers.setdefault(stats.tensor, op)
                    self.writers.setdefault(stats.storage, []).append(op)
                if deliberate and stats.inf and not stats.nan:
                    self.deliberate.add(stats.tensor)

    def first(self, kind: str) -> Op | None:
        """The first operator that has or reads such a value; not one that only handles masks."""
        for op in self.ops:
            # Memory that nobody has written holds anything; that counts where it is read.
            for stats in op.inputs if nan_reasons.only_allocates(op) else (*op.inputs, *op.outputs):
                if _has(stats, kind) and not (kind == "inf" and self._is_mask(stats)):
                    return op
        return None

    def path_to(self, last: Op, kind: str) -> list[Op]:
        """The operators from where the bad values behind an operator begin to the operator itself."""
        path, here = [last], last
        seen = {last.index}
        while True:
            source = self._bad_input(here, kind)
            producer = None if source is None else self._producer(source, here)
            if producer is None or producer.index in seen:
                return path[::-1]
            seen.add(producer.index)
            path.append(producer)
            here = producer

    def earlier_infinity(self, path: list[Op]) -> list[str]:
        """A note on an operator that made an Inf before all of this, though it is not on the path."""
        first = self.first("inf")
        if first is None or first.index >= path[0].index or self._bad_input(first, "inf") is not None:
            return []
        reason = nan_reasons.explain(first)
        return [f"an Inf was made before, by {first.name}{_at(first)}" + (f": {reason}" if reason else "")]

    def cause(self, path: list[Op], kind: str) -> tuple[str, Op, Stats | None, str]:
        """Origin, operator, tensor and reason, for a path of `path_to`."""
        op = path[0]
        source = self._bad_input(op, kind)
        if source is None:
            return MADE, op, next((s for s in op.outputs if s.bad), None), nan_reasons.explain(op)
        before = self._writers(source, op)
        if before and nan_reasons.only_allocates(before[0]):
            return UNSEEN, op, source, (
                f"it read memory that `{before[0].name}`{_at(before[0])} made and no recorded operator has filled: "
                "it is uninitialised, or a kernel that is launched beside operators wrote it"
            )  # fmt: skip
        return OUTSIDE, op, source, _outside_reason(source, op)

    def _bad_input(self, op: Op, kind: str) -> Stats | None:
        """The input that brought the bad values: NaN before Inf, and no mask."""
        for sought in dict.fromkeys((kind, "nan", "inf")):
            for stats in op.inputs:
                if _has(stats, sought) and not (sought == "inf" and self._is_mask(stats)):
                    return stats
        # A tensor of which only a view is read has no counts.
        shown = {s.storage for s in op.outputs if _has(s, kind)} - {-1}
        return next((s for s in op.inputs if s.storage in shown and s.nan is None and s.low is None), None)

    def _producer(self, source: Stats, reader: Op) -> Op | None:
        """The operator that made a value; of a part of a tensor, the last that wrote bad values into its memory."""
        producer = self.producers.get(source.tensor)
        if producer is not None and producer.index < reader.index:
            return None if nan_reasons.only_allocates(producer) else producer
        writers = reversed(self._writers(source, reader))
        return next((op for op in writers if any(s.bad and s.storage == source.storage for s in op.outputs)), None)

    def _writers(self, source: Stats, reader: Op) -> list[Op]:
        """The operators that wrote to the memory of a value before another read it; none where it is not known."""
        known = self.writers.get(source.storage, ()) if source.storage >= 0 else ()
        return [op for op in known if op.index < reader.index]

    def _is_mask(self, stats: Stats) -> bool:
        """Deliberate infinities: written as such, or between zeros, as an additive mask that came in."""
        if not stats.inf or stats.nan:
            return False
        foreign = stats.tensor not in self.producers and stats.storage not in self.writers
        return stats.tensor in self.deliberate or (foreign and stats.low == stats.high == 0)


def _at(op: Op) -> str:
    return f" ({op.place})" if op.place else ""


def _outside_reason(source: Stats, op: Op) -> str:
    counts = " and ".join(f"{n} {name}" for n, name in ((source.nan, "NaN"), (source.inf, "Inf")) if n)
    if op.node == "AccumulateGrad":
        before = "from a backward before the recording began"
        return f"the gradient that the new one was added to already had {counts}, {before}"
    if source.name:
        when = f"before step {op.step}" if op.step else "before the recording began"
        return f"the parameter or buffer `{source.name}` already had {counts} {when}"
    tensor = f"a tensor of shape {list(source.shape)} that no recorded operator made"
    return f"{tensor} already had {counts} when it was first read"
