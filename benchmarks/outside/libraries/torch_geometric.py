"""Specs of PyTorch Geometric: utilities on edges, aggregations, norms and convolutions."""

from __future__ import annotations

import torch
import torch_geometric.nn as nn
import torch_geometric.utils as utils
from describe import add, alone, module

from retrograd import tensor as t

# Empty groups, groups of one and a group of half the edges.
GROUPS = torch.tensor([0, 3, 3, 1, 6, 3, 3, 0, 3, 6, 3, 3])
SORTED = GROUPS.sort().values
EDGES = torch.tensor([[0, 1, 1, 2, 3, 3, 4, 0], [1, 0, 2, 3, 1, 4, 4, 3]])
ROWS = dict(x=t("E", "C"), index=t("E", dtype="int64", high=7))
SIZES = dict(E=(1, 200))


def grouped(fn):
    """A reduction over the rows of each of 7 groups, in plain PyTorch."""
    return lambda x, index: torch.stack([fn(x[index == group]) for group in range(7)])


EMPTY = lambda rows: rows.new_zeros(rows.shape[1:])  # noqa: E731
for kind, plain in dict(
    sum=lambda rows: rows.sum(0), mean=lambda rows: rows.mean(0) if len(rows) else EMPTY(rows),
    max=lambda rows: rows.amax(0) if len(rows) else EMPTY(rows), min=lambda rows: rows.amin(0) if len(rows) else EMPTY(rows),
).items():  # fmt: skip
    add(f"torch_geometric.utils.scatter.{kind}", lambda x, index, k=kind: utils.scatter(x, index, 0, 7, k),
        grouped(plain), ROWS, sizes=SIZES)  # fmt: skip
alone(
    "torch_geometric.utils.scatter.mul",
    lambda x, index: utils.scatter(x, index, 0, 7, "mul"),
    ROWS,
    sizes=dict(E=(1, 40)),
)


def softmax(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    same = index[:, None] == index[None]
    shifted = x[None].expand(len(x), *x.shape).masked_fill(~same[:, :, None], -torch.inf)
    return (x - shifted.logsumexp(1)).exp()


add("torch_geometric.utils.softmax", lambda x, index: utils.softmax(x, index, num_nodes=7), softmax, ROWS, sizes=SIZES)
PTR = torch.tensor([0, 3, 3, 4, 12])
alone("torch_geometric.utils.softmax.ptr", lambda x: utils.softmax(x, ptr=PTR), dict(x=t(12, "C")))
for kind in ("sum", "mean", "max", "min"):
    add(f"torch_geometric.utils.segment.{kind}", lambda x, k=kind: utils.segment(x, PTR, k),
        lambda x, k=kind: utils.scatter(x, torch.tensor([0, 0, 0, 2] + [3] * 8), 0, 4, k), dict(x=t(12, "C")))  # fmt: skip
alone("torch_geometric.utils.to_dense_batch", lambda x: utils.to_dense_batch(x, SORTED)[0], dict(x=t(12, "C")))
add("torch_geometric.utils.to_dense_adj", lambda w: utils.to_dense_adj(EDGES, edge_attr=w),
    lambda w: w.new_zeros(1, 5, 5, *w.shape[1:]).index_put((torch.zeros(8, dtype=torch.int64), *EDGES), w, accumulate=True),
    dict(w=t(8, "C")))  # fmt: skip
for kind in (None, "sym", "rw"):
    alone(f"torch_geometric.utils.get_laplacian.{kind}",
          lambda w, k=kind: utils.get_laplacian(EDGES[:, :6], w, k, num_nodes=5)[1], dict(w=t(6, low=0.3, high=2.0)))  # fmt: skip
for fill in ("add", "mean", "max", "min", "mul"):
    alone(f"torch_geometric.utils.add_self_loops.{fill}",
          lambda w, f=fill: utils.add_self_loops(EDGES, w, f, 5)[1], dict(w=t(8, "C")))  # fmt: skip
alone("torch_geometric.utils.add_remaining_self_loops",
      lambda w: utils.add_remaining_self_loops(EDGES, w, 1.0, 5)[1], dict(w=t(8)))  # fmt: skip
TWICE = torch.cat([EDGES, EDGES[:, :3]], 1)
for kind in ("sum", "mean", "max", "min", "mul"):
    alone(
        f"torch_geometric.utils.coalesce.{kind}",
        lambda w, k=kind: utils.coalesce(TWICE, w, 5, k)[1],
        dict(w=t(11, "C")),
    )
alone("torch_geometric.utils.to_undirected", lambda w: utils.to_undirected(EDGES, w, 5, "mean")[1], dict(w=t(8, "C")))
alone("torch_geometric.utils.cumsum", utils.cumsum, dict(x=t("M", "C")))
alone("torch_geometric.utils.unbatch", lambda x: tuple(utils.unbatch(x, SORTED)), dict(x=t(12, "C")))
alone("torch_geometric.utils.group_cat",
      lambda x, y: utils.group_cat([x, y], [torch.tensor([0, 0, 2]), torch.tensor([0, 1, 2, 2])]),
      dict(x=t(3, "C"), y=t(4, "C")))  # fmt: skip
FACES = torch.tensor([[0, 0, 1], [1, 2, 2], [2, 3, 3]])
alone("torch_geometric.utils.get_mesh_laplacian", lambda x: utils.get_mesh_laplacian(x, FACES)[1], dict(x=t(4, 3)))

FIXED = dict(x=t(12, 6))
for name, make in dict(
    Softmax=lambda: nn.aggr.SoftmaxAggregation(learn=True), PowerMean=lambda: nn.aggr.PowerMeanAggregation(learn=True),
    Std=nn.aggr.StdAggregation, Var=nn.aggr.VarAggregation, Median=nn.aggr.MedianAggregation,
    Quantile=lambda: nn.aggr.QuantileAggregation([0.2, 0.7]), VariancePreserving=nn.aggr.VariancePreservingAggregation,
    Sort=lambda: nn.aggr.SortAggregation(3), Set2Set=lambda: nn.aggr.Set2Set(6, 2),
).items():  # fmt: skip
    positive = dict(x=t(12, 6, low=0.2, high=3.0)) if name == "PowerMean" else FIXED

    class Aggregate(torch.nn.Module):
        def __init__(self, make=make):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x, SORTED, dim_size=7)

    module(f"torch_geometric.nn.{name}Aggregation", Aggregate, positive)

