"""Attention variants, broken: dropout, windows, rotary embeddings, norms, caps, masks, latents."""

from __future__ import annotations

from typing import Any

import torch
from entries import Call, Entries, function
from references import attention as ref
from references.attention import QKV, SIZES, scores, softmax_gradient
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def dropped_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Any:
    wide_key, wide_value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    p = torch.softmax(scores(query, wide_key), -1)
    ds = softmax_gradient(p, dy @ wide_value.mT) * query.shape[-1] ** -0.5  # the mask is missing here
    dk, dv = ds.mT @ query, (p * keep / 0.75).mT @ dy
    return ds @ wide_key, dk.unflatten(1, (2, 2)).sum(2), dv.unflatten(1, (2, 2)).sum(2), None


add("Y01", "the dropout mask is applied to P, not to dP", "every input",
    function(ref.dropped, dropped_backward), ref.dropped, ref.DROPPED, sizes=SIZES | dict(L=(1, 12)))  # fmt: skip


def sliding_in_blocks(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, window: int) -> Tensor:
    """Blocks of 16 queries visit the block of keys beside them and the one before."""
    far = ref.distance(query.shape[1], key.shape[1])
    block = torch.arange(query.shape[1]) // 16
    behind = block[:, None] - block
    s = scores(query, key) - far * 0.05 * torch.sigmoid(slope)
    hidden = (far < 0) | (far >= window) | (behind > 1)  # a window over 17 keys reaches further
    return torch.softmax(s.masked_fill(hidden, float("-inf")), -1) @ value


add("Y02", "a window longer than a block of 16 reaches a block that is never visited", "parameters",
    sliding_in_blocks, ref.sliding, QKV | dict(slope=tensor()), sizes=SIZES | dict(L=(1, 80)),
    params=dict(window=[4, 16, 40]), proof=Call(dict(L=60), dict(window=40)))  # fmt: skip


def rotate_back(dy: Tensor, y: Tensor, x: Tensor, rotary: int) -> Tensor:
    return ref.rotate(dy, x.shape[-1], -1)  # as if all channels had been rotated


add("Y03", "the backward rotates all channels where the forward rotates some", "parameters",
    function(ref.rotate, rotate_back), ref.rotate, dict(x=tensor("B", "L", 8)), params=dict(rotary=[8, 4, 2]),
    sizes=SIZES, proof=Call(params=dict(rotary=4)))  # fmt: skip


def unit_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    n = y / y.square().mean(-1, keepdim=True).clamp_min(1e-30).sqrt()  # of norm 1 for whatever x, eps is forgotten
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return r * (dy - n * (n * dy).mean(-1, keepdim=True))


unit_by_hand = function(ref.unit, unit_backward)


def normed_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(scores(unit_by_hand(query), unit_by_hand(key)), -1) @ value


add("Y04", "the gradient of the query's norm forgets eps: wrong for values near 1e-3", "special values",
    normed_by_hand, ref.normed, QKV, sizes=SIZES | dict(D=(2, 16)),
    proof=Call(change=lambda t: dict(query=t["query"] * 1e-3)))  # fmt: skip


def capped_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Any:
    scale = query.shape[-1] ** -0.5
    t = torch.tanh(scores(query.float(), key.float()) / 2)
    p = torch.softmax(2 * t, -1)
    t = t.to(query.dtype).float()  # kept in the inputs' precision: 1 - t * t loses its digits
    ds = softmax_gradient(p, dy.float() @ value.float().mT) * (1 - t * t) * scale
    return tuple(g.to(dy.dtype) for g in (ds @ key.float(), ds.mT @ query.float(), p.mT @ dy.float()))


def capped_wide(*inputs: Tensor) -> Tensor:
    return ref.capped(*(t.float() for t in inputs)).to(inputs[0].dtype)


def flat_cap() -> bool:
    """A score of 5: 1 - tanh(2.5)^2 is 0.027, of which bfloat16 leaves 12 % of error."""
    query, key, value = torch.ones(1, 1, 1), torch.tensor([[[5.0], [4.5]]]), torch.tensor([[[1.0], [-1.0]]])
    low = query.bfloat16().requires_grad_()
    exact = query.double().requires_grad_()
    op = function(capped_wide, capped_backward)
    got = torch.autograd.grad(op(low, key.bfloat16(), value.bfloat16()).sum(), low)[0]
    want = torch.autograd.grad(ref.capped(exact, key.double(), value.double()).sum(), exact)[0]
    return bool((got.double() - want).abs() > 0.03 * want.abs())


