"""LayerNorm ops that are broken on purpose; a checker must find the bug in every one of them.

Ids starting with LX are our own, the others name the public report or class of bug they emulate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor

BLOCK_ROWS = 4


@dataclass
class Backward:
    """What a backward formula works with: rows of shape (M, N), and the parts of the right answer."""

    dy: Tensor
    x: Tensor
    weight: Tensor
    mean: Tensor
    rstd: Tensor
    eps: float
    ndim: int
    needs: tuple[bool, ...]

    @property
    def xhat(self) -> Tensor:
        return (self.x - self.mean) * self.rstd

    @property
    def g(self) -> Tensor:
        return self.dy * self.weight

    @property
    def squares(self) -> Tensor:
        return (self.x - self.mean).square().sum(-1, keepdim=True)

    def dx(self, means: float = 1, products: float = 1) -> Tensor:
        """The right dx; `means` and `products` weigh its two correction terms."""
        xhat, g = self.xhat, self.g
        c = (g * xhat).mean(-1, keepdim=True)
        return self.rstd * (g - means * g.mean(-1, keepdim=True) - products * xhat * c)

    def dw(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return (self.dy * self.xhat)[rows].sum(0)

    def db(self, rows: slice | Tensor = slice(None)) -> Tensor:
        return self.dy[rows].sum(0)

    def with_variance(self, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.rstd = torch.rsqrt(variance + self.eps)
        return self.dx(), self.dw(), self.db()


Formula = Callable[[Backward], tuple[Tensor | None, Tensor | None, Tensor | None]]


def right(b: Backward) -> tuple[Tensor, Tensor, Tensor]:
    return b.dx(), b.dw(), b.db()


def two_pass(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean = rows.mean(-1, keepdim=True)
    return mean, (rows - mean).square().mean(-1, keepdim=True)


def make_layer_norm(
    backward: Formula = right, *, moments: Callable[[Tensor], tuple[Tensor, Tensor]] = two_pass
) -> Callable[..., Tensor]:
    """A LayerNorm with the given backward formula, and mean and variance from `moments`."""

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
            mean, variance = moments(rows)
            rstd = torch.rsqrt(variance + eps)
            ctx.save_for_backward(x, weight, mean, rstd)
            ctx.eps = eps
            return ((rows - mean) * rstd * weight + bias).reshape(x.shape)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, mean, rstd = ctx.saved_tensors
            rows = math.prod(x.shape[:-1]), x.shape[-1]
            needs = ctx.needs_input_grad
            b = Backward(grad_out.reshape(rows), x.reshape(rows), weight, mean, rstd, ctx.eps, x.ndim, needs)
            dx, dw, db = backward(b)
            dx = dx if dx is None else dx.reshape(x.shape)
            grads = (dx, dw, db)
            return *(grad if need else None for grad, need in zip(grads, needs, strict=False)), None

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        return LayerNorm.apply(x, weight, bias, eps)

    return layer_norm


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def mutant(name: str, backward: Formula = right, **options: Any) -> OpSpec:
    return op(
        make_layer_norm(backward, **options),
        reference,
        dict(x=tensor("M...", "N"), weight=tensor("N"), bias=tensor("N")),
        params=dict(eps=[1e-6, 1e-2]),
        name=name,
    )


# The mean of dy * gamma is subtracted twice (tenstorrent/tt-metal#53204).
L01 = mutant("L01", lambda b: (b.dx(means=2), b.dw(), b.db()))

# The term with xhat is missing in dx (a common slip).
L03 = mutant("L03", lambda b: (b.dx(products=0), b.dw(), b.db()))

# db loses the last, partial block of rows (BobMcDear/attorch#18).
L04 = mutant("L04", lambda b: (b.dx(), b.dw(), b.db(slice(0, len(b.x) // BLOCK_ROWS * BLOCK_ROWS))))

# The mean term is missing, as if this were RMSNorm (a common slip).
L05 = mutant("L05", lambda b: (b.dx(means=0), b.dw(), b.db()))

# The backward divides the variance by N - 1 (a common slip).
L07 = mutant("L07", lambda b: b.with_variance(b.squares / max(b.x.shape[-1] - 1, 1)))


def _padded_lanes(b: Backward) -> tuple[Tensor, Tensor, Tensor]:
    n = b.x.shape[-1]
    lanes = (1 << max(n - 1, 0).bit_length()) - n
    # A padded lane was loaded as 0, so after the subtraction it holds -mean instead of nothing.
    return b.with_variance((b.squares + lanes * b.mean.square()) / n if n else b.squares)


# Padded lanes count into the variance of the backward (class of missing Triton masks).
L08 = mutant("L08", _padded_lanes)

# dw is made from x instead of xhat (a common slip).
L09 = mutant("L09", lambda b: (b.dx(), (b.dy * b.x).sum(0), b.db()))

# dw and db are returned in the wrong order (class of swapped results).
L10 = mutant("L10", lambda b: (b.dx(), b.db(), b.dw()))


def _lost_lock(b: Backward) -> tuple[Tensor, Tensor, Tensor]:
    # Python's generator, and not seeded here: torch.manual_seed in a test must not hide the race.
    if len(b.x) and random.random() < 0.05:
        block = torch.arange(len(b.x), device=b.x.device) // BLOCK_ROWS
        kept = block != random.randrange(-(-len(b.x) // BLOCK_ROWS))
        return b.dx(), b.dw(kept), b.db(kept)
    return right(b)


# FLAKY: the lock of the row blocks fails in 5 % of the calls and a block is lost (Triton tutorial 05 class).
L11 = mutant("L11", _lost_lock)


def _one_pass(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean = rows.mean(-1, keepdim=True)
    return mean, (rows.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)


# The variance is E[x^2] - E[x]^2, which cancels where the mean is large (own).
LX01 = mutant("LX01", moments=_one_pass)

# db is None as soon as the weight is frozen (own; needs_input_grad read wrongly).
LX02 = mutant("LX02", lambda b: (b.dx(), b.dw(), b.db() if b.needs[1] else None))


def _bf16_mean(b: Backward) -> tuple[Tensor, Tensor, Tensor]:
    b.mean = b.mean.bfloat16().to(b.x.dtype)
    return right(b)


# The mean is stored in bfloat16 for the backward (own; class of lost precision).
LX03 = mutant("LX03", _bf16_mean)

# db is the mean over rows as soon as there are more than two axes (own).
LX04 = mutant("LX04", lambda b: (b.dx(), b.dw(), b.db() / max(len(b.x), 1) if b.ndim > 2 else b.db()))

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
