"""oracle: values and gradients against the reference in float64, within the derived attainable error."""

from __future__ import annotations

from retrograd.check import tolerance
from retrograd.check.case_sharding import shard
from retrograd.check.inputs import combinations, param_cases, torch_dtype
from retrograd.check.levels import BUDGETS
from retrograd.check.op_runner import OpRun
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Results
from retrograd.check.schema import Case
from retrograd.check.seeds import derive
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.tensor_comparison import compare


def judged(context: StageContext, case: Case, run: OpRun | None = None) -> CaseOutcome:
    """Run the case once, unless it was, and compare all of it with the truth (shared by the stages that sweep cases).

    The ordinary case speaks for a sweep: at N=1 a norm's gradient is rounding alone, and no test has power.
    """
    findings, profiles = context.judge.against_truth(case, run or context.runner.run(case))
    power = context.oracle.truth(context.case or context.base).power
    return CaseOutcome(findings, profiles, [], power, f"relative error {power:.1e}")


def _strict(context: StageContext, case: Case) -> list[str]:
    """A note on tensors for which the same formula in the next lower precision would pass: it says little there."""
    name, unit = tolerance.lower(case.dtype, context.spec.compute)
    inside = name == case.dtype  # then inputs and grad_out are exact in it
    seed, reference = derive(context.runner.seed, "lower"), context.runner.reference(case)
    coarse: Results = {}
    with may_refuse():  # itself, by an assertion that a matrix is orthogonal
        coarse = reference.rounded(unit, unit, seed, inputs=not inside, grad_outs=not inside)
    truth = context.oracle.truth(case)
    passing = []
    for label, want in truth.want.items():
        got = coarse.get(label)
        if got is not None and want is not None and bool((want != 0).any()):
            stored = got.detach().to(torch_dtype(case.dtype)) if inside else got
            if not compare(stored, want, truth.tol[label]).wrong:
                passing.append(label)
    if not passing:
        return []
    where = f"all {name} arithmetic" if inside else name
    return [f"no power against lower precision in {case.dtype}: {', '.join(passing)} would pass in {where} as well"]


def _beside_tf32(context: StageContext, case: Case) -> list[str]:
    """A note on tensors whose error is not that of tf32: with products of float32 it does not fall as that would."""
    if (run := context.runner.with_exact_factors(case)) is None:
        return []
    truth = context.oracle.truth(case)
    pairs = ((label, run.tensors.get(label), want) for label, want in truth.want.items())
    held = {label: (got.to(want.device), want) for label, got, want in pairs if got is not None and want is not None}
    allowed = {label: truth.tol[label] * tolerance.WITHOUT_TF32 for label in held}
    out = [label for label, pair in held.items() if compare(*pair, allowed[label]).wrong]
    if out:  # what is not multiplied has float32's own error
        plain = context.oracle.without_tf32(case).tol
        out = [label for label in out if compare(*held[label], allowed[label].maximum(plain[label])).wrong]
    text = "with products of float32 too, as after a cast to 16 bits, the error is over 1/16 of what tf32 allows"
    return [f"more than tf32 is lost of {', '.join(out)}: {text}"] if out else []


def check(context: StageContext, case: Case) -> CaseOutcome:
    """The case judged; for the ordinary one also whether a lower precision would be refused."""
    out = judged(context, case)
    if case == context.base and not out.findings:
        out.notes += [*_strict(context, case), *_beside_tf32(context, case)]
    return out


def cases(context: StageContext) -> list[Case]:
    """Every combination of parameters, there and back again (the first once more), then further draws."""
    first, *others = param_cases(context.spec, context.base, context.budget.combinations)
    context.ran("combinations of parameters", 1 + len(others), combinations(context.spec))
    combos = [first, *shard(context, others, "combinations of parameters but the first", least=1)]
    again = combos[:1] if len(combos) > 1 else []
    context.ran("draws of the ordinary case", context.budget.draws, BUDGETS["full"].draws)
    return [*combos, *again, *(context.base.but(draw=d) for d in range(1, context.budget.draws))]


STAGE = Stage("oracle", "values and gradients equal float64", 50, check, cases, needs_reference=True)