for name, make in dict(
    GraphNorm=lambda: nn.GraphNorm(6), PairNorm=nn.PairNorm, InstanceNorm=lambda: nn.InstanceNorm(6, affine=True),
    LayerNorm=lambda: nn.LayerNorm(6), LayerNormNode=lambda: nn.LayerNorm(6, mode="node"),
    GraphSizeNorm=nn.GraphSizeNorm, MeanSubtractionNorm=nn.MeanSubtractionNorm,
).items():  # fmt: skip

    class Norm(torch.nn.Module):
        def __init__(self, make=make):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x, torch.tensor([0] * 5 + [1] * 3 + [2] * 4))

    module(f"torch_geometric.nn.{name}", Norm, FIXED)

for name, make in dict(
    GCNConv=lambda: nn.GCNConv(6, 4), GATConv=lambda: nn.GATConv(6, 4, 2), GATv2Conv=lambda: nn.GATv2Conv(6, 4, 2),
    SAGEConv=lambda: nn.SAGEConv(6, 4, "max"), TransformerConv=lambda: nn.TransformerConv(6, 4),
    ChebConv=lambda: nn.ChebConv(6, 4, 3), ResGatedGraphConv=lambda: nn.ResGatedGraphConv(6, 4),
).items():  # fmt: skip

    class Convolution(torch.nn.Module):
        def __init__(self, make=make):
            super().__init__()
            self.inner = make()

        def forward(self, x):
            return self.inner(x, EDGES)

    module(f"torch_geometric.nn.{name}", Convolution, dict(x=t(5, 6)))
alone(
    "torch_geometric.nn.dense_diff_pool",
    nn.dense_diff_pool,
    dict(x=t(2, 6, 4), a=t(2, 6, 6, low=0.0, high=1.0), s=t(2, 6, 3)),
)
alone(
    "torch_geometric.nn.dense_mincut_pool",
    nn.dense_mincut_pool,
    dict(x=t(2, 6, 4), a=t(2, 6, 6, low=0.1, high=1.0), s=t(2, 6, 3)),
)
