"""The operator that made each value of a trace, and the way of a NaN or Inf back to where it began. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from retrograd.trace import gradient_scaling, nan_reasons
from retrograd.trace.deliberate_values import VIEWS, DeliberateValues
from retrograd.trace.diffing.identity import base_name, names
from retrograd.trace.left_out import left_out
from retrograd.trace.schema import BACKWARD, OPTIMIZER, Op, Stats

_SELECTIONS = names("index index_select embedding gather take take_along_dim embedding_bag _embedding_bag")
_NEAR = 50  # operators before one of an optimizer in which the number may have been read that it was given
# Origins: of `nan_provenance.Provenance`.
MADE, OUTSIDE, UNSEEN, RECEIVED, NOTHING = "made", "outside", "unseen", "received", ""


def has(stats: Stats, kind: str) -> bool:
    return bool(stats.nan) if kind == "nan" else bool(stats.inf)


class History:
    """The operator that made each value."""

    def __init__(self, ops: Sequence[Op], step: int | None, begin: int) -> None:
        self.ops = ops
        self.searched = [op for op in ops if op.step >= begin and step in (None, op.step)]
        self.skips = gradient_scaling.skips(ops)
        self._overflows: dict[int, Op] = {}  # of each skip the first overflow
        self._results = {stats.tensor for op in ops for stats in op.outputs}
        self.producers: dict[int, Op] = {}
        self.writers: dict[int, list[Op]] = {}
        trains = any(op.phase == BACKWARD for op in ops)
        # Without a backward it is not known what does harm.
        self._left_out = left_out(ops) if trains else set[int]()
        for op in (op for op in ops if any(s.tensor in self._left_out for s in op.outputs)):
            # One past the largest is not what the program meant, even if a zero comes of it: 1/sqrt(mean of squares).
            if not any(s.bad for s in op.inputs) and nan_reasons.explain(op).startswith("overflow"):
                self._left_out -= {s.tensor for s in op.outputs}
        self.deliberate = DeliberateValues(self.producers, self.writers, trains=trains)
        for op in ops:
            if nan_reasons.adopts(op):
                continue
            self.deliberate.add(op)
            for stats in op.outputs:
                if all(stats.tensor != source.tensor for source in op.inputs):
                    self.producers.setdefault(stats.tensor, op)
                    self.writers.setdefault(stats.storage, []).append(op)

    def first(self, kind: str) -> Op | None:
        """The first operator that has or reads such a value; not one that only handles masks or what a scaler skips."""
        return next((op for op in self.searched if self._handles(op, kind) and not self._scaled(op, kind)), None)

    def _handles(self, op: Op, kind: str, *, harmless: bool = False) -> bool:
        if op.name.startswith("fsdp::"):
            return False  # copies into a part of new memory and returns all of it
        # Memory that nobody has written holds anything; that counts where it is read.
        shows = base_name(op.name) in VIEWS and bool(op.inputs) and all(self._is_unwritten(s, op) for s in op.inputs)
        unread = shows or nan_reasons.only_allocates(op) or nan_reasons.adopts(op)
        seen = () if unread else (*op.inputs, *op.outputs)
        return any(
            has(stats, kind)
            and not self._is_deliberate(stats, kind)
            and (harmless or stats.tensor not in self._left_out)
            for stats in seen
        )

    def _is_deliberate(self, stats: Stats, kind: str) -> bool:
        return self.deliberate.is_mask(stats) if kind == "inf" else stats.tensor in self.deliberate.nan

    def _is_unwritten(self, stats: Stats, reader: Op) -> bool:
        """Whether nobody has written to the memory of a value before another reads it."""
        writers = self._writers(stats, reader)
        return bool(writers) and all(
            nan_reasons.only_allocates(w) or base_name(w.name) in VIEWS or w.name == "fsdp::all_gather_copy_in"
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
            f"at scale {skip.scale:g}, {named(op)}"
        ]

    def left_out_notes(self) -> list[str]:
        """A note on the first that made one which nothing has any more that is computed from it."""
        makers = (op for op in self.searched if any(s.bad and s.tensor in self._left_out for s in op.outputs))
        op = next((op for op in makers if any(self._handles(op, k, harmless=True) for k in ("nan", "inf"))), None)
        return [f"what {named(op)} made is left out by all that is computed from it, as by where"] if op else []

    def births(self) -> list[list[tuple[Op, bool]]]:
        """Operators that made a NaN or Inf, a list for each line, in order, with whether a scaler skips it."""
        rows: dict[tuple[str, ...], list[tuple[Op, bool]]] = {}
        for op in self.searched:
            kind = next((k for k in ("nan", "inf") if any(has(s, k) for s in op.outputs)), None)
            if kind is None or nan_reasons.only_allocates(op) or not self._handles(op, kind, harmless=True):
                continue
            if self._bad_input(op, kind) is None:
                rows.setdefault((op.name, op.module, op.phase, op.place), []).append((op, self._scaled(op, kind)))
        return list(rows.values())

    def path_to(self, last: Op, kind: str, *, masks: bool = False) -> list[Op]:
        """The operators from where the bad values behind an operator begin to the operator itself; of `masks`, too."""
        path, here = [last], last
        seen = {last.index}
        while True:
            source = self._bad_input(here, kind, masks=masks)
            producer = self._unseen_source(here, kind) if source is None else self._producer(source, here)
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
        return [f"an Inf was made before, by {named(first)}" + (f": {reason}" if reason else "")]

    def bad_losses(self) -> Iterator[Op]:
        """What each backward() begins with, ones like the loss, where the loss is infinite or NaN."""
        for op in self.searched:
            if base_name(op.name) == "ones_like" and any(s.bad and s.shape == () for s in op.inputs):
                begins = any(after.phase == BACKWARD for after in self.ops[op.index + 1 : op.index + 2])
                if begins and not self._scaled(op, "inf"):
                    yield op

    def bad_loss_before(self, op: Op) -> Op | None:
        """The loss, if it was bad before an operator of its backward made a NaN of finite numbers."""
        if self._bad_input(op, "nan") is not None or (op.phase != BACKWARD and self._given_unseen(op) is None):
            return None
        return next((loss for loss in self.bad_losses() if loss.step == op.step and loss.index < op.index), None)

    def cause_of_loss(self, loss: Op) -> tuple[list[Op], tuple[str, Op, Stats | None, str]]:
        """Path and cause of a loss that is bad; of a mask, where it came into a result of fewer elements."""
        kind = "nan" if any(s.nan for s in loss.inputs) else "inf"
        if kind == "nan" or self._handles(loss, "inf"):
            path = self.path_to(loss, kind)
            return path, self.cause(path, kind)
        path = self.path_to(loss, "inf", masks=True)
        sizes = [max((math.prod(s.shape) for s in op.outputs if s.inf), default=0) for op in path]
        at = next((k for k in range(1, len(path)) if 0 < sizes[k] < sizes[k - 1]), 0)
        source = self._bad_input(path[0], "inf", masks=True)
        if source is not None and not at:  # came in, and is added up where it is first read: no mask
            return path, (OUTSIDE, path[0], source, _outside_reason(source, path[0]))
        op, tensor = path[at], next((s for s in path[at].outputs if s.inf), None)
        whose = (
            f"that {named(path[0])} wrote deliberately"
            if source is None
            else f"of a tensor that {named(path[0])} was given"
        )
        return path[at:], (MADE, op, tensor, (
            f"an infinity {whose}, as of a mask, is not left out here and makes the loss infinite"
        ))  # fmt: skip

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
            makers = (self.producers.get(s.tensor) for s in op.inputs if base_name(op.name) == "where")
            determinants = (o for o in makers if o and base_name(o.name) == "_linalg_slogdet" and o.place == op.place)
            op = next(determinants, op)
            factor, reason = self._factor_before(op), nan_reasons.explain(op)
            if not factor and (gradient := self._given_unseen(op)) is not None:
                return UNSEEN, op, gradient, (
                    f"it was given a tensor of shape {list(gradient.shape)} that no recorded operator made and nobody "
                    "has counted, as a gradient of compiled code is (--compiled eager records it)"
                    + f"; or {reason}" * bool(reason)
                )  # fmt: skip
            return MADE, op, next((s for s in op.outputs if s.bad), None), factor or reason or _not_measured(op)
        # A view computes nothing: the first to compute with it tells more.
        if base_name(op.name) in VIEWS:
            after = (other for other in self.ops[op.index + 1 :] if base_name(other.name) not in VIEWS)
            op = next((other for other in after if any(s.storage == source.storage for s in other.inputs)), op)
        op = self._selection(self._first_to_read(source, op), source)
        before = self._writers(source, path[0])
        if before and nan_reasons.only_allocates(before[0]):
            return UNSEEN, op, source, (
                f"it read memory that {named(before[0])} made and no recorded operator has filled: "
                "it is uninitialised, or a kernel that is launched beside operators wrote it"
            )  # fmt: skip
        return OUTSIDE, op, source, _outside_reason(source, op)

    def _first_to_read(self, source: Stats, op: Op) -> Op:
        """The first that has bad results by a value that came in; of an Inf the way of a NaN may begin later."""
        readers = (other for other in self.ops[: op.index] if any(s.tensor == source.tensor for s in other.inputs))
        passed = (r for r in readers if base_name(r.name) not in VIEWS and any(s.bad for s in r.outputs))
        return next(passed, op)

    def _selection(self, op: Op, source: Stats) -> Op:
        """The first to take bad elements of a value of which the same line took others before: its index tells more."""
        readers = [
            other for other in self.ops[op.index :]
            if any(s.tensor == source.tensor or -1 < source.storage == s.storage for s in other.inputs)
            and base_name(other.name) in _SELECTIONS
        ]  # fmt: skip
        bad = next((other for other in readers if any(s.bad for s in other.outputs)), None)
        if bad is None or bad is readers[0]:
            return op
        return bad if (bad.name, bad.place) == (readers[0].name, readers[0].place) else op

    def _factor_before(self, op: Op) -> str:
        """An infinite factor among an optimizer's operators behind this one, whose results nobody counted."""
        reasons = (nan_reasons.infinite_factor(here, nan=False) for here in self._uncounted(op))
        return next(filter(None, reasons), "")

    def _given_unseen(self, op: Op) -> Stats | None:
        """What an optimizer was given that nobody made or counted: a gradient of code that torch.compile generated."""
        uncounted = (s for here in self._uncounted(op) for s in here.inputs if s.nan is None and s.shape and not s.name)
        return next((s for s in uncounted if "float" in s.dtype and s.tensor not in self._results), None)

    def _uncounted(self, op: Op) -> Iterator[Op]:
        """An operator of an optimizer, and those of its own behind it whose results nobody counted."""
        behind, seen = [op], {op.index}
        while op.owner == OPTIMIZER and behind:
            yield (here := behind.pop())
            more = [other for other in self._unmeasured(here) if other.index not in seen]
            seen |= {other.index for other in more}
            behind += more

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

    def _bad_input(self, op: Op, kind: str, *, masks: bool = False) -> Stats | None:
        """The input that brought the bad values: NaN before Inf, and no mask unless those count."""
        bad = [
            stats
            for sought in dict.fromkeys((kind, "nan", "inf"))
            for stats in op.inputs
            if has(stats, sought)
            and not (sought == "inf" and not masks and self.deliberate.is_mask(stats))
            and not (base_name(op.name) == "where" and self._is_deliberate(stats, "nan"))
        ]
        if bad and op.name.startswith("fsdp::"):  # memory that nobody has written is where it copies to
            bad.sort(key=lambda stats: self._is_unwritten(stats, op))
        if bad:
            return bad[0]
        if viewed := next((stats for stats in op.inputs if self._shows_bad(stats, kind)), None):
            return viewed
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
        # What only sends has given nothing.
        before = next((o for o in reversed(self.ops[: reader.index]) if o.outputs or not is_collective(o)), reader)
        if is_collective(before) and not self._writers(source, reader):
            return before  # gloo reduces in memory of its own, and copies from there
        writers = reversed(self._writers(source, reader))
        # Of what a collective wrote nobody has counted: it is there only after a wait.
        return next(
            (w for w in writers if is_collective(w) or any(s.bad and s.storage == source.storage for s in w.outputs)),
            None,
        )

    def _unseen_source(self, op: Op, kind: str) -> Op | None:
        """What is behind an operator that was given nothing bad, as far as anybody counted."""
        if op.owner != OPTIMIZER:
            return self._behind_view(op, kind)
        behind, seen = self._unmeasured(op), {op.index}
        while behind:
            here = behind.pop()
            if self._bad_input(here, kind) is not None:
                return here
            if here.index not in seen:
                seen.add(here.index)
                behind += self._unmeasured(here)
        return None

    def _unmeasured(self, op: Op) -> list[Op]:
        """The optimizer's operators that made what another of its own was given, where nobody counted."""
        makers = (self.producers.get(s.tensor) for s in op.inputs if s.nan is None)
        known = [other for other in makers if other is not None and other.owner == OPTIMIZER and other.index < op.index]
        if nan_reasons.infinite_factor(op, nan=False):  # a number that was read of a tensor
            near = self.ops[max(0, op.index - _NEAR) : op.index]
            known += [other for other in near[::-1] if base_name(other.name) == "_local_scalar_dense"][:1]
        return known

    def _behind_view(self, view: Op, kind: str) -> Op | None:
        """The collective whose result somebody unseen, as the callback of a hook of DDP, wrote into what is viewed."""
        if base_name(view.name) not in VIEWS or not any(has(s, kind) or s.inf for s in view.outputs):
            return None
        before = [
            op for op in self.ops[: view.index]
            if is_collective(op) and op.outputs and (op.step, op.phase) == (view.step, view.phase)
        ]  # fmt: skip
        senders = (op for op in reversed(before) if self._bad_input(op, kind) is not None)
        return next(senders, before[-1] if before else None)

    def _shows_bad(self, stats: Stats, kind: str) -> bool:
        """Whether a value that nobody counted is a view, or part, of one with bad values."""
        maker = self.producers.get(stats.tensor) if stats.nan is None and stats.low is None else None
        if maker is None or base_name(maker.name) not in VIEWS or not maker.inputs:
            return False
        return has(maker.inputs[0], kind) or bool(maker.inputs[0].inf) or self._shows_bad(maker.inputs[0], kind)

    def _writers(self, source: Stats, reader: Op) -> list[Op]:
        """The operators that wrote to the memory of a value before another read it; none where it is not known."""
        known = self.writers.get(source.storage, ()) if source.storage >= 0 else ()
        return [op for op in known if op.index < reader.index]


def is_collective(op: Op) -> bool:
    """Whether other ranks have a part in its results."""
    return op.name.startswith(("c10d::", "_c10d_functional::")) and not op.name.endswith("wait_tensor")


def _not_measured(op: Op) -> str:
    unknown = op.owner == OPTIMIZER and any(
        s.nan is None and s.dtype.startswith(("float", "bfloat")) for s in op.inputs
    )
    return "an operator of the optimizer before it made it: their results are measured at level full" if unknown else ""


def named(op: Op) -> str:
    """Its name, with the line."""
    return f"`{op.name}` ({op.place})" if op.place else f"`{op.name}`"


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
