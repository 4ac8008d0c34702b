"""References of linear algebra, geometry, transport, fixed points, sampling and signals."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import tensor


def solved(matrix: Tensor, right: Tensor) -> Tensor:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return torch.linalg.solve(matrix + 6 * eye, right)


SOLVED = dict(matrix=tensor("N", "N"), right=tensor("N", "M"))
SOLVED_SIZES = dict(M=(1, 4), N=(1, 8))


def orthogonalised(x: Tensor) -> Tensor:
    """Three steps of Newton-Schulz from a matrix of norm 1; tall ones are transposed."""
    tall = x.shape[0] > x.shape[1]
    y = x / (x.square().sum() + 1e-3).sqrt()
    y = y.mT if tall else y
    for _ in range(3):
        y = 1.5 * y - 0.5 * y @ y.mT @ y
    return y.mT if tall else y


def rotation(w: Tensor) -> Tensor:
    """exp of so(3), rows of three numbers to matrices, by the matrix exponential."""
    x, y, z = w.unbind(-1)
    o = torch.zeros_like(x)
    return torch.linalg.matrix_exp(torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).unflatten(-1, (3, 3)))


def composited(alpha: Tensor, colour: Tensor) -> Tensor:
    """Colours along rays, from the front; alpha in [0, 1]."""
    light, out = torch.ones_like(alpha[:, 0]), torch.zeros_like(colour[:, 0])
    for s in range(alpha.shape[1]):
        out = out + (light * alpha[:, s])[:, None] * colour[:, s]
        light = light * (1 - alpha[:, s])
    return out


RAYS = dict(alpha=tensor("M", "S", low=0, high=1), colour=tensor("M", "S", 3))
RAY_SIZES = dict(M=(1, 8), S=(1, 16))


def splat(place: Tensor, centre: Tensor, conic: Tensor) -> Tensor:
    """Weights [P, G] of 2-D Gaussians at places; conic has xx, xy, yy."""
    dx, dy = (place[:, None] - centre).unbind(-1)
    a, b, c = conic.unbind(-1)
    return torch.exp(-0.5 * (F.softplus(a) * dx * dx + F.softplus(c) * dy * dy) - 0.3 * torch.tanh(b) * dx * dy)


SPLAT = dict(place=tensor("P", 2, grad=False), centre=tensor("G", 2), conic=tensor("G", 3))
SPLAT_SIZES = dict(P=(1, 12), G=(1, 12))


def sinkhorn(cost: Tensor, steps: int) -> Tensor:
    """A transport plan with rows and columns of equal weight, columns last."""
    log_p = -cost
    for _ in range(steps):
        log_p = log_p - torch.logsumexp(log_p, 1, keepdim=True)
        log_p = log_p - torch.logsumexp(log_p, 0, keepdim=True)
    return log_p.exp()


def fixed_point(x: Tensor, weight: Tensor) -> Tensor:
    """z = tanh(z W + x), W bounded so that it contracts."""
    w = weight / (1 + weight.square().sum()).sqrt() * 0.7
    z = torch.zeros_like(x)
    for _ in range(100):
        z = torch.tanh(z @ w + x)
    return z


FIXED = dict(x=tensor("M", "N"), weight=tensor("N", "N"))
FIXED_SIZES = dict(M=(1, 4), N=(1, 6))


def sampled(signal: Tensor, place: Tensor) -> Tensor:
    """Linear interpolation between samples, beyond the ends their value."""
    at = place.clamp(0, signal.shape[-1] - 1)
    low = at.detach().floor().clamp_max(max(signal.shape[-1] - 2, 0))
    high = (low + 1).clamp_max(signal.shape[-1] - 1)
    t = at - low
    return signal.gather(-1, low.long()) * (1 - t) + signal.gather(-1, high.long()) * t


SAMPLED = dict(signal=tensor("B", "L"), place=tensor("B", "P", low=-2, high=12))
SAMPLED_SIZES = dict(B=(1, 3), L=(2, 12), P=(1, 12))


def filtered(x: Tensor, taps: Tensor) -> Tensor:
    """A filter whose output is as long as its input; one more zero at the end for an even number of taps."""
    k = len(taps)
    windows = F.pad(x, ((k - 1) // 2, k // 2)).unfold(-1, k, 1)
    return windows @ taps


FILTERED = dict(x=tensor("B", "L"), taps=tensor("K"))
FILTERED_SIZES = dict(B=(1, 3), L=(1, 40), K=(1, 9))


def complex_linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


COMPLEX = dict(x=tensor("M", "N"), weight=tensor("N", "K"))
COMPLEX_SIZES = dict(M=(1, 8), N=(1, 8), K=(1, 8))
