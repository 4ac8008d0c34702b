"""Numbers beside a cell that is not finite: what an op makes of the rest, or of the cell where float64 has a number."""

from __future__ import annotations

import torch

from retrograd.check import tolerance
from retrograd.check.op_runner import OpRun
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, StageContext
from retrograd.check.tensor_comparison import without


def judge_numbers(context: StageContext, case: Case, run: OpRun, out: CaseOutcome) -> None:
    """Findings for numbers that differ, at a case with a NaN or an infinity, where the op and float64 both have one.

    None where the reference's own numbers rest on a comparison with a NaN, or on its place in an order: a greater
    number and one that is not less are the same formula without it. Of gradients at an infinity no number is judged:
    how it shares them with what is as large is a convention, and what cancels beside it has no bound.
    """
    truth = context.oracle.truth(case)
    excused, nan = dict[str, torch.Tensor](), case.values[0][1] == "nan"
    for label, want in truth.want.items():
        got, eager = run.tensors.get(label), truth.eager.get(label)
        if got is None or want is None or got.shape != want.shape:
            continue
        judged = got.isfinite() & want.isfinite() & ~tolerance.overflows(want, got.dtype)
        judged = judged if eager is None else judged & eager.isfinite()
        judged &= nan or not label.startswith("grad ")
        if label in run.complex:  # one number has two places
            judged = judged.all(-1, keepdim=True).expand_as(judged)
        if context.judge.alarms.allowed(case, label, *without(~judged, got, want), truth) is None:
            judged &= ~truth.lost(
                label
            )  # what such a cell adds to a cumulative sum has no bound, and its steps before none
        excused[label] = ~judged
    findings, profiles = context.judge.against_truth(case, run, excused)
    findings = [f for f in findings if f.tensor in excused]
    if not findings:
        return
    mode = Float64(record=True)
    context.runner.reference(case).run(torch.float64, mode)
    names = ", ".join(dict.fromkeys(f.tensor for f in findings))
    if by := mode.by_nan | mode.unplaced:
        out.notes.append(
            f"{names} not judged at {case.text()}: the reference decides by a NaN ({', '.join(sorted(by))}), and "
            "which way that falls is a convention"
        )
        return
    out.findings += findings
    out.profiles += profiles
