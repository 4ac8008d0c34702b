"""The sum over ranks in rank order, which FSDP's gradients go through: ours beside torch.sum."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from retrograd.bench.general.ops import Drawn, Op
from retrograd.bench.harness import Provider
from retrograd.bench.registry import RANK_SUM
from retrograd.errors import UsageError

# Eight ranks that hold the gradients of a layer of 16 Mi elements between them.
_SHAPES = ("8x2097152",)


def retrograd(op: Op, shape: str, dtype: str, **options: Any) -> Provider:
    """This project's; `options` say in which mode."""
    from retrograd.fsdp.rank_sum import rank_sum

    def call(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        received = t["received"]
        output = torch.empty_like(received[0])
        rank_sum(received, output, **options)
        return (output,)

    return Provider(call, backward=False)


def by_torch(op: Op, shape: str, dtype: str) -> Provider:
    """torch.sum with float32 sums, whose order is its own."""
    return Provider(lambda t: (t["received"].sum(0, dtype=torch.float32).to(t["received"].dtype),), backward=False)


def _sizes(shape: str) -> tuple[int, int]:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
        raise UsageError(f"`--shapes` has {shape!r}, expected RANKSxELEMENTS such as {_SHAPES[0]}")
    ranks, _, count = shape.partition("x")
    return int(ranks), int(count)


def _draw(shape: str, dtype: str) -> Drawn:
    ranks, count = _sizes(shape)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((ranks, count), generator=generator) / math.sqrt(ranks)
    return {"received": values.to(getattr(torch, dtype))}, ()


OP = Op(RANK_SUM, _SHAPES, ("float32", "bfloat16"), _draw, lambda received: received.sum(0), check_shape=_sizes)
