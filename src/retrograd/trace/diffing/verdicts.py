"""Verdicts on pairs of operators: the same, different by itself, or different because of its inputs. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from retrograd.trace.diffing import error_bounds
from retrograd.trace.diffing.identity import base_name, comparable_arguments, names, without_numbers
from retrograd.trace.diffing.matching import Pair
from retrograd.trace.diffing.schema import Status
from retrograd.trace.schema import OTHER, PROGRAM, Op, Stats

_UNWRITTEN = re.compile(r"(?:^|_)empty(?:_|$)")
# They write every element of their first input without reading it.
_OVERWRITES = names("fill zero copy normal uniform bernoulli random exponential geometric log_normal cauchy")
_PACKAGING = names("_to_copy to copy detach clone alias contiguous view _unsafe_view reshape _reshape_alias lift_fresh")
_RANDOM = re.compile(
    r"rand|bernoulli|multinomial|poisson|(?:^|_)normal$|dropout|^uniform|^exponential|^geometric$|^cauchy$"
)
# FSDP2 puts the shard of this rank, the first result, into memory for all, the second, that a collective fills later.
_FILLS_A_PART = "fsdp::all_gather_copy_in"
# Error in unit roundoffs of a value from before the recording, of the same dtype: another kernel computed it.
_OUTSIDE = 8.0
# Relative error of what changes unseen between steps: parameters, whose changes are small, and statistics.
_UNSEEN = 0.02


@dataclass(slots=True)
class PairVerdict:
    """The verdict on a pair.

    `inputs` and `outputs` say which tensors differ, `differs` names a difference of the operator itself ("argument",
    "dtype", "shape", "replaced" or ""), `outside` the inputs that differ and were made by no operator, `reads` says in
    words that it takes the result of another operator, `excess` is how many times the attainable error the worst output
    is off.
    """

    pair: Pair
    status: Status
    inputs: tuple[bool, ...] = ()
    outputs: tuple[bool, ...] = ()
    differs: str = ""
    outside: tuple[int, ...] = ()
    reads: str = ""
    excess: float = 0.0
    unwritten: bool = False
    random: bool = False


@dataclass(slots=True)
class _RunValues:
    """Values of one run by number: those that operators produced, memory nobody wrote, what depends on a difference."""

    produced: dict[int, Op] = field(default_factory=dict[int, Op])  # by whom
    unwritten: set[int] = field(default_factory=set[int])
    tainted: set[int] = field(default_factory=set[int])

    @staticmethod
    def reads(op: Op, which: set[int]) -> bool:
        """Whether one of these is an input of the operator."""
        return any(t.tensor in which for t in op.inputs)


class PairJudge:
    """Gives verdicts on pairs, in their order.

    `bitwise`: each bit counts, else what rounding explains does not. `values`: whether any were recorded. `exact`:
    equal digests mean equal tensors.
    """

    def __init__(self, bitwise: bool, values: bool = True, exact: bool = True) -> None:
        self.bitwise, self.values, self._exact = bitwise, values, exact
        self._a, self._b = _RunValues(), _RunValues()
        self._partners: dict[int, int] = {}  # values of B by those of A that the same operator made
        self._paired: set[int] = set()  # the values of B among them
        self._errors: dict[int, float] = {}  # rms per element, of tensors of A
        self._cast: set[int] = set()  # tensors of B that a cast made which A does not have
        self._drift = 0.0  # largest relative error so far
        self._drawn_apart = False  # the generators have another state
        self._step: int | None = None
        self._later = False  # after the first step

    def judge(self, pair: Pair) -> PairVerdict:
        a, b = pair.a, pair.b
        if a is None or b is None:
            return self._unmatched(pair)
        self._later = self._later or (self._step is not None and a.step != self._step)
        self._step = a.step
        if _UNWRITTEN.search(base_name(a.name)) and _UNWRITTEN.search(base_name(b.name)):
            self._a.unwritten.update(t.tensor for t in a.outputs)
            self._b.unwritten.update(t.tensor for t in b.outputs)
            return self._keep(PairVerdict(pair, "same"), False)
        ins, errors = self._inputs(a, b)
        if a.name == b.name == _FILLS_A_PART:
            for run, op in ((self._a, a), (self._b, b)):
                run.unwritten.update(t.tensor for t in op.outputs[1:])
        outs, worst, bounds = self._outputs(a, b, errors)
        verdict = PairVerdict(pair, "same", ins, outs, _difference(pair, self.bitwise), excess=worst)
        verdict.random = draws_random(a) or draws_random(b)
        verdict.outside = tuple(
            k for k, (differs, s, t) in enumerate(zip(ins, a.inputs, b.inputs, strict=False))
            if differs and s.tensor not in self._a.produced and t.tensor not in self._b.produced
        )  # fmt: skip
        verdict.unwritten = self._a.reads(a, self._a.unwritten) or self._b.reads(b, self._b.unwritten)
        tainted = self._a.reads(a, self._a.tainted) or self._b.reads(b, self._b.tainted)
        known = all(t.digest is not None for t in (*a.outputs, *b.outputs)) and len(a.outputs) == len(b.outputs)
        known &= self._exact
        if not tainted and any(outs):
            verdict.reads = self._another_value(a, b, ins)
        depends = any(ins) or (tainted and not (known and all(map(_bits_equal, a.outputs, b.outputs))))
        verdict.status = self._status(verdict, depends, bounds)
        if self.bitwise and verdict.status == "made":
            verdict.excess = _excess(a, b)
        self._errors.update(zip((t.tensor for t in a.outputs), bounds, strict=True))
        return self._keep(verdict, depends)

    def _status(self, verdict: PairVerdict, depends: bool, bounds: Sequence[float]) -> Status:
        differ = any(verdict.outputs)
        if verdict.outside and set(verdict.outside) >= {k for k, d in enumerate(verdict.inputs) if d}:
            return "outside"
        if differ or (verdict.differs and not self.values):
            drawn = verdict.random and self._drawn_apart and not verdict.differs
            if verdict.reads and self.bitwise:
                return "made"  # the wiring differs, not what was computed before
            return "carried" if depends or drawn else "made"
        return "within" if not self.bitwise and any(bounds) else "same"

    def skip(self, pair: Pair) -> PairVerdict:
        """An operator of one side that gives what it was given, and is no difference."""
        op, run = pair.either, self._a if pair.a else self._b
        run.produced.update((t.tensor, op) for t in op.outputs)
        if run.reads(op, run.tainted):
            run.tainted.update(t.tensor for t in op.outputs)
        return PairVerdict(pair, "same")

    def _another_value(self, a: Op, b: Op, ins: Sequence[bool]) -> str:
        """Of an input that differs although nothing before did: whose result it is on each side."""
        for k, (differs, s, t) in enumerate(zip(ins, a.inputs, b.inputs, strict=False)):
            if differs and self._partners.get(s.tensor, t.tensor) != t.tensor and t.tensor in self._paired:
                makers = self._a.produced[s.tensor], self._b.produced[t.tensor]
                was, now = (f"{op.name} ({op.index}{', ' * bool(op.place)}{op.place})" for op in makers)
                return f"input {k} is the result of {was} in A, of {now} in B"
        return ""

    def _unmatched(self, pair: Pair) -> PairVerdict:
        op = pair.either
        run = self._a if pair.a else self._b
        run.produced.update((t.tensor, op) for t in op.outputs)
        if self.bitwise or not is_packaging(op) or run.reads(op, run.tainted):
            run.tainted.update(t.tensor for t in op.outputs)
        elif pair.a is None:
            self._cast.update(t.tensor for t in op.outputs)
        elif op.inputs[-1].tensor in self._errors:
            source, cast = op.inputs[-1], op.outputs[0]
            rounding = error_bounds.unit(cast.dtype) * (cast.rms or 0.0) if cast.dtype != source.dtype else 0.0
            self._errors[cast.tensor] = math.hypot(self._errors[source.tensor], rounding)
        self._drawn_apart |= draws_random(op)
        return PairVerdict(pair, "missing" if pair.a else "inserted", random=draws_random(op))

    def _keep(self, verdict: PairVerdict, depends: bool) -> PairVerdict:
        """Note the values that were produced, and whether from something that differs."""
        tainted = depends or verdict.status in ("made", "carried", "outside")
        for run, op in zip((self._a, self._b), verdict.pair.both, strict=True):
            numbers = [t.tensor for t in op.outputs]
            run.produced.update(dict.fromkeys(numbers, op))
            (run.tainted.update if tainted else run.tainted.difference_update)(numbers)
        for s, t in zip(*(op.outputs for op in verdict.pair.both), strict=False):
            self._partners[s.tensor] = t.tensor
            self._paired.add(t.tensor)
        self._drawn_apart |= verdict.random and any(verdict.outputs)
        return verdict

    def _inputs(self, a: Op, b: Op) -> tuple[tuple[bool, ...], list[float]]:
        """Which inputs differ, and the errors of A's."""
        if len(a.inputs) != len(b.inputs):
            # Another operator may take them in other numbers: all of the fewer must be among the more.
            few, many = sorted((a.inputs, b.inputs), key=len)
            same = all(any(_bits_equal(s, t) for t in many) for s in few)
            return tuple(not same for _ in a.inputs), [0.0 if same else math.inf for _ in a.inputs]
        differ: list[bool] = []
        errors: list[float] = []
        for k, (s, t) in enumerate(zip(a.inputs, b.inputs, strict=True)):
            ignored = s.tensor in self._a.unwritten or t.tensor in self._b.unwritten
            ignored = ignored or (not k and base_name(a.name) in _OVERWRITES and writes(a))
            error = 0.0 if ignored else self._error(s, t)
            errors.append(error)
            differ.append(not ignored and self._differ(s, t, error) > 1)
        return tuple(differ), errors

    def _error(self, s: Stats, t: Stats) -> float:
        if self.bitwise or (_bits_equal(s, t) and s.tensor in self._errors and not self._errors[s.tensor]):
            return 0.0
        size = max(s.rms or 0.0, t.rms or 0.0)
        if s.tensor in self._errors:
            rounding = error_bounds.unit(t.dtype) * size if t.tensor in self._cast else 0.0
            return math.hypot(self._errors[s.tensor], rounding)
        if _bits_equal(s, t):
            return 0.0
        if s.dtype != t.dtype:
            return error_bounds.unit(s.dtype, t.dtype) * size
        unseen = min(self._drift, _UNSEEN) if self._later else 0.0
        return max(_OUTSIDE * error_bounds.unit(s.dtype), unseen) * size

    def _differ(self, s: Stats, t: Stats, error: float) -> float:
        """Above 1 where two tensors differ more than they may."""
        if s.shape != t.shape:
            return math.inf
        if _bits_equal(s, t):
            return 0.0
        if self.bitwise:
            return math.inf
        if s.bad != t.bad:
            return math.inf
        if s.dtype not in error_bounds.UNIT and error == 0 and not self._drift:
            return math.inf
        return error_bounds.excess(s, t, error) if s.dtype in error_bounds.UNIT else 0.0

    def _outputs(self, a: Op, b: Op, errors: Sequence[float]) -> tuple[tuple[bool, ...], float, list[float]]:
        """Which outputs differ, by how many times the attainable error, and the errors of A's outputs."""
        if len(a.outputs) != len(b.outputs):
            return tuple(True for _ in a.outputs), math.inf, [math.inf for _ in a.outputs]
        written = [s.tensor not in self._a.unwritten for s in a.outputs]
        exact = not any(errors) and all(map(_bits_equal, a.outputs, b.outputs))
        if exact or self.bitwise:
            over = [w and not _bits_equal(s, t) for w, s, t in zip(written, a.outputs, b.outputs, strict=True)]
            return tuple(over), 0.0, [0.0] * len(a.outputs)
        bounds = error_bounds.errors(a, b, errors)
        if _updates(a):
            return (False,) * len(bounds), 0.0, [update_error(a, k, e) for k, e in enumerate(bounds)]
        pairs = zip(a.outputs, b.outputs, bounds, strict=True)
        beyond = [self._differ(s, t, e) if w else 0.0 for w, (s, t, e) in zip(written, pairs, strict=True)]
        for t, e in zip(a.outputs, bounds, strict=True):
            if t.rms and t.dtype in error_bounds.UNIT and math.isfinite(e):
                self._drift = max(self._drift, min(e / t.rms, 1.0))
        return tuple(times > 1 for times in beyond), max(beyond, default=0.0), bounds


