"""races: programs of a kernel that touch the same memory, one of them writing, with nothing that orders them.

On a GPU, where memory is not watched, the op runs once more on CPU tensors, with its kernels executed there.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

from retrograd import config
from retrograd.check import cpu_kernels, kernel_faults
from retrograd.check.op_runner import OpRun, OpRunner
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case, Finding
from retrograd.check.stages import shapes
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.errors import RetrogradError

# Orders of programs by seed, each with the multiprocessors of another GPU: grids of persistent kernels depend on them.
_RUNS = ((0, 132), (1, 46), (2, 108), (3, 6), (4, 82), (5, 1))


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Runs of the op in several orders of programs, every access of a kernel compared with those of other programs."""
    out, on_gpu = CaseOutcome(), context.runner.device != "cpu"
    if cpu_kernels.current() is None and not _launches(context, case):
        out.power_text = "no Triton kernel was executed on the CPU"
        if context.emulated():
            out.notes.append("races were not looked for: Triton's interpreter runs programs one after another")
        return out
    runner = OpRunner(context.spec, context.runner.dtype, context.runner.seed, "cpu") if on_gpu else context.runner
    try:
        with cpu_kernels.executed("cpu") if on_gpu else nullcontext():
            return _watched(context, runner, case, out)
    except (OpRaised, RetrogradError) as error:
        if not on_gpu:
            raise
        # It is right where it belongs, and the other stages have nothing to do with the CPU.
        out.notes.append(f"races were not looked for: without a GPU, where memory can be watched, {error}")
        out.power, out.power_text = None, "no Triton kernel was executed on the CPU"
        return out


def _watched(context: StageContext, runner: OpRunner, case: Case, out: CaseOutcome) -> CaseOutcome:
    """What is noticed of runs on CPU tensors; `runner` is not the context's own where that has a GPU."""
    runs = _RUNS[: 2 if context.level == "quick" else len(_RUNS)]
    kernels: set[str] = set()
    findings: dict[tuple[str, str], Finding] = {}
    for seed, multiprocessors in runs:
        with cpu_kernels.session(seed, multiprocessors, trials=True) as session:
            try:
                tuned = runner.run(case)
                if session.configurations and not seed:
                    out.findings += _first_of_tuned(runner, case, tuned)
            except OpRaised:
                # Before any kernel it is no matter of races, and told by the stages that compare.
                unheard = session.launches or runner is not context.runner
                if unheard and not any(fault.kind == "endless loop" for fault in session.faults):
                    raise
        kernels |= {launch.kernel for launch in session.launches}
        out.notes += session.source_remarks
        out.undecided += [f"races of {r.kernel}: {r.undecided}" for r in session.launches if r.undecided]
        for fault in session.faults:
            if fault.kind in kernel_faults.RACES:
                kernel_faults.first_told(fault, "races", context.told)
                findings.setdefault((fault.kind, fault.access.text()), kernel_faults.finding(fault, case))
            elif fault.kind == "same value":
                out.notes.append(fault.text())
    out.findings += findings.values()
    out.undecided = list(dict.fromkeys(out.undecided))
    out.notes = list(dict.fromkeys(out.notes))
    if not kernels:
        out.power_text = "the op launches no Triton kernel"
    else:
        out.power_text = f"every access of {', '.join(sorted(kernels))}, in {len(runs)} orders of its programs"
    return out


def _first_of_tuned(runner: OpRunner, case: Case, tuned: OpRun) -> list[Finding]:
    """A finding if a call whose autotuners choose anew gives other bits than those that follow it in its session.

    Triton zeroes what `reset_to_zero` names once it has chosen, before it launches, and not at later launches.
    """
    later = runner.run(case)
    if not (name := tuned.first_difference(later)) or later.first_difference(runner.run(case)):
        return []
    why = "reset_to_zero does that to memory which its caller has filled"
    text = f"{name} of the call that tunes is not what later calls give; {why}"
    return [Finding.of("autotune", text, case, name)]


def _launches(context: StageContext, case: Case) -> bool:
    """Whether the op has loaded Triton once it has run, and its kernels can be executed."""
    context.runner.run(case)
    if context.runner.device == "cpu":
        return cpu_kernels.current() is not None
    return "triton" in sys.modules and not config.interpreting()


def cases(context: StageContext) -> list[Case]:
    """The ordinary case, and other sizes where there is no reference: the stages that have such cases need one."""
    return [context.base, *shapes.without_reference(context)]


STAGE = Stage("races", "programs do not race for memory", 36, check, cases, shrinks=False)
