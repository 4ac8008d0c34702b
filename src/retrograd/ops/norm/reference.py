"""The definition of RMSNorm in plain torch, differentiated by autograd: the oracle of every other version."""

from __future__ import annotations

import torch


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, s) with s = x + residual and y = s / sqrt(mean(s^2) + eps) * weight + bias over the last dim.

    Args:
        x: [..., N], any floating dtype.
        weight: [N] or None for ones.
        bias: [N] or None for zeros.
        residual: like x, or None for zeros.
        eps: added to the mean square.

    Returns:
        y and s, both [..., N] in the dtype of x.

    Numerics: 16-bit inputs are computed in float32, others in their own dtype; s is not rounded before it is
    normalised, so give a rounded s as x to judge an implementation that normalises what it stores.
    """
    inner = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    s = x.to(inner)
    if residual is not None:
        s = s + residual.to(inner)
    y = s * torch.rsqrt(s.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(inner)
    if bias is not None:
        y = y + bias.to(inner)
    return y.to(x.dtype), s.to(x.dtype)
