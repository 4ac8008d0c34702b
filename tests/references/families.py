"""References of chains of tags, clouds of points, max-plus algebra, splines, flows, filters of states, wavelets, flows of time."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.check.spec import tensor


def tagged(score: Tensor, step: Tensor, tag: Tensor) -> Tensor:
    """Minus the log likelihood of a linear-chain CRF: scores [L, K] of tags, [K, K] of steps from tag to tag."""
    total, own = score[0], score[0].gather(0, tag[:1])[0]
    for t in range(1, len(score)):
        total = torch.logsumexp(total[:, None] + step, 0) + score[t]
        own = own + step[tag[t - 1], tag[t]] + score[t, tag[t]]
    return torch.logsumexp(total, 0) - own


TAGGED = dict(score=tensor("L", "K"), step=tensor("K", "K"), tag=tensor("L", dtype="int64", low=0, high="K"))
TAGGED_SIZES = dict(L=(1, 12), K=(1, 6))


def chamfer(x: Tensor, y: Tensor) -> Tensor:
    """The squared distance from each point of either cloud to the nearest of the other."""
    far = (x[:, None] - y).square().sum(-1)
    return torch.cat([far.amin(1), far.amin(0)])


CLOUDS = dict(x=tensor("M", 3), y=tensor("N", 3))
CLOUD_SIZES = dict(M=(1, 40), N=(1, 40))


def max_plus(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None] + b).amax(1)


MAX_PLUS = dict(a=tensor("M", "K"), b=tensor("K", "N"))
MAX_PLUS_SIZES = dict(M=(1, 8), K=(1, 70), N=(1, 8))


def basis(x: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Where x in [-2, 2] lies among `bins` pieces: the piece, and the place in it."""
    at = (x + 2) * (bins / 4)
    piece = at.detach().floor().clamp(0, bins - 1)
    return piece.long(), at - piece


def spline(x: Tensor, weight: Tensor, bins: int) -> Tensor:
    """A quadratic B-spline with `bins` + 2 of 10 weights a channel: x [M, N], weight [N, 10]."""
    piece, t = basis(x, bins)
    rows = [weight.expand(len(x), -1, -1).gather(-1, (piece + i)[..., None])[..., 0] for i in range(3)]
    parts = ((1 - t).square() / 2, 0.5 + t - t * t, t.square() / 2)
    return sum((p * r for p, r in zip(parts, rows, strict=True)), torch.zeros_like(x))


SPLINE = dict(x=tensor("M", "N", low=-2, high=2), weight=tensor("N", 10))
SPLINE_SIZES = dict(M=(1, 20), N=(1, 6))


def coupled(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """An additive coupling with a scale: a stays, b is moved by what a says; both halves are returned."""
    h = torch.tanh(a @ weight)
    return a, b * torch.exp(0.5 * h) + h


COUPLED = dict(a=tensor("M", "N"), b=tensor("M", "N"), weight=tensor("N", "N"))
COUPLED_SIZES = dict(M=(1, 12), N=(1, 8))


def kalman(y: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Means of a random walk [B, L] that is seen with noise; variances of steps and noise are softplus of q and r."""
    step, noise = torch.nn.functional.softplus(q), torch.nn.functional.softplus(r)
    mean, spread, out = torch.zeros_like(y[:, 0]), torch.ones_like(q), []
    for t in range(y.shape[1]):
        before = spread + step
        gain = before / (before + noise)
        mean, spread = mean + gain * (y[:, t] - mean), (1 - gain) * before
        out.append(mean)
    return torch.stack(out, 1)


KALMAN = dict(y=tensor("B", "L"), q=tensor(), r=tensor())
KALMAN_SIZES = dict(B=(1, 4), L=(1, 20))


def haar(x: Tensor) -> Tensor:
    """Three levels of the orthonormal Haar transform of rows of any length: what is without a partner goes on."""
    parts = []
    for _ in range(3):
        half = x.shape[-1] // 2
        a, b, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        parts.append((a - b) * 0.5**0.5)
        x = torch.cat([(a + b) * 0.5**0.5, rest], -1)
    return torch.cat([x, *parts[::-1]], -1)


HAAR = dict(x=tensor("M", "N"))
HAAR_SIZES = dict(M=(1, 6), N=(1, 50))


def adapted(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """A linear layer with a low-rank adapter, in float32 within."""
    wide = [t.float() if t.dtype != torch.float64 else t for t in (x, weight, down, up)]
    return (wide[0] @ wide[1] + 0.5 * (wide[0] @ wide[2]) @ wide[3]).to(x.dtype)


ADAPTED = dict(x=tensor("M", "N"), weight=tensor("N", "D", grad=False), down=tensor("N", 2), up=tensor(2, "D"))
ADAPTED_SIZES = dict(M=(1, 12), N=(1, 40), D=(1, 12))


def largest(x: Tensor, k: int) -> Tensor:
    """The k largest of each row, zeros elsewhere."""
    kept = x.topk(min(k, x.shape[-1]), -1)
    return torch.zeros_like(x).scatter(-1, kept.indices, kept.values)


LARGEST = dict(x=tensor("M", "N"))
LARGEST_SIZES = dict(M=(1, 8), N=(1, 40))


def slope(z: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(z @ weight)


def midpoint(z: Tensor, weight: Tensor, h: float) -> Tensor:
    """One step of the midpoint rule."""
    return z + h * slope(z + h / 2 * slope(z, weight), weight)


def integrated(z: Tensor, weight: Tensor, steps: int) -> Tensor:
    """z' = tanh(z W) from time 0 to 1."""
    for _ in range(steps):
        z = midpoint(z, weight, 1 / steps)
    return z


INTEGRATED = dict(z=tensor("M", "N"), weight=tensor("N", "N", scale=0.5))
INTEGRATED_SIZES = dict(M=(1, 6), N=(1, 6))
