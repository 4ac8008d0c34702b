"""Float8 e4m3 with a scale: numbers of the format, and the rounding of a norm's y to it by torch operations."""

from __future__ import annotations

import torch

LARGEST = 448.0  # of e4m3, whose unit of rounding is 2^-4
# The least scale: of rows of zeros, and of rows so small that its reciprocal would overflow.
LEAST_SCALE = 2.0**-126


def quantize(y: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y in float8, its scale, and the largest |y| where the scale is given.

    Args:
        y: [M, N] float32.
        scale: [1] float32 for all rows, or None for one a row.

    Returns:
        y / scale [M, N], rounded once, beyond the largest number that number, NaN where y is NaN; scale [M] or as
        given; None, or the largest |y| [1] that is no NaN.
    """
    magnitude = torch.where(y == y, y.abs(), 0.0)  # [M, N]; one NaN in a row leaves the others their scale
    amax = None
    if scale is not None:
        amax = magnitude.amax().reshape(1) if y.numel() else torch.zeros_like(scale)
        return _rounded(y, scale), scale, amax
    largest = magnitude.amax(dim=1) if y.shape[1] else y.new_zeros(y.shape[0])  # [M]
    scale = (largest / LARGEST).clamp_min(LEAST_SCALE)
    return _rounded(y, scale[:, None]), scale, None


def _rounded(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (y * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
