"""determinism: the same call gives the same bits, with the confidence that the number of runs supports."""

from __future__ import annotations

from retrograd.check.case_sharding import share
from retrograd.check.op_runner import Workbench
from retrograd.check.schema import Case
from retrograd.check.stages._base import Outcome, Stage

_ID = "determinism"


def bound(runs: int) -> float:
    """Upper 95 % bound on the chance that a run differs, after `runs` that did not: 1 - 0.05^(1/n)."""
    return 1 - 0.05 ** (1 / runs)


def check(bench: Workbench, case: Case) -> Outcome:
    """Repeat; where bits differ, each odd run must still be within the attainable error."""
    n, note = bench.budget.repeats, ""
    first = bench.run(case)
    if bench.interpreted:
        repeats, note = share(bench, range(n - 1), f"{n - 1} repeats")
        n = len(repeats) + 1
    out = Outcome(power_text=f"{n} runs: P(a run differs) < {bound(n):.1%} (95 %)", notes=[note] * bool(note))
    if bench.interpreted:
        out.notes.append("kernels were interpreted, one program after another: no race between programs can show")
    odd = 0
    name = ""
    for _ in range(n - 1):
        trial = bench.run(case)
        differs = trial.same_bits(first)
        if not differs:
            continue
        odd, name = odd + 1, differs
        if bench.spec.reference is not None:
            findings, _ = bench.judge(_ID, case, trial)
            if findings:
                out.findings.append(findings[0])
                break
    if odd and not out.findings:
        said = f"{name} differs in {odd} of {n - 1} repeats of the same call"
        if bench.spec.deterministic:
            out.findings.append(bench.finding(_ID, "not-repeatable", said, case, tensor=name, wrong=odd, total=n - 1))
        else:
            within = (
                "within the attainable error" if bench.spec.reference else "how far cannot be said without a reference"
            )
            out.notes.append(f"{said}, {within}")
            out.power, out.power_text = None, f"not bitwise repeatable: {odd} of {n - 1} repeats differ"
    return out


STAGE = Stage(_ID, "the same bits at every run", 80, lambda b: [b.base], check)
