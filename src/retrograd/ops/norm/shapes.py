"""Shapes: [..., N] tensors to the [M, N] that implementations take, and back; dtypes and memory of their results."""

from __future__ import annotations

import torch

from retrograd.ops.norm.arguments import NormResults, NormTensors, WantedOutput
from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import inner_dtype


def two_dimensional(tensors: NormTensors) -> NormTensors:
    """x and residual as [M, N], the vectors as [N] or [H, N] with H > 1."""
    x, weight, bias, residual = tensors
    return NormTensors(
        x=rows_of(x),
        weight=vector_of(weight),
        bias=vector_of(bias),
        residual=None if residual is None else rows_of(residual),
    )


def rows_of(t: torch.Tensor) -> torch.Tensor:
    """[..., N] as [M, N]; a copy only where strides leave no other way."""
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def vector_of(t: torch.Tensor | None) -> torch.Tensor | None:
    """[1, N] as [N], since a single head needs no second dimension; others as they are."""
    return t.squeeze(0) if t is not None and t.dim() == 2 else t


def heads_of(*vectors: torch.Tensor | None) -> int:
    """H of the first [H, N] vector, 1 without one or without heads."""
    for vector in vectors:
        if vector is not None:
            return max(vector.shape[0], 1) if vector.dim() == 2 else 1
    return 1


def in_shape(gradient: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """The gradient of a vector, [N] from an implementation where there is one head, in the shape of the vector."""
    if gradient is None or gradient.shape == shape:
        return gradient
    # No head at all is computed as one, which got no row.
    return gradient[: shape.numel()].view(shape)


def has_own_s(x: torch.Tensor, residual: torch.Tensor | None, s_dtype: torch.dtype) -> bool:
    """Whether s is another tensor than x: something was added or cast."""
    return residual is not None or s_dtype != x.dtype


def empty_results(tensors: NormTensors, spec: NormSpec, wanted: WantedOutput) -> NormResults:
    """Results of a forward over x [M, N], to be written."""
    x, _, _, residual = tensors
    out_dtype, s_dtype, store_stats, store_s = wanted
    rows, n = x.shape
    own_s = store_s and has_own_s(x, residual, s_dtype)
    # A torch.Size in place of the tuples would cost the host 0.8 us each.
    y = x.new_empty((rows, n), dtype=out_dtype)  # [M, N]
    s = x.new_empty((rows, n), dtype=s_dtype) if own_s else None  # [M, N]
    rstd = x.new_empty(rows, dtype=inner_dtype(x)) if store_stats else None  # [M]
    mean = torch.empty_like(rstd) if rstd is not None and spec.centered else None  # [M]
    return NormResults(y, s, mean, rstd)


def without_elements(results: NormResults, rstd: float) -> NormResults:
    """The results of a forward over M * N = 0 elements, which no kernel visits: mean is 0, `rstd` in every row."""
    for statistic, value in zip(results[2:], (0.0, rstd), strict=True):
        if statistic is not None:
            # fill_ refuses a number beyond float32, an addition makes it infinity.
            statistic.zero_().add_(value)
    return results
