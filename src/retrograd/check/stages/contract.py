"""contract: outputs and gradients exist, shape, dtype and device fit, for every subset of inputs and outputs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from retrograd.check import tolerance
from retrograd.check.case_sharding import shard
from retrograd.check.inputs import torch_dtype
from retrograd.check.op_runner import OpRun, same_bits
from retrograd.check.outputs import as_real, inexact
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.reference import OpRaised
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, Stage, StageContext


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Every proper subset for up to three inputs, else the single ones and all but one."""
    sizes = range(1, len(names)) if len(names) <= 3 else sorted({1, len(names) - 1})
    return [c for k in sizes for c in itertools.combinations(names, k)]


def _forms(context: StageContext, case: Case, run: OpRun, out: CaseOutcome) -> None:
    for name, grad in run.grads.items():
        like = as_real(run.inputs[name.removeprefix("grad ")])
        if grad is None:
            known = context.spec.reference is not None
            if known and context.oracle.truth(case).want[name] is None:
                continue
            message = f"{name} is None without a word, expected a tensor of shape {tuple(like.shape)}"
            out.find("silent-none", message, case, name)
            continue
        for aspect in ("shape", "dtype", "device"):
            got, want = getattr(grad, aspect), getattr(like, aspect)
            if got != want:
                message = f"{name} has {aspect} {got}, expected {want} as its input"
                out.find(aspect, message, case, name)


def _outputs(context: StageContext, case: Case, out: CaseOutcome) -> None:
    """Dtype, device and requires_grad of each output, beside the reference's where inputs have their own dtypes."""
    if context.spec.reference is None:
        return
    forward = context.runner.forward(case)
    own = context.runner.reference(case).own_outputs()
    floats = [t for t in forward.inputs.values() if inexact(t)]
    # A reference may be careless with dtypes, as it runs in float64: that of an input will do too.
    ordinary = {t.dtype for t in floats}
    for name, t in {**forward.results.inexact, **forward.results.exact}.items():
        if floats and t.device != floats[0].device:
            out.find("device", f"{name} is on {t.device}, the inputs on {floats[0].device}", case, name)
        want = None if own is None else {**own.inexact, **own.exact}.get(name)
        if want is None:
            continue
        if t.dtype not in {want.dtype, *ordinary}:
            message = f"{name} has dtype {t.dtype}, the reference gives {want.dtype}"
            if inexact(t):
                meant = f"; if that is meant, let the reference return it so, by .to({t.dtype})"
                out.find("dtype", message + meant, case, name)
            else:
                out.notes.append(message)
        if want.requires_grad and not t.requires_grad and inexact(t):
            message = f"{name} does not require a gradient, the reference's does: nothing flows back through it"
            out.find("requires-grad", message, case, name)


def _agree(
    got: torch.Tensor | None, want: torch.Tensor | None, *, tf32: bool, sizes: torch.Tensor | None = None
) -> bool:
    """Whether two gradients are equal but for the rounding of numbers of these sizes, by default their own."""
    sizes = want if sizes is None else sizes
    if same_bits(got, want) or got is None or want is None or sizes is None or got.shape != want.shape:
        return same_bits(got, want)
    # Another subset may take another path with other rounding: agreement to the precision will do.
    return bool(((got - want).abs() <= tolerance.another_path(sizes, tf32=tf32)).all())


def _attainable(
    context: StageContext, case: Case, got: torch.Tensor | None, want: torch.Tensor | None, name: str
) -> bool:
    """Whether two gradients are as near as either could be to the truth, by a reference: what amplifies rounding."""
    if context.spec.reference is None or got is None or want is None or got.shape != want.shape:
        return False
    off = (got - want).abs().double()
    for runs in (context.oracle.noise_runs, *tolerance.CONFIRMING):  # most need few
        tol = context.oracle.truth(case, runs).tol.get(name)
        if tol is None or tolerance.no_digit_left(tol, want.double()):  # then it would allow anything
            return False
        if bool((off <= tol).all()):
            return True
    return False


def check(context: StageContext, case: Case) -> CaseOutcome:
    """Run once in full, then with each subset of inputs requiring a gradient, then each output alone."""
    out = CaseOutcome()
    full = context.runner.run(case)
    _forms(context, case, full, out)
    _outputs(context, case, out)
    if out.findings:
        return out
    for subset in shard(context, _subsets(context.runner.differentiable(case)), "subsets of the inputs"):
        try:
            part = context.runner.run(case, only=subset)
        except OpRaised as error:
            out.find("subset", f"when only {', '.join(subset)} require(s) a gradient, {error}", case, ", ".join(subset))
            continue
        for name, grad in part.grads.items():
            if not _agree(grad, full.grads[name], tf32=context.runner.tf32):
                state = "is None" if grad is None else "differs"
                out.find("subset", f"{name} {state} when only {', '.join(subset)} require(s) a gradient", case, name)
    alone = [_outputs_alone] * (len(full.outs) > 1)
    for part in shard(context, alone, "gradients of each output alone", least=1):
        part(context, case, full, out)
    return out


def _outputs_alone(context: StageContext, case: Case, full: OpRun, out: CaseOutcome) -> None:
    """Gradients from each output alone must add up to those from all: a dropped output gradient shows here."""
    total: dict[str, torch.Tensor] = {}
    sizes: dict[str, torch.Tensor] = {}  # of the parts: where these cancel, their sum is as far off as they are
    told = {name for name, grad in full.grads.items() if grad is None}
    for i, output in enumerate(full.outs):
        grads = context.runner.run(case, root=i).grads
        for name, most in _lost(context, case, i, grads).items():
            message = f"{name} is 0 from {output} alone, where the reference's is up to {most:.3g}: what comes back"
            out.find("output-subset", f"{message} through {output} is dropped", case, name)
            told.add(name)
        for name, grad in grads.items():
            if grad is not None:
                total[name] = total.get(name, torch.zeros_like(grad)) + grad
                sizes[name] = sizes.get(name, torch.zeros_like(grad)) + grad.abs()
    for name, grad in full.grads.items():
        if name in told or _agree(total.get(name), grad, tf32=context.runner.tf32, sizes=sizes.get(name)):
            continue
        if not _attainable(context, case, total.get(name), grad, name):
            out.find("output-subset", f"{name} is not the sum of its parts from each output alone", case, name)


def _lost(context: StageContext, case: Case, root: int, grads: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Gradients from one output that are 0 or None and the reference's are not, by name the largest of that.

    In 16 bits that of a loss of 1e-4 beside another one is less than what the other's is rounded by.
    """
    silent = [name for name, grad in grads.items() if grad is None or (grad.numel() and not bool(grad.any()))]
    most = dict[str, float]()
    if not silent or context.spec.reference is None:
        return most
    whole = context.runner.reference(case)

    def alone() -> list[torch.Tensor]:
        return [g if n == root else torch.zeros_like(g) for n, g in enumerate(whole.grad_outs())]

    reference = replace(whole, grad_outs=alone)
    with may_refuse():  # no kernel for the dtype
        exact, own = reference.run(torch.float64, reference.exactly()), reference.run(torch_dtype(case.dtype))
        for name in silent:
            want, eager = exact[name], own[name]
            if want is not None and eager is not None and want.numel():
                at = want.abs().argmax()
                largest = float(want.flatten()[at])
                if abs(float(eager.flatten()[at]) - largest) < abs(largest) / 2:  # no number that rounding has left
                    most[name] = abs(largest)
    return most


STAGE = Stage("contract", "gradients exist, fit, for every subset", 10, check)
