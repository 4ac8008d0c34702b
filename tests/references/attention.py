"""References of attention variants, as plain as they can be."""

from __future__ import annotations

import torch
from torch import Tensor

from retrograd.check.spec import tensor

QKV = {name: tensor("B", "L", "D") for name in ("query", "key", "value")}
SIZES = dict(B=(1, 3), L=(1, 40), D=(1, 16))


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT * query.shape[-1] ** -0.5


def distance(queries: int, keys: int) -> Tensor:
    """How far each key lies behind each query; the last of both are at one place."""
    return torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)


def softmax_gradient(p: Tensor, dp: Tensor) -> Tensor:
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def dropped(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Four heads of queries share two of keys and values; what is kept of the weights is an input."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    return (torch.softmax(scores(query, key), -1) * keep / 0.75) @ value


DROPPED = dict(query=tensor("B", 4, "L", "D"), key=tensor("B", 2, "L", "D"), value=tensor("B", 2, "L", "D"),
               keep=tensor("B", 4, "L", "L", dtype="bool"))  # fmt: skip


def sliding(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, window: int) -> Tensor:
    """Each query sees itself and the `window` - 1 keys before it, at a cost per step."""
    far = distance(query.shape[1], key.shape[1])
    s = scores(query, key) - far * 0.05 * torch.sigmoid(slope)
    return torch.softmax(s.masked_fill((far < 0) | (far >= window), float("-inf")), -1) @ value


def angles(x: Tensor, rotary: int) -> tuple[Tensor, Tensor]:
    rate = 100.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    phase = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rate
    return phase.cos().to(x.dtype), phase.sin().to(x.dtype)


def rotate(x: Tensor, rotary: int, sign: int = 1) -> Tensor:
    """The first `rotary` channels in pairs, the others as they are."""
    cos, sin = angles(x, rotary)
    a, b, rest = x[..., 0:rotary:2], x[..., 1:rotary:2], x[..., rotary:]
    turned = torch.stack([a * cos - sign * b * sin, b * cos + sign * a * sin], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def normed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(scores(unit(query), unit(key)), -1) @ value


def capped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(2 * torch.tanh(scores(query, key) / 2), -1) @ value


def seen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Queries that see nothing give zeros."""
    blind = ~mask.any(-1, keepdim=True)
    p = torch.softmax(scores(query, key).masked_fill(~mask & ~blind, float("-inf")), -1)
    return p.masked_fill(blind, 0) @ value


SEEN = QKV | dict(mask=tensor("B", "L", "L", dtype="bool"))


def latent(query: Tensor, c: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Keys and values are projections of one latent sequence."""
    return torch.softmax(scores(query, c @ w_k), -1) @ (c @ w_v)


LATENT = dict(query=tensor("B", "L", "D"), c=tensor("B", "L", "R"), w_k=tensor("R", "D"), w_v=tensor("R", "D"))


def with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    s = scores(query, key)
    return torch.softmax(s, -1) @ value, torch.logsumexp(s, -1)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    far = distance(query.shape[1], key.shape[1])
    return torch.softmax(scores(query, key).masked_fill(far < 0, float("-inf")), -1) @ value


CAUSAL = dict(query=tensor("B", "Q", "D"), key=tensor("B", "K", "D"), value=tensor("B", "K", "D"))
CAUSAL_SIZES = dict(B=(1, 3), Q=(1, 24), K=(1, 40), D=(1, 8))


def squared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Squared ReLU instead of a softmax."""
    return torch.relu(scores(query, key)).square() @ value / key.shape[1]
