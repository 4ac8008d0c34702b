"""Attention variants, right: other algorithms, outputs without gradients, masks, shared heads, hooks."""

from __future__ import annotations

from typing import Any

import torch
from entries import Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy

QKV = {name: tensor("B", "L", "D") for name in ("query", "key", "value")}
SIZES = dict(B=(1, 3), L=(1, 24), D=(1, 16))


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT * query.shape[-1] ** -0.5


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(scores_of(query, key), -1) @ value


def online(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Blocks of seven keys with a running maximum."""
    top = query.new_full(query.shape[:-1], float("-inf"))
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    for k, v in zip(key.split(7, 1), value.split(7, 1), strict=True):
        s = scores_of(query, k)
        new = torch.maximum(top, s.detach().amax(-1))
        p, scale = torch.exp(s - new[..., None]), torch.exp(top - new)
        total, out, top = total * scale + p.sum(-1), out * scale[..., None] + p @ v, new
    return out / total[..., None]


add("online_softmax", online, plain, QKV, sizes=SIZES)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        s = scores_of(query, key)
        lse = torch.logsumexp(s, -1)
        out = torch.exp(s - lse[..., None]) @ value
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        p = torch.exp(scores_of(query, key) - lse[..., None])
        ds = p * (dy @ value.mT - (dy * out).sum(-1, keepdim=True)) * scale
        return ds @ key, ds.mT @ query, p.mT @ dy


def with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return plain(query, key, value), torch.logsumexp(scores_of(query, key), -1).detach()


add("flash_with_fixed_lse", lambda *a: Flash.apply(*a), with_lse, QKV, sizes=SIZES)


def far_apart(length: int) -> Tensor:
    return torch.arange(length)[:, None] - torch.arange(length)


def windowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    far = far_apart(query.shape[1])
    return torch.softmax(scores_of(query, key).masked_fill((far < 0) | (far >= 4), float("-inf")), -1) @ value


def windowed_by_unfold(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Four keys a query, views of padded keys; those before the first are masked with -inf."""
    k, v = (torch.nn.functional.pad(t, (0, 0, 3, 0)).unfold(1, 4, 1) for t in (key, value))  # [B, L, D, 4]
    s = torch.einsum("bld,bldw->blw", query, k) * query.shape[-1] ** -0.5
    missing = torch.arange(query.shape[1])[:, None] + torch.arange(4) < 3
    return torch.einsum("blw,bldw->bld", torch.softmax(s.masked_fill(missing, float("-inf")), -1), v)


# The reference spreads NaN by products with masked zeros, the views do not.
add("window_by_unfold", windowed_by_unfold, windowed, QKV, sizes=SIZES)


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))


def grouped_by_expand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    b, h, length, d = key.shape
    key, value = (t[:, :, None].expand(b, h, 2, length, d).reshape(b, 2 * h, length, d) for t in (key, value))
    return plain(query, key, value)


add("shared_heads_expanded", grouped_by_expand, grouped,
    dict(query=tensor("B", 4, "L", "D"), key=tensor("B", 2, "L", "D"), value=tensor("B", 2, "L", "D")),
    sizes=SIZES)  # fmt: skip


