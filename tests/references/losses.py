"""References of losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import tensor

SIZES = dict(M=(1, 24), N=(2, 16), V=(2, 200))
LOGITS = dict(logits=tensor("M", "N"), target=tensor("M", dtype="int64", low=0, high="N"))


def focal(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    log_p = torch.log_softmax(logits, -1).gather(-1, target[:, None])[:, 0]
    return -(torch.pow(-torch.expm1(log_p), gamma) * log_p).mean()


def dice(logits: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    p, y = torch.sigmoid(logits) * valid, (label & valid).to(logits.dtype)
    return (1 - (2 * (p * y).sum(-1) + 1) / (p.sum(-1) + y.sum(-1) + 1)).mean()


DICE = dict(logits=tensor("M", "N"), label=tensor("M", "N", dtype="bool"), valid=tensor("M", "N", dtype="bool"))


def soft_dtw(cost: Tensor) -> Tensor:
    """The soft minimum over all monotone paths through a matrix of costs [M, N]."""
    far = cost.new_full((), float("inf"))
    above = [cost.new_zeros(())] + [far] * cost.shape[1]
    for i in range(cost.shape[0]):
        row = [far]
        for j in range(cost.shape[1]):
            ways = [w for w in (above[j], above[j + 1], row[j]) if not torch.isposinf(w)]
            row.append(cost[i, j] - torch.logsumexp(-torch.stack(ways), 0))
        above = row
    return above[-1]


def contrastive(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """Both directions, the temperature at most 100."""
    a, b = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    s = a @ b.mT * scale.exp().clamp(max=100)
    place = torch.arange(len(s))
    return (F.cross_entropy(s, place) + F.cross_entropy(s.mT, place)) / 2


PAIRS = dict(image=tensor("M", "N"), text=tensor("M", "N"), scale=tensor())


def smoothed(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """Cross entropy with label smoothing; targets of 0 are padding. The mean is over all others, or 0."""
    real = (target != 0).to(logits.dtype)
    log_p = torch.log_softmax(logits, -1)
    nll = -(1 - smoothing) * log_p.gather(-1, target[:, None])[:, 0] - smoothing * log_p.mean(-1)
    return (nll * real).sum() / real.sum().clamp_min(1)


def linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.mT, target)


LINEAR = dict(x=tensor("M", "D"), weight=tensor("V", "D"), target=tensor("M", dtype="int64", low=0, high="V"))
LINEAR_SIZES = dict(M=(1, 24), D=(1, 8), V=(2, 100))


def pinball(x: Tensor, y: Tensor, q: float) -> Tensor:
    d = y - x
    return torch.maximum(q * d, (q - 1) * d).sum(-1)


PINBALL = dict(x=tensor("M", "N"), y=tensor("M", "N"))


def preferred(chosen: Tensor, rejected: Tensor, base: Tensor) -> Tensor:
    """DPO on log ratios."""
    return -F.logsigmoid(0.5 * (chosen - rejected - base)).mean()


PREFERRED = dict(chosen=tensor("M", scale=5.0), rejected=tensor("M", scale=5.0), base=tensor("M", grad=False))


def clipped(new: Tensor, old: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    """PPO's clipped objective and GRPO's estimate of the divergence, over real tokens."""
    ratio = torch.exp(new - old)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    d = old - new
    each = -surrogate + 0.1 * (torch.exp(d) - d - 1)
    return (each * mask).sum() / mask.sum().clamp_min(1)


CLIPPED = dict(new=tensor("M", "N", scale=0.3), old=tensor("M", "N", scale=0.3, grad=False),
               gain=tensor("M", "N", grad=False), mask=tensor("M", "N", dtype="bool"))  # fmt: skip


def with_z(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each row and the square of its log-sum-exp."""
    lse = torch.logsumexp(logits, -1)
    return lse - logits.gather(-1, target[:, None])[:, 0] + 0.1 * lse.square()


WIDE_LOGITS = dict(logits=tensor("M", "V"), target=tensor("M", dtype="int64", low=0, high="V"))
