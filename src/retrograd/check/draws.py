"""Random numbers of ops that draw: whether one does, and whether its reference draws the same under one seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from retrograd.check.calling import Call, seeded
from retrograd.check.op_runner import OpRunner
from retrograd.check.outputs import as_real
from retrograd.check.reference import NotApplicable, OpRaised
from retrograd.check.spec import OpSpec

# A draw that differs replaces elements; rounding to the coarsest dtype, bfloat16, moves them by 2**-8.
SAME_DRAW = 2.0**-4
_SEEDS = 64
_ERRORS = 8.0  # standard errors, of thousands of elements: normal noise passes them once in 1e11


def under_one_seed(spec: OpSpec) -> tuple[OpSpec, str]:
    """An op that was seen to draw, as it is to be called, and a note: under one seed unless its bits are promised."""
    note = "the op draws from torch's generators"
    if spec.deterministic:
        return replace(spec, random=False), f"{note}; random=True calls it under one seed"
    calls = dict(fn=seeded(spec.fn), reference=seeded(spec.reference))
    note += ": it and its reference were called under one seed; random=True says that it is meant to"
    return replace(spec, **calls, random=True), note


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding, not of other random numbers."""
    if got.shape != want.shape:
        return False
    difference = (in_double(got) - in_double(want)).nan_to_num(0.0, 0.0, 0.0)
    size = torch.linalg.vector_norm(in_double(want).nan_to_num(0.0, 0.0, 0.0))
    return bool(torch.linalg.vector_norm(difference) <= SAME_DRAW * size)


def disagreement(runner: OpRunner) -> str:
    """Why values of a random op cannot be compared with its reference; "" if they can, or are wrong on average too.

    Two forwards of each; where those differ, 64 under other seeds.
    """
    case = runner.base
    try:
        reference = runner.reference(case)
        own, wide = reference.own_outputs(), reference.outputs()
        got = runner.call(case, runner.inputs(case)).inexact
    except (OpRaised, NotApplicable):
        return ""  # which the stages tell
    if own is None:
        return ""
    if other := _different(own.inexact, wide.inexact):
        return f"random: under one seed the reference draws other numbers in {case.dtype} than in float64 ({other})"
    if not (other := _different(got, own.inexact)) or not _agree_on_average(runner):
        return ""
    return (
        f"random: under one seed the op draws other numbers than its reference ({other}); over {_SEEDS} seeds means "
        "and mean squares of the outputs agree, gradients were not compared: make what is drawn an input (a mask)"
    )


def _different(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> str:
    return next((name for name, t in want.items() if name not in got or not alike(got[name].detach(), t.detach())), "")


def _agree_on_average(runner: OpRunner) -> bool:
    """Whether the outputs of op and reference have the same mean and mean square at each element, over many seeds."""
    got, want = (_samples(runner, of_reference) for of_reference in (False, True))
    if got.shape != want.shape:
        return False
    for power in (1, 2):
        a, b = got**power, want**power
        error = ((a.var(0) + b.var(0)) / _SEEDS).sqrt()
        apart = (a.mean(0) - b.mean(0)).abs()
        if bool((apart > _ERRORS * error + SAME_DRAW * b.mean(0).abs() * (error == 0)).any()):
            return False
    return bool((got.var(0) > 0).any())


def _samples(runner: OpRunner, of_reference: bool) -> torch.Tensor:
    """The outputs of op or reference in the precision under test, one row a seed."""
    case, rows = runner.base, list[torch.Tensor]()
    for seed in range(_SEEDS):
        both = (runner.spec.fn, runner.spec.reference)
        fn, reference = (replace(f, seed=seed) if isinstance(f, Call) else f for f in both)
        seeded = replace(runner, spec=replace(runner.spec, fn=fn, reference=reference))
        if of_reference:
            outputs = seeded.reference(case).own_outputs()
            outs = {} if outputs is None else outputs.inexact
        else:
            outs = seeded.call(case, seeded.inputs(case)).inexact
        rows.append(torch.cat([as_real(in_double(t.detach())).flatten() for t in outs.values()] or [torch.zeros(0)]))
    return torch.stack(rows)


def in_double(t: torch.Tensor) -> torch.Tensor:
    """A tensor as float64 or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)
