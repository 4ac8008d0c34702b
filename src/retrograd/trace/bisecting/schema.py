"""Records of a bisection of precision, and their JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record

BISECT_SCHEMA = "retrograd.trace.bisect/1"


@dataclass(frozen=True)
class Culprit:
    """One operator, or the operators of one module, of the smallest set whose precision matters.

    `alone` is the error with this one in higher precision and no other; `without` with every other culprit so, and this
    one as it is. `ops` counts operators; `place` and `code` are the line of the first, as far as it is known.
    """

    name: str
    module: str
    phase: str
    alone: float
    without: float
    ops: int = 1
    place: str = ""
    code: str = ""


@dataclass(frozen=True)
class Bisection(Record, Shown):
    """Which operators must be computed in `precision` so that the step agrees with the reference within `tolerance`.

    Errors are |got - want| / |want| in the Euclidean norm, the largest of all results; `worst` names that result as the
    step stands. `before` is the error of the step as it is, `after` with the culprits in higher precision, `everything`
    with every operator so. `candidates` counts operators that could be, `runs` how often the step ran.

    `verdict`: "within" (there is no mismatch), "found", or "undecided" (higher precision everywhere does not mend it).
    """

    _noun: ClassVar[str] = "bisection of precision"

    target: str
    verdict: Literal["within", "found", "undecided"]
    precision: str
    by: str
    tolerance: float
    before: float
    after: float
    everything: float
    worst: str = ""
    culprits: tuple[Culprit, ...] = ()
    candidates: int = 0
    runs: int = 0
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    schema: str = BISECT_SCHEMA

    @property
    def exit_code(self) -> int:
        """0 no mismatch, 1 culprits found, 3 cannot decide."""
        return {"within": 0, "found": 1, "undecided": 3}[self.verdict]