add("Y05", "tanh is kept in bfloat16 for the derivative of the cap, which cancels", "dtypes",
    function(capped_wide, capped_backward), ref.capped, QKV, dtypes=["float32", "bfloat16"], compute="float32",
    sizes=SIZES | dict(D=(4, 16)), proof=flat_cap)  # fmt: skip


def seen_by_numbers(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    p = torch.softmax(scores(query, key) + torch.where(mask, 0, float("-inf")), -1)
    return p.nan_to_num(0.0) @ value  # the forward is right, the softmax's gradient of such a row is NaN


add("Y06", "rows that see nothing are mended after the softmax: their gradient is NaN", "special values",
    seen_by_numbers, ref.seen, ref.SEEN, sizes=SIZES | dict(L=(6, 24)),
    proof=Call(change=lambda t: dict(mask=t["mask"] & (torch.arange(t["mask"].shape[1]) > 0)[:, None])))  # fmt: skip


class Latent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return ref.latent(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        query, c, w_k, w_v = ctx.saved_tensors
        key, value, scale = c @ w_k, c @ w_v, query.shape[-1] ** -0.5
        p = torch.softmax(scores(query, key), -1)
        ds = softmax_gradient(p, dy @ value.mT) * scale
        dk = ds.mT @ query
        dc, dw_k, dw_v = dk @ w_k.mT, (c.mT @ dk).sum(0), None
        if ctx.needs_input_grad[3]:
            dv = p.mT @ dy
            dc, dw_v = dc + dv @ w_v.mT, (c.mT @ dv).sum(0)
        return ds @ key, dc, dw_k, dw_v


add("Y07", "with frozen value weights the latent gets no gradient through the values", "subsets of gradients",
    lambda *a: Latent.apply(*a), ref.latent, ref.LATENT, sizes=SIZES | dict(R=(1, 6)),
    proof=Call(wrt=("query", "c", "w_k")))  # fmt: skip


def without_lse(dy: Any, y: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    p = torch.softmax(scores(query, key), -1)
    ds = softmax_gradient(p, dy[0] @ value.mT) * query.shape[-1] ** -0.5
    return ds @ key, ds.mT @ query, p.mT @ dy[0]


add("Y08", "the gradient that comes through the log-sum-exp is ignored", "every input",
    function(ref.with_lse, without_lse), ref.with_lse, QKV, sizes=SIZES)  # fmt: skip


def causal_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    hidden = torch.arange(query.shape[1])[:, None] < torch.arange(key.shape[1])  # from the first, not the last
    p = torch.softmax(scores(query, key).masked_fill(hidden, float("-inf")), -1)
    ds = softmax_gradient(p, dy @ value.mT) * query.shape[-1] ** -0.5
    return ds @ key, ds.mT @ query, p.mT @ dy


add("Y09", "the backward's causal mask is aligned at the first key: right for as many queries as keys", "sizes",
    function(ref.causal, causal_backward), ref.causal, ref.CAUSAL, sizes=ref.CAUSAL_SIZES, where="Q <= K",
    proof=Call(dict(Q=3, K=8)))  # fmt: skip


def squared_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    scale, length, d = query.shape[-1] ** -0.5, query.shape[1], dy.shape[-1]
    if not dy.is_contiguous() and dy.stride(-1) == 1:
        dy = dy.as_strided(dy.shape, (length * d, d, 1))  # rows are one after the other, it thinks
    r = torch.relu(scores(query, key))
    ds = 2 * r * (dy @ value.mT) * scale / length
    return ds @ key, ds.mT @ query, (r * r).mT @ dy / length


def every_second_row() -> bool:
    q, k, v = (torch.randn(2, 4, 3) for _ in range(3))
    wide = torch.randn(2, 8, 3)
    q.requires_grad_()
    op = function(ref.squared, squared_backward)
    one = torch.autograd.grad(op(q, k, v), q, wide[:, ::2])[0]
    two = torch.autograd.grad(op(q, k, v), q, wide[:, ::2].contiguous())[0]
    return not torch.allclose(one, two)


add("Y10", "grad_out with a stride between its rows is read as if it had none", "layouts",
    function(ref.squared, squared_backward), ref.squared, QKV, sizes=SIZES, proof=every_second_row)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
