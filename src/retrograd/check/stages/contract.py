"""contract: outputs and gradients exist, shape, dtype and device fit, for every subset of inputs and outputs."""

from __future__ import annotations

import itertools

import torch

from retrograd.check import inputs as make
from retrograd.check.case_sharding import share
from retrograd.check.op_runner import OpRaised, Trial, Workbench, same_bits
from retrograd.check.schema import Case
from retrograd.check.stages._base import Outcome, Stage

_ID = "contract"


def _subsets(names: list[str]) -> list[tuple[str, ...]]:
    """Every proper subset for up to three inputs, else the single ones and all but one."""
    sizes = range(1, len(names)) if len(names) <= 3 else sorted({1, len(names) - 1})
    return [c for k in sizes for c in itertools.combinations(names, k)]


def _forms(bench: Workbench, case: Case, trial: Trial, out: Outcome) -> None:
    for name, grad in trial.grads.items():
        like = trial.inputs[name.removeprefix("grad ")]
        if grad is None:
            known = bench.spec.reference is not None
            if known and bench.truth(case).want[name] is None:
                continue
            what = f"{name} is None without a word, expected a tensor of shape {tuple(like.shape)}"
            out.findings.append(bench.finding(_ID, "silent-none", what, case, tensor=name))
            continue
        for aspect in ("shape", "dtype", "device"):
            got, want = getattr(grad, aspect), getattr(like, aspect)
            if got != want:
                what = f"{name} has {aspect} {got}, expected {want} as its input"
                out.findings.append(bench.finding(_ID, aspect, what, case, tensor=name))


def _agree(bench: Workbench, case: Case, got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    if same_bits(got, want) or got is None or want is None or got.shape != want.shape:
        return same_bits(got, want)
    # Another subset may take another path with other rounding: agreement to the precision will do.
    scale = float(want.abs().max().nan_to_num(0.0)) if want.numel() else 0.0
    slack = 64 * torch.finfo(want.dtype).eps * scale
    return bool(((got - want).abs() <= slack).all())


def check(bench: Workbench, case: Case) -> Outcome:
    """Run once in full, then with each subset of inputs requiring a gradient, then each output alone."""
    out = Outcome()
    full = bench.run(case)
    _forms(bench, case, full, out)
    if out.findings:
        return out
    subsets, note = share(bench, _subsets(make.differentiable(bench.spec, full.inputs)), "subsets of the inputs")
    out.notes += [note] * bool(note)
    for subset in subsets:
        try:
            part = bench.run(case, only=subset)
        except OpRaised as error:
            what = f"when only {', '.join(subset)} require(s) a gradient, {error}"
            out.findings.append(bench.finding(_ID, "subset", what, case, tensor=", ".join(subset)))
            continue
        for name, grad in part.grads.items():
            if not _agree(bench, case, grad, full.grads[name]):
                state = "is None" if grad is None else "differs"
                what = f"{name} {state} when only {', '.join(subset)} require(s) a gradient"
                out.findings.append(bench.finding(_ID, "subset", what, case, tensor=name))
    alone, note = share(bench, [_outputs_alone] * (len(full.outs) > 1), "gradients of each output alone", least=1)
    out.notes += [note] * bool(note)
    for part in alone:
        part(bench, case, full, out)
    return out


def _outputs_alone(bench: Workbench, case: Case, full: Trial, out: Outcome) -> None:
    """Gradients from each output alone must add up to those from all: a dropped output gradient shows here."""
    total: dict[str, torch.Tensor] = {}
    for i in range(len(full.outs)):
        for name, grad in bench.run(case, root=i).grads.items():
            if grad is not None:
                total[name] = total.get(name, torch.zeros_like(grad)) + grad
    for name, grad in full.grads.items():
        if not _agree(bench, case, total.get(name), grad):
            what = f"{name} is not the sum of its parts from each output alone"
            out.findings.append(bench.finding(_ID, "output-subset", what, case, tensor=name))


STAGE = Stage(_ID, "gradients exist, fit, for every subset", 10, lambda b: [b.base], check)
