"""races: programs of a kernel that touch the same memory, one of them writing, with nothing that orders them."""

from __future__ import annotations

from retrograd.check import cpu_kernels
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext

_ID = "races"
# Orders of programs by seed, each with the multiprocessors of another GPU: grids of persistent kernels depend on them.
_RUNS = ((0, 132), (1, 46), (2, 108), (3, 6), (4, 82), (5, 1))
_KINDS = {"race": "race", "autotune": "autotune", "endless loop": "endless-loop", "uninitialised": "uninitialised"}


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Runs of the op in several orders of programs, every access of a kernel compared with those of other programs."""
    out = CaseOutcome()
    if cpu_kernels.current() is None and not _launches(context, case):
        out.power_text = "no Triton kernel was executed on the CPU"
        if context.interpreted():
            out.notes.append("races were not looked for: Triton's interpreter runs programs one after another")
        elif context.runner.device != "cpu":
            out.notes.append("races of Triton kernels are looked for on the CPU (`--device cpu`), not on a GPU")
        return out
    runs = _RUNS[: 2 if context.level == "quick" else len(_RUNS)]
    kernels: set[str] = set()
    findings: dict[tuple[str, str], Finding] = {}
    for seed, multiprocessors in runs:
        with cpu_kernels.session(seed, multiprocessors) as session:
            try:
                context.runner.run(case)
            except OpRaised:
                # Before any kernel it is no matter of races, and told by the stages that compare.
                if session.launches and not any(fault.kind == "endless loop" for fault in session.faults):
                    raise
        kernels |= {launch.kernel for launch in session.launches}
        out.undecided += [f"races of {r.kernel}: {r.undecided}" for r in session.launches if r.undecided]
        for fault in session.faults:
            kind = _KINDS.get(fault.kind)
            if kind is not None:
                finding = Finding(_ID, kind, fault.text(), case, wrong=fault.count)
                findings.setdefault((kind, fault.access.text()), finding)
            elif fault.kind == "same value":
                out.notes.append(fault.text())
    out.findings = list(findings.values())
    out.undecided = list(dict.fromkeys(out.undecided))
    out.notes = list(dict.fromkeys(out.notes))
    if not kernels:
        out.power_text = "the op launches no Triton kernel"
    else:
        out.power_text = f"every access of {', '.join(sorted(kernels))}, in {len(runs)} orders of its programs"
    return out


def _launches(context: StageContext, case: Case) -> bool:
    """Whether the op has loaded Triton once it has run."""
    context.runner.run(case)
    return cpu_kernels.current() is not None


STAGE = Stage(_ID, "programs do not race for memory", 36, lambda context: [context.base], check, shrinks=False)
