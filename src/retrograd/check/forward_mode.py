"""Forward-mode derivatives of an op: slopes along random directions, beside those of two backwards of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from retrograd.check import tolerance
from retrograd.check.op_runner import OpRun
from retrograd.check.oracle import truth_of
from retrograd.check.outputs import as_real
from retrograd.check.own_mistakes import calls_theirs, may_refuse
from retrograd.check.reference import NotApplicable, OpRaised, Results, directions, grads_of
from retrograd.check.schema import Case
from retrograd.check.stages._base import CaseOutcome, StageContext
from retrograd.compat.torch_dispatch import tree_map_only
from retrograd.errors import UndecidedError

_RUNS = 3  # of second derivatives: an alarm is confirmed with more


def slopes(
    case: Case, seed: int, outs: dict[str, torch.Tensor], leaves: dict[str, torch.Tensor], gs: list[torch.Tensor],
    runs: int = 0,
) -> Results:  # fmt: skip
    """Slopes of the outputs along fixed random directions of all inputs, by two backwards: what forward mode gives."""
    del gs
    through = {name: torch.zeros_like(out).requires_grad_() for name, out in outs.items() if out.requires_grad}
    first = grads_of([outs[name] for name in through], list(leaves.values()), list(through.values()), create_graph=True)
    moves = directions(case, seed, "slope", leaves, runs)
    moved = [(g, moves[name]) for name, g in zip(leaves, first, strict=True) if g is not None and g.requires_grad]
    second = grads_of([g for g, _ in moved], list(through.values()), [move for _, move in moved])
    return {f"slope {name}": slope for name, slope in zip(through, second, strict=True)}


def _within_own_rounding(
    context: StageContext, case: Case, moves: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Which slopes are within what forward mode itself may be off, by name; {} where the reference has none.

    It is another algorithm than two backwards: that of max(x, y) adds and takes away what it does not choose. Its
    error is that from its own result in float64, so a wrong formula has no more of it than a right one.
    """
    reference = context.runner.reference(case)
    function, names = reference.spec.reference, list(reference.inputs())
    assert function is not None

    @calls_theirs
    def tangents(*values: Any, **params: Any) -> Any:
        with forward_ad.dual_level():
            named = zip(names, values, strict=True)
            duals = [forward_ad.make_dual(v, moves[n].to(v.dtype)) if n in moves else v for n, v in named]
            return tree_map_only(torch.Tensor, _tangent, function(*duals, **params))

    forward = replace(reference, spec=replace(reference.spec, reference=tangents))
    own: dict[str, torch.Tensor] = {}
    with may_refuse():  # its operators have no forward mode
        own = truth_of(forward, tolerance.CONFIRM_RUNS, lambda case, seed, outs, leaves, gs, runs: dict(outs)).tol
    truth, masks = context.oracle.truth(case, tolerance.CONFIRM_RUNS, slopes), {}
    for name, tol in own.items():
        label = f"slope {name}"
        want, value = truth.want.get(label), got.get(label)
        if want is not None and value is not None and want.shape == value.shape == tol.shape:
            masks[label] = (value.double() - want).abs() <= truth.tol[label] + tol
    return masks


def _tangent(out: torch.Tensor) -> torch.Tensor:
    tangent = forward_ad.unpack_dual(out).tangent
    return torch.zeros_like(out) if tangent is None else tangent.clone()


def check(context: StageContext, case: Case, out: CaseOutcome) -> None:
    """Forward-mode derivatives along random directions, beside those that two backwards of the reference give."""
    runner, inputs = context.runner, context.runner.inputs(case)
    moves = directions(case, runner.seed, "slope", {name: inputs[name] for name in runner.differentiable(case)})
    try:
        with forward_ad.dual_level():
            duals = inputs | {name: forward_ad.make_dual(inputs[name], move) for name, move in moves.items()}
            outs = runner.call(case, duals).inexact
            pairs = {name: forward_ad.unpack_dual(t) for name, t in outs.items()}
            got = {f"slope {n}": torch.zeros_like(p) if t is None else t.clone() for n, (p, t) in pairs.items()}
    except OpRaised as error:
        out.find("raises", f"in forward mode: {str(error).splitlines()[0]}", case)
        return
    if context.spec.reference is None:
        out.notes.append("slopes in forward mode have no reference to be compared with")
        return
    try:
        wanted = context.oracle.truth(case, _RUNS, slopes).want
        results = {name: as_real(t.detach()) for name, t in got.items() if wanted.get(name) is not None}
        run = OpRun({}, results, inputs, [])  # type: ignore[arg-type]
        findings, _ = context.judge.against_truth(case, run, order=slopes, noise_runs=_RUNS)
        if findings and (excused := _within_own_rounding(context, case, moves, results)):
            findings, _ = context.judge.against_truth(case, run, excused, slopes, _RUNS)
    except (NotApplicable, UndecidedError) as error:
        out.notes.append(f"slopes in forward mode cannot be judged: {error}")
        return
    # Two backwards of the reference are another algorithm by nature: what that may be off is no doubt of the op.
    out.notes += [f"in forward mode: {doubt}" for doubt in context.judge.doubts]
    context.judge.doubts.clear()
    out.findings += [replace(finding, kind="jvp", what=f"in forward mode: {finding.what}") for finding in findings]
