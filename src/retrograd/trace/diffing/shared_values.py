"""Values that an eager and a compiled run share: what compiled code splits or fuses has no operator to be paired with.

A tensor of the eager run has a counterpart where the compiled run has one of as many elements whose statistics are
within the attainable difference. It vouches for everything that it was computed from. What an optimizer reads belongs
together by the names of its parameters: there a difference is certain, elsewhere a value is only not seen. Pure.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from retrograd.trace.diffing import error_bounds
from retrograd.trace.diffing.identity import base_name, names, unwrapped_module
from retrograd.trace.diffing.verdicts import draws_random, is_packaging, update_error, writes
from retrograd.trace.schema import OTHER, Op, Stats

_VIEWS = names(
    "t transpose permute expand squeeze unsqueeze select slice split split_with_sizes as_strided unbind chunk"
)
_FILLS = re.compile(r"_like$|^new_|^(?:fill|zero)$|^(?:full|zeros|ones)")
_LINEAR = names("add sub")  # an update by a noisy gradient is no noisier than that
_MOST_ATTEMPTS = 1000  # values of one size that are looked at for a counterpart


@dataclass(frozen=True, slots=True)
class Anchor:
    """A tensor that both runs certainly have, since the same update of the same parameters reads or writes it."""

    eager: Op
    compiled: Op
    a: Stats
    b: Stats
    parameters: tuple[str, ...]
    read: bool  # an input
    excess: float  # above 1: out; NaN: not known


@dataclass
class SharedValues:
    """What two runs have in common.

    Attributes:
        anchors: tensors that updates read and write, in the order of the eager run.
        counterparts: number of a value of the eager run -> a value of the compiled run that may be the same.
        unseen: operators of the eager run, results of which nothing in the compiled run vouches for.
        unpaired: how many updates of parameters the eager run has that the compiled run has not, or has more often,
            and whose result nothing in the compiled run shows.
        last: parameters whose last update is that of a compiled optimizer, after which nobody reads them.
        alone: how many operators of the eager and of the compiled run have no counterpart of their own.
    """

    eager: Sequence[Op]
    compiled: Sequence[Op]
    anchors: list[Anchor] = field(default_factory=list[Anchor])
    counterparts: dict[int, Stats] = field(default_factory=dict[int, Stats])
    unseen: list[Op] = field(default_factory=list[Op])
    unpaired: int = 0
    last: list[str] = field(default_factory=list[str])
    alone: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._errors = _Errors(self.eager)
        self.anchors = list(self._anchors())
        for a, b in _steps(self.eager, self.compiled):
            self._find_counterparts(a, b)
        self._vouched = self._vouch()
        work = [op for op in self.eager if op.phase != OTHER and not _moves(op)]
        self.unseen = [op for op in work if any(map(self.is_unseen, op.outputs))]
        taken = {t.tensor for t in self.counterparts.values()}
        others = [op for op in self.compiled if op.phase != OTHER and not _moves(op)]
        self.alone = (
            sum(not any(t.tensor in self.counterparts for t in op.outputs) for op in work),
            sum(not any(t.tensor in taken for t in op.outputs) for op in others),
        )

    @property
    def out(self) -> list[Anchor]:
        """Anchors that differ more than rounding explains, of the first step that has any."""
        beyond = [anchor for anchor in self.anchors if anchor.excess > 1]
        return [anchor for anchor in beyond if anchor.eager.step == beyond[0].eager.step]

    @property
    def unknown(self) -> list[Anchor]:
        """Updated parameters that were not measured, or whose attainable difference is not known."""
        return [anchor for anchor in self.anchors if not anchor.read and math.isnan(anchor.excess)]

    def leads(self) -> list[Op]:
        """Operators of the eager run that lead to what is out and for whose results nothing vouches, in their order."""
        reached = {anchor.a.tensor for anchor in self.out if anchor.read}
        step = self.out[0].eager.step if self.out else None
        return self._leading_to(reached, [op for op in self.eager if op.step == step])

    def chain(self, op: Op) -> list[Op]:
        """Those of them that lead to an operator of them through values for which nothing vouches, and itself."""
        reached = {t.tensor for t in op.outputs}
        return self._leading_to(reached, self.eager[: op.index + 1], self.is_unseen)

    def _leading_to(
        self, reached: set[int], ops: Sequence[Op], through: Callable[[Stats], bool] = lambda t: True
    ) -> list[Op]:
        leads: list[Op] = []
        for op in reversed(ops):
            results = [t for t in op.outputs if t.tensor in reached]
            if results:
                reached.update(t.tensor for t in op.inputs if through(t) or _moves(op))
                if op.phase != OTHER and not _moves(op) and any(map(self.is_unseen, results)):
                    leads.append(op)
        return leads[::-1]

    def draws(self) -> Op | None:
        """The first that draws random numbers for which nothing vouches, also where they were not measured."""
        reached = {anchor.a.tensor for anchor in self.out if anchor.read}
        drawn = None
        for op in reversed(self.eager):
            if any(t.tensor in reached for t in op.outputs) and op.step == self.out[0].eager.step:
                reached.update(t.tensor for t in op.inputs)
                if draws_random(op) and not any(t.tensor in self._vouched for t in op.outputs):
                    drawn = op
        return drawn

    def from_outside(self, op: Op) -> Stats | None:
        """An input of the operator that no operator made and the compiled run does not have."""
        produced = {t.tensor for other in self.eager for t in other.outputs}
        return next((t for t in op.inputs if t.tensor not in produced and t.tensor not in self._vouched), None)

    def reader(self, op: Op) -> tuple[Op, int] | None:
        """The operator of the compiled run, and its input, that reads what stands for the result of an operator.

        It does what a reader in the eager run does, and what else that reads is the same.
        """
        results = {t.tensor for t in op.outputs if self.is_unseen(t)}
        for reader in self.eager:
            places = [k for k, t in enumerate(reader.inputs) if t.tensor in results]
            if places and _moves(reader):
                results.update(t.tensor for t in reader.outputs)
            elif len(places) == 1 and len(reader.inputs) > 1:
                same = [c for c in self.compiled if c.step == reader.step and self._reads_alike(reader, c, places[0])]
                if len(same) == 1:
                    return same[0], places[0]
        return None

    def _reads_alike(self, reader: Op, other: Op, place: int) -> bool:
        if (base_name(reader.name), reader.phase) != (base_name(other.name), other.phase):
            return False
        if [t.shape for t in reader.inputs] != [t.shape for t in other.inputs]:
            return False
        times = [self._excess(s, t) for s, t in zip(reader.inputs, other.inputs, strict=True)]
        return times.pop(place) > 1 and all(x <= 1 for x in times)

    def _excess(self, s: Stats, t: Stats) -> float:
        """By how many times two values differ more than attainable; NaN where that is not known."""
        error = self._errors.of(s)
        if math.prod(s.shape) != math.prod(t.shape) or s.dtype != t.dtype or s.bad != t.bad:
            return math.inf
        if s.digest is not None and s.digest == t.digest:
            return 0.0
        if s.rms is None or t.rms is None or s.low is None or t.low is None or not math.isfinite(error):
            return math.nan
        return error_bounds.excess(s, t, error)

    def _anchors(self) -> Iterator[Anchor]:
        pairs = list(_steps(self.eager, self.compiled))
        for at, (a, b) in enumerate(pairs):
            of_a, of_b = _updates(a), _updates(b)
            apart: dict[str, None] = {}
            for key in {**of_a, **of_b}:
                ops, others = of_a.get(key, []), of_b.get(key, [])
                if len(ops) == len(others):
                    for op, other in zip(ops, others, strict=True):
                        yield from self._tensors(op, other)
                else:
                    apart |= {t.name: None for op in (*ops, *others) for t in op.inputs if t.name}
            after = pairs[at + 1][1] if at + 1 < len(pairs) else None
            for name in dict.fromkeys(map(unwrapped_module, apart)):
                yield from self._updated(name, a, b, after)

    def _updated(self, name: str, a: Sequence[Op], b: Sequence[Op], after: Sequence[Op] | None) -> Iterator[Anchor]:
        """A parameter after an update that is compiled in one run alone, where it was written or is read next."""
        written = [_last_written(name, ops) for ops in (a, b)]
        # A transposed view has the numbers of what it shows, which is not measured itself.
        reads = (
            (op, t) for op in after or () for t in op.inputs if unwrapped_module(t.name) == name and t.rms is not None
        )
        there = written[1] or next(reads, None)
        if written[0] is not None and there is not None:
            (op, s), (other, t) = written[0], there
            yield Anchor(op, other, s, t, (name,), False, self._excess(s, t))
        elif written[0] is not None and after is None:
            self.last.append(name)
        else:
            self.unpaired += 1

    def _tensors(self, op: Op, other: Op) -> Iterator[Anchor]:
        parameters = tuple(unwrapped_module(t.name) for t in op.inputs if t.name)
        for read, a, b in ((True, op.inputs, other.inputs), (False, op.outputs, other.outputs)):
            if len(a) == len(b):
                for s, t in zip(a, b, strict=True):
                    if s.dtype in error_bounds.UNIT:
                        yield Anchor(op, other, s, t, parameters, read, self._excess(s, t))

    def _find_counterparts(self, a: Sequence[Op], b: Sequence[Op]) -> None:
        sizes: defaultdict[Hashable, dict[int, Stats]] = defaultdict(dict)
        for t in (t for op in b for t in (*op.inputs, *op.outputs)):
            sizes[math.prod(t.shape), t.dtype][t.tensor] = t
        ordered = {key: sorted(tensors.values(), key=_magnitude) for key, tensors in sizes.items()}
        for s in {t.tensor: t for op in a if op.phase != OTHER for t in (*op.inputs, *op.outputs)}.values():
            near = ordered.get((math.prod(s.shape), s.dtype), [])
            if s.dtype in error_bounds.UNIT and s.rms is not None and math.isfinite(self._errors.of(s)):
                width = error_bounds.SAFETY * self._errors.of(s)
                low = bisect_left(near, s.rms - width, key=_magnitude)
                near = near[low : bisect_right(near, s.rms + width, key=_magnitude)]
                near = [t for t in near[:_MOST_ATTEMPTS] if self._excess(s, t) <= 1]
            else:
                near = [t for t in near if s.low is not None and (s.low, s.high, s.digest) == (t.low, t.high, t.digest)]
            if near:
                self.counterparts[s.tensor] = min(near, key=lambda t: t.shape != s.shape)

    def _vouch(self) -> set[int]:
        """What has a counterpart, and all that it was computed from."""
        vouched = set(self.counterparts)
        strong = {t.tensor for op in self.eager for t in op.outputs if t.tensor in vouched and self._tells(t)}
        for op in reversed(self.eager):
            # A step of an optimizer changes a parameter too little to say anything of the gradient, and what is filled
            # with a number nothing of the tensor whose size it has.
            if (
                op.phase != OTHER
                and not _FILLS.search(base_name(op.name))
                and any(t.tensor in strong for t in op.outputs)
            ):
                strong.update(t.tensor for t in op.inputs)
        return vouched | strong

    def _tells(self, t: Stats) -> bool:
        """Whether a value is larger than what rounding may make of it."""
        return t.rms is not None and error_bounds.SAFETY * self._errors.of(t) < t.rms

    def is_unseen(self, t: Stats) -> bool:
        """Whether nothing in the compiled run vouches for a value, also where it was not measured."""
        return t.dtype in error_bounds.UNIT and t.tensor not in self._vouched and bool(math.prod(t.shape))


class _Errors:
    """Attainable differences of a run's values from those of another correct run, by its operators."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._errors: dict[int, float] = {}
        self._stored: dict[int, float] = {}  # the last of each storage: views of what was written have new numbers
        for op in ops:
            errors = error_bounds.errors(op, op, [self.of(t) for t in op.inputs])
            linear = base_name(op.name).removeprefix("_foreach_") in _LINEAR
            if op.phase == OTHER and not linear and (writes(op) or "_fused_" in op.name):
                errors = [update_error(op, k, error) for k, error in enumerate(errors)]
            for t, error in zip(op.outputs, errors, strict=True):
                self._errors[t.tensor] = self._stored[t.storage] = error

    def of(self, t: Stats) -> float:
        """Error of a value, rms per element; 0 of what came from outside."""
        known = self._errors.get(t.tensor)
        return known if known is not None else self._stored.get(t.storage, 0.0) if t.storage != -1 else 0.0


