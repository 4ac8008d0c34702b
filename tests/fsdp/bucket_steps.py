"""What ranks run in the tests of buckets: small sharded models of every awkward kind, trained for some steps.

Each function runs on every rank of a gloo group and returns plain data.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS, BATCH = 12, 6, 4
STEPS = 3


class Block(nn.Module):
    """A norm, two layers and a residual; 13 rows in the middle, so that shards are padded."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 13)
        self.down = nn.Linear(13, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in a chain, used as `order` says (given per call), with an embedding and a head in the root's group."""

    def __init__(self, blocks: int = BLOCKS, save: str = "no", tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.save = save
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, order: Any = None, chain: bool = True) -> torch.Tensor:
        start = x = self.embed(tokens)
        for i in range(len(self.blocks)) if order is None else order:
            before = x if chain else start
            if self.save == "no":
                out = self.blocks[i](before)
            else:
                out = checkpoint(self.blocks[i], before, use_reentrant=self.save == "reentrant")
            x = out if chain else x + out
        return self.head(x).square().mean()


def shard(net: nn.Module, mesh: Any = None, each: Any = None, **options: Any) -> nn.Module:
    """fully_shard on every block and on the root."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for module in net.blocks if each is None else each:
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return shard(Net(), mesh)
    if kind in ("reentrant", "not reentrant", "reentrant twice"):
        return shard(Net(save=kind.removesuffix(" twice")))
    if kind == "tied":
        return shard(Net(tied=True))
    if kind == "frozen":
        net = Net()
        net.blocks[2].requires_grad_(False)
        net.blocks[4].norm.requires_grad_(False)
        return shard(net)
    if kind == "unused parameter":
        net = Net()
        net.blocks[1].spare = nn.Linear(3, 3)
        return shard(net)
    if kind == "kept":
        return shard(Net(), reshard_after_forward=False)
    if kind == "mixed":
        net = Net()
        for block in net.blocks:
            block.norm.float()
            fully_shard(block.norm, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return shard(net, mp_policy=policy)
    if kind == "bfloat16":
        return shard(Net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return shard(Net())


def tokens(step: int, part: int = 0) -> torch.Tensor:
    """Another batch for each step and rank."""
    seed = 1000 * step + 10 * part + dist.get_rank()
    return torch.randint(16, (BATCH, 5), generator=torch.Generator().manual_seed(seed))


def order_of(kind: str, step: int) -> Any:
    if kind in ("twice", "reentrant twice"):
        return [0, 1, 1, 2, 3, 0, 4, 5]
    if kind == "unused":
        return [0, 1, 2, 4, 5]
    if kind == "random":
        return random.Random(step).sample(range(BLOCKS), BLOCKS) if step else range(BLOCKS)
    return None


def backward(net: Any, kind: str, step: int) -> None:
    """One step's worth of backwards."""
    order = order_of(kind, step)
    if kind.startswith("accumulate"):
        for part in range(3):
            net.set_requires_gradient_sync(part == 2)
            if kind == "accumulate kept":
                net.set_reshard_after_backward(part == 2)
            net(tokens(step, part)).backward()
        return
    if kind == "no all-reduce":
        for part in range(2):
            net.set_requires_all_reduce(part == 1)
            net(tokens(step, part)).backward()
        return
    if kind == "two backwards":
        one, two = net(tokens(step, 0)), net(tokens(step, 1))
        one.backward()
        two.backward()
        return
    if kind == "rank order":
        # Every rank its own order of equal blocks; parameters are there already, so that gathers do not mix.
        net.set_reshard_after_forward(False)
        for block in net.blocks:
            block.unshard()
        turn = dist.get_rank() + step
        net(tokens(step), [(i + turn) % BLOCKS if step else i for i in range(BLOCKS)], chain=False).backward()
        return
    net(tokens(step), order).backward()


def local(tensor: Any) -> list[float]:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().double().flatten().tolist()


def train(kind: str, steps: int = STEPS, buckets: dict[str, Any] | None = None, keep: bool = True) -> dict[str, Any]:
    """Train; gradients of every step and parameters at the end, and what the handle says."""
    net = build("hsdp" if kind == "no all-reduce" else kind)
    handle = None
    if buckets is not None:
        from retrograd.fsdp import bucket_gradients

        handle = bucket_gradients(net, **buckets)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: dict[str, Any] = {"grads": [], "hashes": []}
    with counted() as sent:
        for step in range(steps):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                backward(net, kind, step)
            if keep:
                seen["grads"].append({n: None if p.grad is None else local(p.grad) for n, p in net.named_parameters()})
            optimiser.step()
            optimiser.zero_grad()
            if handle is not None:
                seen["hashes"].append(handle.hash())
    seen["params"] = {name: local(p) for name, p in net.named_parameters()} if keep else {}
    seen["sent"] = sent[0] / steps
    if handle is not None:
        seen |= {"plan": handle.plan.to_json(), "report": handle.report(), "log": handle.log}
        handle.remove()
    return seen


class counted:
    """Count reduce-scatters."""

    def __enter__(self) -> list[int]:
        self.count = [0]
        self.names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)]
        self.before = {name: getattr(dist, name) for name in self.names}

        def counting(real: Any, *args: Any, **kwargs: Any) -> Any:
            self.count[0] += 1
            return real(*args, **kwargs)

        for name in self.names[:1]:
            setattr(dist, name, partial(counting, self.before[name]))
        return self.count

    def __exit__(self, *_: Any) -> None:
        for name, real in self.before.items():
            setattr(dist, name, real)
