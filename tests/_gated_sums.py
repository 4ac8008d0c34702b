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


def packed(added: Callable[[Tensor, Tensor], Tensor], name: str) -> OpSpec:
    """Two such recurrences in one row, with their first and last states; suffix sums begin from these."""

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(q, k, g, h)
            return _two_recurrences(q, k, g, h)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, do: Tensor, dlast: Tensor) -> tuple[Tensor, ...]:
            grads = []
            ends = zip(ctx.saved_tensors[3].unbind(1), dlast.unbind(1), strict=True)
            sequences = zip(*(_two(t) for t in (*ctx.saved_tensors[:3], do)), strict=True)
            for (q, k, g, do_i), (first, last) in zip(sequences, ends, strict=True):
                states, read = _states(k, g, first), do_i * q.tanh()
                later = torch.cat([g[:, 1:], torch.zeros_like(g[:, :1])], 1)
                read = torch.cat([read[:, :-1], read[:, -1:] + last[:, None]], 1)
                dk = recurrence(torch.ones_like(k), read.flip(1), later.flip(1)).flip(1)
                dg = added(q.tanh() * do_i * states, k * dk).flip(1).cumsum(1).flip(1)
                dg = dg + (last * states[:, -1])[:, None]
                grads.append((do_i * states * (1 - q.tanh() ** 2), dk, dg, (g[:, :1].exp() * dk[:, :1])))
            return tuple(torch.cat(each, 1) for each in zip(*grads, strict=True))

    # With 1e4 in one of them the first step's gradient, of the first state alone, is left no digit by any such sum.
    k, h = tensor("M", 48, low=-4, high=4), tensor("M", 2, low=-4, high=4)
    inputs = dict(q=tensor("M", 48), k=k, g=tensor("M", 48, low=-0.5, high=-0.01), h=h)
    return op(Packed.apply, _two_recurrences, inputs, sizes=dict(M=(1, 16)), name=name, deterministic=True)


def _two(t: Tensor) -> tuple[Tensor, ...]:
    return t.split([17, 31], 1)


def _states(k: Tensor, g: Tensor, first: Tensor) -> Tensor:
    k = torch.cat([k[:, :1] + g[:, :1].exp() * first[:, None], k[:, 1:]], 1)
    return recurrence(torch.ones_like(k), k, g)


def _two_recurrences(q: Tensor, k: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    states = [_states(*each) for each in zip(_two(k), _two(g), h.unbind(1), strict=True)]
    return q.tanh() * torch.cat(states, 1), torch.stack([s[:, -1] for s in states], 1)
