"""Samplers, modules with buffers, in-place and view ops, right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Entries
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool) -> Any:
    """Buffers are copied, changed in place by PyTorch, and returned."""
    mean, var = mean.clone(), var.clone()
    return F.batch_norm(x, mean, var, weight, bias, training=training), mean, var


def batch_norm_formula(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, training: bool) -> Any:
    own, spread = (x.mean((0, 2)), x.var((0, 2), correction=0)) if training else (mean, var)
    y = (x - own[:, None]) * torch.rsqrt(spread + 1e-5)[:, None] * weight[:, None] + bias[:, None]
    if training:
        mean, var = 0.9 * mean + 0.1 * own.detach(), 0.9 * var + 0.1 * x.detach().var((0, 2))
    return y, mean.clone(), var.clone()


add("batch_norm_with_buffers", batch_norm, batch_norm_formula,
    dict(x=tensor("B", "C", "L"), weight=tensor("C"), bias=tensor("C"), mean=tensor("C", grad=False),
         var=tensor("C", low=0.5, high=2.0, grad=False)), params=dict(training=[True, False]),
    sizes=dict(B=(2, 4), C=(1, 4), L=(2, 8)))  # fmt: skip


def spectral_norm(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        v = F.normalize(weight.mT @ u, dim=0)
        u = F.normalize(weight @ v, dim=0)
    return weight / (u @ weight @ v), u


def spectral_norm_by_einsum(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = torch.einsum("mn,m->n", weight.detach(), u)
    v = v / v.norm()
    u = weight.detach() @ v
    u = u / u.norm()
    return weight / torch.einsum("m,mn,n->", u, weight, v), u


add("spectral_norm_with_buffer", spectral_norm_by_einsum, spectral_norm,
    dict(weight=tensor("M", "N"), u=tensor("M", low=0.1, high=1.0, grad=False)), extremes=(),
    sizes=dict(M=(2, 8), N=(2, 8)), surrogate=True)  # fmt: skip


def shifted(x: Tensor, start: Tensor) -> Tensor:
    return torch.cat([start[:, None], x[:, :-1]], 1)


def shifted_in_place(x: Tensor, start: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[:, 0].copy_(start)
    return y


add("slices_assigned", shifted_in_place, shifted, dict(x=tensor("M", "N"), start=tensor("M")), sizes=dict(N=(1, 32)))


def windows(x: Tensor) -> Tensor:
    return x.unfold(-1, 3, 1) * 2


def windows_strided(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.as_strided((x.shape[0], x.shape[1] - 2, 3), (x.shape[1], 1, 1), x.storage_offset()) * 2


add("windows_by_stride", windows_strided, windows, dict(x=tensor("M", "N")), sizes=dict(M=(1, 8), N=(3, 32)))


def overlap_added(frames: Tensor) -> Tensor:
    length = 2 * frames.shape[1] + 2
    return F.fold(frames.mT, (1, length), (1, 4), stride=(1, 2))[:, 0, 0]


def overlap_added_in_place(frames: Tensor) -> Tensor:
    y = frames.new_zeros(frames.shape[0], 2 * frames.shape[1] + 2)
    for i, frame in enumerate(frames.unbind(1)):
        y[:, 2 * i : 2 * i + 4] += frame
    return y


add("overlap_added_in_place", overlap_added_in_place, overlap_added, dict(frames=tensor("B", "F", 4)),
    sizes=dict(B=(1, 3), F=(1, 12)))  # fmt: skip


def sampled(x: Tensor, where: Tensor) -> Tensor:
    """Hat functions at whole numbers: their kinks are the samples."""
    far = (where[..., None] - torch.arange(x.shape[-1], dtype=where.dtype)).abs()
    return ((1 - far).clamp_min(0) * x[:, None]).sum(-1)


def sampled_by_gather(x: Tensor, where: Tensor) -> Tensor:
    low = where.detach().floor()
    out: Any = 0
    for step in (0, 1):
        index = (low + step).long()
        share = where - low if step else 1 - (where - low)
        inside = (index >= 0) & (index < x.shape[-1])
        out = out + x.gather(-1, index.clamp(0, x.shape[-1] - 1)) * inside * share
    return out


# The reference spreads NaN by products with zeros, the gather does not.
add("linear_gather", sampled_by_gather, sampled,
    dict(x=tensor("B", "N"), where=tensor("B", "P", low=-1.0, high="N")), sizes=dict(B=(1, 3), N=(2, 32), P=(1, 12)))  # fmt: skip


def winograd(x: Tensor, kernel: Tensor) -> Tensor:
    """F(2, 3) along the last axis: four products for two outputs."""
    count = (x.shape[-1] - 1) // 2
    tiles = F.pad(x, (0, 2)).unfold(-1, 4, 2)[..., :count, :]
    a, b, c, d = tiles.unbind(-1)
    e, f, g = kernel.unbind(-1)
    one, four = (a - c) * e, (b - d) * g
    two, three = (b + c) * ((e + f + g) / 2), (c - b) * ((e - f + g) / 2)
    y = torch.stack([one + two + three, two - three - four], -1).flatten(-2)
    return y[..., : x.shape[-1] - 2]


def correlated(x: Tensor, kernel: Tensor) -> Tensor:
    return x.unfold(-1, 3, 1) @ kernel


add("winograd", winograd, correlated, dict(x=tensor("M", "N"), kernel=tensor(3)), sizes=dict(M=(1, 8), N=(3, 32)))

add("reduced_by_permutation", lambda x, w: (x.permute(2, 0, 1).flatten(1).sum(-1) * w).flip(0),
    lambda x, w: (x.sum((0, 1)) * w).flip(0), dict(x=tensor("A", "B", "C"), w=tensor("C")),
    sizes=dict(A=(1, 40), B=(1, 12), C=(1, 12)))  # fmt: skip

add("masked_fill_in_place", lambda x, mask: (x * 2).masked_fill_(mask, -1.0).mul_(3).add(x),
    lambda x, mask: torch.where(mask, -3.0, 6 * x) + x, dict(x=tensor("M", "N"), mask=tensor("M", "N", dtype="bool")))  # fmt: skip

add("expanded_output", lambda row, x: (row.expand(len(x), -1), x + row), lambda row, x: (row * torch.ones_like(x), x + row),
    dict(row=tensor("N"), x=tensor("M", "N")))  # fmt: skip

HEALTHY = RIGHT.ops
