"""algebra: a backward pass is linear in grad_out, exactly so for a sign and a power of two; zero gives zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from retrograd.check import tolerance
from retrograd.check.op_runner import OpRun
from retrograd.check.oracle import Truth, truth_of
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import Results
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext
from retrograd.check.tensor_comparison import compare, first_index


def _compare(context: StageContext, case: Case, base: OpRun, factor: float, label: str, out: CaseOutcome) -> None:
    # Made anew: a backward may have overwritten those of `base`, which is for the mutation stage to tell.
    scaled = context.runner.run(case, grad_outs=[g * factor for g in context.runner.grad_outs(case)])

    @cache
    def truth() -> Truth:
        """For that grad_out, once for all gradients: of a recurrence of 70 steps it takes 8 s."""
        gs = [g * factor for g in context.runner.grad_outs(case)]
        reference = replace(context.runner.reference(case), grad_outs=lambda: gs)
        return truth_of(reference, context.oracle.noise_runs)

    told = {finding.tensor for finding in out.findings}
    for name, grad in base.grads.items():
        got = scaled.grads[name]
        if grad is None or got is None or got.shape != grad.shape or name in told:
            continue
        want = grad * factor
        off = (got != want) & tolerance.scales_exactly(grad, factor) & ~(got.isnan() & want.isnan())
        if not bool(off.any()):
            continue
        beyond = off & _beyond(context, case, name, got, want, factor, truth)
        index = first_index(beyond if bool(beyond.any()) else off)
        a, b = float(got[index]), float(want[index])
        if context.judge.noisy(case) and abs(a - b) <= tolerance.NOISY_LINEAR * float(want.abs().max()):
            out.notes.append(f"{label} not bitwise for {name}: the op differs run to run")
            continue
        if not bool(beyond.any()):
            # An algorithm may choose its way by the size of what goes in, as the matrix exponential does.
            out.notes.append(f"{label} not bitwise for {name}, within the attainable error")
            continue
        message = f"{name}{list(index)}: {label} fails, {a:.9g} against {b:.9g} ({int(off.sum())} elements)"
        out.find("not-linear", message, case, name, index=index, got=a, want=b, wrong=int(off.sum()), total=got.numel())


def _beyond(
    context: StageContext, case: Case, name: str, got: torch.Tensor, want: torch.Tensor, factor: float,
    truth_of_scaled: Callable[[], Truth],
) -> torch.Tensor:  # fmt: skip
    """Where two gradients, one of them scaled, differ by more than the errors that both may make."""
    apart = (got.detach().double() - want.detach().double()).abs()
    split = got.isfinite() != want.isfinite()
    if context.spec.reference is None:
        return (apart > tolerance.another_path(want, tf32=context.runner.tf32)) | split
    beyond = torch.ones_like(split)
    for runs in (context.oracle.noise_runs, *context.judge.alarms.confirming):
        excess = apart / (2 * abs(factor) * context.oracle.truth(case, runs).tol[name])
        beyond = (excess > 1) | split
        if not bool(beyond.any()) or bool((excess[beyond].nan_to_num(math.inf) > tolerance.BEYOND_NOISE).any()):
            break
    if not bool(beyond.any()) or abs(factor) == 1:
        return beyond
    # Its error may depend on the size of grad_out too: then the truth for that one is what counts.
    truth = truth_of_scaled()
    exact = truth.want[name]
    if exact is None:
        return beyond
    for runs in (truth.runs, *context.judge.alarms.confirming):
        result = compare(got, exact, replace(truth, runs=runs).tol[name])
        if not 1 < result.worst < tolerance.BEYOND_NOISE:
            break
    return beyond & (result.ratio > 1)


def _zero_of(context: StageContext, case: Case) -> Results:
    """What the reference makes of a zero grad_out, where it can: 0 * inf is NaN there too."""
    if context.spec.reference is None:
        return {}
    zeros = [torch.zeros_like(g) for g in context.runner.grad_outs(case)]
    with may_refuse():  # which is for other stages to tell
        return replace(context.runner.reference(case), grad_outs=lambda: zeros).run(torch.float64, Float64())
    return {}


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Four runs: g, -g, 8 g, 0."""
    out = CaseOutcome(power_text="exact: any bit of bwd(-g), bwd(8g), bwd(0)")
    base = context.runner.run(case)
    _compare(context, case, base, -1.0, "bwd(-g) == -bwd(g)", out)
    _compare(context, case, base, 8.0, "bwd(8g) == 8 bwd(g)", out)
    zero = context.runner.run(case, grad_outs=[torch.zeros_like(g) for g in context.runner.grad_outs(case)])
    wrong = {name: grad != 0 for name, grad in zero.grads.items() if grad is not None and bool((grad != 0).any())}
    wanted = _zero_of(context, case) if wrong else {}
    for name, off in wrong.items():
        want = wanted.get(name)
        if want is None or want.shape != off.shape or bool((off & ~want.isnan()).any()):
            out.find("zero", f"{name} is not zero for a zero grad_out", case, name)
    return out


STAGE = Stage("algebra", "backward is exactly linear", 40, check)
