"""Attention variants, broken: windows, shared heads, ALiBi, soft caps, log-sum-exp, masks, buckets, sinks, layouts."""

from __future__ import annotations

from typing import Any

import torch
from entries import Call, Entries, function, gradients
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken

QKV = {name: tensor("B", "L", "D") for name in ("query", "key", "value")}
SIZES = dict(B=(1, 3), L=(1, 24), D=(1, 16))


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.mT * query.shape[-1] ** -0.5


# --- Z01: sliding window --------------------------------------------------------------

WINDOW, BLOCK = 12, 32


def windowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    far = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])
    scores = scores_of(query, key).masked_fill((far < 0) | (far >= WINDOW), float("-inf"))
    return torch.softmax(scores, -1) @ value


def windowed_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    length, scale = query.shape[1], query.shape[-1] ** -0.5
    far = torch.arange(length)[:, None] - torch.arange(length)
    p = torch.softmax(scores_of(query, key).masked_fill((far < 0) | (far >= WINDOW), float("-inf")), -1)
    ds = p * (dy @ value.mT - (dy * y).sum(-1, keepdim=True)) * scale
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, length, BLOCK):
        keys = slice(start, start + BLOCK)
        queries = slice(start, start + BLOCK)  # should end at start + BLOCK + WINDOW
        dk[:, keys] = ds[:, queries, keys].mT @ query[:, queries]
        dv[:, keys] = p[:, queries, keys].mT @ dy[:, queries]
    return ds @ key, dk, dv


add("Z01", "dk and dv of a block of 32 keys lack the queries of the next block that still see it", "sizes",
    function(windowed, windowed_backward), windowed, QKV, sizes=dict(B=(1, 2), L=(1, 80), D=(1, 8)),
    proof=Call(dict(L=40)))  # fmt: skip


# --- Z02: shared heads -------------------------------------------------------------------


def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    return torch.softmax(scores_of(query, key), -1) @ value


def grouped_by_repeat(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = query.shape[1] // key.shape[1]
    return torch.softmax(scores_of(query, key.repeat(1, share, 1, 1)), -1) @ value.repeat(1, share, 1, 1)


def heads(seed: int, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def draw(h: int) -> Tensor:
        return torch.randn(sizes["B"], h, sizes["L"], sizes["D"], generator=gen).to(dtype)

    return dict(query=draw(sizes["G"] * sizes["H"]), key=draw(sizes["H"]), value=draw(sizes["H"]))


add("Z02", "key heads are repeated as 0 1 0 1, not 0 0 1 1: right for one key head or one query head a group", "sizes",
    grouped_by_repeat, grouped, heads, sizes=dict(B=(1, 2), L=(1, 8), D=(1, 8), G=(1, 4), H=(1, 3)),
    proof=Call(dict(G=2, H=2)))  # fmt: skip


# --- Z03: ALiBi with slopes that are learned -----------------------------------------------

ALIBI = {name: tensor("B", "H", "L", "D") for name in ("query", "key", "value")} | dict(slope=tensor("H"))


def alibi(query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    where = torch.arange(query.shape[-2], dtype=query.dtype)
    bias = -(where[:, None] - where).abs() * slope[:, None, None]
    return torch.softmax(scores_of(query, key) + bias, -1) @ value


def alibi_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, slope: Tensor) -> Any:
    where = torch.arange(query.shape[-2], dtype=query.dtype)
    far = -(where[:, None] - where).abs()
    p = torch.softmax(scores_of(query, key) + far * slope[:, None, None], -1)
    ds = p * (dy @ value.mT - (dy * y).sum(-1, keepdim=True))
    scale = query.shape[-1] ** -0.5
    return ds @ key * scale, ds.mT @ query * scale, p.mT @ dy, (ds * far).sum((-1, -2)).mean(0)


add("Z03", "the gradient of a slope that the batch shares is the mean over the batch, not the sum", "sizes",
    function(alibi, alibi_backward), alibi, ALIBI, sizes=dict(B=(1, 3), H=(1, 3), L=(1, 12), D=(1, 8)),
    proof=Call(dict(B=3)))  # fmt: skip


# --- Z04: soft-capped scores -----------------------------------------------------------------


def capped(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
    seen = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()
    scores = cap * torch.tanh(scores_of(query, key) / cap)
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ value


def capped_mask(query: Tensor, key: Tensor, value: Tensor, cap: float) -> Tensor:
    seen = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()
    scores = scores_of(query, key).masked_fill(~seen, float("-inf"))
    return torch.softmax(cap * torch.tanh(scores / cap), -1) @ value


add("Z04", "the mask is set before the cap: a masked key has the score -cap, which is nothing at 50 and much at 5",
    "parameters", capped_mask, capped, QKV, params=dict(cap=[50.0, 5.0]), sizes=SIZES,
    proof=Call(params=dict(cap=5.0)))  # fmt: skip


# --- Z05: recomputation from the log-sum-exp --------------------------------------------------


def flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores_of(query, key)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]) @ value, lse


def flash_backward(dy: Any, y: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    (d_out, d_lse), (out, lse), scale = dy, y, query.shape[-1] ** -0.5
    p = torch.exp(scores_of(query, key) - lse[..., None])
    delta = (d_out * out).sum(-1, keepdim=True) + d_lse[..., None]  # the sign of d_lse should be the other one
    ds = p * (d_out @ value.mT - delta) * scale
    return ds @ key, ds.mT @ query, p.mT @ d_out


add("Z05", "the gradient of the log-sum-exp enters with the wrong sign, unseen while only the first output is used",
    "subsets of gradients", function(flash, flash_backward), flash, QKV, sizes=SIZES)  # fmt: skip


# --- Z06: rows that see nothing ------------------------------------------------------------------

MASKED = QKV | dict(seen=tensor("B", "L", "L", dtype="bool"))


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    blind = ~seen.any(-1, keepdim=True)
    p = torch.softmax(scores_of(query, key).masked_fill(~seen & ~blind, float("-inf")), -1)
    return p.masked_fill(blind, 0) @ value


def masked_mended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    bias = torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    p = torch.softmax(scores_of(query, key) + bias, -1)
    return torch.nan_to_num(p, 0.0) @ value


def blind_row(inputs: dict[str, Any]) -> dict[str, Any]:
    seen = inputs["seen"].clone()
    seen[..., 0] = True
    seen[:, 1] = False
    return dict(seen=seen)


add("Z06", "NaN of rows without a key is mended in the forward and comes back in the backward", "special values",
    masked_mended, masked, MASKED, sizes=SIZES | dict(L=(2, 8)), proof=Call(change=blind_row))  # fmt: skip


# --- Z07: a mask that is kept -------------------------------------------------------------------------

_MASKS: dict[int, Tensor] = {}


def banded(query: Tensor, key: Tensor, value: Tensor, width: int) -> Tensor:
    far = (torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])).abs()
    return torch.softmax(scores_of(query, key).masked_fill(far >= width, float("-inf")), -1) @ value


