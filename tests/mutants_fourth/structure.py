"""Routing, graphs, segments, ragged sequences, transforms and views, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function, gradients
from references import structure as ref
from references.structure import SIZES
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken


def routed_floor(x: Tensor, logits: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(logits, -1)
    gate, expert = p.max(-1)
    hot = F.one_hot(expert, logits.shape[-1])
    room = max(1, int(1.25 * len(x) / logits.shape[-1]))  # rounded down
    late = (hot.cumsum(0) * hot).sum(-1) > room
    y = x * weight[expert] * gate[:, None]
    return torch.where(late[:, None], 0, y), logits.shape[-1] * (hot.to(x.dtype).mean(0) * p.mean(0)).sum()


add("Y41", "the capacity of an expert is rounded down", "sizes", routed_floor, ref.routed, ref.ROUTED, sizes=SIZES,
    proof=Call(dict(M=9, E=2), change=lambda t: dict(logits=t["logits"] + torch.tensor([9.0, 0.0]))))  # fmt: skip


def edge_softmax_backward(dy: Tensor, y: Tensor, score: Tensor, node: Tensor) -> tuple[Tensor, None]:
    total = torch.zeros(8, dtype=y.dtype)
    for start in range(0, len(y), 128):
        part = slice(start, start + 128)
        total = torch.zeros_like(total).index_add(0, node[part], (dy * y)[part])  # each block begins anew
    return y * (dy - total[node]), None


add("Y42", "sums over the edges of a node are those of the last block of 128", "sizes",
    function(ref.edge_softmax, edge_softmax_backward), ref.edge_softmax, ref.EDGES, sizes=SIZES,
    proof=Call(dict(P=140)))  # fmt: skip


def pooled_backward(dy: Tensor, y: Tensor, x: Tensor, node: Tensor) -> tuple[Tensor, None]:
    own = (node[:, None] == torch.arange(8))[..., None]
    place = torch.where(own, x[:, None], float("-inf")).max(0).indices  # row 0 where there is none
    return torch.zeros_like(x).scatter_add(0, place, dy), None


add("Y43", "the gradient of an empty group goes to row 0", "some inputs",
    function(ref.pooled, pooled_backward), ref.pooled, ref.POOLED, sizes=SIZES,
    proof=Call(dict(M=4)))  # fmt: skip


def ragged_by_differences(x: Tensor, cut: Tensor) -> Tensor:
    at = torch.tensor(ref.lengths(cut, len(x)))
    total = x.cumsum(0)
    ends = total[(at[1:] - 1).clamp_min(0)]  # of an empty first sequence this is row 0, not nothing
    before = F.pad(ends[:-1], (0, 0, 1, 0))
    return (ends - before) / (at[1:] - at[:-1]).clamp_min(1)[:, None]


add("Y44", "an empty first sequence takes the first row of the next", "special values",
    ragged_by_differences, ref.ragged_mean, ref.RAGGED, sizes=SIZES, algorithm_error=16, extremes=(),
    proof=Call(dict(M=5), change=lambda t: dict(cut=torch.tensor([0, 2, 3]))))  # fmt: skip


class GraphAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return ref.graph_attention(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        grads = gradients(ref.graph_attention, dy, *ctx.saved_tensors)
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None, None, None  # left and right are thought to go together
        return grads


add("Y45", "with a frozen left vector the right one gets no gradient", "subsets of gradients",
    lambda *a: GraphAttention.apply(*a), ref.graph_attention, ref.GRAPH, sizes=ref.GRAPH_SIZES,
    proof=Call(wrt=("x", "right")))  # fmt: skip


def hadamard_backward(dy: Tensor, y: Tensor, x: Tensor) -> Tensor:
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    return ref.hadamard(dy) * (size / n) ** 0.5  # the factor of what was cut, not of what was padded


add("Y46", "the gradient is scaled by the size before it was padded: right for powers of two", "sizes",
    function(ref.hadamard, hadamard_backward), ref.hadamard, dict(x=tensor("M", "N")), sizes=dict(M=(1, 8), N=(1, 70)),
    proof=Call(dict(N=6)))  # fmt: skip


def bags_backward(dy: Tensor, y: Tensor, table: Tensor, weight: Tensor, index: Tensor) -> Any:
    flat = weight.as_strided((weight.numel(),), (1,)).view(weight.shape)  # a transposed weight is read row by row
    grad = torch.zeros_like(table).index_put((index,), dy[:, None] * flat[..., None], accumulate=True)
    return grad, (table[index] * dy[:, None]).sum(-1), None


def transposed_weight() -> bool:
    op = function(ref.weighed_bags, bags_backward)
    table, index, dy = torch.randn(5, 2, requires_grad=True), torch.randint(5, (3, 4)), torch.randn(3, 2)
    weight = torch.randn(4, 3).mT
    one = torch.autograd.grad(op(table, weight, index), table, dy)[0]
    return not torch.allclose(one, torch.autograd.grad(op(table, weight.contiguous(), index), table, dy)[0])


add("Y47", "a transposed weight of bags is read row by row", "layouts",
    function(ref.weighed_bags, bags_backward), ref.weighed_bags, ref.BAGS, sizes=SIZES, proof=transposed_weight)  # fmt: skip


class Cache:
    """Keeps the cache of the last call of a shape; a call with rows as long as it appends in place."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, cache: Tensor, new: Tensor, query: Tensor) -> Tensor:
        if self.kept is None or self.kept.shape != cache.shape or self.kept.dtype != cache.dtype:
            self.kept = cache.clone()  # later calls of this shape go on with it
        keys = torch.cat([self.kept[:, : cache.shape[1] - new.shape[1]], new], 1)
        return torch.einsum("bd,bld->bl", query, keys)


def second_cache() -> bool:
    op, new, query = Cache(), torch.randn(1, 1, 2), torch.randn(1, 2)
    op(torch.zeros(1, 3, 2), new, query)
    return not torch.equal(op(torch.ones(1, 3, 2), new, query), ref.appended(torch.ones(1, 3, 2), new, query))


add("Y48", "the first cache of a shape is kept for all later calls", "calls", Cache(), ref.appended, ref.CACHE,
    sizes=ref.CACHE_SIZES, where="E <= V", proof=second_cache)  # fmt: skip


def sparsemax_few(x: Tensor) -> Tensor:
    z = x.topk(min(16, x.shape[-1]), -1).values  # more than 16 are never needed, it thinks
    k = torch.arange(1, z.shape[-1] + 1)
    total = z.cumsum(-1) - 1
    size = (z * k > total).sum(-1, keepdim=True)
    return (x - total.gather(-1, size - 1) / size).clamp_min(0)


add("Y49", "sparsemax looks at the 16 largest: wrong for long rows of nearly equal numbers", "special values",
    sparsemax_few, ref.sparsemax, dict(x=tensor("M", "N")), sizes=dict(M=(1, 6), N=(1, 80)),
    proof=Call(dict(N=60), change=lambda t: dict(x=t["x"] * 0.01)))  # fmt: skip


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ref.dropout_mlp(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return gradients(ref.dropout_mlp, dy, *ctx.saved_tensors)  # draws another mask


def another_mask() -> bool:
    x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8)
    grads = []
    for op in (Recomputed.apply, ref.dropout_mlp):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(op(x, weight).sum(), x)[0])
    return not torch.allclose(*grads)


add("Y50", "a recomputing backward draws another dropout mask", "calls", lambda *a: Recomputed.apply(*a),
    ref.dropout_mlp, ref.MLP, sizes=SIZES, random=True, proof=another_mask)  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
