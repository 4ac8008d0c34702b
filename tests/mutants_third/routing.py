"""Routing to experts, segments, bags and sparse products, broken."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from entries import Call, Entries, function
from torch import Tensor

from retrograd.check.spec import tensor

BROKEN = Entries()
add = BROKEN.broken

# --- Z21, Z22: losses of a router --------------------------------------------------------------

ROUTED = dict(logits=tensor("M", "E"), expert=tensor("M", dtype="int64", low=0, high="E"))
ROUTER_SIZES = dict(M=(1, 40), E=(2, 12))


def balance(logits: Tensor, expert: Tensor) -> Tensor:
    share = torch.bincount(expert, minlength=logits.shape[-1]).to(logits.dtype) / len(expert)
    return logits.shape[-1] * (share * torch.softmax(logits, -1).mean(0)).sum()


def balance_counted(logits: Tensor, expert: Tensor) -> Tensor:
    share = torch.bincount(expert).to(logits.dtype) / len(expert)  # as long as the last expert that was used
    used = torch.softmax(logits, -1).mean(0)[: len(share)]
    return len(share) * (share * used).sum()


def last_unused(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(expert=inputs["expert"].clamp(max=inputs["logits"].shape[-1] - 2))


add("Z21", "the number of experts is that of the last one used: too small where the last gets no token",
    "special values", balance_counted, balance, ROUTED, sizes=ROUTER_SIZES, proof=Call(change=last_unused))  # fmt: skip

ZLOSS = dict(logits=tensor("M", "E"), real=tensor("M", dtype="bool"))


def z_loss(logits: Tensor, real: Tensor) -> Tensor:
    return (torch.logsumexp(logits, -1).square() * real).sum() / real.sum().clamp_min(1)


def z_loss_backward(dy: Tensor, y: Tensor, logits: Tensor, real: Tensor) -> tuple[Tensor, None]:
    lse = torch.logsumexp(logits, -1, keepdim=True)
    return dy * 2 * lse * torch.softmax(logits, -1) * real[:, None] / len(real), None


add("Z22", "the gradient is divided by all tokens, the loss by those that are not padding", "some inputs",
    function(z_loss, z_loss_backward), z_loss, ZLOSS, sizes=ROUTER_SIZES,
    proof=Call(change=lambda t: dict(real=torch.arange(len(t["real"])) < 2)))  # fmt: skip

# --- Z23: capacity ------------------------------------------------------------------------------------

ROOM = 2


def late(expert: Tensor) -> Tensor:
    """Whether a token comes when its expert is full."""
    order = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
    return order > ROOM


def capacity(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    return x * torch.sigmoid(gate).masked_fill(late(expert), 0)[:, None]


def capacity_by_data(x: Tensor, gate: Tensor, expert: Tensor) -> Tensor:
    weight = torch.sigmoid(gate)
    kept = weight * 1
    kept.data[late(expert)] = 0  # the graph does not know
    return x * kept[:, None]


def crowded(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(expert=torch.ones_like(inputs["expert"]))


add("Z23", "dropped tokens are zeroed through .data: their gates still get a gradient", "some inputs",
    capacity_by_data, capacity,
    dict(x=tensor("M", "N"), gate=tensor("M"), expert=tensor("M", dtype="int64", low=0, high=4)),
    sizes=dict(M=(1, 16), N=(1, 8)), proof=Call(change=crowded))  # fmt: skip

# --- Z24, Z25: permutations and counts ----------------------------------------------------------------------

SORTED = dict(x=tensor("M", "N"), expert=tensor("M", dtype="int64", low=0, high=5))


def by_expert(x: Tensor, expert: Tensor) -> Tensor:
    return x[expert.argsort(stable=True)]


add("Z24", "the gradient is permuted as the forward, not back: right for permutations that undo themselves",
    "some inputs",
    function(by_expert, lambda dy, y, x, expert: (dy[expert.argsort(stable=True)], None)), by_expert, SORTED,
    sizes=dict(M=(1, 24), N=(1, 8)), proof=Call(dict(M=8)))  # fmt: skip


def counted(x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    total = x.new_zeros(5, x.shape[1]).index_add(0, expert, x)
    return total, torch.bincount(expert, minlength=5)


def counted_low(x: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(5, dtype=torch.int8).index_add(0, expert, torch.ones(len(expert), dtype=torch.int8))
    return x.new_zeros(5, x.shape[1]).index_add(0, expert, x), counts.long()


add("Z25", "tokens are counted in int8: the integer output is negative from 128 tokens an expert on", "sizes",
    counted_low, counted, SORTED, sizes=dict(M=(1, 2000), N=(1, 4)), proof=Call(dict(M=1500)))  # fmt: skip

# --- Z26: results in a dictionary ------------------------------------------------------------------------


def routed(x: Tensor, logits: Tensor) -> dict[str, Any]:
    p = torch.softmax(logits, -1)
    kept, index = p.topk(2, -1)
    return dict(out=x * kept.sum(-1, keepdim=True), router=dict(aux=p.mean(0).square().sum(), index=[index]))


def routed_detached(x: Tensor, logits: Tensor) -> dict[str, Any]:
    out = routed(x, logits)
    aux = torch.softmax(logits, -1).detach().mean(0).square().sum()  # logged, they thought
    return dict(out=out["out"], router=dict(aux=aux, index=out["router"]["index"]))


def members(fn: Any) -> Any:
    """The natural op returns nested dictionaries, which no spec describes: its tensors, as a tuple."""

    def flattened(*inputs: Tensor) -> tuple[Tensor, ...]:
        out = fn(*inputs)
        return out["out"], out["router"]["aux"], out["router"]["index"][0]

    return flattened


add("Z26", "the auxiliary loss within a nested result is detached", "every input",
    members(routed_detached), members(routed), dict(x=tensor("M", "N"), logits=tensor("M", "E")),
    sizes=dict(M=(1, 16), N=(1, 8), E=(2, 8)))  # fmt: skip

# --- Z27 to Z29: segments ---------------------------------------------------------------------------------

SEGMENTS = dict(x=tensor("M", "N"), segment=tensor("M", dtype="int64", low=0, high=5))
SEGMENT_SIZES = dict(M=(1, 40), N=(1, 8))


def segment_sum(x: Tensor, segment: Tensor) -> Tensor:
    return x.new_zeros(5, x.shape[1]).index_add(0, segment, x)


def segment_sum_sorted(x: Tensor, segment: Tensor) -> Tensor:
    """Differences of a running sum at the segments' ends: right for sorted segments."""
    total = F.pad(x.cumsum(0), (0, 0, 1, 0))
    ends = torch.bincount(segment, minlength=5).cumsum(0)
    return total[ends] - total[F.pad(ends[:-1], (1, 0))]


