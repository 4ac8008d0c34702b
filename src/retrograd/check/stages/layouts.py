"""layouts: the same numbers at other strides and offsets, as inputs and as grad_out."""

from __future__ import annotations

import torch

from retrograd.check.constraints import constrained
from retrograd.check.layouts import REPEATING, applicable
from retrograd.check.op_runner import OpRun
from retrograd.check.outputs import inexact
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.stages._torchs_own import set_apart
from retrograd.check.stages.oracle import judged


def cases(context: StageContext) -> list[Case]:
    """Each layout of grad_out, then each layout of each input; at level quick one dtype's worth of inputs.

    What repeats values has a truth of its own: where a reference takes long, every other input is laid out at once.
    """
    base = context.base
    rank = max((g.ndim for g in context.runner.grad_outs(base)), default=0)
    out = [base.but(layouts={"grad_out": layout}) for layout in applicable(rank)]
    kept = constrained(context.spec)
    state = context.spec.state  # a module's own tensors are laid out as it made them
    for name, value in context.runner.inputs(base).items():
        if isinstance(value, torch.Tensor) and name not in state:
            choices = [c for c in applicable(value.ndim) if c != "scalar"]
            # Equal rows are no longer what its values keep to, or what whole numbers of the user mean (offsets).
            if name in kept or _is_table(context.spec, name, value):
                choices = [c for c in choices if c not in REPEATING]
            out += [base.but(layouts={name: c}) for c in choices]
    repeating = [case for case in out if case.layouts[0][0] != "grad_out" and _repeats(case)]
    if len(repeating) > 2 and context.is_dear:
        halves = (repeating[::2], repeating[1::2])
        together = [base.but(layouts=tuple(case.layouts[0] for case in half)) for half in halves]
        context.ran("cases with an input that repeats values", len(together), len(repeating))
        return [*(case for case in out if case not in repeating), *together]
    return out


def _is_table(spec: OpSpec, name: str, value: torch.Tensor) -> bool:
    rule = spec.tensors.get(name)
    return not inexact(value) and (rule is None or rule.concrete is not None)


def _repeats(case: Case) -> bool:
    return any(layout in REPEATING for _, layout in case.layouts)


def _as_contiguous(context: StageContext, case: Case, run: OpRun) -> bool:
    """Whether the op gives the same bits for the same numbers without repeating strides.

    Then only what it makes of repeated numbers is not known, whose truth takes most of this stage beside a reference
    that takes long: 3.1 of 3.6 s of an attention of 70 steps.
    """
    inputs = {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in context.runner.inputs(case).items()
    }
    grad_outs = [g.contiguous() for g in context.runner.grad_outs(case)]
    again = context.runner.forward(case, inputs=inputs, grad_outs=grad_outs).backward()
    return not again.first_difference(run)


def check(context: StageContext, case: Case) -> CaseOutcome:
    """The case judged; a note where a layout that the op says it refuses is not refused."""
    run = context.runner.run(case)
    if _repeats(case) and context.is_dear and _as_contiguous(context, case, run):
        out = CaseOutcome(power_text="exact: any bit that a layout changes")
    else:
        out = judged(context, case, run)
        set_apart(context, case, out)
    refused = context.spec.layouts
    if isinstance(refused, dict) and (kinds := {v for k, v in case.layouts if k != "grad_out"} & set(refused)):
        out.notes.append(f"{case.text()} is not refused, as `layouts` says: leave {', '.join(kinds)} out of it")
    return out


def _applies(spec: OpSpec) -> str:
    return "random numbers are drawn in the order of memory, so that another layout draws others" if spec.random else ""


STAGE = Stage(
    "layouts", "any strides of inputs and grad_out", 60, check, cases,
    needs_reference=True, after=("oracle", "contract"), hears=True, sharded=True, applies=_applies,
)  # fmt: skip
