"""Arguments and results that all implementations of the norms have in common, each described here and nowhere else.

    norm_fwd(tensors: NormTensors, spec: NormSpec, wanted: WantedOutput) -> NormResults
    norm_bwd(tensors: BackwardTensors, spec: NormSpec, wanted: WantedGrads) -> NormGrads

All of them are made by keyword, or from variables of the same names in the same order, which a test sees to. They are
named tuples since those cost an eager call of 13 us least: four fields take 0.3 us in order, 0.9 by keyword, and 1.6 as
a frozen dataclass (Python 3.11).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from retrograd.ops.norm.spec import NormSpec
from retrograd.ops.types import Impl


class NormArguments(NamedTuple):
    """The arguments of `rms_norm` and `layer_norm` that are no tensors, checked one by one."""

    eps: float
    weight_offset: float = 0.0
    deterministic: bool = True
    dw_parts: int | None = None
    residual_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    impl: str | Impl | None = None
    centered: bool = False

    def spec(self) -> NormSpec:
        """The part that implementations are told."""
        return NormSpec(self.centered, self.eps, self.weight_offset, self.deterministic, self.dw_parts)


class NormTensors(NamedTuple):
    """The inputs; implementations take x and residual as [M, N]."""

    x: torch.Tensor  # [M, N] float32, float16 or bfloat16 (float64 by torch); rows at any distance, 0 included
    # [N], or [H, N] where row r takes weight[r % H], in any of these dtypes; None is ones
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None  # likewise; None is zeros
    residual: torch.Tensor | None = None  # [M, N] in any of these dtypes; None adds nothing


class WantedOutput(NamedTuple):
    """What a forward computes."""

    out_dtype: torch.dtype  # of y
    s_dtype: torch.dtype  # of s = x + residual, which is rounded before it is normalised
    store_stats: bool = True  # whether mean and rstd are kept
    store_s: bool = True  # whether s is kept where it is not x itself


class NormResults(NamedTuple):
    """What a forward returns; statistics are float32, float64 for float64."""

    y: torch.Tensor  # [M, N]
    s: torch.Tensor | None  # [M, N]; None where it is x itself or not kept
    mean: torch.Tensor | None  # [M]; None for RMSNorm, or where it is not kept
    rstd: torch.Tensor | None  # [M]; None where it is not kept


class Float8Results(NamedTuple):
    """What a forward returns whose y is float8 e4m3: y * scale is the norm."""

    y: torch.Tensor  # [M, N]
    scale: torch.Tensor  # float32 [M], or [1] as given
    amax: torch.Tensor | None  # float32 [1]: the largest |y| before rounding; None where there is a scale a row
    s: torch.Tensor | None  # as of `NormResults`, like the next two
    mean: torch.Tensor | None
    rstd: torch.Tensor | None


class BackwardTensors(NamedTuple):
    """What a backward reads."""

    grad_out: torch.Tensor  # [M, N]; rows at any distance, 0 included
    s: torch.Tensor  # [M, N], what the forward normalised
    weight: torch.Tensor | None  # that of the forward
    mean: torch.Tensor | None  # [M] of the forward; None for RMSNorm
    rstd: torch.Tensor  # [M] of the forward
    grad_s: torch.Tensor | None = None  # [M, N] gradient that reached s by another way; None for none


class WantedGrads(NamedTuple):
    """Which gradients a backward computes."""

    # dtype of the gradient of x; None skips it and all that it costs. Likewise the next three.
    x: torch.dtype | None = None
    weight: torch.dtype | None = None  # of the weight
    bias: torch.dtype | None = None  # of the bias
    residual: torch.dtype | None = None  # of the residual
    heads: int = 1  # H of [H, N] vectors
    # float32 [H, N] or [N], contiguous, to add the gradient of the weight to; then None is returned
    into_weight: torch.Tensor | None = None
    into_bias: torch.Tensor | None = None  # likewise

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of weight and bias are added to what is there."""
        return self.into_weight is not None or self.into_bias is not None

    def vector_shape(self, columns: int) -> tuple[int, ...]:
        """Of the gradients of weight and bias."""
        return (self.heads, columns) if self.heads > 1 else (columns,)


class NormGrads(NamedTuple):
    """What a backward returns: None for what was not wanted or was added elsewhere."""

    x: torch.Tensor | None = None  # [M, N]
    weight: torch.Tensor | None = None  # [N], or [H, N] if H > 1
    bias: torch.Tensor | None = None  # likewise
    residual: torch.Tensor | None = None  # [M, N]; the same tensor as that of x where the dtypes are equal
