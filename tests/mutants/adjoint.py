"""Ops whose gradient is not the derivative of their forward, and that no reference can show: there is none, or it has
the same mistake. Ids start with J; each names the public report or class of bug that it emulates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor


class ForgetsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, _, rstd = ctx.saved_tensors
        xhat = x * rstd
        dw = (dy * xhat).flatten(0, -2).sum(0) if x.ndim > 1 else dy * xhat
        return rstd * (dy - xhat * (dy * xhat).mean(-1, keepdim=True)), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ForgetsWeight.apply(x, weight, eps)


_INPUTS = dict(x=tensor("M", "N"), weight=tensor("N"))

# dx forgets the weight, and nobody has a reference (karpathy/llm.c#763: days of chasing).
J01 = op(rms_norm, None, _INPUTS, params=dict(eps=[1e-6, 1e-2]), name="J01")


def constant_scale(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return torch.tanh(x / scale)


# The scale is computed under no_grad, and the reference is a copy of the same code: both gradients agree, neither is
# right (class of linkedin/Liger-Kernel#1305, a test that compared a result with itself).
J02 = op(constant_scale, lambda x: constant_scale(x), dict(x=tensor("M", "N")), sizes=dict(N=(1, 512)), name="J02")

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
