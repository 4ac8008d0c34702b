"""Losses, right: gradients made in the forward, recursions by hand, chunks of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Entries, function
from references import losses as ref
from references.losses import LOGITS, SIZES
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def focal_backward(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor, gamma: float) -> tuple[Tensor, None]:
    log_p = torch.log_softmax(logits, -1)
    own = log_p.gather(-1, target[:, None])
    rest = -torch.expm1(own)
    slope = gamma * rest ** (gamma - 1) * own.exp() * own - rest**gamma
    hot = F.one_hot(target, logits.shape[-1])
    d = hot - log_p.exp()
    d = d.scatter(-1, target[:, None], rest)
    return dy * slope * d / len(logits), None


add("focal_by_hand", function(ref.focal, focal_backward), ref.focal, LOGITS, sizes=SIZES,
    params=dict(gamma=[2.0, 1.5]))  # fmt: skip


def dice_selected(logits: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    """Invalid elements are set before the sigmoid, to where it is 0."""
    p = torch.sigmoid(logits.masked_fill(~valid, float("-inf")))
    t = label & valid
    top = torch.where(t, p, 0).sum(-1)
    return (1 - (top + 0.5) / ((p.sum(-1) + t.sum(-1) + 1) / 2)).mean()


add("dice_of_valid_elements", dice_selected, ref.dice, ref.DICE, sizes=SIZES, algorithm_error=4)


def dtw_backward(dy: Tensor, y: Tensor, cost: Tensor) -> Tensor:
    """Weights of the paths, from the last cell back."""
    m, n = cost.shape
    r = torch.full((m + 1, n + 1), float("inf"), dtype=cost.dtype)
    r[0, 0] = 0
    for i in range(m):
        for j in range(n):
            r[i + 1, j + 1] = cost[i, j] - torch.logsumexp(-torch.stack([r[i, j], r[i, j + 1], r[i + 1, j]]), 0)
    e = torch.zeros(m + 1, n + 1, dtype=cost.dtype)
    e[m, n] = 1
    for i in reversed(range(1, m + 1)):
        for j in reversed(range(1, n + 1)):
            low = r[i, j] - cost[i - 1, j - 1]
            for a, b in ((i - 1, j), (i, j - 1), (i - 1, j - 1)):
                e[a, b] += e[i, j] * torch.exp(low - r[a, b])
    return dy * e[1:, 1:]


add("soft_dtw_by_hand", function(ref.soft_dtw, dtw_backward), ref.soft_dtw, dict(cost=tensor("M", "N")),
    sizes=dict(M=(1, 6), N=(1, 6)), extremes=())  # fmt: skip


def contrastive_backward(dy: Tensor, y: Tensor, image: Tensor, text: Tensor, scale: Tensor) -> Any:
    norms = [t.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12) for t in (image, text)]
    a, b = image / norms[0], text / norms[1]
    factor = scale.exp().clamp(max=100)
    cosine = a @ b.mT
    ds = (torch.softmax(cosine * factor, -1) + torch.softmax(cosine * factor, 0)) / 2 - torch.eye(len(a)).to(a.dtype)
    ds = ds * dy / len(a)
    d_scale = (ds * cosine).sum() * torch.where(scale.exp() <= 100, factor, 0)
    da, db = ds @ b * factor, ds.mT @ a * factor
    return *((g - t * (g * t).sum(-1, keepdim=True)) / n for g, t, n in ((da, a, norms[0]), (db, b, norms[1]))), d_scale


add("contrastive_by_hand", function(ref.contrastive, contrastive_backward), ref.contrastive, ref.PAIRS, sizes=SIZES)  # fmt: skip


def smoothed_backward(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor, smoothing: float) -> Any:
    real = (target != 0)[:, None]
    p = torch.softmax(logits, -1)
    p = p - smoothing / logits.shape[-1]
    p = p.scatter_add(-1, target[:, None], torch.full_like(p[:, :1], smoothing - 1))
    return torch.where(real, p * (dy / real.sum().clamp_min(1)), 0), None


# Rows of padding get zeros whatever they hold, also where the reference multiplies NaN by 0.
add("smoothed_with_padding", function(ref.smoothed, smoothed_backward), ref.smoothed, LOGITS, sizes=SIZES,
    params=dict(smoothing=[0.0, 0.1]))  # fmt: skip


class LinearLoss(torch.autograd.Function):
    """Gradients are made in the forward, chunk by chunk; logits are never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), 8):
            part = slice(start, start + 8)
            logits = x[part] @ weight.mT
            lse = torch.logsumexp(logits, -1, keepdim=True)
            loss += (lse - logits.gather(-1, target[part, None])).sum()
            d = logits.softmax(-1)  # exp(logits - lse) has the rounding of lse in it, 6e-4 at 1e4, and no sum of 1
            d.scatter_add_(-1, target[part, None], -torch.ones_like(lse)).div_(len(x))
            dx[part] = d @ weight
            dw.addmm_(d.mT, x[part])
        ctx.save_for_backward(dx, dw)
        return loss / len(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        return dx * dy, dw * dy, None


add("linear_loss_in_chunks", lambda *a: LinearLoss.apply(*a), ref.linear_loss, ref.LINEAR, sizes=ref.LINEAR_SIZES,
    algorithm_error=4)  # fmt: skip


def pinball_backward(dy: Tensor, y: Tensor, x: Tensor, target: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """At the kink the slope of the left side, where the reference has the mean of both."""
    g = torch.where(target > x, -q, 1 - q).to(x.dtype) * dy[:, None]
    return g, -g


add("pinball_at_its_kink", function(ref.pinball, pinball_backward), ref.pinball, ref.PINBALL, sizes=SIZES,
    params=dict(q=[0.5, 0.9]))  # fmt: skip


def preferred_softplus(chosen: Tensor, rejected: Tensor, base: Tensor) -> Tensor:
    return F.softplus(-0.5 * (chosen - rejected - base), threshold=30).mean()


# From 30 on softplus is its argument: off by 1e-13.
add("preferred_by_softplus", preferred_softplus, ref.preferred, ref.PREFERRED, sizes=SIZES)


def clipped_backward(dy: Tensor, y: Tensor, new: Tensor, old: Tensor, gain: Tensor, mask: Tensor) -> Any:
    ratio = torch.exp(new - old)
    stopped = ((gain > 0) & (ratio > 1.2)) | ((gain < 0) & (ratio < 0.8))
    g = torch.where(stopped, 0, -ratio * gain) - 0.1 * torch.expm1(old - new)
    return torch.where(mask, dy * g / mask.sum().clamp_min(1), 0), None, None, None


add("clipped_by_hand", function(ref.clipped, clipped_backward), ref.clipped, ref.CLIPPED, sizes=SIZES)


def z_in_blocks(logits: Tensor, target: Tensor) -> Tensor:
    """A running maximum and sum over blocks of 32 columns."""
    top, total = logits.new_full((len(logits),), float("-inf")), logits.new_zeros(len(logits))
    for part in logits.split(32, -1):
        new = torch.maximum(top, part.detach().amax(-1))
        total = total * torch.exp(top - new) + torch.exp(part - new[:, None]).sum(-1)
        top = new
    lse = top + total.log()
    return lse - logits[torch.arange(len(logits)), target] + 0.1 * lse.square()


add("z_loss_in_blocks", z_in_blocks, ref.with_z, ref.WIDE_LOGITS, sizes=SIZES, extremes=("logits",))

HEALTHY = RIGHT.ops
