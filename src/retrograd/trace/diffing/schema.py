"""Records of a comparison of two traces, and their JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import ComparisonOutcome, Record
from retrograd.trace.schema import OTHER

UNKNOWN = -1  # the digest of what is not known: no tensor's, so that nothing takes it for exact
DIFF_SCHEMA = "retrograd.trace.diff/1"

Kind = Literal[
    "outside",  # a value that no operator of the trace made: parameter, data, state
    "random",  # draws other numbers
    "product",  # a matrix product or convolution in another precision
    "order",  # rounding of the size that another order of additions makes
    "nondeterministic",  # adds with atomics, or is said to by PyTorch
    "uninitialised",  # reads memory that nobody wrote
    "nonfinite",  # NaN or infinite on one side only
    "operator",  # other output from the same inputs, for no plainer reason
    "operand",  # the result of another operator is read, though no operator before it differs
    "argument",
    "dtype",
    "shape",
    "replaced",
    "inserted",
    "missing",
]
Status = Literal["same", "within", "made", "carried", "outside", "inserted", "missing"]


@dataclass(frozen=True)
class RunSide:
    """One of the two runs: what it is called, how many operators it has, and what is known of it."""

    title: str
    ops: int
    steps: int
    level: str
    rank: int = 0
    devices: tuple[str, ...] = ()
    meta: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A tensor as text, whether it differs from the one on the other side, and which input or output it is."""

    text: str
    differs: bool = False
    index: int = 0


@dataclass(frozen=True)
class OpSummary:
    """An operator of one run, for people."""

    index: int
    step: int
    phase: str
    name: str
    module: str
    place: str = ""
    code: str = ""
    arguments: str = ""
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    inside: str = ""

    @property
    def where(self) -> str:
        """Line, module, phase and step, as far as they are known."""
        module = f"module {self.module}" if self.module else ""
        return ", ".join(filter(None, (self.place, module, *self.when)))

    @property
    def when(self) -> tuple[str, ...]:
        """Phase and step; of a log, which has no steps, the phase if it is known and the position in the log."""
        if self.step >= 0:
            return self.phase, f"step {self.step}"
        return *[self.phase] * (self.phase != OTHER), f"call {self.index}"


@dataclass(frozen=True)
class DivergenceCause:
    """One thing that differs first: nothing that it was computed from does.

    `what` says it in words, `why` the reason where it is plain, `advice` what to do. `a` and `b` are the operators of
    the first place; None on the side that has none. `count` is how many places have this cause, `others` names some.
    """

    kind: Kind
    what: str
    why: str = ""
    advice: str = ""
    a: OpSummary | None = None
    b: OpSummary | None = None
    count: int = 1
    others: tuple[str, ...] = ()

    @property
    def first(self) -> OpSummary | None:
        """The operator of the first of them, in B or else in A."""
        return self.b or self.a

    @property
    def where(self) -> str:
        """Where the first of them is."""
        return self.first.where if self.first else ""


@dataclass(frozen=True)
class PairRow:
    """Two operators that correspond, or one that has none on the other side, near the first cause."""

    status: Status
    a: OpSummary | None
    b: OpSummary | None


@dataclass(frozen=True)
class TraceDiff(Record, ComparisonOutcome, Shown):
    """The comparison of two runs, true if they are the same at this level.

    `mode` is "bitwise", "attainable" (differences that rounding explains do not count), "names" (no values were
    recorded) or "logged" (logs of DebugMode, with a number a tensor). `causes` come in the order of the run; the first
    is the first divergence. `matched` counts operators that have the same values on both sides, `within` those that
    differ by no more than attainable, `carried` those that differ because of what they were given. `rows` is the
    neighbourhood of the first cause.
    """

    _noun: ClassVar[str] = "comparison of traces"

    a: RunSide
    b: RunSide
    mode: Literal["bitwise", "attainable", "names", "logged"]
    causes: tuple[DivergenceCause, ...]
    notes: tuple[str, ...] = ()
    matched: int = 0
    within: int = 0
    carried: int = 0
    seconds: float = 0.0
    rows: tuple[PairRow, ...] = ()
    schema: str = DIFF_SCHEMA
