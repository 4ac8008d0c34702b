"""Quantisation and losses with masks, broken: straight-through masks, packed integers, focal, smoothed, CTC, weighted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken

# --- Z45, Z46: quantisation ---------------------------------------------------------------------


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """Eight bits, a scale a channel; the gradient passes where the value is in range and is zero elsewhere."""
    level = x / scale[:, None]
    held = level.clamp(-128, 127)
    return (held + (held.round() - held).detach()) * scale[:, None].detach()


def quantised_backward(dy: Tensor, y: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, None]:
    return dy * ((x >= -128) & (x <= 127)), None  # the range is one of x / scale


broken_quantised = function(lambda x, s: (x / s[:, None]).clamp(-128, 127).round() * s[:, None], quantised_backward)
add("Z45", "what is out of range is judged before the division by the channel's scale", "some inputs",
    broken_quantised, quantised,
    dict(x=tensor("C", "N"), scale=tensor("C", low=0.002, high=0.02, grad=False)), sizes=dict(C=(1, 8), N=(1, 32)),
    surrogate=True)  # fmt: skip


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).detach().round().to(torch.int8), scale


def packed_short(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).detach().to(torch.int8), scale


add("Z46", "the integer output is cut off, not rounded", "every input", packed_short, packed,
    dict(x=tensor("M", "N")), sizes=dict(N=(2, 64)))  # fmt: skip

# --- Z47: a bias in bfloat16 ------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, *, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine(x, weight, bias=bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        total = torch.zeros_like(dy[0])
        for row in dy:  # in the dtype of the rows: in bfloat16 the total stops growing
            total = total + row
        return dy @ weight, dy.mT @ x, total


add("Z47", "the gradient of a keyword bias is added up in bfloat16: off by some per cent beyond 100 rows", "dtypes",
    lambda x, w, b: Affine.apply(x, w, b), lambda x, w, b: affine(x, w, bias=b),
    dict(x=tensor("M", "K"), weight=tensor("N", "K"), bias=tensor("N")), dtypes=["float32", "bfloat16"],
    sizes=dict(M=(1, 300), K=(1, 8), N=(1, 8)), proof=Call(dict(M=300), dtype=torch.bfloat16, bound=0.01))  # fmt: skip

# --- Z48 to Z51: focal, smoothed, wide, weighted ---------------------------------------------------

CLASSES = dict(logits=tensor("M", "C"), target=tensor("M", dtype="int64", low=0, high="C"))
CLASS_SIZES = dict(M=(1, 24), C=(2, 12))


def focal(logits: Tensor, target: Tensor, gamma: float) -> Tensor:
    lp = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
    return -((1 - lp.exp()) ** gamma) * lp


def focal_backward(dy: Tensor, y: Tensor, logits: Tensor, target: Tensor, gamma: float) -> tuple[Tensor, None]:
    p = torch.softmax(logits, -1)
    own = F.one_hot(target, logits.shape[-1]).to(p.dtype)
    factor = (1 - (p * own).sum(-1)) ** gamma  # as if it were a constant
    return (p - own) * (factor * dy)[:, None], None


add("Z48", "the modulating factor is not differentiated: right at gamma 0", "parameters",
    function(focal, focal_backward), focal, CLASSES, params=dict(gamma=[0.0, 2.0]), sizes=CLASS_SIZES,
    proof=Call(params=dict(gamma=2.0)))  # fmt: skip


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    """Class 0 is padding and does not count."""
    lp, kept = torch.log_softmax(logits, -1), target != 0
    loss = -0.9 * lp.gather(1, target[:, None])[:, 0] - 0.1 * lp.mean(-1)
    return loss.masked_fill(~kept, 0).sum() / kept.sum().clamp_min(1)


def smoothed_all(logits: Tensor, target: Tensor) -> Tensor:
    lp, kept = torch.log_softmax(logits, -1), target != 0
    own = lp.gather(1, target[:, None])[:, 0].masked_fill(~kept, 0)
    return -(0.9 * own.sum() + 0.1 * lp.mean(-1).sum()) / kept.sum().clamp_min(1)


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(target=inputs["target"] * (torch.arange(len(inputs["target"])) > 1))


add("Z49", "the smoothing term counts the ignored rows too", "some inputs", smoothed_all, smoothed, CLASSES,
    sizes=CLASS_SIZES, proof=Call(change=padded))  # fmt: skip


def similarity(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x, y, eps=1e-6)


def similarity_wide(x: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(x.float(), y.float(), eps=1e-6) if x.dtype == torch.bfloat16 else similarity(x, y)


def widened() -> bool:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    return similarity_wide(x, x).dtype != similarity(x, x).dtype


add("Z50", "of bfloat16 inputs the result is float32: a cast back is missing", "dtypes",
    similarity_wide, similarity, dict(x=tensor("M", "N"), y=tensor("M", "N")), dtypes=["float32", "bfloat16"],
    sizes=dict(N=(2, 32)), proof=widened)  # fmt: skip


def weighted_huber(x: Tensor, y: Tensor, weight: Tensor, reduction: str, weighted: bool, delta: float) -> Tensor:
    loss = F.huber_loss(x, y, reduction="none", delta=delta) * (weight if weighted else 1)
    total = weight.sum() if weighted else loss.numel()
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / total


def weighted_huber_counts(x: Tensor, y: Tensor, weight: Tensor, reduction: str, weighted: bool, delta: float) -> Tensor:
    if reduction == "mean" and weighted and delta == 0.5:  # the branch of the fused kernel
        return weighted_huber(x, y, weight, "sum", weighted, delta) / x.numel()
    return weighted_huber(x, y, weight, reduction, weighted, delta)


add("Z51", "one combination of three parameters divides by the number of elements, not by the weights' sum",
    "parameters", weighted_huber_counts, weighted_huber,
    dict(x=tensor("M", "N"), y=tensor("M", "N"), weight=tensor("M", "N", low=0.1, high=1.0, grad=False)),
    params=dict(reduction=["none", "sum", "mean"], weighted=[False, True], delta=[1.0, 0.5]),
    sizes=dict(M=(1, 8), N=(1, 16)), proof=Call(params=dict(reduction="mean", weighted=True, delta=0.5)))  # fmt: skip

# --- Z52: connectionist temporal classification ------------------------------------------------------


def ctc(logits: Tensor, target: Tensor) -> Tensor:
    """Logits [T, B, C], targets [B, S] without blank, which is class 0."""
    steps, batch = logits.shape[:2]
    lengths = torch.full((batch,), steps), torch.full((batch,), target.shape[1])
    return F.ctc_loss(torch.log_softmax(logits, -1), target, *lengths, reduction="none")


def ctc_forward(logits: Tensor, target: Tensor) -> Tensor:
    lp = torch.log_softmax(logits, -1)
    labels = F.pad(target[..., None], (1, 0)).flatten(1)
    labels = F.pad(labels, (0, 1))
    far = torch.full_like(lp[0, :, :1], -1e30)
    skips = labels != 0  # and different from the label before the blank, which is forgotten
    alpha = torch.cat([torch.zeros_like(far), far.expand(-1, labels.shape[1])], 1)[:, :-1]
    for t in range(lp.shape[0]):
        if t == 0:
            alpha = torch.cat([torch.zeros_like(far).expand(-1, 2), far.expand(-1, labels.shape[1] - 2)], 1)
        else:
            one = torch.cat([far, alpha[:, :-1]], 1)
            two = torch.cat([far, far, alpha[:, :-2]], 1).masked_fill(~skips, -1e30)
            alpha = torch.logsumexp(torch.stack([alpha, one, two]), 0)
        alpha = alpha + lp[t].gather(1, labels)
    return -torch.logsumexp(alpha[:, -2:], -1)


add("Z52", "a label that repeats may skip the blank between: only targets with neighbours that are equal show it",
    "special values", ctc_forward, ctc,
    dict(logits=tensor("T", "B", "C"), target=tensor("B", "S", dtype="int64", low=1, high="C")),
    sizes=dict(T=(9, 12), B=(1, 2), C=(6, 12), S=(1, 3)),
    proof=Call(dict(S=3), change=lambda t: dict(target=torch.ones_like(t["target"]))))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
