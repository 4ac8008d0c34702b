"""The autograd node of deformable attention: what is saved, which gradients are computed, second derivatives.

The node takes tensors with or without a dimension of levels and flattens inside: views outside would be nodes of their
own. In the fused form, too, it keeps its inputs: locations and weights, three numbers for each point of each query and
head, exist only while a forward or a backward runs, and in a forward that takes references not even then.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.msda import fused, reference
from retrograd.ops.msda.arguments import Levels, MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.dispatch import MsdaCall
from retrograd.ops.msda.shapes import flat


class MsdaFunction(torch.autograd.Function):
    """[B, Q, H, C] of value, locations, weights, references, both forms of `Levels`, call; keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> torch.Tensor:
        """Compute the output."""
        *tensors, ctx.sizes, ctx.call = operands
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*tensors)
        return attend(_inputs((*tensors, ctx.sizes)), ctx.call)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of value, locations, weights and references, where they are needed."""
        (grad_out,) = tensor_subclasses.as_stored((tensor_subclasses.finished(grad_out),))
        inputs, needed = _inputs((*ctx.saved_tensors, ctx.sizes)), NeededGrads(*ctx.needs_input_grad[:4])
        if torch.is_grad_enabled():
            grads = differentiable_gradients(grad_out, inputs, ctx.call.spec, needed)
        else:
            grads = _gradients(grad_out, inputs, ctx.call, needed)
        return (*grads, None, None, None)


def _inputs(operands: tuple[Any, ...]) -> MsdaInputs:
    # One by one, since a node sees and keeps no other tensors.
    value, locations, weights, references, shapes, sizes = operands
    return MsdaInputs(value, Levels(sizes, shapes), locations, weights, references)


def attend(inputs: MsdaInputs, call: MsdaCall) -> torch.Tensor:
    """[B, Q, H, C] without a graph, by the kernel for all of it where the implementation has one."""
    whole = inputs.references is None or call.functions.fused
    return call.functions.forward(flat(inputs) if whole else call.functions.sampled(inputs, call.spec), call.spec)


def _gradients(grad_out: torch.Tensor, inputs: MsdaInputs, call: MsdaCall, needed: NeededGrads) -> MsdaGrads:
    functions, spec = call.functions, call.spec
    if inputs.references is None:
        grads = functions.backward(grad_out, flat(inputs), spec, needed)
    else:
        plain = functions.sampled(inputs, spec)
        grads, weights = functions.backward(grad_out, plain, spec, fused.needed_of_points(needed)), plain.weights
        del plain  # makes room for what follows
        grads = functions.sampled_bwd(grads, weights, flat(inputs), spec, needed)
    pairs = zip(grads, inputs.tensors(), strict=False)
    return MsdaGrads(*(None if grad is None else grad.view(of.shape) for grad, of in pairs))


def differentiable_gradients(
    grad_out: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads
) -> MsdaGrads:
    """Gradients that can be differentiated again, by way of the reference."""
    # Other names for the inputs: where one was computed from another, only the direct derivative is wanted.
    aliases = [t.view_as(t) for t in inputs.tensors()]
    again = inputs.with_tensors(aliases)
    out = reference.attend(flat(again) if again.references is None else fused.sampled(again, spec), spec)
    wanted = [t for t, need in zip(aliases, needed, strict=False) if need]
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return MsdaGrads(*(next(grads) if need else None for need in needed))
