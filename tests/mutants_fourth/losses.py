"""Losses, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from references import losses as ref
from references.losses import LOGITS, SIZES
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def focal_backward(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor, gamma: float) -> tuple[Tensor, None]:
    p_all = torch.softmax(logits, -1)
    p = p_all.gather(-1, target[:, None])
    slope = gamma * (1 - p) ** (gamma - 1) * p * p.log() - (1 - p) ** gamma  # 0 to a power below 0
    hot = F.one_hot(target, logits.shape[-1])
    return dy * slope * (hot - p_all) / len(logits), None


add("Y31", "focal loss of a sure row: 0 ** (gamma - 1) * 0 is NaN for gamma = 0.5", "special values",
    function(ref.focal, focal_backward), ref.focal, LOGITS, sizes=SIZES, params=dict(gamma=[2.0, 0.5]),
    algorithm_error=100, extremes=dict(logits="finite"),
    proof=Call(params=dict(gamma=0.5), change=lambda t: dict(
        logits=t["logits"].scatter(1, t["target"][:, None], 25.0))))  # fmt: skip


def dice_backward(dy: Tensor, y: Tensor, logits: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, None, None]:
    p, t = torch.sigmoid(logits) * valid, (label & valid).to(logits.dtype)
    top, low = 2 * (p * t).sum(-1, keepdim=True) + 1, p.sum(-1, keepdim=True) + t.sum(-1, keepdim=True) + 1
    s = torch.sigmoid(logits)
    return dy * (top / low**2 - 2 * t / low) * s * (1 - s) / len(logits), None, None  # the mask once more is missing


add("Y32", "what is not valid gets the gradient of the union", "some inputs",
    function(ref.dice, dice_backward), ref.dice, ref.DICE, sizes=SIZES)  # fmt: skip


def paths(cost: Tensor) -> Tensor:
    """Soft minima of the paths to each cell, with borders of inf."""
    r = torch.full((cost.shape[0] + 2, cost.shape[1] + 2), float("inf"), dtype=cost.dtype)
    r[0, 0] = 0
    for i in range(cost.shape[0]):
        for j in range(cost.shape[1]):
            r[i + 1, j + 1] = cost[i, j] - torch.logsumexp(-torch.stack([r[i, j], r[i, j + 1], r[i + 1, j]]), 0)
    return r


def dtw_backward(dy: Tensor, y: Tensor, cost: Tensor) -> Tensor:
    m, n = cost.shape
    r, d, e = paths(cost), F.pad(cost, (1, 1, 1, 1)), torch.zeros(m + 2, n + 2, dtype=cost.dtype)
    r[m + 1, : n + 2], r[: m + 2, n + 1] = float("-inf"), float("-inf")
    last = min(m, n)  # a square matrix is thought of
    r[last + 1, last + 1], e[last + 1, last + 1] = r[last, last], 1
    for j in reversed(range(1, n + 1)):
        for i in reversed(range(1, m + 1)):
            e[i, j] = sum(
                e[a, b] * torch.exp(r[a, b] - r[i, j] - d[a, b])
                for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1))
                if torch.isfinite(r[a, b])
            )
    return dy * e[1 : m + 1, 1 : n + 1]


add("Y33", "soft-DTW's backward begins at the corner of a square", "sizes", function(ref.soft_dtw, dtw_backward),
    ref.soft_dtw, dict(cost=tensor("M", "N")), sizes=dict(M=(1, 6), N=(1, 6)), algorithm_error=8, extremes=(),
    proof=Call(dict(M=3, N=5)))  # fmt: skip


def contrastive_bounded(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    a, b = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    factor = scale.exp()
    s = a @ b.mT * (factor + (factor.clamp(max=100) - factor).detach())  # the bound passes gradients
    place = torch.arange(len(s))
    return (F.cross_entropy(s, place) + F.cross_entropy(s.mT, place)) / 2


add("Y34", "a temperature at its bound gets a gradient", "special values",
    contrastive_bounded, ref.contrastive, ref.PAIRS, sizes=SIZES,
    proof=Call(change=lambda t: dict(scale=torch.tensor(5.0))))  # fmt: skip


def smoothed_backward(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor, smoothing: float) -> Any:
    real = (target != 0).to(logits.dtype)[:, None]
    p, n = torch.softmax(logits, -1), logits.shape[-1]
    hard = (1 - smoothing) * (p - F.one_hot(target, n)) * real
    soft = smoothing * (p - 1 / n)  # for padding, too
    return dy * (hard + soft) / real.sum().clamp_min(1), None


add("Y35", "rows of padding get the gradient of the smoothing", "parameters",
    function(ref.smoothed, smoothed_backward), ref.smoothed, LOGITS, sizes=SIZES, params=dict(smoothing=[0.0, 0.1]),
    proof=Call(params=dict(smoothing=0.1), change=lambda t: dict(target=t["target"] * torch.tensor([0, 1, 1, 1, 1])))
    )  # fmt: skip


class LinearLoss(torch.autograd.Function):
    """Gradients are made in the forward, a factor is put in by the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = x @ weight.mT
        d = (torch.softmax(logits, -1) - F.one_hot(target, len(weight))) / len(x)
        ctx.grads = d @ weight, d.mT @ x
        return F.cross_entropy(logits, target)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dw = ctx.grads
        if dy != 1:
            dx, dw = dx.mul_(dy), dw.mul_(dy)  # a second backward multiplies once more
        return dx, dw, None