add("Z27", "segments are taken to be sorted", "some inputs", segment_sum_sorted, segment_sum, SEGMENTS,
    sizes=SEGMENT_SIZES, proof=Call(dict(M=12)))  # fmt: skip


def segment_max(x: Tensor, segment: Tensor) -> Tensor:
    """From -inf: PyTorch counts an equal value that was there before as a tie even with include_self=False."""
    index = segment[:, None].expand_as(x)
    y = x.new_full((5, x.shape[1]), float("-inf")).scatter_reduce(0, index, x, "amax")
    return torch.where((torch.bincount(segment, minlength=5) == 0)[:, None], 0, y)


def every_maximum(dy: Tensor, y: Tensor, x: Tensor, segment: Tensor) -> tuple[Tensor, None]:
    return dy[segment] * (x == y[segment]), None


def equal_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(x=torch.ones_like(inputs["x"]), segment=torch.zeros_like(inputs["segment"]))


def all_of_a_tie() -> bool:
    """Two rows that are equal share the maximum: together they may get at most the whole gradient."""
    x, segment = torch.ones(2, 1, requires_grad=True), torch.zeros(2, dtype=torch.int64)
    function(segment_max, every_maximum)(x, segment).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum()) > 1.5


add("Z28", "each of several equal maxima gets the whole gradient", "special values",
    function(segment_max, every_maximum), segment_max, SEGMENTS, sizes=SEGMENT_SIZES, extremes=(),
    proof=all_of_a_tie)  # fmt: skip


def segment_mean(x: Tensor, segment: Tensor) -> Tensor:
    return segment_sum(x, segment) / torch.bincount(segment, minlength=5).clamp_min(1)[:, None]


