"""oracle: values and gradients against the reference in float64, within the derived attainable error."""

from __future__ import annotations

from retrograd.check import tolerance
from retrograd.check.case_sharding import share
from retrograd.check.compare import compare
from retrograd.check.inputs import param_cases, torch_dtype
from retrograd.check.op_runner import Workbench
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.check.stages._base import Outcome, Stage

_ID = "oracle"


def judged(bench: Workbench, case: Case, stage: str) -> Outcome:
    """Run the case once and compare all of it with the truth (shared by the stages that sweep cases).

    The ordinary case speaks for a sweep: at N=1 a norm's gradient is rounding alone, and no test has power.
    """
    trial = bench.run(case)
    findings, profiles = bench.judge(stage, case, trial)
    power = bench.truth(bench.override or bench.base).power
    return Outcome(findings, profiles, [], power, f"relative error {power:.1e}")


def _strict(bench: Workbench, case: Case) -> list[str]:
    """A note on tensors for which the same formula in the next lower precision would pass: it says little there."""
    name, unit = tolerance.lower(bench.dtype, bench.spec.compute)
    inside = name == bench.dtype  # then inputs and grad_out are exact in it
    seed = derive(bench.seed, "lower")
    coarse = bench.rounded_run(case, unit, unit, seed, inputs=not inside, grad_outs=not inside)
    truth = bench.truth(case)
    passing = []
    for label, want in truth.want.items():
        got = coarse.get(label)
        if got is not None and want is not None and bool((want != 0).any()):
            stored = got.detach().to(torch_dtype(bench.dtype)) if inside else got
            if not compare(stored, want, truth.tol[label]).wrong:
                passing.append(label)
    if not passing:
        return []
    where = f"all {name} arithmetic" if inside else name
    return [f"no power against lower precision in {bench.dtype}: {', '.join(passing)} would pass in {where} as well"]


def check(bench: Workbench, case: Case) -> Outcome:
    """The case judged; for the ordinary one also whether a lower precision would be refused."""
    out = judged(bench, case, _ID)
    _, note = _combinations(bench)
    out.notes += [note] * bool(note)
    if case == bench.base and not out.findings:
        out.notes += _strict(bench, case)
    return out


def _combinations(bench: Workbench) -> tuple[list[Case], str]:
    """The first combination of parameters, and those of the others that this dtype is to run; a note on the rest."""
    first, *others = param_cases(bench.spec, bench.base)
    mine, note = share(bench, others, "combinations of parameters but the first", least=1)
    return [first, *mine], note


def cases(bench: Workbench) -> list[Case]:
    """Every combination of parameters, there and back again (the first once more), then further draws."""
    combos, _ = _combinations(bench)
    again = combos[:1] if len(combos) > 1 else []
    return [*combos, *again, *(bench.base.but(draw=d) for d in range(1, bench.budget.draws))]


STAGE = Stage(_ID, "values and gradients equal float64", 50, cases, check, needs_reference=True)
