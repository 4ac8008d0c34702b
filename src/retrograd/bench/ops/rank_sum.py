"""Sum over ranks in rank order, which FSDP's gradients go through: ours beside torch.sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from retrograd.bench.benchmark import DEVICES, GPU, Implementation, Provider, Tensors, two_sizes
from retrograd.bench.ops.any_spec import Drawn, ReferencedOp

if TYPE_CHECKING:
    import torch

OP = "rank_sum"
# Eight ranks that hold the gradients of a layer of 16 Mi elements between them.
_EXAMPLE = "8x2097152"


def _keywords(shape: str, dtype: str) -> dict[str, Any]:
    two_sizes(shape, f"RANKSxELEMENTS such as {_EXAMPLE}")
    return {}


def _draw(shape: str, dtype: str) -> Drawn:
    import torch

    ranks, count = map(int, shape.split("x"))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((ranks, count), generator=generator) / math.sqrt(ranks)
    return {"received": values.to(getattr(torch, dtype))}, ()


def retrograd(_: dict[str, Any], **options: Any) -> Implementation:
    """This project's; `options` say in which mode."""
    import torch

    from retrograd.fsdp.rank_sum import rank_sum

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        received = t["received"]
        output = torch.empty_like(received[0])
        rank_sum(received, output, **options)
        return (output,)

    return Implementation(call, backward=False)


def by_torch(_: dict[str, Any]) -> Implementation:
    """torch.sum with float32 sums, whose order is its own."""
    import torch

    def call(t: Tensors) -> tuple[torch.Tensor, ...]:
        return (t["received"].sum(0, dtype=torch.float32).to(t["received"].dtype),)

    return Implementation(call, backward=False)


BENCHMARKS = (
    ReferencedOp(
        name=OP,
        signature="f(received) -> sum",
        usual_shapes=dict.fromkeys((*DEVICES, "host"), (_EXAMPLE,)),
        usual_dtypes=dict.fromkeys(DEVICES, ("float32", "bfloat16")),
        draw=_draw,
        reference=lambda received: received.sum(0),
        keywords=_keywords,
    ),
)
PROVIDERS = (
    Provider("retrograd", (OP,), retrograd),
    Provider("retrograd-loop", (OP,), retrograd, {"impl": "loop"}, usual=GPU),
    Provider("torch", (OP,), by_torch, package="torch"),
)
