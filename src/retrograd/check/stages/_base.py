"""What a stage is: a list of cases and a check of one case. Running, shrinking, reporting are not its business."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from retrograd.check.compare import Sketch
from retrograd.check.op_runner import Workbench
from retrograd.check.schema import Case, Finding
from retrograd.check.spec import OpSpec


@dataclass
class Outcome:
    """What the check of one case says. `power` is the smallest relative error it would have caught; 0 is exact."""

    findings: list[Finding] = field(default_factory=list)
    profiles: list[Sketch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    power: float | None = 0.0
    power_text: str = "exact: any bit"


@dataclass(frozen=True)
class Stage:
    """One stage. `id` is stable (junit names, --only, --skip).

    Args:
        id: stable name.
        title: the question it answers, a few words.
        order: place in the run; cheapest first.
        cases: the cases to check.
        check: checks one case.
        needs_reference: skipped without one.
        after: stages whose failure in the same dtype makes this one meaningless, so it is skipped.
        shrinks: whether a failing case is shrunk; not where a check takes too long to be made forty times.
        applies: "" if the op is to be checked by this stage, else why it is not.
        deals: whether level quick may deal its cases out to the dtypes (`check.dealing`).
    """

    id: str
    title: str
    order: int
    cases: Callable[[Workbench], list[Case]]
    check: Callable[[Workbench, Case], Outcome]
    needs_reference: bool = False
    after: tuple[str, ...] = ()
    shrinks: bool = True
    applies: Callable[[OpSpec], str] = lambda spec: ""
    deals: bool = False
