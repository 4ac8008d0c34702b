"""mutation: inputs and grad_out keep their bits; an input changed after the forward is refused or harmless."""

from __future__ import annotations

import torch

from retrograd.check import inputs as make
from retrograd.check.op_runner import OpRaised, Workbench, same_bits
from retrograd.check.repeatability import apart
from retrograd.check.schema import Case
from retrograd.check.stages._base import Outcome, Stage

_ID = "mutation"


def _stale(bench: Workbench, case: Case, name: str, out: Outcome) -> None:
    def change(inputs: dict[str, object]) -> None:
        with torch.no_grad():
            inputs[name].mul_(1.5)  # type: ignore[attr-defined]

    before = bench.run(case)
    try:
        after = bench.run(case, between=change)
    except OpRaised:
        return  # autograd's version counter refused: what it is for
    if changed := apart(bench, after.grads, before.grads):
        what = (
            f"{changed} changes silently when `{name}` is modified in place between forward and backward; "
            "save it with ctx.save_for_backward so that autograd raises"
        )
        out.findings.append(bench.finding(_ID, "stale-input", what, case, tensor=changed))


def check(bench: Workbench, case: Case) -> Outcome:
    """Compare every input and grad_out with its copy after a forward and backward."""
    out = Outcome()
    fresh = bench.inputs(case)
    gs = bench.grad_outs(case)
    kept = [g.clone() for g in gs]
    trial = bench.run(case, grad_outs=gs)
    for name, value in fresh.items():
        if isinstance(value, torch.Tensor) and not same_bits(trial.inputs[name].detach(), value):
            what = f"input `{name}` was overwritten"
            out.findings.append(bench.finding(_ID, "input", what, case, tensor=name))
    for i, (g, copy) in enumerate(zip(gs, kept, strict=True)):
        if not same_bits(g, copy):
            what = f"grad_out of output {i} was overwritten by the backward"
            out.findings.append(bench.finding(_ID, "grad_out", what, case, tensor="grad_out"))
    if not out.findings:
        for name in make.differentiable(bench.spec, fresh):
            if fresh[name].numel():
                _stale(bench, case, name, out)
    return out


STAGE = Stage(_ID, "inputs and grad_out unchanged", 20, lambda b: [b.base], check)
