"""oracle: values and gradients against the reference in float64, within the derived attainable error."""

from __future__ import annotations

from retrograd.check.inputs import param_cases
from retrograd.check.stages._base import Outcome, Stage
from retrograd.check.workbench import Workbench
from retrograd.record import Case

_ID = "oracle"


def judged(bench: Workbench, case: Case, stage: str) -> Outcome:
    """Run the case once and compare all of it with the truth (shared by the stages that sweep cases)."""
    trial = bench.run(case)
    findings, profiles = bench.judge(stage, case, trial)
    power = bench.truth(case).power()
    return Outcome(findings, profiles, [], power, f"relative error {power:.1e}")


def cases(bench: Workbench) -> list[Case]:
    """Every combination of parameters, there and back again (the first once more), then further draws."""
    combos = param_cases(bench.spec, bench.base)
    again = combos[:1] if len(combos) > 1 else []
    return [*combos, *again, *(bench.base.but(draw=d) for d in range(1, bench.budget.draws))]


STAGE = Stage(
    _ID, "values and gradients equal float64", 50, cases, lambda b, c: judged(b, c, _ID), needs_reference=True
)
