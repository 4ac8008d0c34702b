"""layouts: the same numbers at other strides and offsets, as inputs and as grad_out."""

from __future__ import annotations

import torch

from retrograd.check.constraints import constrained
from retrograd.check.layouts import REPEATING, applicable
from retrograd.check.schema import Case
from retrograd.check.stages._base import Stage, StageContext
from retrograd.check.stages.oracle import judged

_ID = "layouts"


def cases(context: StageContext) -> list[Case]:
    """Each layout of grad_out, then each layout of each input; at level quick one dtype's worth of inputs."""
    base = context.base
    rank = max((g.ndim for g in context.runner.grad_outs(base)), default=0)
    out = [base.but(layouts={"grad_out": layout}) for layout in applicable(rank)]
    kept = constrained(context.spec)
    for name, value in context.runner.inputs(base).items():
        if isinstance(value, torch.Tensor):
            choices = [c for c in applicable(value.ndim) if c != "scalar"]
            if name in kept:  # equal rows are no longer what its values keep to
                choices = [c for c in choices if c not in REPEATING]
            out += [base.but(layouts={name: c}) for c in choices]
    return out


STAGE = Stage(
    _ID, "any strides of inputs and grad_out", 60, cases, lambda context, case: judged(context, case, _ID),
    needs_reference=True, after=("oracle", "contract"), sharded=True,
)  # fmt: skip
