"""Small ops with a backward of one's own, for tests that need something to be wrong, or right in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_backward(
    forward: Callable[..., Any], backward: Callable[..., Any], *, once: bool = False
) -> Callable[..., Any]:
    """`forward` with gradients `backward(grad_out, *inputs)`: one tensor, or one (or None) for each input.

    Differentiable again where `backward` is; never if `once`.
    """

    def gradients(ctx: Any, *grad_out: Tensor) -> Any:
        return backward(*grad_out, *ctx.saved_tensors)

    class Specimen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Any:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        backward = staticmethod(once_differentiable(gradients) if once else gradients)

    return lambda *inputs: Specimen.apply(*inputs)


def square(slope: float = 2.0) -> Callable[[Tensor], Tensor]:
    """x * x, whose gradient is `slope` x grad_out: right if it is 2."""
    return with_backward(lambda x: x * x, lambda dy, x: slope * x * dy)
