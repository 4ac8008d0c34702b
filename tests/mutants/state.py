"""Ops whose calls disturb each other: right when called alone, as every other stage calls them.

Ids start with S; each names the public report or class of bug that it emulates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from retrograd.check.spec import OpSpec, op, tensor


def reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rms_norm_grads(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The right dx and dw."""
    xhat, g = x * rstd, dy * weight
    terms = dy * xhat
    dw = terms.reshape(-1, terms.shape[-1]).sum(0) if terms.numel() else torch.zeros_like(weight)
    return rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True)), dw


class Shared:
    """What an op keeps between its calls."""

    def __init__(self) -> None:
        self.copies: Any = WeakTensorKeyDictionary()
        self.buffers: dict[Any, Tensor] = {}
        self.eps = 0.0

    def rstd(self, value: Tensor) -> Tensor:
        """The workspace of this shape, holding `value` until the next call with the shape writes it."""
        return self.buffers.setdefault((value.shape, value.dtype), torch.empty_like(value)).copy_(value)


Formula = Callable[[Any, Tensor, Shared], tuple[Tensor, Tensor]]


def make(backward: Formula, *, workspace: bool = False, copies: bool = False) -> Callable[..., Tensor]:
    """An RMSNorm with the given backward; `workspace` keeps rstd in a shared buffer, `copies` a copy of the weight."""
    shared = Shared()

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, owner: Any, eps: float) -> Tensor:
            if copies:
                weight = shared.copies.setdefault(owner.value, weight.clone())
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            ctx.rstd = shared.rstd(rstd) if workspace else rstd
            ctx.save_for_backward(x, weight)
            shared.eps = eps
            return x * rstd * weight

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            grads = backward(ctx, dy, shared)
            return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None

    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return Norm.apply(x, weight, Owner(weight), eps)

    return rms_norm


class Owner:
    """Carries a tensor past autograd, which would hand the forward another object."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def mutant(name: str, backward: Formula, **options: Any) -> OpSpec:
    inputs = dict(x=tensor("M...", "N"), weight=tensor("N"))
    return op(make(backward, **options), reference, inputs, params=dict(eps=[1e-6, 1e-2]), name=name)


def right(ctx: Any, dy: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    return rms_norm_grads(dy, *ctx.saved_tensors, ctx.rstd)


def _scales_in_place(ctx: Any, dy: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    grads = right(ctx, dy, shared)
    ctx.rstd.mul_(2)
    return grads


# The backward works in place in what it saved for itself: right once, wrong at a second backward over the same graph
# (unslothai/unsloth-zoo#610, Dao-AILab/quack#209, where the version counter at least makes it fail).
S01 = mutant("S01", _scales_in_place)

# rstd lives in one workspace per shape, which the next forward overwrites before this one's backward has run
# (class of NVIDIA/warp#1732: one tape for several graphs).
S02 = mutant("S02", right, workspace=True)


def _same_buffer(ctx: Any, dy: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    dx, dw = right(ctx, dy, shared)
    return dx, shared.buffers.setdefault((dw.shape, dw.dtype), torch.empty_like(dw)).copy_(dw)


# dw is returned in a buffer that the op keeps and writes again at its next call: gradients summed over micro-batches
# change under the hand of who holds them (pytorch/pytorch#181723).
S03 = mutant("S03", _same_buffer)

# A copy of the weight (a cast, a transpose) is cached per tensor and not renewed after an optimizer's step in place
# (sgl-project/sglang#30247, ooples/AiDotNet#1817).
S04 = mutant("S04", right, copies=True)


def _last_eps(ctx: Any, dy: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return rms_norm_grads(dy, x, weight, torch.rsqrt(x.square().mean(-1, keepdim=True) + shared.eps))


# The backward takes eps from the forward that ran last, not from its own (own; class of linkedin/Liger-Kernel#1303,
# where the device is the one of the last call).
S05 = mutant("S05", _last_eps)

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
