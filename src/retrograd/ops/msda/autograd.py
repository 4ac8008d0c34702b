"""The autograd node of deformable attention: what is saved, which gradients are computed, second derivatives.

The node takes locations and weights with or without a dimension of levels and flattens inside: views outside would be
nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.msda.dispatch import MsdaCall
from retrograd.ops.msda.reference import attend
from retrograd.ops.msda.shapes import Levels, flat
from retrograd.ops.msda.spec import MsdaSpec

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class MsdaFunction(torch.autograd.Function):
    """[B, Q, H, C] of value, locations and weights; keeps its inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        locations: torch.Tensor,
        weights: torch.Tensor,
        shapes: torch.Tensor | None,
        sizes: tuple[tuple[int, int], ...] | None,
        call: MsdaCall,
    ) -> torch.Tensor:
        """Compute the output; `shapes` and `sizes` are the two forms of `Levels`."""
        ctx.call, ctx.sizes = call, sizes
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(value, locations, weights, shapes)
        return call.functions.forward(value, Levels(sizes, shapes), *flat(locations, weights), call.spec)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of value, locations and weights, where they are needed."""
        (grad_out,) = tensor_subclasses.as_stored((tensor_subclasses.finished(grad_out),))
        value, locations, weights, shapes = ctx.saved_tensors
        levels, needed = Levels(ctx.sizes, shapes), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            grads = differentiable_gradients(grad_out, (value, locations, weights), levels, ctx.call.spec, needed)
            return (*grads, None, None, None)
        grad_value, grad_locations, grad_weights = ctx.call.functions.backward(
            grad_out,
            value,
            levels,
            *flat(locations, weights),
            ctx.call.spec,
            need_value=needed[0],
            need_locations=needed[1],
            need_weights=needed[2],
        )
        if grad_locations is not None:
            grad_locations = grad_locations.view(locations.shape)
        if grad_weights is not None:
            grad_weights = grad_weights.view(weights.shape)
        return grad_value, grad_locations, grad_weights, None, None, None


def differentiable_gradients(
    grad_out: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    levels: Levels,
    spec: MsdaSpec,
    needed: tuple[bool, ...],
) -> Gradients:
    """Gradients of value, locations and weights that can be differentiated again, by way of the reference."""

    def by_reference(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return attend(value, levels, *flat(locations, weights), spec)

    grad_value, grad_locations, grad_weights = differentiated(by_reference, inputs, grad_out, needed)
    return grad_value, grad_locations, grad_weights


def differentiated(
    function: Callable[..., torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    grad_out: torch.Tensor,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of each input of a function of torch operations, with their graph; None where not needed."""
    # Other names for the inputs: where one was computed from another, only the direct derivative is wanted.
    aliases = [t.view_as(t) for t in inputs]
    wanted = [t for t, need in zip(aliases, needed, strict=True) if need]
    grads = iter(torch.autograd.grad(function(*aliases), wanted, grad_out, create_graph=True))
    return tuple(next(grads) if need else None for need in needed)
