"""The definition of deformable attention in plain torch, differentiated by autograd: the oracle of every version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from retrograd.ops.msda import validation
from retrograd.ops.msda.arguments import MsdaInputs, MsdaSpec
from retrograd.ops.msda.shapes import PointLevels, flat, levels_of_points
from retrograd.ops.types import inner_dtype

_CORNERS = ((0, 0), (1, 0), (0, 1), (1, 1))  # (x, y) of the pixels around, from the one left above


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
    # A pixel of zeros in front stands for all that lies outside.
    padded = torch.nn.functional.pad(value.to(inner), (0, 0, 0, 0, 1, 0))  # [B, 1 + S, H, C]
    across, down = torch.stack((1 - fraction, fraction), dim=-2).unbind(dim=-1)  # [B, Q, H, K, 2]
    share = (down[..., :, None] * across[..., None, :]).flatten(-2)  # [B, Q, H, K, 4], the corners of a cell
    pixels = _pixels(padded, _corners(cell.to(torch.int64)), reachable, where)
    sample = (share[..., None] * pixels).sum(dim=-2)
    return (weights.to(inner)[..., None] * sample).sum(dim=3).to(value.dtype)


def _positions(
    p: torch.Tensor, where: PointLevels, spec: MsdaSpec, coordinates_in: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) in pixels [B, Q, H, K, 2] and which points exist [B, Q, H, K]: not those at NaN or infinity."""
    size = where.size.to(p.dtype)  # [K, 2]
    last = size - 1
    scale = last if spec.align_corners else size
    position = p * scale if spec.align_corners else p * scale - 0.5
    if coordinates_in != p.dtype:
        low = p.detach().to(coordinates_in) * scale.to(coordinates_in)
        low = low if spec.align_corners else low - 0.5
        position = position + (low.to(p.dtype) - position.detach())
    if spec.border:
        exists = p.isfinite().all(dim=-1, keepdim=True)
        position = torch.where(position >= last, last, position)
        position = torch.where(position <= 0, torch.zeros_like(position), position)
        position = torch.where(exists, position, torch.nan)
    cell = position.detach().floor()
    reachable = ((cell >= -1) & (cell <= last)).all(dim=-1)  # no number at NaN, nor infinity
    return torch.where(reachable[..., None], position, 0.0), reachable


def _corners(cell: torch.Tensor) -> torch.Tensor:
    """[B, Q, H, K, 4, 2] (x, y) of the pixels around: a row, then the one below."""
    return cell[..., None, :] + torch.tensor(_CORNERS, dtype=cell.dtype, device=cell.device)


def _pixels(padded: torch.Tensor, place: torch.Tensor, reachable: torch.Tensor, where: PointLevels) -> torch.Tensor:
    """[B, Q, H, K, 4, C] values at places (x, y), zeros outside; `padded` has a pixel of zeros first."""
    size = where.size[:, None]
    inside = reachable[..., None] & ((place >= 0) & (place < size)).all(dim=-1)
    column, row = place.unbind(dim=-1)
    index = (inside * (1 + where.start[:, None] + row * size[..., 0] + column)).transpose(1, 2)
    channels = padded.shape[-1]
    columns = index.flatten(2)[..., None].expand(-1, -1, -1, channels)  # [B, H, Q * K * 4, C]
    gathered = padded.transpose(1, 2).gather(2, columns)
    return gathered.view(*index.shape, channels).transpose(1, 2)
