"""What the files of this folder share: an op with a right forward and a given backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op

Grads = Callable[..., tuple[Tensor | None, ...]]


def of(wrong: Callable[..., Any]) -> Grads:
    """The gradients of another function than the forward: what a backward that forgot a step computes."""

    def grads(dy: Any, _y: Any, *inputs: Any) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
            out = wrong(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(out, wanted, dy, allow_unused=True, materialize_grads=True))
        return tuple(next(found) if t.requires_grad else None for t in leaves)

    return grads


def broken(name: str, forward: Callable[..., Any], grads: Grads, inputs: dict[str, Any], **options: Any) -> OpSpec:
    """An op whose gradients are `grads(grad_out, output, *inputs)`, one per input; its forward is the reference.

    With several outputs grad_out and output are tuples.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Any:
            y = forward(*given)
            ctx.many = isinstance(y, tuple)
            ctx.save_for_backward(*given, *(y if ctx.many else (y,)))
            return y

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
            count = len(ctx.needs_input_grad)
            given, y = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            found = grads(dy if ctx.many else dy[0], y if ctx.many else y[0], *given)
            return tuple(g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=True))

    return op(lambda *given: Function.apply(*given), forward, inputs, name=name, **options)