def is_packaging(op: Op) -> bool:
    """Whether an operator gives its input another dtype, device or shape and computes nothing: a cast, a view."""
    return base_name(op.name) in _PACKAGING and bool(op.inputs) and len(op.outputs) == 1


def draws_random(op: Op) -> bool:
    """Whether an operator draws from a generator, as recorded or by its name."""
    return op.random or ("backward" not in op.name and bool(_RANDOM.search(base_name(op.name))))


def update_error(op: Op, k: int, error: float) -> float:
    """The error of what an optimizer changes: where a gradient is noise, so is the step, whatever its size."""
    output = op.outputs[k]
    size = output.rms or 0.0
    before = next((t.rms for t in op.inputs if t.storage == output.storage != -1 and t.rms is not None), size)
    return min(max(error, _UNSEEN * size, abs(size - before)), max(size, before))


def _updates(op: Op) -> bool:
    """Whether an operator changes a parameter or what an optimizer keeps of it; clipping a gradient does not."""
    if op.phase != OTHER or not (writes(op) or "_fused_" in op.name):
        return False
    return op.owner != PROGRAM or any(t.name for t in op.inputs)


def writes(op: Op) -> bool:
    """Whether an operator works in place, by its name."""
    middle = re.split(r"::|\.", op.name)
    return (middle[1] if len(middle) > 1 else middle[0]).endswith("_")


