"""Fused add + RMSNorm ops, `(y, s)` with s = x + residual, that are broken on purpose.

Ids starting with AX are our own, the others name the public report or class of bug they emulate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrograd.check.spec import OpSpec, op, tensor


@dataclass
class Backward:
    """What a backward formula works with; `ds` and `dy` are None where autograd has no gradient."""

    dy: Tensor | None
    ds: Tensor | None
    s: Tensor
    weight: Tensor
    rstd: Tensor

    def through_norm(self, s: Tensor | None = None) -> Tensor:
        """The part of the gradient that comes back through y."""
        xhat = (self.s if s is None else s) * self.rstd
        g = self.dy * self.weight
        return self.rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))

    def dw(self, s: Tensor | None = None) -> Tensor:
        terms = self.dy * (self.s if s is None else s) * self.rstd
        return terms.reshape(math.prod(terms.shape[:-1]), terms.shape[-1]).sum(0)


Formula = Callable[[Backward], tuple[Tensor, Tensor, Tensor]]


def right(b: Backward) -> tuple[Tensor, Tensor, Tensor]:
    total = b.through_norm() + b.ds
    return total, total.clone(), b.dw()


def make_fused_add(
    backward: Formula = right,
    *,
    keep: Callable[[Tensor, Tensor], Tensor] = lambda x, s: s,
    add: Callable[[Tensor, Tensor], Tensor] = torch.add,
    materialize: bool = True,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A fused add + RMSNorm with the given backward formula.

    `keep` chooses what is saved for the backward, `add` makes s, `materialize` is autograd's setting of
    whether the gradient of an unused output comes as zeros or as None.
    """

    class FusedAddRMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            s = add(x, residual)
            rstd = torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
            ctx.save_for_backward(keep(x, s), weight, rstd)
            ctx.set_materialize_grads(materialize)
            return s * rstd * weight, s

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: Tensor, ds: Tensor) -> tuple[Tensor | None, ...]:
            grads = backward(Backward(dy, ds, *ctx.saved_tensors))
            return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None

    def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
        return FusedAddRMSNorm.apply(x, residual, weight, eps)

    return fused_add_rms_norm


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    s = x + residual
    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps) * weight, s


def mutant(name: str, backward: Formula = right, **options: Any) -> OpSpec:
    return op(
        make_fused_add(backward, **options),
        reference,
        dict(x=tensor("M...", "N"), residual=tensor("M...", "N"), weight=tensor("N")),
        params=dict(eps=[1e-6, 1e-2]),
        name=name,
    )


# The gradient of the residual output is dropped (topic of ROCm/FlyDSL#800).
A01 = mutant("A01", lambda b: (b.through_norm(), b.through_norm(), b.dw()))

# The residual input does not get ds, x does (topic of ROCm/FlyDSL#800).
A02 = mutant("A02", lambda b: (b.through_norm() + b.ds, b.through_norm(), b.dw()))

# x is saved where x + residual is needed (a common slip).
A04 = mutant("A04", keep=lambda x, s: x)

# ds is scaled by rstd, as if it came through the norm (a common slip).
A06 = mutant("A06", lambda b: ((total := b.through_norm() + b.rstd * b.ds), total.clone(), b.dw()))

# Gradients are not materialised and the None of an unused output is not handled: the backward raises (own).
AX01 = mutant("AX01", materialize=False)


def _no_dy(b: Backward) -> tuple[Tensor | None, ...]:
    if b.dy is None:
        return None, None, None
    b.ds = torch.zeros_like(b.s) if b.ds is None else b.ds
    return right(b)


# If only s is used, the early exit for a missing dy drops ds as well (own).
AX02 = mutant("AX02", _no_dy, materialize=False)


def _add_over_x(x: Tensor, residual: Tensor) -> Tensor:
    # .data, as a kernel that writes to memory does not bump the version counter either.
    if 0 not in x.stride():
        x.data.add_(residual)
        return x.clone()
    return x + residual


# The forward adds the residual into the caller's x (own; class of linkedin/Liger-Kernel#254).
AX03 = mutant("AX03", add=_add_over_x)

MUTANTS = {name: spec for name, spec in list(globals().items()) if isinstance(spec, OpSpec)}
