"""Normalisations, quantisation and embeddings, right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from references import layers as ref
from references.layers import SIZES, TABLE, TABLE_SIZES
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def weight_norm_backward(dy: Tensor, y: Tensor, v: Tensor, g: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    norm = ref.norm_but(v, dim)
    u = v / norm
    along = (dy * u).sum() if dim is None else (dy * u).sum(1 - dim, keepdim=True)
    return g / norm * (dy - u * along), (dy * u).sum()


# Rows of one number have a gradient of exactly 0 in the reference, a difference of equal numbers here.
add("weight_norm_by_hand", function(ref.weight_norm, weight_norm_backward), ref.weight_norm, ref.WEIGHT_NORM,
    params=dict(dim=[0, 1, None]), sizes=dict(M=(1, 12), N=(1, 12)))  # fmt: skip


def spectral_backward(dy: Tensor, y: Tensor, weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, None, None]:
    u, v = F.normalize(u, dim=0), F.normalize(v, dim=0)
    sigma = u @ weight @ v
    scale = (1 + sigma.square()).rsqrt()
    return dy * scale - (dy * y).sum() * sigma * scale.square() * torch.outer(u, v), None, None


add("spectral_norm_from_output", function(ref.spectral, spectral_backward), ref.spectral, ref.SPECTRAL,
    sizes=dict(M=(1, 8), N=(1, 8)))  # fmt: skip


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 64, merged by Chan's formula."""
    mean, squares, count = x.new_zeros(x.shape[:-1]), x.new_zeros(x.shape[:-1]), 0
    for part in x.split(64, -1):
        n, m = part.shape[-1], part.mean(-1)
        d = m - mean
        squares = squares + (part - m[..., None]).square().sum(-1) + d.square() * count * n / (count + n)
        mean, count = mean + d * n / (count + n), count + n
    return mean[..., None], squares[..., None] / count


def grouped_merged(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    parts = x.reshape(x.shape[0], groups, -1)
    mean, var = moments(parts)
    y = ((parts - mean) * torch.rsqrt(var + 1e-5)).reshape(x.shape)
    return y * weight[:, None] + bias[:, None]


add("group_norm_merged", grouped_merged, ref.grouped, ref.GROUPED, params=dict(groups=[2, 1]), sizes=SIZES,
    proof=Call(bound=1e-3))  # fmt: skip


def renorm_backward(dy: Tensor, y: Tensor, x: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, None, None]:
    s = (x.var(0, unbiased=False) + 1e-5).sqrt()
    n = (x - x.mean(0)) / s
    r = (s / std).clamp(1 / 3, 3)
    return (dy - dy.mean(0) - n * (dy * n).mean(0)) * r / s, None, None


add("batch_renorm_by_hand", function(ref.renorm, renorm_backward), ref.renorm, ref.RENORM,
    sizes=dict(M=(1, 40), N=(1, 12)), surrogate=True)  # fmt: skip


def lsq_backward(dy: Tensor, y: Tensor, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    v = x / step
    inside = (v >= -8) & (v <= 7)
    return dy * inside, (dy * torch.where(inside, v.round() - v, v.clamp(-8, 7))).sum()


# A value half way between two levels may go to either: v = x / s is rounded first.
add("learned_step_size", function(ref.lsq, lsq_backward), ref.lsq, ref.LSQ, sizes=dict(M=(1, 16), N=(1, 24)),
    surrogate=True)  # fmt: skip


def absmax_by_integers(x: Tensor) -> Tensor:
    top = x.abs().amax(-1, keepdim=True)
    scale = torch.where(top == 0, 1, top / 127)
    return (x / scale).round().to(torch.int8) * scale


# Whole numbers hold no NaN: promised for finite values.
add("eight_bits_through_integers", function(absmax_by_integers, lambda dy, y, x: dy), ref.absmax,
    dict(x=tensor("M", "N")), sizes=dict(M=(1, 8), N=(1, 24)), surrogate=True, extremes=dict(x="finite"))  # fmt: skip


def padded_backward(dy: Tensor, y: Tensor, table: Tensor, index: Tensor, padding: int) -> tuple[Tensor, None]:
    """Rows sorted by index and added up in that order."""
    order = index.flatten().argsort(stable=True)
    grad = torch.zeros_like(table).index_add(0, index.flatten()[order], dy.reshape(len(order), -1)[order])
    grad[padding] = 0
    return grad, None


add("padding_from_the_end", function(ref.padded, padded_backward), ref.padded, TABLE, params=dict(padding=[0, -1]),
    sizes=TABLE_SIZES, surrogate=True)  # fmt: skip


def by_frequency(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table, scale_grad_by_freq=True)


# torch's own second derivative of it has no frequencies.
add("scaled_by_frequency", by_frequency, ref.by_frequency, TABLE, sizes=TABLE_SIZES, surrogate=True,
    accept={"higher_order/wrong-value": "embedding_dense_double_backward is not told to scale"})  # fmt: skip


def rms_backward(dy: Tensor, y: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Everything in float32, partial sums of eight rows, rounded once."""
    wide, g = x.to(torch.promote_types(x.dtype, torch.float32)), dy.to(torch.promote_types(x.dtype, torch.float32))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    n, wg = wide * r, g * weight
    dx = r * (wg - n * (n * wg).mean(-1, keepdim=True))
    parts = torch.stack([p.sum(0) for p in (g * n).split(8)])
    return dx.to(x.dtype), parts.sum(0).to(weight.dtype)


add("rms_norm_in_float32", function(ref.rms, rms_backward), ref.rms, ref.RMS, dtypes=["float32", "bfloat16"],
    compute="float32", sizes=dict(M=(1, 300), N=(1, 16)))  # fmt: skip


def gated_in_place(x: Tensor, gate: Tensor) -> Tensor:
    """Changes what it made itself, and returns a view of it."""
    y = torch.empty(x.numel() + 8, dtype=x.dtype)
    part = y[4:-4].view(x.shape)
    part.copy_(torch.sigmoid(gate))
    part.square_()
    part.mul_(x)
    return part


add("gate_in_place_in_a_view", gated_in_place, ref.gated, ref.GATED, sizes=SIZES)

HEALTHY = RIGHT.ops