def segment_mean_empty(x: Tensor, segment: Tensor) -> Tensor:
    return segment_sum(x, segment) / torch.bincount(segment, minlength=5)[:, None]


def one_segment(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(segment=torch.ones_like(inputs["segment"]))


add("Z29", "an empty segment is 0 / 0 instead of 0", "special values", segment_mean_empty, segment_mean, SEGMENTS,
    sizes=dict(M=(30, 60), N=(1, 8)), proof=Call(change=one_segment))  # fmt: skip

# --- Z30: an embedding with a largest norm ------------------------------------------------------------------


def bounded_rows(table: Tensor, index: Tensor) -> Tensor:
    rows = table[index]
    norm = rows.detach().norm(dim=-1, keepdim=True)
    return rows * torch.where(norm > 2, 2 / (norm + 1e-7), 1.0)


def bounded_in_place(table: Tensor, index: Tensor) -> Tensor:
    used = index.unique()
    norm = table.detach()[used].norm(dim=-1, keepdim=True)
    with torch.no_grad():  # the caller's table, whose version counts up
        table.data[used] *= torch.where(norm > 2, 2 / (norm + 1e-7), 1.0)
    return table[index]


def changed_table() -> bool:
    table = torch.full((3, 4), 5.0)
    bounded_in_place(table, torch.tensor([1]))
    return not torch.equal(table, torch.full((3, 4), 5.0))


add("Z30", "rows above the largest norm are shortened in the caller's table", "special values",
    bounded_in_place, bounded_rows, dict(table=tensor("V", "N"), index=tensor("M", dtype="int64", low=0, high="V")),
    sizes=dict(V=(1, 16), N=(1, 4), M=(1, 16)), surrogate=True, proof=changed_table)  # fmt: skip

# --- Z31, Z32: products with sparse matrices, softmax over edges -----------------------------------------------

EDGES = dict(value=tensor("P"), dense=tensor("V", "N"), row=tensor("P", dtype="int64", low=0, high="V"),
             column=tensor("P", dtype="int64", low=0, high="V"))  # fmt: skip


def spmm(value: Tensor, dense: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.zeros_like(dense).index_add(0, row, value[:, None] * dense[column])


def spmm_backward(dy: Tensor, y: Tensor, value: Tensor, dense: Tensor, row: Tensor, column: Tensor) -> Any:
    matrix = value.new_zeros(len(dense), len(dense))
    matrix[row, column] = value  # the last of equal pairs stays
    return (dy[row] * dense[column]).sum(-1), matrix.mT @ dy, None, None


def same_edge(inputs: dict[str, Any]) -> dict[str, Any]:
    return dict(row=torch.zeros_like(inputs["row"]), column=torch.zeros_like(inputs["column"]))


add("Z31", "of edges that occur twice the backward keeps the last", "special values",
    function(spmm, spmm_backward), spmm, EDGES, sizes=dict(V=(20, 40), N=(1, 6), P=(1, 16)),
    proof=Call(change=same_edge))  # fmt: skip

SCORES = dict(score=tensor("P"), node=tensor("P", dtype="int64", low=0, high=4))


def edge_softmax(score: Tensor, node: Tensor) -> Tensor:
    top = score.detach().new_full((4,), float("-inf")).scatter_reduce(0, node, score.detach(), "amax")
    weight = torch.exp(score - top[node])
    return weight / weight.new_zeros(4).index_add(0, node, weight)[node]


def edge_softmax_from_zero(score: Tensor, node: Tensor) -> Tensor:
    top = score.detach().new_zeros(4).scatter_reduce(0, node, score.detach(), "amax")  # zero takes part
    weight = torch.exp(score - top[node])
    return weight / weight.new_zeros(4).index_add(0, node, weight)[node].clamp_min(1e-16)


add("Z32", "the maximum that is subtracted is at least zero: scores far below it vanish", "special values",
    edge_softmax_from_zero, edge_softmax, SCORES, sizes=dict(P=(1, 40)),
    proof=Call(change=lambda t: dict(score=t["score"] - 60)))  # fmt: skip

MUTANTS, NOT_SAYABLE = BROKEN.ops, BROKEN.not_sayable
