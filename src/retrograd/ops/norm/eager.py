"""RMSNorm by explicit torch operations (impl='torch'): any device, float64 too, closed-form backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# 64 K elements are 256 KiB in float32: a block of rows and its temporaries stay in a core's cache.
_BLOCK_ELEMENTS = 65536


def eager_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    *,
    store_rstd: bool = True,
    store_s: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (y, s, rstd) of y = s * rstd * weight + bias, with s = x + residual rounded to the dtype of x.

    Args:
        x: [M, N].
        weight: [N] or None.
        bias: [N] or None.
        residual: [M, N] or None.
        eps: added to the mean square.
        store_rstd: Whether rstd is kept.
        store_s: Whether s is kept where residual is given.

    Returns:
        y [M, N] in the dtype of x; s likewise, or None if not kept or without residual; rstd [M] float32 (float64
        for float64), or None.

    Numerics: inside float32, float64 for float64.
    """
    rows, columns = x.shape
    inner = _inner_dtype(x)
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)  # [M, N]
    s_out = torch.empty_like(y) if residual is not None and store_s else None  # [M, N]
    rstd_out = torch.empty(rows, dtype=inner, device=x.device) if store_rstd else None  # [M]
    scale = None if weight is None else weight.to(inner)  # [N]
    shift = None if bias is None else bias.to(inner)  # [N]
    for block in _row_blocks(rows, columns):
        s = x[block].to(inner)  # [R, N]
        if residual is not None:
            s_rounded = (s + residual[block].to(inner)).to(x.dtype)
            if s_out is not None:
                s_out[block] = s_rounded
            s = s_rounded.to(inner)
        mean_square = (s * s).sum(dim=1, keepdim=True) / max(columns, 1)  # [R, 1]
        rstd = (mean_square + eps).sqrt().reciprocal()
        if rstd_out is not None:
            rstd_out[block] = rstd[:, 0]
        normed = s * rstd
        if scale is not None:
            normed = normed * scale
        if shift is not None:
            normed = normed + shift
        y[block] = normed.to(x.dtype)
    return y, s_out, rstd_out


def eager_bwd(
    grad_out: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_s: torch.Tensor | None,
    *,
    need_grad_x: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (grad_x, grad_weight, grad_bias) in closed form.

    With h = s * rstd and g = grad_out * weight: grad_x = rstd * (g - h * mean(g * h)) + grad_s,
    grad_weight = sum over rows of grad_out * h, grad_bias = sum over rows of grad_out.

    Args:
        grad_out: [M, N].
        s: [M, N], what was normalised.
        weight: [N] or None.
        rstd: [M].
        grad_s: [M, N] gradient that reached s by another way, or None.
        need_grad_x: Whether grad_x is computed.
        weight_dtype: dtype of grad_weight, None to skip it.
        bias_dtype: dtype of grad_bias, None to skip it.

    Returns:
        grad_x [M, N] in the dtype of s, grad_weight [N], grad_bias [N]; None for what was not asked for.

    Numerics: inside float32 (float64 for float64); blocks of rows are added in their order: deterministic.
    """
    rows, columns = s.shape
    inner = _inner_dtype(s)
    grad_x = torch.empty((rows, columns), dtype=s.dtype, device=s.device) if need_grad_x else None  # [M, N]
    weight_sum = None if weight_dtype is None else torch.zeros(columns, dtype=inner, device=s.device)  # [N]
    bias_sum = None if bias_dtype is None else torch.zeros(columns, dtype=inner, device=s.device)  # [N]
    scale = None if weight is None else weight.to(inner)  # [N]
    for block in _row_blocks(rows, columns):
        g = grad_out[block].to(inner)  # [R, N]
        if bias_sum is not None:
            bias_sum += g.sum(dim=0)
        if grad_x is None and weight_sum is None:
            continue
        r = rstd[block].unsqueeze(1)  # [R, 1]
        h = s[block].to(inner) * r  # [R, N]
        if weight_sum is not None:
            weight_sum += (g * h).sum(dim=0)
        if grad_x is None:
            continue
        if scale is not None:
            g = g * scale
        projection = (g * h).sum(dim=1, keepdim=True) / max(columns, 1)  # [R, 1]
        ds = r * (g - h * projection)
        if grad_s is not None:
            ds = ds + grad_s[block].to(inner)
        grad_x[block] = ds.to(s.dtype)
    grad_weight = None if weight_sum is None else weight_sum.to(weight_dtype)
    grad_bias = None if bias_sum is None else bias_sum.to(bias_dtype)
    return grad_x, grad_weight, grad_bias


def _inner_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
