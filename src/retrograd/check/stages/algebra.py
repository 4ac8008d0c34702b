"""algebra: a backward pass is linear in grad_out, exactly so for a sign and a power of two; zero gives zero."""

from __future__ import annotations

import torch

from retrograd.check import tolerance
from retrograd.check.compare import first_index
from retrograd.check.op_runner import OpRun
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext

_ID = "algebra"


def _compare(context: StageContext, case: Case, base: OpRun, factor: float, label: str, out: CaseOutcome) -> None:
    # Made anew: a backward may have overwritten those of `base`, which is for the mutation stage to tell.
    scaled = context.runner.run(case, grad_outs=[g * factor for g in context.runner.grad_outs(case)])
    for name, grad in base.grads.items():
        got = scaled.grads[name]
        if grad is None or got is None or got.shape != grad.shape:
            continue
        want = grad * factor
        off = (got != want) & tolerance.scales_exactly(grad, factor) & ~(got.isnan() & want.isnan())
        if not bool(off.any()):
            continue
        index = first_index(off)
        a, b = float(got[index]), float(want[index])
        if context.judge.noisy(case) and abs(a - b) <= tolerance.NOISY_LINEAR * float(want.abs().max()):
            out.notes.append(f"{label} not bitwise for {name}: the op differs run to run")
            continue
        message = f"{name}{list(index)}: {label} fails, {a:.9g} against {b:.9g} ({int(off.sum())} elements)"
        out.findings.append(
            Finding(_ID, "not-linear", message, case, tensor=name, index=index, got=a, want=b, wrong=int(off.sum()),
                    total=got.numel())
        )  # fmt: skip


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Four runs: g, -g, 8 g, 0."""
    out = CaseOutcome(power_text="exact: any bit of bwd(-g), bwd(8g), bwd(0)")
    base = context.runner.run(case)
    _compare(context, case, base, -1.0, "bwd(-g) == -bwd(g)", out)
    _compare(context, case, base, 8.0, "bwd(8g) == 8 bwd(g)", out)
    zero = context.runner.run(case, grad_outs=[torch.zeros_like(g) for g in context.runner.grad_outs(case)])
    for name, grad in zero.grads.items():
        if grad is not None and bool((grad != 0).any()):
            message = f"{name} is not zero for a zero grad_out"
            out.findings.append(Finding(_ID, "zero", message, case, tensor=name))
    return out


STAGE = Stage(_ID, "backward is exactly linear", 40, lambda context: [context.base], check)
