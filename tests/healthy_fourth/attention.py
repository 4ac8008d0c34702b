"""Attention variants, right: blocks that are skipped, complex rotations, absorbed projections, running maxima."""

from __future__ import annotations

from typing import Any

import torch
from entries import Entries, function
from references import attention as ref
from references.attention import QKV, SIZES, scores, softmax_gradient
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def dropped_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Any:
    """The row sums are those of dy * y, as flash attention has them."""
    wide_key, wide_value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    p = torch.softmax(scores(query, wide_key), -1)
    dp = dy @ wide_value.mT * keep / 0.75
    ds = p * (dp - (dy * y).sum(-1, keepdim=True)) * query.shape[-1] ** -0.5
    dk, dv = ds.mT @ query, (p * keep / 0.75).mT @ dy
    return ds @ wide_key, dk.unflatten(1, (2, 2)).sum(2), dv.unflatten(1, (2, 2)).sum(2), None


add("dropout_mask_given", function(ref.dropped, dropped_backward), ref.dropped, ref.DROPPED,
    sizes=SIZES | dict(L=(1, 12)))  # fmt: skip


def sliding_in_blocks(query: Tensor, key: Tensor, value: Tensor, slope: Tensor, window: int) -> Tensor:
    """Eight queries at a time against the keys that one of them can see."""
    out, cost = [], 0.05 * torch.sigmoid(slope)
    for start in range(0, query.shape[1], 8):
        stop, first = min(start + 8, query.shape[1]), max(0, start - window + 1)
        far = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
        s = scores(query[:, start:stop], key[:, first:stop]) - far * cost
        s = s.masked_fill((far < 0) | (far >= window), float("-inf"))
        out.append(torch.softmax(s, -1) @ value[:, first:stop])
    return torch.cat(out, 1)


add("window_in_blocks", sliding_in_blocks, ref.sliding, QKV | dict(slope=tensor()), sizes=SIZES,
    params=dict(window=[4, 16]))  # fmt: skip


def rotate_complex(x: Tensor, rotary: int) -> Tensor:
    cos, sin = ref.angles(x, rotary)
    a, b = x[..., :rotary].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.complex(a, b) * torch.complex(cos, sin)
    return torch.cat([torch.stack([turned.real, turned.imag], -1).flatten(-2), x[..., rotary:]], -1)


# Not by torch.view_as_complex, which refuses x and grad_out at an odd offset.
add("rotary_by_complex_numbers", rotate_complex, ref.rotate, dict(x=tensor("B", "L", 8)),
    params=dict(rotary=[8, 4, 2]), sizes=SIZES)  # fmt: skip


def unit_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """From the output: r (dy - y mean(y dy)), which holds with eps too."""
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return r * (dy - y * (y * dy).mean(-1, keepdim=True))


unit_by_output = function(ref.unit, unit_backward)
add("norm_of_queries_from_output",
    lambda q, k, v: torch.softmax(scores(unit_by_output(q), unit_by_output(k)), -1) @ v, ref.normed, QKV,
    sizes=SIZES)  # fmt: skip


def capped_backward(dy: Tensor, y: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Any:
    query, key, value, dy, y = (t.float() for t in (query, key, value, dy, y))
    s, scale = scores(query, key) / 2, query.shape[-1] ** -0.5
    p = torch.softmax(2 * torch.tanh(s), -1)
    ds = softmax_gradient(p, dy @ value.mT) / torch.cosh(s).square() * scale  # 1 - tanh^2 without cancelling
    return ds @ key, ds.mT @ query, p.mT @ dy


def rounded(fn: Any) -> Any:
    """Gradients in the inputs' precision, whatever it is."""
    return lambda dy, y, *inputs: tuple(g.to(dy.dtype) for g in fn(dy, y, *inputs))


add("cap_by_hyperbolic_cosine",
    function(lambda *a: ref.capped(*(t.float() for t in a)).to(a[0].dtype), rounded(capped_backward)), ref.capped, QKV,
    dtypes=["float32", "bfloat16"], compute="float32", sizes=SIZES)  # fmt: skip


def seen_by_guard(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The lowest number for what is hidden, and one product with the mask's rows."""
    s = torch.where(mask, scores(query, key), torch.finfo(query.dtype).min)
    return torch.softmax(s, -1) @ value * mask.any(-1, keepdim=True)


# NaN times the guard's zero is NaN in a row that sees nothing: only finite values are promised.
add("hidden_by_lowest_number", seen_by_guard, ref.seen, ref.SEEN, sizes=SIZES | dict(L=(1, 12)),
    extremes=dict.fromkeys(QKV, "finite"))  # fmt: skip


def absorbed(query: Tensor, c: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """The key's projection is moved to the queries, the value's to the end."""
    s = (query @ w_k.mT) @ c.mT * query.shape[-1] ** -0.5
    return (torch.softmax(s, -1) @ c) @ w_v


# Sums in another order, over R and D: up to R + D roundings in place of D.
add("latent_absorbed", absorbed, ref.latent, ref.LATENT, sizes=SIZES | dict(R=(1, 6), L=(1, 16), D=(1, 8)),
    algorithm_error=4)  # fmt: skip


def with_lse_backward(dy: Any, y: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    p = torch.softmax(scores(query, key), -1)
    ds = (softmax_gradient(p, dy[0] @ value.mT) + p * dy[1][..., None]) * query.shape[-1] ** -0.5
    return ds @ key, ds.mT @ query, p.mT @ dy[0]


add("gradient_through_lse", function(ref.with_lse, with_lse_backward), ref.with_lse, QKV, sizes=SIZES)


def causal_online(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Keys in blocks of 16 with a running maximum that is rescaled only where it grows."""
    top = query.new_full((*query.shape[:-1], 1), float("-inf"))
    total, out = torch.zeros_like(top), torch.zeros_like(query)
    far = ref.distance(query.shape[1], key.shape[1])
    for start in range(0, key.shape[1], 16):
        part = slice(start, start + 16)
        s = scores(query, key[:, part]).masked_fill(far[:, part] < 0, float("-inf"))
        new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
        base = torch.where(new == float("-inf"), 0, new)
        p, scale = torch.exp(s - base), torch.exp(top - base)
        total, out, top = total * scale + p.sum(-1, keepdim=True), out * scale + p @ value[:, part], new
    return out / total


add("causal_online", causal_online, ref.causal, ref.CAUSAL, sizes=ref.CAUSAL_SIZES, where="Q <= K")


def squared_recomputed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return checkpoint(ref.squared, query, key, value, use_reentrant=False)


add("squared_checkpointed", squared_recomputed, ref.squared, QKV, sizes=SIZES)

HEALTHY = RIGHT.ops
