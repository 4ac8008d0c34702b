"""The definition of deformable attention in plain torch, differentiated by autograd: the oracle of every version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.ops.msda import validation
from retrograd.ops.msda.arguments import MsdaInputs, MsdaSpec
from retrograd.ops.msda.shapes import PointLevels, flat, levels_of_points
from retrograd.ops.types import inner_dtype


def ms_deform_attn_reference(
    value: torch.Tensor,
    spatial_shapes: Any,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    *,
    padding_mode: str = "zeros",
    align_corners: bool = False,
    points_per_level: Sequence[int] | None = None,
    coordinates_in: torch.dtype | None = None,
) -> torch.Tensor:
    """The function that `ms_deform_attn` computes, whose docstring describes the arguments; differentiable twice.

    Args:
        coordinates_in: dtype in which the position in pixels and the place in its cell are computed. None is
            float32, float64 for float64 inputs. torch.float32 beside float64 inputs gives the float64 truth of a
            float32 computation: each point lies where float32 puts it, in the same cell, and all that follows is
            float64. The derivative of the position is that without rounding.

    Returns:
        [B, Q, H, C] in the dtype of value.

    Raises:
        TypeError, ValueError: as `ms_deform_attn`.

    Numerics: 16-bit inputs are computed in float32, others in their own dtype. All samples exist at once:
    B * Q * H * K * C numbers, several times.
    """
    levels = validation.check_levels(spatial_shapes, value)
    inputs = MsdaInputs(value, levels, sampling_locations, attention_weights)
    points = validation.check_tensors(inputs, points_per_level)
    spec = MsdaSpec(points, validation.check_padding(padding_mode), align_corners)
    return attend(flat(inputs), spec, coordinates_in)


def attend(inputs: MsdaInputs, spec: MsdaSpec, coordinates_in: torch.dtype | None = None) -> torch.Tensor:
    """`ms_deform_attn_reference` of checked arguments, locations [B, Q, H, K, 2] and weights [B, Q, H, K]."""
    value, levels, locations, weights, _ = inputs
    inner = inner_dtype(value)
    where = levels_of_points(levels, spec.points, value.shape[1], value.device)
    low = coordinates_in or inner
    position, reachable = _positions(locations.to(inner), where, spec, low)
    cell = position.detach().floor()  # the derivative at a border is that of the cell on its right
    fraction = position - cell  # [B, Q, H, K, 2]
    if low != inner:
        # Left of a level, where the cell is -1, the difference is rounded too: -2^-30 is at 1 in float32.
        fraction = fraction + ((position.detach().to(low) - cell.to(low)).to(inner) - fraction.detach())
    column, row = cell.to(torch.int64).unbind(dim=-1)  # [B, Q, H, K]
    # A pixel of zeros in front stands for all that lies outside.
    padded = torch.nn.functional.pad(value.to(inner), (0, 0, 0, 0, 1, 0))  # [B, 1 + S, H, C]
    sample = torch.zeros((), dtype=inner, device=value.device)
    for y in (0, 1):
        for x in (0, 1):
            share = _share(fraction[..., 0], x) * _share(fraction[..., 1], y)
            sample = sample + share[..., None] * _pixels(padded, column + x, row + y, reachable, where)
    return (weights.to(inner)[..., None] * sample).sum(dim=3).to(value.dtype)


def _positions(
    p: torch.Tensor, where: PointLevels, spec: MsdaSpec, coordinates_in: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) in pixels [B, Q, H, K, 2] and which points exist [B, Q, H, K]: not those at NaN or infinity."""
    exists = p.isfinite().all(dim=-1)
    scale = (where.size - 1 if spec.align_corners else where.size).to(p.dtype)  # [K, 2]
    position = p * scale if spec.align_corners else p * scale - 0.5
    if coordinates_in != p.dtype:
        low = p.detach().to(coordinates_in) * scale.to(coordinates_in)
        low = low if spec.align_corners else low - 0.5
        position = position + (low.to(p.dtype) - position.detach())
    last = (where.size - 1).to(p.dtype)
    if spec.border:
        position = torch.where(position >= last, last, position)
        position = torch.where(position <= 0, torch.zeros_like(position), position)
    cell = position.detach().floor()
    reachable = exists & ((cell >= -1) & (cell <= last)).all(dim=-1)
    return torch.where(reachable[..., None], position, 0.0), reachable


def _share(fraction: torch.Tensor, corner: int) -> torch.Tensor:
    """How much of a corner is in the sample, along one axis."""
    return fraction if corner else 1 - fraction


def _pixels(
    padded: torch.Tensor, x: torch.Tensor, y: torch.Tensor, reachable: torch.Tensor, where: PointLevels
) -> torch.Tensor:
    """[B, Q, H, K, C] values at (x, y), zeros outside; `padded` has a pixel of zeros first."""
    width, height = where.size.unbind(dim=-1)
    inside = reachable & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    index = torch.where(inside, 1 + where.start + y * width + x, 0).transpose(1, 2)  # [B, H, Q, K]
    batch, heads, queries, points = index.shape
    channels = padded.shape[-1]
    columns = index.reshape(batch, heads, queries * points, 1).expand(-1, -1, -1, channels)
    gathered = padded.transpose(1, 2).gather(2, columns)  # [B, H, Q * K, C]
    return gathered.view(batch, heads, queries, points, channels).transpose(1, 2)
