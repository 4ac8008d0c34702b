"""PyTorch's own ops as targets: retrograd verify examples/torch_ops.py:layer_norm (docs/peers.md has what it says)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import retrograd as rg


def rms_norm_formula(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def layer_norm_formula(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) * w + b


_VECTOR = rg.tensor("N")
# compute="float32" claims that 16-bit gradients are sums in float32.
_NORM: dict[str, Any] = dict(dtypes=["float32", "bfloat16"], compute="float32")

rms_norm = rg.op(
    lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
    rms_norm_formula,
    dict(x=rg.tensor("M", "N"), w=_VECTOR),
    name="rms_norm",
    **_NORM,
)
layer_norm = rg.op(
    lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
    layer_norm_formula,
    dict(x=rg.tensor("M", "N"), w=_VECTOR, b=_VECTOR),
    name="layer_norm",
    **_NORM,
)


def _grid_sample(padding_mode: str, align_corners: bool) -> Any:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, padding_mode=padding_mode, align_corners=align_corners)

    # Against itself in float64: is the kernel right, not what it should compute.
    inputs = dict(x=rg.tensor("B", "C", "H", "W"), grid=rg.tensor("B", "P", "Q", 2, scale=0.7))
    return rg.op(sample, sample, inputs, dtypes=["float32"], name=f"grid_sample_{padding_mode}")


grid_sample_zeros = _grid_sample("zeros", False)
grid_sample_border = _grid_sample("border", False)
grid_sample_reflection = _grid_sample("reflection", False)