def twice() -> bool:
    x, w, t = torch.randn(3, 2, requires_grad=True), torch.randn(5, 2), torch.tensor([0, 1, 2])
    y = LinearLoss.apply(x, w, t) * 3
    first = torch.autograd.grad(y, x, retain_graph=True)[0].clone()
    return not torch.allclose(first, torch.autograd.grad(y, x)[0])


add("Y36", "gradients that the forward made are multiplied in place: a second backward does it again", "calls",
    lambda *a: LinearLoss.apply(*a), ref.linear_loss, ref.LINEAR, sizes=ref.LINEAR_SIZES, proof=twice)  # fmt: skip


def pinball_backward(dy: Tensor, y: Tensor, x: Tensor, target: Tensor, q: float) -> tuple[Tensor, Tensor]:
    g = torch.where(target > x, -(1 - q), q).to(x.dtype) * dy[:, None]  # q and 1 - q are the wrong way round
    return g, -g


add("Y37", "the pinball loss's gradient has q for 1 - q: right at the median", "parameters",
    function(ref.pinball, pinball_backward), ref.pinball, ref.PINBALL, sizes=SIZES, params=dict(q=[0.5, 0.9]),
    proof=Call(params=dict(q=0.9)))  # fmt: skip


def preferred_log(chosen: Tensor, rejected: Tensor, base: Tensor) -> Tensor:
    return -torch.log(torch.sigmoid(0.5 * (chosen - rejected - base)) + 1e-9).mean()


add("Y38", "log(sigmoid(x) + 1e-9): flat from -20 on", "special values", preferred_log, ref.preferred, ref.PREFERRED,
    sizes=SIZES, algorithm_error=8,
    proof=Call(change=lambda t: dict(chosen=t["chosen"] - 100)))  # fmt: skip


def clipped_backward(dy: Tensor, y: Tensor, new: Tensor, old: Tensor, gain: Tensor, mask: Tensor) -> Any:
    ratio = torch.exp(new - old)
    inside = (ratio > 0.8) & (ratio < 1.2)  # whatever the gain's sign
    g = -ratio * gain * inside + 0.1 * (1 - torch.exp(old - new))
    return dy * g * mask / mask.sum().clamp_min(1), None, None, None


add("Y39", "the clip stops gradients on both sides, whatever the sign of the gain", "some inputs",
    function(ref.clipped, clipped_backward), ref.clipped, ref.CLIPPED, sizes=SIZES)  # fmt: skip


def z_in_blocks(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor) -> tuple[Tensor, None]:
    lse = torch.logsumexp(logits, -1, keepdim=True)
    grad = torch.zeros_like(logits)
    for start in range(0, logits.shape[-1], 64):
        part = slice(start, start + 64)
        size = logits[:, part].shape[-1]
        if size == 1 and start:
            continue  # one column beyond a block: `start + 1 < size` was meant otherwise
        hot = target[:, None] == torch.arange(start, start + size)
        grad[:, part] = torch.exp(logits[:, part] - lse) * (1 + 0.2 * lse) - hot.to(grad.dtype)
    return grad * dy[:, None], None


add("Y40", "one column beyond a block of 64 gets no gradient", "sizes",
    function(ref.with_z, z_in_blocks), ref.with_z, ref.WIDE_LOGITS, sizes=SIZES, proof=Call(dict(V=129)))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
