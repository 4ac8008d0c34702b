"""Provenance of the first NaN or Inf of a trace. No torch.

An operator *made* a NaN if a result has one and no input has; an Inf likewise. The first NaN is followed back through
the bad inputs to the operator that made the Inf behind it (an overflow, say), to a value that came from outside, or to
memory that nobody seen has written. Infinities that were written deliberately, as for masks, are no cause, nor is the
overflow of gradients that GradScaler looks for and skips. What a collective makes came from another rank.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.trace import gradient_scaling, nan_reasons
from retrograd.trace.diffing.identity import base_name, names
from retrograd.trace.schema import BACKWARD, FORWARD, Op, Stats, Trace

SCHEMA = "retrograd.provenance/1"
_MAX_PATH = 12  # operators of the path that are kept
_MAX_BIRTHS = 50
_VIEWS = names(
    "view reshape _unsafe_view as_strided alias detach t transpose permute unsqueeze squeeze expand slice narrow split "
    "select split_with_sizes chunk unbind"
)
_CONSTANTS = names("scalar_tensor full full_like new_full fill")
MADE, OUTSIDE, UNSEEN, RECEIVED, NOTHING = "made", "outside", "unseen", "received", ""


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
    history = _History(trace.ops, step, begin)
    facts: dict[str, Any] = {
        "bad": sum(any(s.bad for s in op.outputs) for op in trace.ops),
        "total": len(trace.ops),
        "steps": len({op.step for op in trace.ops}),
        "level": trace.level,
        "notes": tuple(_notes(trace)),
        "rank": trace.rank,
        "ranks": (trace.rank,),
        "births": history.births() if births else (),
    }
    for kind in ("nan", "inf"):
        first = history.first(kind)
        if first is not None:
            path, sought = history.path_to(first, kind), kind
            if kind == "nan" and (loss := history.infinite_loss(path[0])) is not None:
                facts["notes"] += (f"the first NaN is in its backward, made by {path[0].name}{_at(path[0])}",)
                path, sought = history.path_to(loss, "inf"), "inf"
            origin, op, tensor, reason = history.cause(path, sought)
            facts["notes"] += (*history.earlier_infinity(path), *history.skipped_notes())
            return Provenance(kind, origin, op, tensor, reason, tuple(path[:_MAX_PATH]), **facts)
    facts["notes"] += tuple(history.skipped_notes())
    return Provenance("", NOTHING, None, None, "", **facts)


def _notes(trace: Trace) -> list[str]:
    notes = ["the trace has no statistics (level names); record it with level fast"] * (trace.level == "names")
    notes += [f"{name}: {trace.meta[name]}" for name in ("compiled", "raised", "lost") if name in trace.meta]
    return notes + [text for name, text in trace.meta.items() if name.startswith("note ")]


def _has(stats: Stats, kind: str) -> bool:
    return bool(stats.nan) if kind == "nan" else bool(stats.inf)


class _History:
    """The operator that made each value."""

    def __init__(self, ops: Sequence[Op], step: int | None, begin: int) -> None:
        self.ops = ops
        self.searched = [op for op in ops if op.step >= begin and step in (None, op.step)]
        self.skips = gradient_scaling.skips(ops)
        self._overflows: dict[int, Op] = {}  # of each skip the first overflow
        self.producers: dict[int, Op] = {}
        self.writers: dict[int, list[Op]] = {}
        self.deliberate: set[int] = set()  # values with infinities that were written as such
        self.constants: set[int] = set()  # values that are NaN as a whole since they were written so
        for op in ops:
            deliberate = nan_reasons.writes_infinity(op) or any(self._is_mask(s) for s in op.inputs)
            for stats in op.outputs:
                if all(stats.tensor != source.tensor for source in op.inputs):
                    self.producers.setdefault(stats.tensor, op)
                    self.writers.setdefault(stats.storage, []).append(op)
                if deliberate and stats.inf and not stats.nan:
                    self.deliberate.add(stats.tensor)
            if base_name(op.name) in _CONSTANTS and nan_reasons.writes_nan(op):
                self.constants |= {stats.tensor for stats in op.outputs}

    def first(self, kind: str) -> Op | None:
        """The first operator that has or reads such a value; not one that only handles masks or what a scaler skips."""
        return next((op for op in self.searched if self._handles(op, kind) and not self._scaled(op, kind)), None)

    def _handles(self, op: Op, kind: str) -> bool:
        if op.name.startswith("fsdp::"):
            return False  # copies into a part of new memory and returns all of it
        # Memory that nobody has written holds anything; that counts where it is read.
        unread = nan_reasons.only_allocates(op) or (
            base_name(op.name) in _VIEWS and bool(op.inputs) and all(self._is_unwritten(s, op) for s in op.inputs)
        )
        seen = () if unread else (*op.inputs, *op.outputs)
        if any(stats.nan and stats.tensor in self.constants for stats in seen):
            # A branch of `where` that nobody takes, a buffer before it is filled, what nanmean leaves out: no harm yet.
            seen = tuple(s for s in op.outputs if s.tensor not in self.constants)
        return any(_has(stats, kind) and not (kind == "inf" and self._is_mask(stats)) for stats in seen)

    def _is_unwritten(self, stats: Stats, reader: Op) -> bool:
        """Whether nobody has written to the memory of a value before another reads it."""
        writers = self._writers(stats, reader)
        return bool(writers) and all(
            nan_reasons.only_allocates(w) or base_name(w.name) in _VIEWS or w.name == "fsdp::all_gather_copy_in"
            for w in writers
        )

    def _scaled(self, op: Op, kind: str) -> bool:
        """Whether it has its values from an overflow of scaled gradients in a step that GradScaler skips."""
        skip = next((skip for skip in self.skips if skip.first <= op.index <= skip.last), None)
        if skip is None:
            return False
        origin = self.path_to(op, kind)[0]
        # What came from another rank in a skipped step is told by that rank's trace, if it is no such overflow.
        overflows = self._bad_input(origin, kind) is None and (
            is_collective(origin) or gradient_scaling.overflows(origin, skip)
        )
        if overflows:
            self._overflows.setdefault(skip.last, origin)
        return overflows

    def skipped_notes(self) -> list[str]:
        """A note on the overflows that were passed over."""
        if not self._overflows:
            return []
        skip = next(skip for skip in self.skips if skip.last in self._overflows)
        op = self._overflows[skip.last]
        times = f"{len(self._overflows)} step{'s' * (len(self._overflows) > 1)}"
        return [
            f"GradScaler skipped {times} in which scaled gradients overflow, as it should; first in step {op.step} "
            f"at scale {skip.scale:g}, {op.name}{_at(op)}"
        ]

    def births(self) -> tuple[Birth, ...]:
        """Each operator that made a NaN or Inf, once a line, in the order of the first time."""
        rows: dict[tuple[str, ...], list[tuple[Op, bool]]] = {}
        for op in self.searched:
            kind = next((k for k in ("nan", "inf") if any(_has(s, k) for s in op.outputs)), None)
            if kind is None or nan_reasons.only_allocates(op) or not self._handles(op, kind):
                continue
            if self._bad_input(op, kind) is None:
                rows.setdefault((op.name, op.module, op.phase, op.place), []).append((op, self._scaled(op, kind)))
        return tuple(
            Birth(
                times[0][0], nan_reasons.explain(times[0][0]), len(times), len({op.step for op, _ in times}),
                all(scaled for _, scaled in times),
            )
            for times in list(rows.values())[:_MAX_BIRTHS]
        )  # fmt: skip

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
        first = next((op for op in self.ops if self._handles(op, "inf") and not self._scaled(op, "inf")), None)
        if first is None or first.index >= path[0].index or self._bad_input(first, "inf") is not None:
            return []
        reason = nan_reasons.explain(first)
        return [f"an Inf was made before, by {first.name}{_at(first)}" + (f": {reason}" if reason else "")]

    def infinite_loss(self, op: Op) -> Op | None:
        """The loss, if it was infinite before an operator of its backward made a NaN of finite numbers."""
        if op.phase != BACKWARD or self._bad_input(op, "nan") is not None:
            return None
        # backward() begins with ones like the loss.
        before = (other for other in reversed(self.ops[: op.index]) if other.phase == FORWARD)
        loss = next((other for other in before if base_name(other.name) == "ones_like"), None)
        if loss is None or loss.step != op.step or not self._handles(loss, "inf") or self._scaled(loss, "inf"):
            return None
        return loss

    def cause(self, path: list[Op], kind: str) -> tuple[str, Op, Stats | None, str]:
        """Origin, operator, tensor and reason, for a path of `path_to`."""
        op = path[0]
        source = self._bad_input(op, kind)
        if source is None and (forward := self._forward_of(op)) is not None:
            op = forward
        if source is None and is_collective(op):
            # What it gave is known, and finite; its results are there later, and may have no statistics of their own.
            return RECEIVED, op, next((s for s in op.outputs if s.bad), None), (
                f"this rank gave `{op.name}` finite numbers: another rank gave the "
                f"{'NaN' if kind == 'nan' else 'Inf'}, or the sum over ranks is too large"
            )  # fmt: skip
        if source is None:
            return MADE, op, next((s for s in op.outputs if s.bad), None), nan_reasons.explain(op)
        # A view computes nothing: the first to compute with it tells more.
        if base_name(op.name) in _VIEWS:
            after = (other for other in self.ops[op.index + 1 :] if base_name(other.name) not in _VIEWS)
            op = next((other for other in after if any(s.storage == source.storage for s in other.inputs)), op)
        before = self._writers(source, path[0])
        if before and nan_reasons.only_allocates(before[0]):
            return UNSEEN, op, source, (
                f"it read memory that `{before[0].name}`{_at(before[0])} made and no recorded operator has filled: "
                "it is uninitialised, or a kernel that is launched beside operators wrote it"
            )  # fmt: skip
        return OUTSIDE, op, source, _outside_reason(source, op)

    def _forward_of(self, op: Op) -> Op | None:
        """The forward that made an Inf itself where its derivative, which made one too, is infinite."""
        function = op.node.rstrip("0123456789").removesuffix("Backward").lower()
        if op.phase != BACKWARD or not function or any(s.nan for s in op.outputs):
            return None
        earlier = (other for other in self.ops[: op.index] if other.step == op.step and other.place == op.place)
        return next(
            (
                other for other in earlier
                if base_name(other.name) == function and any(s.inf for s in other.outputs)
                and self._bad_input(other, "inf") is None
            ),
            None,
        )  # fmt: skip

    def _bad_input(self, op: Op, kind: str) -> Stats | None:
        """The input that brought the bad values: NaN before Inf, and no mask."""
        bad = [
            stats
            for sought in dict.fromkeys((kind, "nan", "inf"))
            for stats in op.inputs
            if _has(stats, sought)
            and not (sought == "inf" and self._is_mask(stats))
            and not (stats.tensor in self.constants and base_name(op.name) == "where")
        ]
        if bad and op.name.startswith("fsdp::"):  # memory that nobody has written is where it copies to
            bad.sort(key=lambda stats: self._is_unwritten(stats, op))
        if bad:
            return bad[0]
        if base_name(op.name).startswith("_fused_") or re.search(r"_(\.|$)", op.name):
            return None  # what it wrote in place says nothing of what was there before
        # A tensor of which only a view is read has no counts.
        shown = {s.storage for s in op.outputs if s.bad} - {-1}
        return next((s for s in op.inputs if s.storage in shown and s.nan is None and s.low is None), None)

    def _producer(self, source: Stats, reader: Op) -> Op | None:
        """The operator that made a value; of a part of a tensor, the last that wrote bad values into its memory."""
        producer = self.producers.get(source.tensor)
        if producer is not None and producer.index < reader.index:
            return None if nan_reasons.only_allocates(producer) else producer
        before = self.ops[reader.index - 1] if reader.index else reader
        if is_collective(before) and not self._writers(source, reader):
            return before  # gloo reduces in memory of its own, and copies from there
        writers = reversed(self._writers(source, reader))
        # Of what a collective wrote nobody has counted: it is there only after a wait.
        return next(
            (w for w in writers if is_collective(w) or any(s.bad and s.storage == source.storage for s in w.outputs)),
            None,
        )

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


def is_collective(op: Op) -> bool:
    """Whether other ranks have a part in its results."""
    return op.name.startswith(("c10d::", "_c10d_functional::")) and not op.name.endswith("wait_tensor")


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
