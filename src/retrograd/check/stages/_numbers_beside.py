"""Numbers beside a cell that is not finite: what an op makes of the rest, or of the cell where float64 has a number."""

from __future__ import annotations

from functools import partial

import torch

from retrograd.check import tolerance
from retrograd.check.op_runner import OpRun
from retrograd.check.oracle import Truth
from retrograd.check.rounding import Float64
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, StageContext
from retrograd.check.tensor_comparison import compare_stored, without


def judge_numbers(context: StageContext, case: Case, run: OpRun, out: CaseOutcome) -> None:
    """Findings for numbers that differ, at a case with a NaN or an infinity, where the op and float64 both have one.

    None where the reference's own numbers rest on a comparison with a NaN, or on its place in an order: a greater
    number and one that is not less are the same formula without it. Of gradients at an infinity no number is judged:
    how it shares them with what is as large is a convention, and what cancels beside it has no bound.
    """
    truth, plain = context.oracle.truth(case), context.oracle.truth(case.but(values=()))
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
        allowed = partial(context.judge.alarms.allowed, case, label, truth=truth)
        if allowed(*without(~judged, got, want)) is None:
            judged &= ~_right_without_it(plain, label, got, want, case)
            if allowed(*without(~judged, got, want)) is None:
                # What such a cell adds to a cumulative sum has no bound, and its steps before none.
                judged &= ~truth.lost(label)
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


def _right_without_it(plain: Truth, label: str, got: torch.Tensor, want: torch.Tensor, case: Case) -> torch.Tensor:
    """Where the cell reaches nothing, as float64 has the number that it has without it, and the op is right by that.

    The same operations made it of the same numbers, so what they may be off is known: of an attention in bfloat16 half
    of all randomly rounded runs of the stage were made for such elements.
    """
    before = plain.want.get(label)
    if before is None or before.shape != want.shape or not bool((same := before == want).any()):
        return torch.zeros_like(want, dtype=torch.bool)
    return same & (compare_stored(got, want, plain.tol[label], plain.stored.get(label, case.dtype)).ratio <= 1)
