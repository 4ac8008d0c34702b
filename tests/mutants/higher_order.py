"""Ops whose gradients are right and whose gradients of gradients are silently wrong; each names what it emulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor

EPS = dict(eps=[1e-6, 1e-2])


def _sum_rows(terms: Tensor) -> Tensor:
    return terms.flatten(0, -2).sum(0) if terms.ndim > 1 else terms


class ConstantRstd(torch.autograd.Function):
    """The backward is made of differentiable operations, but rstd is neither an input nor an output of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        xhat, g = x * rstd, dy * weight
        return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), _sum_rows(dy * xhat), None


class ConstantMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return (x - mean) * rstd * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        xhat, g = (x - mean) * rstd, dy * weight
        dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
        return dx, _sum_rows(dy * xhat), None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight


def _norm(name: str, function: Any, reference: Callable[..., Tensor]) -> OpSpec:
    inputs = dict(x=tensor("M...", "N"), weight=tensor("N"))
    call = lambda x, weight, eps: function.apply(x, weight, eps)  # noqa: E731
    return op(call, reference, inputs, params=EPS, sizes=dict(N=(1, 512)), name=name)


# rstd is an intermediate that is saved, so the second derivative takes it for a constant
# (pytorch/pytorch#58509, #76185, #104040; triton-lang/triton#1189 class).
R37 = _norm("R37", ConstantRstd, _rms_norm)

# The same in LayerNorm, with mean and rstd (as R37; pytorch/pytorch#92348 for what torch.compile did).
L15 = _norm("L15", ConstantMoments, _layer_norm)


class IntoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.exp(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        with torch.no_grad():  # a kernel writes here, and autograd sees nothing of it
            out.copy_(dy * torch.exp(x))
        return out


# A kernel writes the gradient into fresh memory, and once_differentiable is missing: a penalty on the gradient adds to
# the loss and not to the gradients (class of pytorch/pytorch#76185). Promised it is a finding, else a note.
into_memory = lambda x: IntoMemory.apply(x)  # noqa: E731
HX01 = op(into_memory, torch.exp, dict(x=tensor("M...", "N")), double_backward=True, name="HX01")


class DetachedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x.detach().clone()
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * (1 - torch.tanh(ctx.x).square())


# The input is kept detached: the second derivative exists for grad_out and is missing for x (pytorch/pytorch#58509).
HX02 = op(lambda x: DetachedInput.apply(x), torch.tanh, dict(x=tensor("M...", "N")), name="HX02")

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
