"""The norms by explicit torch operations (impl='torch'): any device, float64 too, closed-form backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from retrograd.ops.norm.arguments import BackwardTensors, NormGrads, NormResults, NormTensors, WantedGrads, WantedOutput
from retrograd.ops.norm.shapes import empty_results, has_own_s, heads_of
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import inner_dtype

# 64 K elements are 256 KiB in float32: a block of rows and its temporaries stay in a core's cache.
_BLOCK_ELEMENTS = 65536


def norm_fwd(tensors: NormTensors, spec: NormSpec, wanted: WantedOutput) -> NormResults:
    """y = (s - mean) * rstd * (weight + offset) + bias with s = x + residual; see `arguments`.

    Numerics: inside float32, float64 for float64. s is rounded to s_dtype before it is normalised. The variance is
    that of the centred row.
    """
    x, weight, bias, residual = tensors
    rows, columns = x.shape
    inner, own_s = inner_dtype(x), has_own_s(x, residual, wanted.s_dtype)
    results = empty_results(tensors, spec, wanted)
    y, s_out, mean_out, rstd_out = results
    scale, shift = _scale(weight, spec, inner), None if bias is None else bias.to(inner)  # [N] or [H, N]
    for block in _row_blocks(rows, columns, heads_of(scale, shift)):
        # Contiguous rows are summed in one order, whatever the layout and the number of rows.
        s = x[block].to(inner).contiguous()  # [R, N]
        if residual is not None:
            s = (s + residual[block].to(inner)).contiguous()
        if own_s:
            rounded = s.to(wanted.s_dtype)
            s = rounded.to(inner)
            if s_out is not None:
                s_out[block] = rounded
        if spec.centered:
            mean = _row_mean(s)
            s = s - mean
            if mean_out is not None:
                mean_out[block] = mean[:, 0]
        rstd = (_row_mean(s * s) + spec.eps).sqrt().reciprocal()  # [R, 1]
        if rstd_out is not None:
            rstd_out[block] = rstd[:, 0]
        y[block] = _affine(s * rstd, scale, shift).to(y.dtype)
    return results


def norm_bwd(tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> NormGrads:
    """The gradients in closed form; see `arguments`.

    With h = (s - mean) * rstd and g = grad_out * (weight + offset):
    ds = rstd * (g - h * mean(g * h) - mean(g)) + grad_s, without mean(g) for RMSNorm; grad_weight = sum over rows of
    grad_out * h, grad_bias = sum over rows of grad_out.

    Numerics: inside float32 (float64 for float64); blocks of rows are added in their order: deterministic.
    """
    grad_out, s, weight, mean, rstd, grad_s = tensors
    rows, columns = s.shape
    inner = inner_dtype(s)
    dtypes: set[torch.dtype | None] = {wanted.x, wanted.residual} - {None}
    ds_out = {dtype: torch.empty(s.shape, dtype=dtype, device=s.device) for dtype in dtypes}
    shape = wanted.vector_shape(columns)
    weight_sum = None if wanted.weight is None else torch.zeros(shape, dtype=inner, device=s.device)
    bias_sum = None if wanted.bias is None else torch.zeros(shape, dtype=inner, device=s.device)
    scale = _scale(weight, spec, inner)
    for block in _row_blocks(rows, columns, wanted.heads):
        g = grad_out[block].to(inner).contiguous()  # [R, N]
        if bias_sum is not None:
            bias_sum += _per_head(g, bias_sum).sum(dim=0)
        if not ds_out and weight_sum is None:
            continue
        r = rstd[block].unsqueeze(1)  # [R, 1]
        h = s[block].to(inner).contiguous()
        h = (h if mean is None else h - mean[block].unsqueeze(1)) * r  # [R, N]
        if weight_sum is not None:
            weight_sum += _per_head(g * h, weight_sum).sum(dim=0)
        if not ds_out:
            continue
        ds = _row_gradient(_affine(g, scale, None), h, r, mean is not None)
        if grad_s is not None:
            ds = ds + grad_s[block].to(inner)
        for dtype, out in ds_out.items():
            out[block] = ds.to(dtype)
    return NormGrads(
        x=ds_out.get(wanted.x),
        weight=_deliver(weight_sum, wanted.weight, wanted.into_weight),
        bias=_deliver(bias_sum, wanted.bias, wanted.into_bias),
        residual=ds_out.get(wanted.residual),
    )


def _scale(weight: torch.Tensor | None, spec: NormSpec, inner: torch.dtype) -> torch.Tensor | None:
    if weight is None:
        return None
    return weight.to(inner) + spec.weight_offset if spec.weight_offset else weight.to(inner)


def _row_mean(rows: torch.Tensor) -> torch.Tensor:
    """[R, 1]; 0 for rows without elements."""
    return rows.sum(dim=1, keepdim=True) / max(rows.shape[1], 1)


def _affine(rows: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None) -> torch.Tensor:
    if scale is not None:
        rows = _per_head(rows, scale).mul(scale).view_as(rows)
    return rows if shift is None else _per_head(rows, shift).add(shift).view_as(rows)


def _row_gradient(g: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor, centered: bool) -> torch.Tensor:
    """[R, N] gradient of what was normalised, from g = grad_out * scale and h = the normalised rows."""
    projected = g - h * _row_mean(g * h)
    return (projected - _row_mean(g) if centered else projected) * rstd


def _per_head(rows: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """The rows as [R / H, H, N] for an [H, N] vector, unchanged for an [N] one."""
    return rows if vector.dim() == 1 else rows.view(-1 if rows.numel() else 0, *vector.shape)


def _deliver(total: torch.Tensor | None, dtype: torch.dtype | None, into: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or into is None:
        return None if total is None else total.to(dtype)
    into.add_(total.view(into.shape))
    return None


def _row_blocks(rows: int, columns: int, heads: int) -> Iterator[slice]:
    # Whole groups of heads, so that a block can be seen as [R / H, H, N].
    step = max(1, _BLOCK_ELEMENTS // max(columns * heads, 1)) * heads
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
