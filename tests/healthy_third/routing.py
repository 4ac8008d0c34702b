"""Routing to experts, segments, bags and sparse products, right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from entries import Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

RIGHT = Entries()
add = RIGHT.healthy

LOGITS = dict(logits=tensor("M", "E"))
ROUTER_SIZES = dict(M=(1, 24), E=(3, 12))


def gates(logits: Tensor) -> Tensor:
    kept, index = torch.softmax(logits, -1).topk(2)
    return torch.zeros_like(logits).scatter(-1, index, kept / kept.sum(-1, keepdim=True))


def gates_masked(logits: Tensor) -> Tensor:
    """The softmax over the two largest, the others -inf: exact zeros."""
    index = logits.detach().topk(2).indices
    mask = torch.ones_like(logits, dtype=torch.bool).scatter(-1, index, False)
    return torch.softmax(logits.masked_fill(mask, float("-inf")), -1)


add("top_two_gates", gates_masked, gates, LOGITS, sizes=ROUTER_SIZES)


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    return (torch.logsumexp(logits, -1).square() * real).sum() / real.sum().clamp_min(1)


def z_loss_selected(logits: Tensor, real: Tensor) -> Tensor:
    kept = torch.logsumexp(logits[real], -1)
    return kept.square().mean() if len(kept) else logits.sum() * 0


add("z_loss_of_selected_rows", z_loss_selected, z_loss, LOGITS | dict(real=tensor("M", dtype="bool")),
    sizes=ROUTER_SIZES)  # fmt: skip

TOKENS = dict(x=tensor("M", "N"), gate=tensor("M"), expert=tensor("M", dtype="int64", low=0, high=4))
TOKEN_SIZES = dict(M=(1, 24), N=(1, 8))


def late(expert: Tensor) -> Tensor:
    return F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0] > 2


def dropped(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    return torch.where(late(expert)[:, None], 0, x * torch.sigmoid(gate)[:, None])


def dropped_in_place(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    y = x * torch.sigmoid(gate)[:, None]
    y[late(expert)] = 0
    return y


add("capacity_in_place", dropped_in_place, dropped, TOKENS, sizes=TOKEN_SIZES)


def doubled(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    return x * gate[:, None] * (expert + 1)[:, None]


def doubled_by_expert(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    """Sorted to experts, each its own product, and back by index_copy."""
    order = expert.argsort(stable=True)
    parts = x[order].split(torch.bincount(expert, minlength=4).tolist())
    y = torch.cat([part * (i + 1) for i, part in enumerate(parts)])
    return torch.empty_like(x).index_copy(0, order, y) * gate[:, None]


add("sorted_and_back", doubled_by_expert, doubled, TOKENS, sizes=TOKEN_SIZES)


def counted(x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hot = F.one_hot(expert, 5)
    return hot.to(x.dtype).mT @ x, hot.sum(0), hot.sum(0).argmax()


def counted_accumulated(x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums by index_put, counts [5] and the most frequent expert [] as integers."""
    total = x.new_zeros(5, x.shape[1]).index_put((expert,), x, accumulate=True)
    counts = torch.zeros(5, dtype=torch.int64).index_add(0, expert, torch.ones_like(expert))
    return total, counts, counts.argmax()


add("sums_and_counts", counted_accumulated, counted,
    dict(x=tensor("M", "N"), expert=tensor("M", dtype="int64", low=0, high=5)), sizes=TOKEN_SIZES)  # fmt: skip

SEGMENTS = dict(x=tensor("M", "N"), segment=tensor("M", dtype="int64", low=0, high=6))


def segment_max(x: Tensor, segment: Tensor) -> Tensor:
    return torch.stack([x[segment == i].amax(0) if (segment == i).any() else x.sum(0) * 0 for i in range(6)])


def segment_max_scattered(x: Tensor, segment: Tensor) -> Tensor:
    """From -inf: PyTorch counts an equal value that was there before as a tie even with include_self=False."""
    index = segment[:, None].expand_as(x)
    y = x.new_full((6, x.shape[1]), float("-inf")).scatter_reduce(0, index, x, "amax")
    return torch.where((torch.bincount(segment, minlength=6) == 0)[:, None], 0, y)


def first_of_ties(dy: Tensor, y: Tensor, x: Tensor, segment: Tensor) -> tuple[Tensor, None]:
    """Of equal maxima the first gets all."""
    equal = x == y[segment]
    earlier = (segment[:, None] == segment).tril(-1).to(x.dtype) @ equal.to(x.dtype)
    return dy[segment] * (equal & (earlier == 0)), None


SEGMENT_SIZES = dict(M=(1, 32), N=(1, 8))
add("segment_max_shared", segment_max_scattered, segment_max, SEGMENTS, sizes=SEGMENT_SIZES)
# A maximum that is NaN equals nothing, so that nothing gets its gradient: promised for finite values alone.
add("segment_max_first", function(segment_max_scattered, first_of_ties), segment_max, SEGMENTS, sizes=SEGMENT_SIZES,
    extremes=())  # fmt: skip


def segment_mean(x: Tensor, segment: Tensor) -> Tensor:
    hot = F.one_hot(segment, 6).to(x.dtype)
    return hot.mT @ x / hot.sum(0).clamp_min(1)[:, None]


def segment_mean_reduced(x: Tensor, segment: Tensor) -> Tensor:
    """Empty segments keep the zero they begin with."""
    index = segment[:, None].expand_as(x)
    return x.new_zeros(6, x.shape[1]).scatter_reduce(0, index, x, "mean", include_self=False)


add("segment_mean_with_empty", segment_mean_reduced, segment_mean, SEGMENTS, sizes=SEGMENT_SIZES)


def bag(table: Tensor, index: Tensor) -> Tensor:
    kept = (index != 0)[..., None].to(table.dtype)
    return (table[index] * kept).sum(1) / kept.sum(1).clamp_min(1)


def bag_with_padding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding_bag(index, table, mode="mean", padding_idx=0)


add("bag_with_padding", bag_with_padding, bag,
    dict(table=tensor("V", "N"), index=tensor("M", 4, dtype="int64", low=0, high="V")),
    sizes=dict(V=(2, 16), N=(1, 8), M=(1, 12)))  # fmt: skip

EDGES = dict(value=tensor("P"), dense=tensor("V", "N"), row=tensor("P", dtype="int64", low=0, high="V"),
             column=tensor("P", dtype="int64", low=0, high="V"))  # fmt: skip


def spmm(value: Tensor, dense: Tensor, row: Tensor, column: Tensor) -> Tensor:
    matrix = value.new_zeros(len(dense), len(dense)).index_put((row, column), value, accumulate=True)
    return matrix @ dense


def spmm_by_edges(value: Tensor, dense: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.zeros_like(dense).index_add(0, row, value[:, None] * dense[column])


add("sparse_product_by_edges", spmm_by_edges, spmm, EDGES, sizes=dict(V=(1, 16), N=(1, 6), P=(1, 40)))

HEALTHY = RIGHT.ops