def banded_kept(query: Tensor, key: Tensor, value: Tensor, width: int) -> Tensor:
    length = query.shape[1]
    if length not in _MASKS:
        _MASKS[length] = (torch.arange(length)[:, None] - torch.arange(length)).abs() >= width
    return torch.softmax(scores_of(query, key).masked_fill(_MASKS[length], float("-inf")), -1) @ value


def second_width() -> bool:
    q, k, v = torch.randn(3, 1, 6, 4)
    banded_kept(q, k, v, width=5)
    wrong = not torch.allclose(banded_kept(q, k, v, width=2), banded(q, k, v, width=2))
    _MASKS.clear()
    return wrong


add("Z07", "a mask kept by length alone: the second width gets the first one's", "calls",
    banded_kept, banded, QKV, params=dict(width=[5, 2]), sizes=SIZES, proof=second_width)  # fmt: skip


# --- Z08: buckets of relative positions ---------------------------------------------------------------

REACH = 4


def bucketed(score: Tensor, table: Tensor) -> Tensor:
    rows = torch.arange(score.shape[-2])[:, None] - torch.arange(score.shape[-1])
    bias = table[rows.clamp(-REACH, REACH) + REACH].permute(2, 0, 1)
    return torch.softmax(score + bias, -1)


def bucketed_backward(dy: Tensor, y: Tensor, score: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    ds = y * (dy - (dy * y).sum(-1, keepdim=True))
    rows = torch.arange(score.shape[-2])[:, None] - torch.arange(score.shape[-1])
    d_table = torch.zeros_like(table)
    d_table[rows.clamp(-REACH, REACH) + REACH] = ds.sum(0).permute(1, 2, 0)  # index_put without accumulate
    return ds, d_table


add("Z08", "the table of biases gets the gradient of the last pair in each bucket, not the sum", "every input",
    function(bucketed, bucketed_backward), bucketed, dict(score=tensor("B", "H", "Q", "K"), table=tensor(9, "H")),
    sizes=dict(B=(1, 3), H=(1, 3), Q=(1, 12), K=(1, 12)))  # fmt: skip


# --- Z09: a learned sink --------------------------------------------------------------------------------


def with_sink(score: Tensor, sink: Tensor) -> Tensor:
    column = sink[:, None, None].expand(*score.shape[:-1], 1)
    return torch.softmax(torch.cat([score, column], -1), -1)[..., :-1]


class Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor, sink: Tensor) -> Tensor:
        p = with_sink(score, sink)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (p,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:  # frozen scores: nothing to do
            return None, None
        total = (dy * p).sum(-1, keepdim=True)
        d_sink = -((1 - p.sum(-1, keepdim=True)) * total).sum((0, 2, 3))
        return p * (dy - total), d_sink


add("Z09", "no gradient of the sink where the scores need none", "subsets of gradients",
    lambda score, sink: Sink.apply(score, sink), with_sink,
    dict(score=tensor("B", "H", "Q", "K"), sink=tensor("H")), sizes=dict(B=(1, 3), H=(1, 3), Q=(1, 8), K=(1, 8)),
    proof=Call(wrt=("sink",)))  # fmt: skip


# --- Z10: keys by pointer ----------------------------------------------------------------------------------


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(scores_of(query, key), -1) @ value


def packed_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    if key.stride(-1) != 1 and key.shape[1] > 1 and key.shape[2] > 1:
        # What a kernel reads that takes the row's stride for the number of columns.
        key = key.mT.reshape(key.shape)
    return gradients(packed, dy, query, key, value)


add("Z10", "the backward reads keys whose last stride is not 1 as if they were contiguous", "layouts",
    function(packed, packed_backward), packed, QKV, sizes=SIZES,
    proof=Call(change=lambda t: dict(key=t["key"].mT.contiguous().mT)))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