def _excess(a: Op, b: Op) -> float:
    """By how many times the attainable error outputs differ whose inputs are the same, bit for bit."""
    if len(a.outputs) != len(b.outputs) or any(s.shape != t.shape for s, t in zip(a.outputs, b.outputs, strict=True)):
        return math.inf
    bounds = error_bounds.errors(a, b, [0.0] * len(a.inputs))
    return max(
        (error_bounds.excess(s, t, e) for s, t, e in zip(a.outputs, b.outputs, bounds, strict=True)), default=0.0
    )


def _bits_equal(s: Stats, t: Stats) -> bool:
    """The same bits, as far as was recorded."""
    if s.shape != t.shape or s.dtype != t.dtype:
        return False
    if s.digest is not None and t.digest is not None:
        return s.digest == t.digest
    return _numbers_equal(s, t)


def _numbers_equal(s: Stats, t: Stats) -> bool:
    """Where there are no two digests: what both have is the same, but for the order in which rms was added.

    Level fast gives a transposed view the numbers of its source, and leaves out values that level full measures.
    """
    exact = ((s.low, t.low), (s.high, t.high), (s.nan, t.nan), (s.inf, t.inf), (s.zero, t.zero))
    if any(x != y for x, y in exact if x is not None and y is not None):
        return False
    if s.rms is None or t.rms is None:
        return True
    unit = 2.0**-53 if s.device == t.device == "cpu" else 2.0**-24  # as `Stats.rms` says
    return abs(s.rms - t.rms) <= min(1.0, unit * (4 + math.prod(s.shape))) * max(s.rms, t.rms)


def _difference(pair: Pair, bitwise: bool) -> str:
    """What differs in the operators themselves, whatever their values are."""
    a, b = pair.both
    if base_name(a.name) != base_name(b.name):
        return "replaced"
    if comparable_arguments(a.arguments) != comparable_arguments(b.arguments):
        return "number" if without_numbers(a.arguments) == without_numbers(b.arguments) else "argument"
    sizes = [[t.shape for t in ts] for ts in (a.inputs, b.inputs, a.outputs, b.outputs)]
    if sizes[0] == sizes[1] and sizes[2] != sizes[3]:
        return "shape"
    dtypes = [[t.dtype for t in ts] for ts in (a.inputs, b.inputs, a.outputs, b.outputs)]
    return "dtype" if bitwise and dtypes[0] == dtypes[1] and dtypes[2] != dtypes[3] else ""
