"""The definition of the norms in plain torch, differentiated by autograd: the oracle of every other version."""

from __future__ import annotations

import torch

from retrograd.ops.types import inner_dtype


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s): s = x + residual; y = s / sqrt(mean(s^2) + eps) * (weight + weight_offset) + bias.

    Args:
        x: [..., N], any floating dtype.
        weight: [N], or [H, N] for x [..., H, N], or None for ones.
        bias: like weight, or None for zeros.
        residual: [..., N], or None for zeros.
        eps: added to the mean square.
        weight_offset: added to a weight that is given.
        residual_dtype: dtype of s; None is that of residual, or of x without one.
        out_dtype: dtype of y; None is that of x.

    Returns:
        y and s, both [..., N].

    Numerics: 16-bit inputs are computed in float32, others in their own dtype; s is not rounded before it is
    normalised, so give a rounded s as x to judge an implementation that normalises what it stores.
    """
    s = _sum(x, residual)
    y = s * torch.rsqrt(s.square().mean(dim=-1, keepdim=True) + eps)
    y = _affine(y, weight, bias, weight_offset)
    return y.to(out_dtype or x.dtype), s.to(residual_dtype or (x if residual is None else residual).dtype)


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s): s = x + residual; y = (s - mean) / sqrt(var + eps) * (weight + weight_offset) + bias.

    mean and var are those of a row, var without Bessel's correction. Arguments, results and numerics are those of
    `rms_norm_reference`.
    """
    s = _sum(x, residual)
    centred = s - s.mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = _affine(y, weight, bias, weight_offset)
    return y.to(out_dtype or x.dtype), s.to(residual_dtype or (x if residual is None else residual).dtype)


def _sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    inner = inner_dtype(x)
    return x.to(inner) if residual is None else x.to(inner) + residual.to(inner)


def _affine(
    y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    if weight is not None:
        scale = weight.to(y.dtype)
        y = y * (scale + weight_offset if weight_offset else scale)
    return y if bias is None else y + bias.to(y.dtype)
