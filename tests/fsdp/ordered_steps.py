"""Training steps that the tests of the fixed order run: on ranks through FSDP2, and in one process as the reference."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from retrograd import fsdp

STEPS, RATE = 3, 0.5
Tensors = dict[str, torch.Tensor]


def four_ranks() -> Ranks:
    """Four processes that all tests of the fixed order share: to start them takes longer than most of their work."""
    if not _four_ranks().alive:
        _four_ranks.cache_clear()
    return _four_ranks()


@cache
def _four_ranks() -> Ranks:
    group = Ranks(4, Path(tempfile.mkdtemp()) / "store")
    atexit.register(group.close)
    return group


def among(ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """function(mesh, ...) on the first ranks of the group that this process is in; None on the others."""
    mesh = _mesh(ranks)
    return function(mesh, *args, **options) if dist.get_rank() < ranks else None


@cache
def _mesh(ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("shard",))


class Block(nn.Module):
    """Odd sizes: no dimension is a multiple of 2, 3 or 4 ranks, so every parameter is padded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 29, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(7, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(11, 7, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def wrap(model: Net, how: str, **options: Any) -> None:
    """How modules are grouped: each block, pairs of them, or the whole model at once."""
    if how == "block":
        for layer in model.layers:
            fully_shard(layer, **options)
    elif how == "pairs":
        for first in range(0, len(model.layers), 2):
            fully_shard(list(model.layers[first : first + 2]), **options)
    fully_shard(model, **options)


def train(
    mesh: DeviceMesh,
    how: str,
    *,
    accumulate: int = 1,
    every_sync: bool = False,
    ordered: dict[str, Any] | None = None,
    param: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    factor: float | None = None,
    force_sum: bool = False,
) -> list[tuple[Tensors, Tensors]]:
    """Steps of SGD on this rank: after each one the whole gradients and the whole parameters.

    Args:
        mesh: shards; with two dimensions HSDP.
        how: see `wrap`.
        accumulate: micro-batches a step; reduced once, or each if every_sync.
        ordered: options of fixed_order, or None for the group's own reduce-scatter.
        param, reduce: of the mixed precision policy.
        factor: set_gradient_divide_factor.
        force_sum: set_force_sum_reduction_for_comms.
    """
    model = make_net()
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    wrap(model, how, mesh=mesh, mp_policy=policy)
    if ordered is not None:
        fsdp.fixed_order(model, **ordered)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            if factor is not None:
                module.set_gradient_divide_factor(factor)
            if force_sum:
                module.set_force_sum_reduction_for_comms(True)
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    made = []
    for step in range(STEPS):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(every_sync or micro == accumulate - 1)
            loss_of(model, make_batch(step, micro, dist.get_rank())).backward()
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimiser.step()
        optimiser.zero_grad()
        made.append((gradients, {name: p.full_tensor().detach() for name, p in model.named_parameters()}))
    return made


def in_rank_order(values: list[torch.Tensor], scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The definition: values of the ranks, added in float32 from the first on, then scaled once."""
    total = values[0].float()
    for value in values[1:]:
        total = total + value.float()
    return scale(total)


def reference(
    ranks: int,
    *,
    accumulate: int = 1,
    every_sync: bool = False,
    param: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    wire: torch.dtype | None = None,
    factor: float | None = None,
) -> list[tuple[Tensors, Tensors]]:
    """What `train` has to give on every rank, to the bit: one process, no FSDP."""
    model = make_net()
    optimiser = torch.optim.SGD(model.parameters(), lr=RATE)
    made = []

    def scale(total: torch.Tensor) -> torch.Tensor:
        return total / ranks if factor in (None, ranks) else total * torch.tensor(1 / factor)

    def reduced(values: list[torch.Tensor]) -> torch.Tensor:
        sent = [value.to(reduce or value.dtype) for value in values]
        total = in_rank_order([value if wire is None else value.to(wire) for value in sent], scale)
        return total.to(sent[0].dtype).float()  # FSDP's buffer, then the parameter's dtype

    for step in range(STEPS):
        local = [
            [_gradients(model, make_batch(step, m, r), param) for m in range(accumulate)] for r in range(ranks)
        ]  # [rank][micro]
        gradients: Tensors = {}
        for name, _ in model.named_parameters():
            of_ranks = [[micro[name] for micro in rank] for rank in local]
            if every_sync:
                each = [reduced([rank[m] for rank in of_ranks]) for m in range(accumulate)]
                gradients[name] = _added(each)
            else:
                # Micro-batches that are not reduced are kept in the dtype of the reduction.
                gradients[name] = reduced([_added([m.to(reduce or m.dtype) for m in rank]) for rank in of_ranks])
        for name, p in model.named_parameters():
            p.grad = gradients[name].clone()
        optimiser.step()
        optimiser.zero_grad()
        made.append((gradients, {name: p.detach().clone() for name, p in model.named_parameters()}))
    return made


def _gradients(model: nn.Module, batch: torch.Tensor, dtype: torch.dtype | None) -> Tensors:
    values = {name: p.detach().to(dtype or p.dtype).requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, values, (batch.to(dtype or batch.dtype),)).float().square().mean()
    return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


def _added(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def differing(got: list[tuple[Tensors, Tensors]], want: list[tuple[Tensors, Tensors]]) -> dict[str, int]:
    """How many elements differ in any bit but the sign of zero, by step, kind and name; empty if none."""
    counts = {}
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for kind, a, b in zip(("grad", "param"), mine, theirs, strict=True):
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].dtype == b[name].dtype, name
                if count := int((a[name] != b[name]).sum()):
                    counts[f"step {step} {kind} {name}"] = count
    return counts
