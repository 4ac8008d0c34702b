"""algebra: a backward pass is linear in grad_out, exactly so for a sign and a power of two; zero gives zero."""

from __future__ import annotations

import torch

from retrograd.check.op_runner import Trial, Workbench
from retrograd.check.repeatability import noisy
from retrograd.check.schema import Case
from retrograd.check.stages._base import Outcome, Stage

_ID = "algebra"


def _exact_range(t: torch.Tensor, factor: float) -> torch.Tensor:
    """Where scaling by `factor` is exact: well above the subnormals (2^10 of room inside), no overflow."""
    info = torch.finfo(t.dtype)
    size = t.abs()
    return (size > info.tiny * 1024) & (size * abs(factor) < info.max / 2)


def _compare(bench: Workbench, case: Case, base: Trial, factor: float, label: str, out: Outcome) -> None:
    # Made anew: a backward may have overwritten those of `base`, which is for the mutation stage to tell.
    scaled = bench.run(case, grad_outs=[g * factor for g in bench.grad_outs(case)])
    for name, grad in base.grads.items():
        got = scaled.grads[name]
        if grad is None or got is None or got.shape != grad.shape:
            continue
        want = grad * factor
        off = (got != want) & _exact_range(grad, factor) & ~(got.isnan() & want.isnan())
        if not bool(off.any()):
            continue
        index = tuple(int(i) for i in off.nonzero()[0])
        a, b = float(got[index]), float(want[index])
        if noisy(bench, case) and abs(a - b) <= 1e-3 * float(want.abs().max()):
            out.notes.append(f"{label} not bitwise for {name}: the op differs run to run")
            continue
        what = f"{name}{list(index)}: {label} fails, {a:.9g} against {b:.9g} ({int(off.sum())} elements)"
        out.findings.append(
            bench.finding(
                _ID,
                "not-linear",
                what,
                case,
                tensor=name,
                index=index,
                got=a,
                want=b,
                wrong=int(off.sum()),
                total=got.numel(),
            )
        )


def check(bench: Workbench, case: Case) -> Outcome:
    """Four runs: g, -g, 8 g, 0."""
    out = Outcome(power_text="exact: any bit of bwd(-g), bwd(8g), bwd(0)")
    base = bench.run(case)
    _compare(bench, case, base, -1.0, "bwd(-g) == -bwd(g)", out)
    _compare(bench, case, base, 8.0, "bwd(8g) == 8 bwd(g)", out)
    zero = bench.run(case, grad_outs=[torch.zeros_like(g) for g in bench.grad_outs(case)])
    for name, grad in zero.grads.items():
        if grad is not None and bool((grad != 0).any()):
            what = f"{name} is not zero for a zero grad_out"
            out.findings.append(bench.finding(_ID, "zero", what, case, tensor=name))
    return out


STAGE = Stage(_ID, "backward is exactly linear", 40, lambda b: [b.base], check)
