"""mutation: inputs and grad_out keep their bits; an input changed after the forward is refused or harmless."""

from __future__ import annotations

import torch

from retrograd.check.op_runner import OpRun, same_bits
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext


def _stale(context: StageContext, case: Case, name: str, out: CaseOutcome) -> None:
    def change(inputs: dict[str, object]) -> None:
        with torch.no_grad():
            inputs[name].mul_(1.5)  # type: ignore[attr-defined]

    before = context.runner.run(case)
    try:
        after = context.runner.run(case, between=change)
    except OpRaised:
        return  # autograd's version counter refused: what it is for
    if changed := context.judge.clearly_changed(after.grads, before.grads):
        message = (
            f"{changed} changes silently when `{name}` is modified in place between forward and backward; "
            "save it with ctx.save_for_backward so that autograd raises"
        )
        out.find("stale-input", message, case, changed)


def overwritten(context: StageContext, case: Case, run: OpRun) -> list[str]:
    """Names of the inputs that a run has left with other bits than they had."""
    fresh = context.runner.inputs(case).items()
    return [n for n, t in fresh if isinstance(t, torch.Tensor) and not same_bits(run.inputs[n].detach(), t)]


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Compare every input and grad_out with its copy after a forward and backward."""
    out = CaseOutcome()
    fresh = context.runner.inputs(case)
    gs = context.runner.grad_outs(case)
    kept = [g.clone() for g in gs]
    try:
        run = context.runner.run(case, grad_outs=gs)
    except OpRaised:
        if not case.layouts:
            raise
        return out  # it refuses these strides, which the layouts stage tells
    for name in overwritten(context, case, run):
        out.find("input", f"input `{name}` was overwritten", case, name)
    for i, (g, copy) in enumerate(zip(run.grad_outs, kept, strict=True)):  # some were converted for the op
        if not same_bits(g, copy.to(g.dtype)):
            out.find("grad_out", f"grad_out of output {i} was overwritten by the backward", case, "grad_out")
    # In place on what is laid out otherwise, a view, autograd takes apart what hangs on it.
    if not out.findings and not case.layouts:
        for name in context.runner.differentiable(case):
            if fresh[name].numel():
                _stale(context, case, name, out)
    return out


def _cases(context: StageContext) -> list[Case]:
    """The ordinary case, and with everything transposed: a copy that is saved there is a view elsewhere."""
    base = context.base
    matrices = [n for n, t in context.runner.inputs(base).items() if isinstance(t, torch.Tensor) and t.ndim > 1]
    return [base, base.but(layouts=dict.fromkeys(matrices, "transposed"))] if matrices else [base]


STAGE = Stage("mutation", "inputs and grad_out unchanged", 20, check, _cases, sharded=True)
