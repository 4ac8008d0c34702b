"""What a finding says of one tensor: that it is missing, where it is out, or that it is at a kink and may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from retrograd.check import tolerance
from retrograd.check.compare import Comparison
from retrograd.check.oracle import Truth
from retrograd.check.schema import Case, Finding

if TYPE_CHECKING:
    from retrograd.check.op_runner import Workbench


def misfit(
    bench: Workbench, stage: str, case: Case, name: str, got: torch.Tensor | None, want: torch.Tensor | None
) -> list[Finding]:
    """The finding for a tensor that is there on one side only (all zeros count as nothing), or of another shape."""
    if got is not None and want is not None:
        what = f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        return [bench.finding(stage, "shape", what, case, tensor=name)]
    there = want if got is None else got
    if there is None or not bool(there.ne(0).any()):
        return []
    what = f"{name} is None, the reference has a gradient" if got is None else f"{name} should be zero"
    return [bench.finding(stage, "missing-gradient", what, case, tensor=name)]


def wrong_value(
    bench: Workbench, stage: str, case: Case, name: str, got: torch.Tensor, found: Comparison, truth: Truth
) -> Finding:
    """The finding for a tensor with elements out of tolerance, by its worst one."""
    what = (
        f"{name}{list(found.index)} is {found.got:.6g}, expected {found.want:.6g}: "
        f"{found.worst:.3g} times the attainable error ({found.wrong} of {got.numel()} elements are out)"
    )
    least, tol = (float(of[name][found.index]) for of in (truth.floor, truth.tol))
    more = dict(got=found.got, want=found.want, excess=found.worst, wrong=found.wrong, total=got.numel())
    more["terms"] = tolerance.terms(found.want, least, tol, bench.dtype)
    return bench.finding(stage, "wrong-value", what, case, tensor=name, index=found.index, **more)


def at_kinks(bench: Workbench, case: Case, name: str, got: torch.Tensor, tol: torch.Tensor, found: Comparison) -> str:
    """A remark if every element that is out is at a kink or jump, and between what its sides give; else ""."""
    if not got.numel() or not bench.truth(case).switches:
        return ""
    try:
        hull = bench.hull(case)
    except Exception:  # the reference refuses points beside the case: then it stays with the tolerance
        return ""
    wrong = found.ratio > 1
    if name not in hull.at or not bool((hull.at[name] & (hull.outside(name, got) <= tol))[wrong].all()):
        return ""
    places, sides = "kinks", "both one-sided derivatives"
    if not name.startswith("grad "):
        places, sides = "jumps", "the values of both sides"
    return (
        f"{found.wrong} of {got.numel()} elements of {name} are at {places} of the forward, such as "
        f"{list(found.index)} at {case.text() or 'the given inputs'}; there {sides} are accepted"
    )
