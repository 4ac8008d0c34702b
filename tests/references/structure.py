"""References of routing, graphs, segments, ragged sequences, transforms and views."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from retrograd.check.spec import tensor

SIZES = dict(M=(1, 60), N=(1, 6), E=(2, 6), V=(1, 12), P=(1, 150))


def routed(x: Tensor, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The best expert of each, at most ceil(1.25 M / E) tokens an expert; the auxiliary loss."""
    p = torch.softmax(logits, -1)
    experts = logits.shape[-1]
    gate, expert = p.max(-1)
    hot = F.one_hot(expert, experts)
    room = -(-5 * len(x) // (4 * experts))
    late = (hot.cumsum(0) * hot).sum(-1) > room
    y = (x * weight[expert]) * gate[:, None]
    return torch.where(late[:, None], 0, y), experts * (hot.to(x.dtype).mean(0) * p.mean(0)).sum()


ROUTED = dict(x=tensor("M", "N"), logits=tensor("M", "E"), weight=tensor("E", "N"))


def edge_softmax(score: Tensor, node: Tensor) -> Tensor:
    """A softmax over the edges of each of 8 nodes, by a matrix with -inf elsewhere."""
    own = node[:, None] == torch.arange(8)
    lse = torch.logsumexp(torch.where(own, score[:, None], float("-inf")), 0)
    return torch.exp(score - lse[node])


EDGES = dict(score=tensor("P"), node=tensor("P", dtype="int64", low=0, high=8))


def pooled(x: Tensor, node: Tensor) -> Tensor:
    """The maximum of each of 8 groups of rows, 0 where there is none."""
    own = (node[:, None] == torch.arange(8))[..., None]
    top = torch.where(own, x[:, None], float("-inf")).amax(0)
    return torch.where(own.any(0), top, 0)


POOLED = dict(x=tensor("M", "N"), node=tensor("M", dtype="int64", low=0, high=8))


def lengths(cut: Tensor, rows: int) -> list[int]:
    """cu_seqlens from three places where sequences are cut, empty ones among them."""
    return [0, *sorted(int(c) % (rows + 1) for c in cut), rows]


def ragged_mean(x: Tensor, cut: Tensor) -> Tensor:
    at = lengths(cut, len(x))
    return torch.stack([x[a:b].sum(0) / max(b - a, 1) for a, b in itertools.pairwise(at)])


RAGGED = dict(x=tensor("M", "N"), cut=tensor(3, dtype="int64", low=0, high=61))


def graph_attention(x: Tensor, left: Tensor, right: Tensor, source: Tensor, target: Tensor) -> Tensor:
    score = F.leaky_relu((x @ left)[source] + (x @ right)[target], 0.2)
    own = target[:, None] == torch.arange(len(x))
    lse = torch.logsumexp(torch.where(own, score[:, None], float("-inf")), 0)
    weight = torch.exp(score - lse[target])
    return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source])


GRAPH = dict(x=tensor("V", "N"), left=tensor("N"), right=tensor("N"),
             source=tensor("P", dtype="int64", low=0, high="V"), target=tensor("P", dtype="int64", low=0, high="V"))  # fmt: skip
GRAPH_SIZES = SIZES | dict(P=(1, 40))


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard of rows that are padded to a power of two, normalised, cut again."""
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    h = torch.ones(1, 1, dtype=x.dtype)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return x @ h[:n, :n] * size**-0.5


def weighed_bags(table: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    return (table[index] * weight[..., None]).sum(1)


BAGS = dict(table=tensor("V", "N"), weight=tensor("M", 4), index=tensor("M", 4, dtype="int64", low=0, high="V"))


def appended(cache: Tensor, new: Tensor, query: Tensor) -> Tensor:
    """The last rows of a cache are the new keys; scores of a query."""
    keys = torch.cat([cache[:, : cache.shape[1] - new.shape[1]], new], 1)
    return torch.einsum("bd,bld->bl", query, keys)


CACHE = dict(cache=tensor("B", "V", "D", grad=False), new=tensor("B", "E", "D"), query=tensor("B", "D"))
CACHE_SIZES = dict(B=(1, 3), V=(1, 12), E=(1, 6), D=(1, 6))


def sparsemax(x: Tensor) -> Tensor:
    """The Euclidean projection of rows onto the simplex."""
    z = x.sort(-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1)
    total = z.cumsum(-1) - 1
    size = (z * k > total).sum(-1, keepdim=True)
    return (x - total.gather(-1, size - 1) / size).clamp_min(0)


def dropout_mlp(x: Tensor, weight: Tensor) -> Tensor:
    """The mask is drawn in float32 whatever x is."""
    return torch.tanh(x * (torch.rand(x.shape) < 0.75) / 0.75 * weight)


MLP = dict(x=tensor("M", "N"), weight=tensor("N"))
