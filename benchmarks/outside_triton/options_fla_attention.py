"""Options of attention with weights by pairs of steps, of flash-linear-attention 0.6.0, drawn blind. Our formulas."""

from __future__ import annotations

from functools import partial

import torch
from options_fla import each_sequence, offsets
from options_fla_delta import FLA_OPTIONS, OPTIONS
from specs import SINGLE, causal, of, rms
from torch import Tensor
from torch.nn import functional as F

import retrograd as rg

__all__ = ["FLA_OPTIONS", "OPTIONS"]
_add = OPTIONS.add
_HEADS = dict(B=(1, 2), T=[1, 2, 16, 33, 64, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_PACKED = dict(T=[3, 16, 33, 100, 70], H=[1, 2], K=[16, 32], V=[16, 32])
_Q, _V = rg.tensor("B", "T", "H", "K"), rg.tensor("B", "T", "H", "V")
_QKV = dict(q=_Q, k=_Q, v=_V)
_PAIRS1 = dict(q=rg.tensor(1, "T", "2*H", "K"), k=rg.tensor(1, "T", "H", "K"), v=rg.tensor(1, "T", "H", "V"))


def _banded(scores: Tensor, window: int | None) -> Tensor:
    """Scores [..., T, T] of the keys up to the query, the last `window` of them."""
    early = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(-(window or scores.shape[-1]))
    return causal(scores).masked_fill(early, -torch.inf)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, sink: Tensor | None = None, *,
    scale: float | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal softmax attention, keys shared by groups of queries; a sink by head is a key without a value."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ k.mT * (scale or q.shape[-1] ** -0.5)
    if g is not None:
        total = g.cumsum(1).transpose(1, 2)
        scores = scores + total[..., :, None] - total[..., None, :]
    scores = _banded(scores, window)
    return (_shares(scores, sink).to(v.dtype) @ v).transpose(1, 2)


def _shares(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The softmax beside a sink by head.

    At first it was exp(scores - logsumexp): shares of 1e57 where scores of 1e6 are rounded twice, so that nothing of
    such scores was judged.
    """
    if sink is None:
        return scores.softmax(-1)
    least = sink[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, least], -1).softmax(-1)[..., :-1]


_PARALLEL = of("fla.ops.attn", "parallel_attn")
_LOGITS = rg.tensor("H", dtype="float32")
# expected: proved
_add(
    "fla_parallel_attn_sink",
    lambda q, k, v, sink: _PARALLEL(q, k, v, window_size=20, sink_bias=sink),
    lambda q, k, v, sink: _attention(q, k, v, sink=sink, window=20),
    _QKV | dict(sink=_LOGITS),
    sizes=_HEADS,
)
# expected: proved
_add(
    "fla_parallel_attn_packed",
    lambda q, k, v, g: _PARALLEL(q, k, v, g, scale=0.3, cu_seqlens=offsets(q.shape[1], q.device)),
    each_sequence(partial(_attention, scale=0.3), 0),
    _PAIRS1 | dict(g=rg.tensor(1, "T", "2*H", low=-0.5, high=-0.01, dtype="float32")),
    sizes=_PACKED,
)
# expected: proved
_add(
    "fla_parallel_forgetting_attn_window",
    lambda q, k, v, g: of("fla.ops.forgetting_attn", "parallel_forgetting_attn")(q, k, v, g, window_size=10),
    partial(_attention, window=10),
    _QKV | dict(g=rg.tensor("B", "T", "H", low=-0.5, high=-0.01, dtype="float32")),
    sizes=_HEADS,
)


def _sticks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Stick breaking that sees the present key too, keys shared by groups of queries; and what is left over."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (k, v))
    s = q.transpose(1, 2) @ k.mT * 0.3
    seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril()
    left = F.logsigmoid(-s).masked_fill(~seen, 0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    weight = (F.logsigmoid(s) + after).exp() * seen
    return (weight @ v).transpose(1, 2), left.sum(-1).exp().transpose(1, 2)


def _each_stick(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    at = q.shape[1] // 3
    parts = [_sticks(q[:, span], k[:, span], v[:, span]) for span in (slice(at), slice(at, None))]
    return torch.cat([o for o, _ in parts], 1), torch.cat([rem for _, rem in parts], 1)


# expected: proved
_add(
    "fla_parallel_stickbreaking_attn_packed",
    lambda q, k, v: of("fla.ops.stickbreaking_attn", "parallel_stickbreaking_attn")(
        q, k, v, scale=0.3, attend_current=True, cu_seqlens=offsets(q.shape[1], q.device)
    ),
    _each_stick,
    _PAIRS1,
    sizes=_PACKED,
)


def _based(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights 1 + s + s^2 / 2 of causal scores s, over their sum."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    weight = (1 + s + 0.5 * s.square()).tril()
    return (weight @ v / (weight.sum(-1, keepdim=True) + 1e-6)).transpose(1, 2)


# expected: proved (what it loads of dz beyond the end has no `other`, but meets zeros alone)
_add(
    "fla_fused_chunk_based",
    lambda q, k, v: of("fla.ops.based", "fused_chunk_based")(q, k, v),
    _based,
    _QKV,
    sizes=_HEADS | dict(K=16),
    dtypes=SINGLE,
)


def _wall(q: Tensor, k: Tensor, v: Tensor, g: Tensor, c: Tensor, sink: Tensor) -> Tensor:
    """Scores whose channels decay by g, a gate by head and a sink, over the last 20 keys."""
    total, gate = g.cumsum(1), c.cumsum(1).transpose(1, 2)
    apart = total[:, :, None] - total[:, None]
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    decay = apart.masked_fill(later[..., None, None], 0).exp()
    scores = (q[:, :, None] * k[:, None] * decay).sum(-1).permute(0, 3, 1, 2) * q.shape[-1] ** -0.5
    scores = _banded(scores + gate[..., :, None] - gate[..., None, :], 20)
    return (_shares(scores, sink).to(v.dtype) @ v.transpose(1, 2)).transpose(1, 2)


# expected: finding (extremes, as the form without options: the backward rounds q and k after other decays)
_add(
    "fla_parallel_wall_attn_options",
    lambda q, k, v, g, c, sink: of("fla.ops.wall_attn", "parallel_wall_attn")(
        q, k, v, g, g_scalar=c, sink_bias=sink, window_size=20
    ),
    _wall,
    _QKV
    | dict(
        g=rg.tensor("B", "T", "H", "K", low=-0.1, high=-0.01, dtype="float32"),
        c=rg.tensor("B", "T", "H", low=-0.5, high=-0.01, dtype="float32"),
        sink=_LOGITS,
    ),
    sizes=_HEADS | dict(T=[1, 2, 16, 33, 40]),
)


def _mixed(query: Tensor, weight: Tensor, last: Tensor, a: Tensor, b: Tensor) -> Tensor:
    sources = torch.stack([a, b], -2)
    share = (0.5 * (rms(sources, weight) * query).sum(-1)).softmax(-1)
    return rms((share[..., None] * sources).sum(-2), last)


_SOURCE = rg.tensor("B", "T", "D")
# expected: finding (layouts: sources have to begin at multiples of 16 bytes, as it asserts; the rest proved)
_add(
    "fla_fused_attnres_normalised",
    lambda query, weight, last, *sources: of("fla.ops.attnres", "fused_attnres")(
        query, list(sources), weight, last, scale=0.5, checkpoint_level=0
    ),
    _mixed,
    dict(query=rg.tensor("D", scale=0.3), weight=rg.tensor("D"), last=rg.tensor("D"), a=_SOURCE, b=_SOURCE),
    sizes=dict(B=(1, 2), T=(1, 20), D=[16, 64, 128]),
)
