"""The autograd node of the fused form, and the torch operations that make locations and weights of its inputs.

The node keeps what it was given. Locations and weights, three numbers for each point of each query and head, exist
only while a forward or a backward runs; in a forward that an implementation offers whole (`Functions.fused_forward`),
not even then.
"""

from __future__ import annotations

from typing import Any

import torch

from retrograd.ops import tensor_subclasses
from retrograd.ops.msda.autograd import differentiated
from retrograd.ops.msda.dispatch import MsdaCall
from retrograd.ops.msda.reference import attend
from retrograd.ops.msda.shapes import Levels, flat, inner_dtype, level_of, tensor_of

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class MsdaFusedFunction(torch.autograd.Function):
    """[B, Q, H, C] of value, reference points, offsets and logits; keeps its inputs and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        reference_points: torch.Tensor,
        offsets: torch.Tensor,
        logits: torch.Tensor,
        shapes: torch.Tensor | None,
        sizes: tuple[tuple[int, int], ...] | None,
        call: MsdaCall,
    ) -> torch.Tensor:
        """Compute the output; `shapes` and `sizes` are the two forms of `Levels`."""
        ctx.call, ctx.sizes = call, sizes
        if any(ctx.needs_input_grad[:4]):
            ctx.save_for_backward(value, reference_points, offsets, logits, shapes)
        return attend_fused((value, reference_points, offsets, logits), Levels(sizes, shapes), call)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of value, reference points, offsets and logits, where they are needed."""
        (grad_out,) = tensor_subclasses.as_stored((tensor_subclasses.finished(grad_out),))
        *saved, shapes = ctx.saved_tensors
        value, reference_points, offsets, logits = saved
        inputs, levels = (value, reference_points, offsets, logits), Levels(ctx.sizes, shapes)
        needed, call = ctx.needs_input_grad[:4], ctx.call
        if torch.is_grad_enabled():

            def by_reference(*aliases: torch.Tensor) -> torch.Tensor:
                return attend(aliases[0], levels, *sampled(aliases, levels, call.spec.points), call.spec)

            grads = differentiated(by_reference, inputs, grad_out, needed)
        else:
            grads = _gradients(grad_out, inputs, levels, call, needed)
        return (*grads, None, None, None)


def attend_fused(inputs: Inputs, levels: Levels, call: MsdaCall) -> torch.Tensor:
    """[B, Q, H, C] without a graph, by the kernel for all of it where the implementation has one."""
    value, reference_points, offsets, logits = inputs
    spec, fused_forward = call.spec, call.functions.fused_forward
    if fused_forward is not None:
        return fused_forward(value, levels, reference_points, *flat(offsets, logits), spec)
    return call.functions.forward(value, levels, *sampled(inputs, levels, spec.points), spec)


def sampled(
    inputs: tuple[torch.Tensor, ...], levels: Levels, points: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Locations [B, Q, H, K, 2] and weights [B, Q, H, K] in the dtype that is computed in, by torch operations."""
    value, reference_points, offsets, logits = inputs
    inner = inner_dtype(value)
    offsets, logits = flat(offsets, logits)
    locations = locations_of(reference_points.to(inner), offsets.to(inner), levels, points)
    return locations, torch.softmax(logits.to(inner), dim=-1)


def locations_of(
    reference_points: torch.Tensor, offsets: torch.Tensor, levels: Levels, points: tuple[int, ...]
) -> torch.Tensor:
    """[B, Q, H, K, 2] from [B, Q, L, 2 or 4] and [B, Q, H, K, 2], both of the dtype to compute in."""
    reference, divisor = _of_each_point(reference_points, levels, points, offsets)
    if reference.shape[-1] == 2:
        return reference + offsets / divisor
    return reference[..., :2] + offsets / divisor * reference[..., 2:] * 0.5


def _of_each_point(
    reference_points: torch.Tensor, levels: Levels, points: tuple[int, ...], offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """References [B, Q, 1, K, 2 or 4], and what offsets are divided by: [K, 2] sizes or, for boxes, [K, 1] counts."""
    device = offsets.device
    level = level_of(points, device)
    reference = reference_points.index_select(2, level)[:, :, None]
    if reference.shape[-1] == 2:
        # An empty level has no pixel to be away from; dividing by 0 would make a gradient NaN.
        size = tensor_of(levels, device).flip(1).clamp_min(1).to(offsets.dtype)  # [L, 2] (width, height)
        return reference, size.index_select(0, level)
    counts = [[n] for n in points for _ in range(n)]
    count = torch.tensor(counts, dtype=offsets.dtype, device="cpu").view(-1, 1)
    return reference, count.to(device, non_blocking=True)


def _gradients(
    grad_out: torch.Tensor, inputs: Inputs, levels: Levels, call: MsdaCall, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients that are needed, in closed form from those of locations and weights."""
    value, logits = inputs[0], inputs[3]
    need_value, need_reference, need_offsets, need_logits = needed
    locations, weights = sampled(inputs, levels, call.spec.points)
    grad_value, grad_locations, grad_weights = call.functions.backward(
        grad_out,
        value,
        levels,
        locations,
        weights,
        call.spec,
        need_value=need_value,
        need_locations=need_reference or need_offsets,
        need_weights=need_logits,
    )
    grad_reference = grad_offsets = grad_logits = None
    if grad_weights is not None:
        # d softmax: weight * (its gradient - the mean of all of them)
        mean = (weights * grad_weights).sum(dim=-1, keepdim=True)
        grad_logits = (weights * (grad_weights - mean)).to(logits.dtype).view(logits.shape)
    del locations, weights
    if grad_locations is not None:
        grad_reference, grad_offsets = _through_locations(
            grad_locations, inputs, levels, call.spec.points, need_reference, need_offsets
        )
    return grad_value, grad_reference, grad_offsets, grad_logits


def _through_locations(
    grad_locations: torch.Tensor,
    inputs: Inputs,
    levels: Levels,
    points: tuple[int, ...],
    need_reference: bool,
    need_offsets: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of reference points and offsets; see `locations_of`."""
    _, reference_points, raw_offsets, _ = inputs
    inner = grad_locations.dtype
    offsets = raw_offsets.to(inner).reshape(grad_locations.shape)
    reference, divisor = _of_each_point(reference_points.to(inner), levels, points, offsets)
    grad_reference = grad_offsets = None
    boxes = reference.shape[-1] == 4
    halves = grad_locations * 0.5 if boxes else grad_locations
    if need_reference:
        grad_reference = _sums_of_levels(grad_locations, points)
        if boxes:
            grad_sides = _sums_of_levels(halves * (offsets / divisor), points)
            grad_reference = torch.cat([grad_reference, grad_sides], dim=-1)
        grad_reference = grad_reference.to(reference_points.dtype)
    if need_offsets:
        steps = halves * reference[..., 2:] if boxes else halves
        grad_offsets = (steps / divisor).to(raw_offsets.dtype).view(raw_offsets.shape)
    return grad_reference, grad_offsets


def _sums_of_levels(terms: torch.Tensor, points: tuple[int, ...]) -> torch.Tensor:
    """[B, Q, L, 2] from [B, Q, H, K, 2]: over heads and the points of each level, never by atomic additions."""
    batch, queries = terms.shape[:2]
    sums = terms.new_empty(batch, queries, len(points), 2)
    begin = 0
    for level, count in enumerate(points):
        sums[:, :, level] = terms[:, :, :, begin : begin + count].sum(dim=(2, 3))
        begin += count
    return sums
