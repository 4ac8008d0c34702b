"""Gated recurrence whose gradient of the gates is a suffix sum, right or with a mistake in what is added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograd.check.spec import OpSpec, op, tensor


def recurrence(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """s = exp(g) s + k, o = q s, along the last dimension."""
    state, outs = torch.zeros_like(q[:, 0]), []
    for q_t, k_t, g_t in zip(q.unbind(1), k.unbind(1), g.unbind(1), strict=True):
        state = g_t.exp() * state + k_t
        outs.append(q_t * state)
    return torch.stack(outs, 1)


def gated(added: Callable[[Tensor, Tensor], Tensor], name: str) -> OpSpec:
    """The recurrence, read by tanh(q), whose gradient of g is the suffix sum of what `added` makes of reads and k dk."""

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, g: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, g)
            return recurrence(q.tanh(), k, g)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, g = ctx.saved_tensors
            q = q.tanh()
            dq = do * recurrence(torch.ones_like(q), k, g)
            later = torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1)
            dk = recurrence(torch.ones_like(q), (do * q).flip(1), later.flip(1)).flip(1)
            return dq * (1 - q * q), dk, added(q * dq, k * dk).flip(1).cumsum(1).flip(1)

    inputs = dict(q=tensor("M", "N"), k=tensor("M", "N"), g=tensor("M", "N", low=-0.5, high=-0.01))
    return op(
        Gated.apply,
        lambda q, k, g: recurrence(q.tanh(), k, g),
        inputs,
        sizes=dict(M=(1, 16), N=[1, 2, 48, 64]),
        name=name,
        deterministic=True,
    )
