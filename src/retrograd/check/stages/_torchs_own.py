"""Reads between rows that are torch's own: products in bfloat16 on CPUs with AMX multiply what lies there."""

from __future__ import annotations

import math

import torch

from retrograd.check.guard_bands import SIDES
from retrograd.check.own_mistakes import may_refuse
from retrograd.check.schema import Case, Finding
from retrograd.check.stages._base import CaseOutcome, StageContext


def set_apart(context: StageContext, case: Case, out: CaseOutcome) -> None:
    """Make a note of findings that say what lies between rows, where the reference reads it too.

    oneDNN takes factors in pairs: of rows of five numbers in bfloat16 it multiplies the sixth by zero, which is NaN
    where a NaN lies there (torch 2.11 and 2.13 on a Xeon with AMX).
    """
    odd = [finding for finding in out.findings if _is_of_gaps(finding)]
    if odd and case.layouts and context.spec.reference is not None and _reads_between_rows(context, case):
        out.findings = [finding for finding in out.findings if finding not in odd]
        out.notes.append(f"at {case.text()} torch's own operators read between rows, in the reference as well")


def _is_of_gaps(finding: Finding) -> bool:
    reads = finding.kind == "read" and SIDES[2] in finding.what
    return reads or (finding.got is not None and math.isnan(finding.got))


def _reads_between_rows(context: StageContext, case: Case) -> bool:
    """Whether the reference has NaN, with the strides and in the precision of the case, that float64 has not."""
    own, want = dict[str, torch.Tensor](), context.oracle.truth(case).want
    reference = context.runner.reference(case)
    with may_refuse(), reference.without_traces(), torch.no_grad():
        own = reference.call(context.runner.inputs(case)).inexact
    pairs = ((t, want.get(name)) for name, t in own.items())
    return any(w is not None and t.shape == w.shape and bool((t.isnan() & ~w.isnan()).any()) for t, w in pairs)
