"""Ops that are right wherever their forward has a derivative, and wrong where it has none: random inputs never show it.

Ids start with K; each names the public report or class of bug that it emulates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor


def mutant(name: str, forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], **options: Any) -> OpSpec:
    class Mutant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * slope(*ctx.saved_tensors)

    inputs = dict(x=tensor("M...", "N", **options))
    return op(lambda x: Mutant.apply(x), forward, inputs, name=name)


PIXELS = 16


def _pixels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Position in pixels, and the slopes of the cell before and after the pixel at or below it."""
    position = (x + 1) * PIXELS - 0.5
    cell = position.floor()
    table = lambda i: torch.sin(i * i)  # noqa: E731
    return position, table(cell) - table(cell - 1), table(cell + 1) - table(cell)


def interpolate(x: Tensor) -> Tensor:
    """Linear interpolation in a table, as grid_sample does it in one dimension."""
    position = (x + 1) * PIXELS - 0.5
    cell = position.floor()
    share = position - cell
    return torch.sin(cell * cell) * (1 - share) + torch.sin((cell + 1) * (cell + 1)) * share


def _both_cells(x: Tensor) -> Tensor:
    position, before, after = _pixels(x)
    return PIXELS * torch.where(position == position.floor(), before + after, after)


# Exactly on a pixel the corners of both cells count, so the slope is their sum (pytorch/pytorch#23925, where border
# coordinates had a gradient that no side has).
K01 = mutant("K01", interpolate, _both_cells, low=-1.0, high=1.0)

# At the edges of its range hardtanh's backward counts the slope twice, once for each comparison (own; class of K01).
K02 = mutant("K02", F.hardtanh, lambda x: (x >= -1).to(x.dtype) * (x <= 1) * (1 + ((x == 1) | (x == -1)).to(x.dtype)))


def _staircase(x: Tensor) -> Tensor:
    """A ramp with steps: its slope is 1 on either side of each step, so that only the rounding tells where one is."""
    return x + (4 * x).round()


# Exactly between two steps both count (as K01, where no change of the gradient shows the place).
K03 = mutant("K03", _staircase, lambda x: torch.where(4 * x - 0.5 == (4 * x - 0.5).round(), 2.0, 1.0),
             low=-1.0, high=1.0)  # fmt: skip

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