def _moves(op: Op) -> bool:
    """Whether an operator computes nothing: views, casts, and memory that nobody has written yet."""
    name = base_name(op.name)
    return is_packaging(op) or name in _VIEWS or name.startswith("empty") or name.startswith("new_empty")


def _magnitude(t: Stats) -> float:
    return -1.0 if t.rms is None else t.rms


def _steps(a: Sequence[Op], b: Sequence[Op]) -> Iterator[tuple[list[Op], list[Op]]]:
    by_step: list[dict[int, list[Op]]] = []
    for ops in (a, b):
        steps: defaultdict[int, list[Op]] = defaultdict(list)
        for op in ops:
            steps[op.step].append(op)
        by_step.append(steps)
    yield from zip(by_step[0].values(), by_step[1].values(), strict=False)


def _last_written(name: str, ops: Sequence[Op]) -> tuple[Op, Stats] | None:
    results = (
        (op, t) for op in reversed(ops) if op.phase == OTHER for t in op.outputs if unwrapped_module(t.name) == name
    )
    return next(((op, t) for op, t in results if t.rms is not None), None)


def _updates(ops: Sequence[Op]) -> dict[Hashable, list[Op]]:
    """Operators of an optimizer by what they do to which parameters."""
    updates: defaultdict[Hashable, list[Op]] = defaultdict(list)
    for op in ops:
        parameters = tuple(unwrapped_module(t.name) for t in op.inputs)
        if op.phase == OTHER and any(parameters):
            # torch 2.11 takes a factor out of the addition: what is added is then another tensor.
            updates[base_name(op.name), parameters, "alpha=" in op.arguments].append(op)
    return updates