def alibi(query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    return torch.softmax(scores_of(query, key) - far_apart(query.shape[-2]).abs() * slope[:, None, None], -1) @ value


def alibi_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Any:
    far = -far_apart(query.shape[-2]).abs()
    p = torch.softmax(scores_of(query, key) + far * slope[:, None, None], -1)
    ds = p * (dy @ value.mT - (dy * y).sum(-1, keepdim=True))
    scale = query.shape[-1] ** -0.5
    return ds @ key * scale, ds.mT @ query * scale, p.mT @ dy, (ds * far).sum((-1, -2)).sum(0)


add("alibi_slopes", function(alibi, alibi_backward), alibi,
    {name: tensor("B", "H", "L", "D") for name in QKV} | dict(slope=tensor("H")),
    sizes=dict(B=(1, 3), H=(1, 3), L=(1, 12), D=(1, 8)))  # fmt: skip


def capped(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
    s = cap * torch.tanh(scores_of(query, key) / cap)
    return torch.softmax(s.masked_fill(far_apart(query.shape[1]) < 0, float("-inf")), -1) @ value


def capped_by_sigmoid(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
    s = 2 * cap * torch.sigmoid(scores_of(query, key) * (2 / cap)) - cap
    p = torch.exp(s - s.detach().amax(-1, keepdim=True)).tril()
    return (p @ value) / p.sum(-1, keepdim=True)


add("soft_cap_by_sigmoid", capped_by_sigmoid, capped, QKV, params=dict(cap=[5.0, 30.0]), sizes=SIZES)


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    blind = ~seen.any(-1, keepdim=True)
    p = torch.softmax(scores_of(query, key).masked_fill(~seen & ~blind, float("-inf")), -1)
    return p.masked_fill(blind, 0) @ value


def masked_by_product(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Exact zeros for queries that see nothing, from a sum that is at least a guard value."""
    s = scores_of(query, key)
    top = s.detach().masked_fill(~seen, float("-inf")).amax(-1, keepdim=True)
    p = torch.where(seen, torch.exp(torch.where(seen, s - top.nan_to_num(0, neginf=0), 0)), 0)
    return p @ value / p.sum(-1, keepdim=True).clamp_min(1e-30)


add("blind_queries", masked_by_product, masked, QKV | dict(seen=tensor("B", "L", "L", dtype="bool")),
    sizes=SIZES | dict(L=(1, 6)))  # fmt: skip


def bucketed(score: Tensor, table: Tensor) -> Tensor:
    rows = far_apart(max(score.shape[-2:]))[: score.shape[-2], : score.shape[-1]].clamp(-4, 4) + 4
    return torch.softmax(score + table[rows].permute(2, 0, 1), -1)


def bucketed_backward(dy: Tensor, y: Tensor, score: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    ds = y * (dy - (dy * y).sum(-1, keepdim=True))
    rows = far_apart(max(score.shape[-2:]))[: score.shape[-2], : score.shape[-1]].clamp(-4, 4) + 4
    return ds, torch.zeros_like(table).index_put((rows,), ds.sum(0).permute(1, 2, 0), accumulate=True)


add("bucket_bias_accumulated", function(bucketed, bucketed_backward), bucketed,
    dict(score=tensor("B", "H", "Q", "K"), table=tensor(9, "H")), deterministic=False,
    sizes=dict(B=(1, 3), H=(1, 3), Q=(1, 12), K=(1, 12)))  # fmt: skip


def with_sink(score: Tensor, sink: Tensor) -> Tensor:
    column = sink[:, None, None].expand(*score.shape[:-1], 1)
    return torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]


def with_sink_by_sum(score: Tensor, sink: Tensor) -> Tensor:
    top = torch.maximum(score.detach().amax(-1, keepdim=True), sink.detach()[:, None, None])
    p = torch.exp(score - top)
    return p / (p.sum(-1, keepdim=True) + torch.exp(sink[:, None, None] - top))


add("sink_by_sum", with_sink_by_sum, with_sink, dict(score=tensor("B", "H", "Q", "K"), sink=tensor("H")),
    sizes=dict(B=(1, 3), H=(1, 3), Q=(1, 8), K=(1, 8)))  # fmt: skip


def with_hooks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What is saved goes through storage of another kind, and comes back as a new tensor."""

    def unpack(kept: tuple[Any, torch.dtype]) -> Tensor:
        return torch.from_numpy(kept[0].copy()).to(kept[1])

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach().double().numpy().copy(), t.dtype), unpack):
        return plain(query, key, value)


# A gradient of a gradient would need the history that the hooks drop.
add("saved_by_hooks", lambda *a: HooksOnce.apply(*a), plain, QKV, sizes=SIZES)


class HooksOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in inputs]
            ctx.leaves, ctx.out = leaves, with_hooks(*leaves)
        return ctx.out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(ctx.out, ctx.leaves, dy, retain_graph=True)


HEALTHY = RIGHT.ops
