"""fla-core 0.6.0, attention with weights by pairs of steps: softmax, polynomials, stick breaking. Our formulas."""

from __future__ import annotations

import torch
from fla_recurrences import FLA, by_head
from specs import SINGLE, causal, of, rms, softmax
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

_add = FLA.add
_HEADS = dict(B=(1, 2), T=[1, 2, 16, 33, 64, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_Q, _V = rg.tensor("B", "T", "H", "K"), rg.tensor("B", "T", "H", "V")
_QKV = dict(q=_Q, k=_Q, v=_V)

# Attention.


def _attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, window: int | None = None) -> Tensor:
    """Causal softmax attention; a gate by head adds its sum from key to query, a window keeps the last keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if g is not None:
        total = g.cumsum(1).transpose(1, 2)
        scores = scores + total[..., :, None] - total[..., None, :]
    if window is not None:
        early = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(-window)
        scores = scores.masked_fill(early, -torch.inf)
    return (softmax(causal(scores)).to(v.dtype) @ v).transpose(1, 2)


_PARALLEL = of("fla.ops.attn", "parallel_attn")
_add("fla_parallel_attn", lambda q, k, v: _PARALLEL(q, k, v), _attention, _QKV, sizes=_HEADS)
_add(
    "fla_parallel_attn_gated",
    lambda q, k, v, g: _PARALLEL(q, k, v, g),
    _attention,
    _QKV | dict(g=rg.tensor("B", "T", "H", low=-0.5, high=-0.01, dtype="float32")),
    sizes=_HEADS,
)
_add(
    "fla_parallel_attn_window",
    lambda q, k, v: _PARALLEL(q, k, v, window_size=16),
    lambda q, k, v: _attention(q, k, v, window=16),
    _QKV,
    sizes=_HEADS,
)
_add(
    "fla_parallel_forgetting_attn",
    lambda q, k, v, g: of("fla.ops.forgetting_attn", "parallel_forgetting_attn")(q, k, v, g),
    _attention,
    _QKV | dict(g=rg.tensor("B", "T", "H", low=-0.5, high=-0.01, dtype="float32")),
    sizes=_HEADS,
)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attention(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))


_add(
    "fla_parallel_attn_grouped",
    lambda q, k, v: _PARALLEL(q, k, v),
    _grouped,
    dict(q=rg.tensor("B", "T", "G", "K"), k=_Q, v=_V),
    sizes=_HEADS | dict(H=1, G=2),
)


def _polynomial(q: Tensor, k: Tensor, v: Tensor, *, based: bool, eps: float | None) -> Tensor:
    """Weights 1 + s + s^2 / 2 (Based) or s^2 (ReBased) of causal scores s, over their sum where `eps` is given."""
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    weight = (1 + s + 0.5 * s**2 if based else s**2).tril()
    o = weight @ v
    return o if eps is None else o / (weight.sum(-1, keepdim=True) + eps)


for _normal in (True, False):
    _name = "normalised" if _normal else "plain"
    _add(
        f"fla_parallel_based_{_name}",
        lambda q, k, v, norm=_normal: of("fla.ops.based", "parallel_based")(q, k, v, use_norm=norm),
        by_head(lambda q, k, v, eps=1e-6 if _normal else None: _polynomial(q, k, v, based=True, eps=eps)),
        _QKV,
        sizes=_HEADS,
        dtypes=SINGLE,
    )
_add(
    "fla_parallel_rebased",
    lambda q, k, v: of("fla.ops.rebased", "parallel_rebased")(q, k, v, use_normalize=False),
    by_head(lambda q, k, v: _polynomial(q, k, v, based=False, eps=None)),
    _QKV,
    sizes=_HEADS,
    dtypes=SINGLE,
)


def _stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weight sigmoid(s_ij) times what the keys between j and i left over; also what is left over at the end."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(-1)
    left = F.logsigmoid(-s).masked_fill(~seen, 0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    weight = (F.logsigmoid(s) + after).exp() * seen
    return (weight @ v).transpose(1, 2), left.sum(-1).exp().transpose(1, 2)


_add(
    "fla_parallel_stickbreaking_attn",
    lambda q, k, v: of("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn")(q, k, v),
    _stick_breaking,
    _QKV,
    sizes=_HEADS,
)


def _attnres(query: Tensor, weight: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    sources = torch.stack([a, b, c], -2)
    share = softmax((rms(sources, weight) * query).sum(-1))
    return (share[..., None] * sources).sum(-2)


_SOURCE = rg.tensor("B", "T", "D")
_add(
    "fla_fused_attnres",
    lambda query, weight, *sources: of("fla.ops.attnres", "fused_attnres")(query, list(sources), weight),
    _attnres,
    dict(query=rg.tensor("D", scale=0.3), weight=rg.tensor("D"), a=_SOURCE, b=_SOURCE, c=_SOURCE),
    sizes=dict(B=(1, 2), T=(1, 20), D=[16, 64, 128]),
)
