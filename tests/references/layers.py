"""References of normalisations, quantisation and embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import tensor

SIZES = dict(M=(1, 40), N=(1, 24), B=(1, 4), C=[2, 4, 8], L=(1, 100))


def norm_but(v: Tensor, dim: int | None) -> Tensor:
    dims = tuple(range(v.ndim)) if dim is None else tuple(i for i in range(v.ndim) if i != dim)
    return v.square().sum(dims, keepdim=True).sqrt()


def weight_norm(v: Tensor, g: Tensor, dim: int | None) -> Tensor:
    return v / norm_but(v, dim) * g


WEIGHT_NORM = dict(v=tensor("M", "N"), g=tensor())


def spectral(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """u and v are kept, sigma = u W v is not a constant."""
    u, v = F.normalize(u.detach(), dim=0), F.normalize(v.detach(), dim=0)
    return weight / (1 + (u @ weight @ v).square()).sqrt()


SPECTRAL = dict(weight=tensor("M", "N"), u=tensor("M", grad=False), v=tensor("N", grad=False))


def grouped(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    parts = x.reshape(x.shape[0], groups, -1)
    centred = parts - parts.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)).reshape(x.shape)
    return y * weight[:, None] + bias[:, None]


GROUPED = dict(x=tensor("B", "C", "L"), weight=tensor("C"), bias=tensor("C"))


def renorm(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Batch renormalisation: r and d are constants, bounded."""
    m = x.mean(0)
    s = (x.var(0, unbiased=False) + 1e-5).sqrt()
    r, d = (s / std).clamp(1 / 3, 3).detach(), ((m - mean) / std).clamp(-5, 5).detach()
    return (x - m) / s * r + d


RENORM = dict(x=tensor("M", "N"), mean=tensor("N", grad=False), std=tensor("N", low=0.5, high=2, grad=False))


def straight(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def lsq(x: Tensor, step: Tensor) -> Tensor:
    """Learned step size: four bits, rounding passes gradients."""
    return straight((x / step).clamp(-8, 7)) * step


LSQ = dict(x=tensor("M", "N", scale=3.0), step=tensor(low=0.3, high=0.7))


def absmax(x: Tensor) -> Tensor:
    """Rows as whole numbers of eight bits and a scale; a row of zeros stays one."""
    top = x.detach().abs().amax(-1, keepdim=True)
    scale = torch.where(top == 0, 1, top / 127)
    return straight(x / scale) * scale


def padded(table: Tensor, index: Tensor, padding: int) -> Tensor:
    """An embedding whose row of padding gets no gradient."""
    padding %= len(table)
    return torch.where((index == padding)[..., None], table[index].detach(), table[index])


TABLE = dict(table=tensor("V", "N"), index=tensor("M", 3, dtype="int64", low=0, high="V"))
TABLE_SIZES = dict(V=(2, 40), N=(1, 6), M=(1, 20))


def by_frequency(table: Tensor, index: Tensor) -> Tensor:
    """The gradient of a row is divided by how often it occurs in the batch."""
    count = torch.bincount(index.flatten(), minlength=len(table))[index][..., None]
    rows = table[index]
    return rows.detach() + (rows - rows.detach()) / count


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight).to(x.dtype)


RMS = dict(x=tensor("M", "N"), weight=tensor("N"))


def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate).square()


GATED = dict(x=tensor("M", "N"), gate=tensor("M", "N"))
