"""Routing, graphs, segments, ragged sequences, transforms and views, right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from references import structure as ref
from references.structure import SIZES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy


def routed_by_tokens(x: Tensor, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Experts one after the other take their first tokens; dropped tokens are never touched."""
    p, experts = torch.softmax(logits, -1), logits.shape[-1]
    expert = logits.argmax(-1)
    room, y, share = -(-5 * len(x) // (4 * experts)), torch.zeros_like(x), []
    for e in range(experts):
        tokens = (expert == e).nonzero()[:, 0]
        share.append(len(tokens) / len(x))
        kept = tokens[:room]
        y = y.index_copy(0, kept, x[kept] * p[kept, e, None] * weight[e])
    return y, p.mean(0) @ torch.tensor(share, dtype=x.dtype) * experts


add("experts_one_by_one", routed_by_tokens, ref.routed, ref.ROUTED, sizes=SIZES)


def edge_softmax_scattered(score: Tensor, node: Tensor) -> Tensor:
    """Edges sorted by node, in another order of sums; a node's maximum taken away."""
    order = node.argsort(stable=True)
    s, n = score[order], node[order]
    top = torch.full((8,), float("-inf"), dtype=s.dtype).scatter_reduce(0, n, s.detach(), "amax")
    e = torch.exp(s - top[n])
    p = e / torch.zeros(8, dtype=s.dtype).index_add(0, n, e)[n]
    return torch.empty_like(p).index_copy(0, order, p)


add("edge_softmax_sorted", edge_softmax_scattered, ref.edge_softmax, ref.EDGES, sizes=SIZES)


def pooled_backward(dy: Tensor, y: Tensor, x: Tensor, node: Tensor) -> tuple[Tensor, None]:
    """The last of equal maxima gets all."""
    equal = x == y[node]
    later = (node[:, None] == node).triu(1).to(x.dtype) @ equal.to(x.dtype)
    return torch.where(equal & (later == 0), dy[node], 0), None


add(
    "maximum_to_the_last",
    function(ref.pooled, pooled_backward),
    ref.pooled,
    ref.POOLED,
    sizes=SIZES,
    extremes=dict(x="finite"),
)


def ragged_by_ids(x: Tensor, cut: Tensor) -> Tensor:
    at = torch.tensor(ref.lengths(cut, len(x)))
    size = at[1:] - at[:-1]
    rows = torch.repeat_interleave(torch.arange(4), size)
    return torch.segment_reduce(x, "sum", lengths=size) / size.clamp_min(1)[:, None] + 0 * rows.sum()


# What is 0 times the rows' numbers is there for a device's sake, and adds nothing.
add("ragged_mean_by_segments", ragged_by_ids, ref.ragged_mean, ref.RAGGED, sizes=SIZES)


def graph_scattered(x: Tensor, left: Tensor, right: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Divides once, at the nodes: sums of weights and of weighed rows."""
    score = F.leaky_relu((x @ left)[source] + (x @ right)[target], 0.2)
    top = score.new_full((len(x),), float("-inf")).scatter_reduce(0, target, score.detach(), "amax")
    e = torch.exp(score - top[target])
    total = x.new_zeros(len(x)).index_add(0, target, e)
    rows = torch.zeros_like(x).index_add(0, target, e[:, None] * x[source])
    return rows / torch.where(total == 0, 1, total)[:, None]


add("graph_attention_divided_once", graph_scattered, ref.graph_attention, ref.GRAPH, sizes=ref.GRAPH_SIZES,
    proof=Call(bound=1e-3))  # fmt: skip  # fmt: skip


def butterfly(x: Tensor) -> Tensor:
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    y, width = F.pad(x, (0, size - n)), 1
    while width < size:
        a, b = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y, width = torch.stack([a + b, a - b], -2).flatten(-3), 2 * width
    return y[..., :n] * size**-0.5


add("hadamard_by_butterflies", function(butterfly, lambda dy, y, x: butterfly(dy)), ref.hadamard,
    dict(x=tensor("M", "N")), sizes=dict(M=(1, 8), N=(1, 70)))  # fmt: skip


def bags(table: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return F.embedding_bag(index, table, mode="sum", per_sample_weights=weight)


add("bags_with_weights", bags, ref.weighed_bags, ref.BAGS, sizes=SIZES)


def appended_in_place(cache: Tensor, new: Tensor, query: Tensor) -> Tensor:
    """A copy of the cache, written in place through a view that autograd follows."""
    keys = cache.clone()
    keys.narrow(1, cache.shape[1] - new.shape[1], new.shape[1]).copy_(new)
    return (keys @ query[:, :, None]).squeeze(-1)


add("cache_through_a_view", appended_in_place, ref.appended, ref.CACHE, sizes=ref.CACHE_SIZES, where="E <= V")


class Sparsemax(torch.autograd.Function):
    """By bisection, then exactly from the support: no sort."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
        for _ in range(30):
            middle = (low + high) / 2
            more = (x - middle).clamp_min(0).sum(-1, keepdim=True) >= 1
            low, high = torch.where(more, middle, low), torch.where(more, high, middle)
        kept = x > low
        tau = (torch.where(kept, x, 0).sum(-1, keepdim=True) - 1) / kept.sum(-1, keepdim=True)
        y = (x - tau).clamp_min(0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        kept = ctx.saved_tensors[0] > 0
        return torch.where(kept, dy - (dy * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True), 0)


add("sparsemax_by_bisection", lambda x: Sparsemax.apply(x), ref.sparsemax, dict(x=tensor("M", "N")),
    sizes=dict(M=(1, 6), N=(1, 80)), extremes=dict(x="finite"))  # fmt: skip


def kept_generator(x: Tensor, weight: Tensor) -> Tensor:
    """Recomputed with the generator's state of the forward."""
    return checkpoint(ref.dropout_mlp, x, weight, use_reentrant=False, preserve_rng_state=True)


add("dropout_checkpointed", kept_generator, ref.dropout_mlp, ref.MLP, sizes=SIZES, random=True)

HEALTHY = RIGHT.ops
