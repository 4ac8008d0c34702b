"""Norm that is computed, without its tensors: what every implementation of the family is told. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NormSpec:
    """y = (s - mean) * rstd * (weight + weight_offset) + bias with s = x + residual."""

    # LayerNorm: mean is subtracted and rstd comes from the variance. False is RMSNorm: mean = 0 and rstd comes from the
    # mean square.
    centered: bool
    eps: float  # added to the variance or mean square; finite, 0 or more
    weight_offset: float = 0.0  # added to the weight in float32 (1.0 for weights stored around zero)
    deterministic: bool = True  # grad_weight and grad_bias are sums in a fixed order, not atomic additions
    # number of partial sums behind grad_weight and grad_bias; None lets the launch plan choose by GPU. The same number
    # gives the same bits on any GPU.
    parts: int | None = None

    @property
    def empty_rstd(self) -> float:
        """rstd of a row without elements, whose variance and mean square are 0."""
        return 1 / math.sqrt(self.eps) if self.eps else math.inf
