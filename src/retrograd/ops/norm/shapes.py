"""From [..., N] tensors to the [M, N] that implementations take, and back."""

from __future__ import annotations

import torch

Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def two_dimensional(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> Tensors:
    """x and residual as [M, N], the vectors as [N] or [H, N] with H > 1."""
    return rows_of(x), vector_of(weight), vector_of(bias), None if residual is None else rows_of(residual)


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
