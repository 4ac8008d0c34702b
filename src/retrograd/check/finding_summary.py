"""Summary of the findings of a stage in one dtype: the worst of each fault, where it fails, what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from retrograd.check import shrink, tolerance
from retrograd.check.diagnosis import diagnose
from retrograd.check.schema import Case, Finding, Sighting
from retrograd.check.stages import CaseOutcome, StageContext

Attempt = Callable[[Case], CaseOutcome | None]
Fault = tuple[str, ...]


def progress_line(finding: Finding) -> str:
    """A line for whoever waits: what was found and at which case, before anything is known of why."""
    at = f"{finding.case.dtype} {finding.case.text()}".strip()
    return f"found: {finding.what.splitlines()[0]} (at {at})"


def explain(
    context: StageContext, findings: list[Finding], tried: dict[Case, frozenset[Fault]], attempt: Attempt, shrinks: bool
) -> list[Finding]:
    """One finding per tensor and kind, the worst, at its smallest failing case, with where it fails.

    Args:
        context: of the dtype.
        findings: what a stage found in it.
        tried: the cases that it ran, and the faults of each.
        attempt: runs a case; None if it means nothing for the op.
        shrinks: whether smaller cases are to be tried.
    """
    kept = worst_faults(findings)[:4]
    small, more, often = kept[0].case, dict[Case, bool](), ""
    if shrinks and len(context.spec.size_names) and small not in context.unjudged:
        # Smaller cases with a dozen randomly rounded runs each; the smallest is confirmed below.
        alarms = context.judge.alarms
        alarms.confirming, alarms.sought = tolerance.CONFIRMING[:1], kept[0].tensor
        try:
            small, more, often = _shrunk(context, kept[0], attempt)
        finally:
            alarms.confirming, alarms.sought = tolerance.CONFIRMING, ""
    text = shrink.where(_cases_of(fault(kept[0]), tried) | more)
    text += f"; smallest: {small.text()}" if small.text() else ""
    text += f"; {often}" if often else ""
    last = attempt(small) if small != kept[0].case else None
    shrunk = [f for f in last.findings if fault(f) == fault(kept[0])] if last else []
    first = shrunk[0] if shrunk else kept[0]
    if first.case != kept[0].case:
        of = kept[0]
        first = replace(first, first=Sighting(of.case, of.excess, of.wrong, of.total))
    others = [f for f in kept[1:] if fault(f) != fault(first)]
    # The ordinary case tells more than the smallest, where one element may be all there is.
    diagnosed = {fault(f): diagnose(context.oracle, f, context.is_dear) for f in kept}
    shown = [replace(first, where=text), *(replace(f, where=shrink.where(_cases_of(fault(f), tried))) for f in others)]
    known = [(f, diagnosed.get(fault(f))) for f in shown]
    return [replace(f, elements=d.elements, looks_like=d.looks_like) if d else f for f, d in known]


def _shrunk(context: StageContext, first: Finding, attempt: Attempt) -> tuple[Case, dict[Case, bool], str]:
    """The smallest case with the same fault, the cases tried, and how often it comes where that is not always."""

    def excess(case: Case) -> float:
        outcome = attempt(case)
        same = [f.excess or 0.0 for f in outcome.findings if fault(f) == fault(first)] if outcome else []
        return max(same, default=-1.0)

    before = excess(first.case)  # as plain as it is with as many randomly rounded runs
    plain = min(tolerance.PLAINLY_WRONG, before if before >= 0 else first.excess or 0.0)
    enough = 2 if context.is_dear else shrink.ENOUGH_FAILURES
    again = shrink.RepeatedCheck(lambda case: excess(case) >= plain, first.case, before >= 0, enough)
    if not again.failures:  # what does not come again in 30 runs cannot be shrunk
        return first.case, {}, again.text()
    return *shrink.shrink(context.spec, first.case, again), again.text()


def worst_faults(findings: list[Finding]) -> list[Finding]:
    """The worst finding of each fault."""
    worst: dict[Fault, Finding] = {}
    for f in findings:
        key = fault(f)
        if key not in worst or (f.excess or 0) > (worst[key].excess or 0):
            worst[key] = f
    return list(worst.values())


def _cases_of(wanted: Fault, tried: dict[Case, frozenset[Fault]]) -> dict[Case, bool]:
    """Which cases have a fault; those at which the op raises say nothing of another one."""
    return {
        case: wanted in faults
        for case, faults in tried.items()
        if wanted in faults or not any(kind == "raises" for kind, *_ in faults)
    }


def fault(finding: Finding) -> Fault:
    """What makes two findings of a stage one: kind and tensor, of an exception also its type and where it came from."""
    return finding.kind, finding.tensor, finding.what.partition(":")[0] if finding.kind == "raises" else ""


def crashed(last: Finding, reason: str) -> CaseOutcome:
    """The outcome where the GPU is lost: what runs now raises the same, and would be told of cases that are right."""
    message = f"{last.what}\nafterwards the GPU answers no call: {reason}"
    return CaseOutcome([replace(last, kind="crash", what=message, where="the first case that does it")])
