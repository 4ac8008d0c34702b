"""Quantisation, losses and pointwise ops, right: integers, mixed dtypes, numbers with a gradient, guards, ties."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    held = (x / scale[:, None]).clamp(-128, 127)
    return (held + (held.round() - held).detach()) * scale[:, None]


def quantised_backward(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    level = x / scale[:, None]
    return dy * ((level >= -128) & (level <= 127)), None


add("straight_through",
    function(lambda x, s: (x / s[:, None]).round().clamp(-128, 127) * s[:, None], quantised_backward), quantised,
    dict(x=tensor("C", "N"), scale=tensor("C", low=0.002, high=0.02, grad=False)), sizes=dict(C=(1, 8), N=(1, 32)),
    surrogate=True)  # fmt: skip


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).detach().round().to(torch.int8), scale


def packed_by_ends(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp_min(1e-8) / 127
    return (x / scale).detach().round().to(torch.int8), scale


add("eight_bits_and_scale", packed_by_ends, packed, dict(x=tensor("M", "N")), sizes=dict(N=(1, 64)))


class Linear(torch.autograd.Function):
    """A float32 weight beside inputs of 16 bits: products in float32, the gradient of the weight in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.to(weight.dtype) @ weight.mT).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = dy.to(weight.dtype)
        return (wide @ weight).to(x.dtype), wide.mT @ x.to(weight.dtype)


add("float32_weight", lambda x, w: Linear.apply(x, w), lambda x, w: (x.to(w.dtype) @ w.mT).to(x.dtype),
    dict(x=tensor("M", "K"), weight=tensor("N", "K", dtype="float32")), dtypes=["float32", "bfloat16"],
    sizes=dict(M=(1, 24), K=(1, 24), N=(1, 12)))  # fmt: skip

add("mean_of_nothing", lambda x: x.sum(-1) / x.shape[-1] if x.shape[-1] else x.new_full(x.shape[:-1], torch.nan) + x.sum(-1),
    lambda x: x.mean(-1), dict(x=tensor("M", "N")))  # fmt: skip


def ctc(logits: Tensor, target: Tensor) -> Tensor:
    steps, batch = logits.shape[:2]
    lengths = torch.full((batch,), steps), torch.full((batch,), target.shape[1])
    return F.ctc_loss(torch.log_softmax(logits, -1), target, *lengths, reduction="none")


def ctc_step_by_step(logits: Tensor, target: Tensor) -> Tensor:
    """Logarithms with -1e30 for paths that do not exist, which stay exact zeros."""
    lp = torch.log_softmax(logits, -1)
    labels = F.pad(F.pad(target[..., None], (1, 0)).flatten(1), (0, 1))
    skips = (labels != 0) & (labels != F.pad(labels, (2, 0))[:, :-2])
    alpha = torch.full_like(lp[0, :, :1], -1e30).expand(-1, labels.shape[1])
    alpha = torch.cat([torch.zeros_like(alpha[:, :2]), alpha[:, 2:]], 1) + lp[0].gather(1, labels)
    for t in range(1, lp.shape[0]):
        near = F.pad(alpha[:, :-1], (1, 0), value=-1e30)
        far = F.pad(alpha[:, :-2], (2, 0), value=-1e30).masked_fill(~skips, -1e30)
        alpha = torch.logsumexp(torch.stack([alpha, near, far]), 0) + lp[t].gather(1, labels)
    return -torch.logsumexp(alpha[:, -2:], -1)


add("ctc_step_by_step", ctc_step_by_step, ctc,
    dict(logits=tensor("T", "B", "C"), target=tensor("B", "S", dtype="int64", low=1, high="C")),
    sizes=dict(T=(9, 12), B=(1, 2), C=(3, 8), S=(1, 3)))  # fmt: skip


def contrastive(x: Tensor, y: Tensor, temperature: Tensor) -> Tensor:
    x, y = F.normalize(x, dim=-1, eps=1e-6), F.normalize(y, dim=-1, eps=1e-6)
    return F.cross_entropy(x @ y.mT * torch.exp(temperature), torch.arange(len(x)))


def contrastive_by_pairs(x: Tensor, y: Tensor, temperature: Tensor) -> Tensor:
    scale = torch.exp(temperature)
    norms = x.norm(dim=-1).clamp_min(1e-6)[:, None] * y.norm(dim=-1).clamp_min(1e-6)
    scores = torch.einsum("in,jn->ij", x, y) / norms * scale
    return (torch.logsumexp(scores, -1) - scores.diagonal()).mean()


add("contrastive_with_temperature", contrastive_by_pairs, contrastive,
    dict(x=tensor("M", "N"), y=tensor("M", "N"), temperature=tensor()), sizes=dict(M=(2, 12), N=(2, 16)))  # fmt: skip

# Of -inf it makes NaN: promised for finite values alone.
add("relu_by_halves", lambda x: (x + x.abs()) / 2, torch.relu, dict(x=tensor("M...", "N")), extremes=())


def nearly_zero() -> bool:
    """The gradient of x / |x| is 0, in floating point a rounding of 1 / |x|; at 0 it is NaN, as the value."""
    x = torch.randn(1000, requires_grad=True)
    (grad,) = torch.autograd.grad((x / x.abs()).sum(), x)
    return bool((grad * x).abs().max() < 1e-6)


add("sign_by_quotient", lambda x: x / x.abs(), lambda x: x / x.abs(), dict(x=tensor("M", "N")), proof=nearly_zero)
add("signed_square", lambda x: x * x.abs(), lambda x: torch.where(x < 0, -x * x, x * x), dict(x=tensor("M", "N")),
    proof=Call(order=2, bound=1e-4))  # fmt: skip


def welford(x: Tensor) -> Tensor:
    mean, total = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        delta = x[..., i] - mean
        mean = mean + delta / (i + 1)
        total = total + delta * (x[..., i] - mean)
    return total / x.shape[-1]


add("variance_by_welford", welford, lambda x: x.var(-1, correction=0), dict(x=tensor("M", "N")),
    sizes=dict(N=(1, 32)))  # fmt: skip


def cardinal_sine(x: Tensor, near: float, terms: int) -> Tensor:
    """sin(x) / x, near zero by its series, which is right for derivatives too."""
    close = x.abs() < near
    safe = torch.where(close, 1, x)
    small = torch.where(close, x, 0)
    series: Any = sum((-1) ** n / math.factorial(2 * n + 1) * small ** (2 * n) for n in range(terms))
    return torch.where(close, series, torch.sin(safe) / safe)


add("sinc_with_guard", lambda x: cardinal_sine(x, 0.4, 6), lambda x: cardinal_sine(x, 0.5, 10),
    dict(x=tensor("M", "N")), proof=Call(order=2, bound=1e-4, change=lambda t: dict(x=t["x"] * 0.01)))  # fmt: skip

HEALTHY = RIGHT.ops
