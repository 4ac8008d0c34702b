"""Gradient scaling in a trace: the steps that torch.amp.GradScaler skips, and which overflows are its own. No torch.

A scaler multiplies the loss so that small gradients are no zeros, looks for Inf and NaN in the gradients, and skips the
optimizer where there are any: overflows of scaled gradients are part of that. What is bad in the forward is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrograd.trace import nan_reasons
from retrograd.trace.schema import BACKWARD, Op

_UPDATE = "aten._amp_update_scale_"


@dataclass(frozen=True)
class Skip:
    """Operators of an update that was skipped."""

    first: int
    last: int
    scale: float
    tensor: int  # number of the scale's value


def updates_scale(name: str) -> bool:
    """Whether the operator of this name ends what a scaler calls a step."""
    return name.startswith(_UPDATE)


def skips(ops: Sequence[Op]) -> list[Skip]:
    """The updates that a scaler skipped, as far as its numbers were measured."""
    rows: list[Skip] = []
    begin = 0
    for op in ops:
        if not updates_scale(op.name):
            continue
        scale, _, bad = op.inputs[:3]
        if bad.high and scale.high is not None:
            rows.append(Skip(begin, op.index, scale.high, scale.tensor))
        begin = op.index + 1
    return rows


def overflows(op: Op, skip: Skip) -> bool:
    """Whether an operator that made an Inf did so because the loss was scaled: a smaller scale would mend it."""
    infinite = any(s.inf for s in op.outputs) and not any(s.nan for s in op.outputs)
    scaled = op.phase == BACKWARD or any(s.tensor == skip.tensor for s in op.inputs)
    return infinite and scaled and skip.scale > 1 and nan_reasons.explain(op).startswith("overflow")
