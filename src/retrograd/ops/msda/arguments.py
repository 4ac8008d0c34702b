"""Arguments and results that all implementations of deformable attention have in common, each described here alone.

    msda_fwd(inputs: MsdaInputs, spec: MsdaSpec) -> [B, Q, H, C], contiguous, in the dtype of value
    msda_bwd(grad_out: [B, Q, H, C], inputs: MsdaInputs, spec: MsdaSpec, needed: NeededGrads) -> MsdaGrads

Tensors have any strides and any size may be 0; implementations copy what they cannot read. All compute
x = fl(fl(p * w) - 0.5), or fl(p * (w - 1)) with align_corners, every step rounded on its own, and add the K terms to 0
in ascending order. The backward is in closed form: with g = grad_out, corners v00 v01 (upper), v10 v11 (lower) and
fractions tx, ty, grad_weights = <g, sample>,
grad_x = weight * w * <g, (1 - ty) (v01 - v00) + ty (v11 - v10)> with w - 1 for w under align_corners, grad_y alike, and
grad_value[corner] += weight * (share of the corner) * g, which is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class MsdaSpec:
    """out[b, q, h] = sum over k of weights[b, q, h, k] * bilinear(the level of point k, locations[b, q, h, k])."""

    points: tuple[int, ...]  # how many of the K points belong to each level, in the order of the levels; their sum is K
    border: bool = False  # points outside are moved to the nearest pixel centre; False: outside there are zeros
    align_corners: bool = False  # 0 and 1 are the centres of the outermost pixels; False: the outer edges of them
    deterministic: bool = False  # grad_value is a sum in a fixed order, not atomic additions


class Levels(NamedTuple):
    """Heights and widths of the levels, either known to the host or in a tensor."""

    # (height, width) of each level, checked against S; None if only the device knows them
    sizes: tuple[tuple[int, int], ...] | None
    # [L, 2] int32 or int64 (height, width) on the device of value, unchecked; None if `sizes` has them
    shapes: torch.Tensor | None = None

    def count(self) -> int:
        """L."""
        return self.shapes.shape[0] if self.shapes is not None else len(self.sizes or ())


class MsdaInputs(NamedTuple):
    """The inputs; those beside value in its dtype or float32 (float64 with float64)."""

    value: torch.Tensor  # [B, S, H, C] float32, float16 or bfloat16, for torch and C++ float64 too
    levels: Levels  # sizes of the levels
    locations: torch.Tensor  # [B, Q, H, K, 2] (x, y) where 0 and 1 are the edges of a level
    weights: torch.Tensor  # [B, Q, H, K]
    # None; in the fused form [B, Q, L, 2] (x, y) or [B, Q, L, 4] boxes (x, y, width, height), with offsets in pixels,
    # or in parts of half a side, for locations, and logits for weights. A forward takes them where
    # `dispatch.Functions.fused` says so, a backward never.
    references: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that may need a gradient."""
        tensors = (self.value, self.locations, self.weights)
        return tensors if self.references is None else (*tensors, self.references)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> MsdaInputs:
        """With others for those of `tensors`."""
        value, *beside = tensors
        return MsdaInputs(value, self.levels, *beside)


class NeededGrads(NamedTuple):
    """Whether a gradient is computed; what is asked for changes no bit of the others."""

    value: bool
    locations: bool
    weights: bool
    references: bool = False


class MsdaGrads(NamedTuple):
    """Contiguous gradients in shape and dtype of their tensors; None for what was not asked for."""

    value: torch.Tensor | None = None
    locations: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    references: torch.Tensor | None = None


def zero_grads(inputs: MsdaInputs, needed: NeededGrads) -> MsdaGrads:
    """The gradients where there is no pixel or no sample."""
    value, _, locations, weights, _ = inputs
    tensors = zip((value, locations, weights), needed, strict=False)
    return MsdaGrads(*(t.new_zeros(t.shape) if need else None for t, need in tensors))
