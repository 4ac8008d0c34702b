"""Ops whose rows have other bits in another batch, against their promise: every value is within rounding of the truth.

Ids start with BI; they emulate kernels that choose how to split a sum by how many rows there are (split-K matmuls and
split-KV attention, https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

FEW = 64  # rows up to which a GPU would stand idle with one program a row


def summed(terms: Tensor, pieces: int) -> Tensor:
    """Sums of rows, added up in pieces first."""
    return torch.stack([piece.sum(-1) for piece in terms.split(-(-terms.shape[-1] // pieces), -1)], -1).sum(-1)


def make(few: int, many: int, few_backward: int, many_backward: int) -> Any:
    """x / sum(x**2) by row, its sums in so many pieces where rows are few or many."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            size = summed(x * x, few if len(x) <= FEW else many)
            return x / (1 + size[:, None])

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            scale = 1 / (1 + summed(x * x, 1)[:, None])
            product = summed(dy * x, few_backward if len(x) <= FEW else many_backward)[:, None]
            return scale * (dy - 2 * scale * product * x)

    return Scaled.apply


def spec(name: str, *pieces: int) -> OpSpec:
    return op(
        make(*pieces), lambda x: x / (1 + x.square().sum(-1, keepdim=True)), dict(x=tensor("M", "N")),
        batch_invariant=True, name=name,
    )  # fmt: skip


MUTANTS: dict[str, OpSpec] = {
    "BI01": spec("split_by_rows_forward", 4, 1, 1, 1),
    "BI02": spec("split_by_rows_backward", 1, 1, 4, 1),
}
HEALTHY_SPLIT = spec("split_whatever_the_rows", 4, 4, 4, 4)
