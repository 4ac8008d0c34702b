"""Two steps of one small model, recorded on a single device or by two ranks in several layouts, with faults."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn import functional

from retrograd import trace
from retrograd.trace import Trace

WIDTH, WORDS = 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sum(torch.autograd.Function):
    """Adds over ranks in the directions it is told to, as tensor parallelism by hand does on both sides of a layer."""

    @staticmethod
    def forward(ctx, x, ahead, back):
        ctx.back = back
        return _all_reduce(x) if ahead else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad) if ctx.back else grad, None, None


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _by_hand(model: Model, fault: str) -> None:
    """Tensor parallelism without DTensor: `up` by its rows, `down` by its columns."""
    rank, half = dist.get_rank(), 2 * WIDTH
    for number, block in enumerate(model.blocks):
        faulty = number == 1
        part = slice(rank * half, (rank + 1) * half)
        other = slice(0, half) if faulty and fault == "shard of another rank" else part
        block.up.weight = nn.Parameter(block.up.weight[other].detach().clone())
        block.up.bias = nn.Parameter(block.up.bias[other].detach().clone())
        block.down.weight = nn.Parameter(block.down.weight[:, part].detach().clone())
        enter = (False, not (faulty and fault == "no sum in backward"))
        leave = (not (faulty and fault == "no sum in forward"), False)
        block.up.register_forward_pre_hook(lambda module, args, enter=enter: (Sum.apply(args[0], *enter),))
        block.down.forward = lambda x, m=block.down, leave=leave: Sum.apply(x @ m.weight.t(), *leave) + m.bias


def _sequence(model: Model) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
    parallelize_module(model.blocks[0], mesh, split)
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    parallelize_module(model.head, mesh, gather)


def _sums(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def _laid_out(model: Model, layout: str, fault: str) -> nn.Module:
    if layout == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if fault == "weight" and dist.get_rank() == 1:
            with torch.no_grad():
                model.blocks[1].up.weight.to_local().mul_(1.01)
    elif layout == "by hand":
        _by_hand(model, fault)
    elif layout == "sequence":
        _sequence(model)
    elif layout == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if fault == "sum for mean":
            for module in (*model.blocks, model):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        if fault == "sum for mean":
            model.register_comm_hook(None, _sums)
    return model


def record(layout: str, fault: str = "", optimizer: str = "sgd", dtype: str = "float32", level: str = "full") -> Trace:
    """The trace of this rank, or of a single device where `layout` is "single"."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of FSDP2, for a model that ends in a view
    torch.manual_seed(0)
    model = _laid_out(Model().to(getattr(torch, dtype)), layout, fault)
    words = torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(1))
    if layout in ("fsdp", "ddp"):
        words = words.chunk(dist.get_world_size())[0 if fault == "batch of another rank" else dist.get_rank()]
    adam = optimizer == "adamw"
    chosen = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), 0.01)
    with trace.record(model, level=level, engine="python") as recorder:
        for _ in range(2):
            chosen.zero_grad()
            logits = model(words).flatten(0, 1)
            functional.cross_entropy(logits.float(), (words + 1).flatten() % WORDS).backward()
            if fault == "gradient of a rank" and dist.get_rank() == 1:
                model.get_submodule(f"{'module.' * (layout == 'ddp')}blocks.1.norm").weight.grad.mul_(1.5)
            if adam and layout in ("single", "fsdp", "ddp") and not fault:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            chosen.step()
    return recorder.trace
