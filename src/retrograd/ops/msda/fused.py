"""Torch operations of the fused form: locations and weights of references, offsets and logits, and their gradients."""

# That there are references is what brings anybody here.
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import torch

from retrograd.ops.msda.arguments import Levels, MsdaGrads, MsdaInputs, MsdaSpec, NeededGrads
from retrograd.ops.msda.shapes import beside_tensor, flat, tensor_of
from retrograd.ops.types import inner_dtype


def sampled(inputs: MsdaInputs, spec: MsdaSpec) -> MsdaInputs:
    """Locations [B, Q, H, K, 2] and weights [B, Q, H, K] in the dtype that is computed in."""
    value, levels, offsets, logits, references = flat(inputs)
    inner = inner_dtype(value)
    locations = locations_of(references.to(inner), offsets.to(inner), levels, spec.points)
    return MsdaInputs(value, levels, locations, torch.softmax(logits.to(inner), dim=-1))


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
    level = beside_tensor(tuple(n for n, count in enumerate(points) for _ in range(count)), torch.int64, offsets)
    reference = reference_points.index_select(2, level)[:, :, None]
    if reference.shape[-1] == 4:
        return reference, beside_tensor(tuple(n for n in points for _ in range(n)), offsets.dtype, offsets).view(-1, 1)
    # An empty level has no pixel to be away from; dividing by 0 would make a gradient NaN.
    if levels.sizes is None:
        size = tensor_of(levels, device).flip(1).clamp_min(1).to(offsets.dtype)  # [L, 2] (width, height)
        return reference, size.index_select(0, level)
    sizes = zip(levels.sizes, points, strict=True)
    sides = tuple(max(side, 1) for (height, width), count in sizes for _ in range(count) for side in (width, height))
    return reference, beside_tensor(sides, offsets.dtype, offsets).view(-1, 2)


def needed_of_points(needed: NeededGrads) -> NeededGrads:
    """What the gradients of locations and weights are needed for."""
    return NeededGrads(needed.value, needed.locations or needed.references, needed.weights)


def sampled_bwd(
    grads: MsdaGrads, weights: torch.Tensor, inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads
) -> MsdaGrads:
    """Gradients of offsets, logits and references, in closed form.

    Args:
        grads: those of value, locations and weights, as far as `needed_of_points` says.
        weights: those of `sampled`.
        inputs: what `sampled` took.
        spec: its points are looked at.
        needed: gradients to compute; that of value is passed on.
    """
    grad_logits = None
    if grads.weights is not None:
        # d softmax: weight * (its gradient - the mean of all of them)
        mean = (weights * grads.weights).sum(dim=-1, keepdim=True)
        grad_logits = (weights * (grads.weights - mean)).to(inputs.weights.dtype)
    if grads.locations is None:
        return MsdaGrads(grads.value, None, grad_logits)
    grad_offsets, grad_references = _through_locations(grads.locations, inputs, spec.points, needed)
    return MsdaGrads(grads.value, grad_offsets, grad_logits, grad_references)


def _through_locations(
    grad_locations: torch.Tensor, inputs: MsdaInputs, points: tuple[int, ...], needed: NeededGrads
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of offsets and references; see `locations_of`."""
    inner = grad_locations.dtype
    offsets = inputs.locations.to(inner).reshape(grad_locations.shape)
    reference, divisor = _of_each_point(inputs.references.to(inner), inputs.levels, points, offsets)
    grad_reference = grad_offsets = None
    boxes = reference.shape[-1] == 4
    halves = grad_locations * 0.5 if boxes else grad_locations
    if needed.references:
        grad_reference = _sums_of_levels(grad_locations, points)
        if boxes:
            grad_sides = _sums_of_levels(halves * (offsets / divisor), points)
            grad_reference = torch.cat([grad_reference, grad_sides], dim=-1)
        grad_reference = grad_reference.to(inputs.references.dtype)
    if needed.locations:
        steps = halves * reference[..., 2:] if boxes else halves
        grad_offsets = (steps / divisor).to(inputs.locations.dtype)
    return grad_offsets, grad_reference


def _sums_of_levels(terms: torch.Tensor, points: tuple[int, ...]) -> torch.Tensor:
    """[B, Q, L, 2] from [B, Q, H, K, 2]: over heads and the points of each level, never by atomic additions."""
    batch, queries = terms.shape[:2]
    sums = terms.new_empty(batch, queries, len(points), 2)
    begin = 0
    for level, count in enumerate(points):
        sums[:, :, level] = terms[:, :, :, begin : begin + count].sum(dim=(2, 3))
        begin += count
    return sums
