"""Records of repeated steps, and their JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.trace.diffing.schema import OpSummary

REPEAT_SCHEMA = "retrograd.trace.repeat/1"

DifferenceKind = Literal[
    "once",  # one execution alone gave other bits
    "varies",  # several did, and nothing is known by which its bits may vary
    "nondeterministic",  # its bits may vary: it adds with atomics, or PyTorch says so
]


@dataclass(frozen=True)
class OperatorDifference:
    """An operator whose executions from the same inputs gave different bits.

    Attributes:
        kind: what the executions show.
        op: the operator; its `step` is that of the run.
        rank: where it ran.
        executions: which result each execution gave, numbered as they came; the program goes on with the first.
        elements: how many elements of the results differ between two executions, of `total`.
        example: one of them, as each of the two has it.
    """

    kind: DifferenceKind
    op: OpSummary
    rank: int = 0
    executions: tuple[int, ...] = (0, 1)
    elements: int = 0
    total: int = 0
    example: str = ""


@dataclass(frozen=True)
class ReplicaDifference:
    """Parameters or gradients of which ranks hold copies, and that are not equal before an update."""

    quantity: Literal["parameters", "gradients"]
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class RepeatedSteps(Record, Shown):
    """What repeating the operators of sampled steps has shown.

    `every`, `steps` and `sampled` are how often a step was sampled, how many the run had and in which operators were
    repeated; `operators` counts those, `left_out` operators of these steps that were executed once, by why. `ranks` are
    those whose results are in this record, `rank` is the one that made it.
    """

    _noun: ClassVar[str] = "record of repeated steps"

    every: int
    steps: int
    sampled: int
    operators: int
    differences: tuple[OperatorDifference, ...] = ()
    replicas: tuple[ReplicaDifference, ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    schema: str = REPEAT_SCHEMA

    @property
    def wrong(self) -> tuple[OperatorDifference, ...]:
        """Those of the differences that a sound device and a deterministic operator cannot show."""
        return tuple(d for d in self.differences if d.kind != "nondeterministic")

    @property
    def exit_code(self) -> int:
        """0 nothing differs that must not, 1 something does, 3 no operator was repeated."""
        if self.wrong or self.replicas:
            return 1
        return 0 if self.operators else 3
