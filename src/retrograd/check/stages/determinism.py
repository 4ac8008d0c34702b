"""determinism: the same call gives the same bits, with the confidence that the number of runs supports."""

from __future__ import annotations

from contextlib import nullcontext

from retrograd import config
from retrograd.check import configurations, cpu_kernels
from retrograd.check.case_sharding import shard
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext


def bound(runs: int) -> float:
    """Upper 95 % bound on the chance that a run differs, after `runs` that did not: 1 - 0.05^(1/n)."""
    return 1 - 0.05 ** (1 / runs)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Repeat; where bits differ, each odd run must still be within the attainable error."""
    n = context.budget.repeats
    first = context.runner.run(case)
    if context.emulated():
        n = len(shard(context, range(n - 1), f"{n - 1} repeats")) + 1
    out = CaseOutcome(power_text=f"{n} runs: P(a run differs) < {bound(n):.1%} (95 %)")
    if context.emulated() and config.interpreting():
        out.notes.append("kernels were interpreted, one program after another: no race between programs can show")
    differing, name, told = 0, "", None
    executed = cpu_kernels.current()
    launched = False
    for number in range(n - 1):
        with cpu_kernels.session(number + 1) if executed is not None else nullcontext() as session:
            again = context.runner.run(case)
        launched = launched or bool(session and session.launches)
        differs = again.first_difference(first)
        if not differs:
            continue
        differing, name = differing + 1, differs
        if context.spec.reference is not None:
            findings, _ = context.judge.against_truth(case, again)
            if findings and told is None:  # of every run, as stage oracle tells
                told = {(f.kind, f.tensor) for f in context.judge.against_truth(case, first)[0]}
            if own := [f for f in findings if (f.kind, f.tensor) not in (told or ())]:
                out.findings.append(own[0])
                break
    if launched:
        out.notes.append("each run had another order of programs and atomics")
    if differing and not out.findings:
        message = f"{name} differs in {differing} of {n - 1} repeats of the same call"
        if context.spec.deterministic:
            out.find("not-repeatable", message, case, name, wrong=differing, total=n - 1)
        else:
            within = "which is wrong at each" if told else "within the attainable error"
            unknown = "how far cannot be said without a reference"
            out.notes.append(f"{message}, {within if context.spec.reference else unknown}")
            out.power, out.power_text = None, f"not bitwise repeatable: {differing} of {n - 1} repeats differ"
    if executed is not None and executed.times_itself:
        out.notes.append("the op times its launches by itself: of what it chooses from only the first was checked")
    tuned = configurations.compare(context, case)
    out.power_text += f"; {tuned.power_text}" * bool(tuned.power_text)
    out.add(tuned)
    return out


STAGE = Stage("determinism", "the same bits at every run", 80, check)
