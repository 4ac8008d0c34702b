"""Two steps of one small model, recorded on a single device or by two ranks in several layouts, with faults."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
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


class Stage(nn.Module):
    """Blocks of a model that keep their names; with the words before the first and the head behind the last."""

    def __init__(self, model: Model, first: int, last: int, *, ends: bool) -> None:
        super().__init__()
        self.words = model.words if first == 0 else None
        self.blocks = nn.ModuleDict({str(n): model.blocks[n] for n in range(first, last)})
        self.head = model.head if ends else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) if self.words is not None else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def _loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), words.flatten())


def _words() -> torch.Tensor:
    return torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(1))


def _optimizer(model: nn.Module, optimizer: str) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if "adamw" in optimizer else torch.optim.SGD
    how = {name: True for name in ("foreach", "fused") if name in optimizer}
    return kind(model.parameters(), 0.01, **how, **{"momentum": 0.9} if "momentum" in optimizer else {})


def _of_pipeline(model: Model, layout: str, fault: str, optimizer: str, level: str) -> Trace:
    """The trace of this rank of a pipeline over two, with the schedule and the microbatches that `layout` names."""
    _, schedule, microbatches = layout.split()
    rank, kind = dist.get_rank(), getattr(pipelining, f"Schedule{schedule}")
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    numbers = ([0, 3] if rank == 0 else [1, 2]) if "ZBV" in schedule else [rank, rank + 2] if several else [rank]
    edges = (0, 1, 2, 3, 3) if several else (0, 2, 3)
    parts = nn.ModuleList(Stage(model, *edges[n : n + 2], ends=n == len(edges) - 2) for n in numbers)
    if fault == "weight" and rank == 1:
        with torch.no_grad():
            parts[0].blocks["2"].up.weight.mul_(1.01)
    stages = [
        pipelining.PipelineStage(m, n, len(edges) - 1, torch.device("cpu")) for n, m in zip(numbers, parts, strict=True)
    ]
    run = kind(
        stages if several else stages[0], int(microbatches), loss_fn=_loss, scale_grads=fault != "gradients not scaled"
    )
    chosen = _optimizer(parts, optimizer)
    words = _words()
    if fault == "a microbatch twice":
        words[2:4] = words[:2]
    if fault == "a gradient lost":
        seen = []
        next(iter(parts[0].blocks.values())).up.weight.register_hook(
            lambda g: seen.append(g) or (g * 0 if len(seen) % 4 == 2 else g)
        )
    first, last = 0 in numbers, len(edges) - 2 in numbers
    if fault == "logarithm" and rank == 1:
        parts[0].register_forward_hook(lambda _, __, y: y + (y - 1e3).log())
    with trace.record(parts if several else parts[0], level=level, engine="python") as recorder:
        for _ in range(2):
            chosen.zero_grad()
            run.step(*[words] * first, **dict(target=(words + 1) % WORDS, losses=[]) if last else {})
            if "clipped" in optimizer:
                norm = nn.utils.get_total_norm([p.grad for p in parts.parameters()]) ** 2
                dist.all_reduce(norm)
                nn.utils.clip_grads_with_norm_(parts.parameters(), 0.1, norm.sqrt())
            chosen.step()
    return recorder.trace


def record(layout: str, fault: str = "", optimizer: str = "sgd", dtype: str = "float32", level: str = "full") -> Trace:
    """The trace of this rank, or of a single device where `layout` begins with "single".

    Args:
        layout: also "pipeline 1F1B 4", "ddp accumulated 2" for as many microbatches, or "ddp compiled by
            inductor" where torch.compile compiles the last block by that backend.
        fault: "" of a healthy run.
        optimizer: "sgd" or "adamw", with "momentum", "foreach", "fused", "clipped" behind it.
    """
    warnings.filterwarnings("ignore", message=".*returned a view tensor")  # of FSDP2, for a model that ends in a view
    torch.manual_seed(0)
    model = Model().to(getattr(torch, dtype))
    if layout.startswith("pipeline"):
        return _of_pipeline(model, layout, fault, optimizer, level)
    layout, _, microbatches = layout.partition(" accumulated ")
    layout, _, backend = layout.partition(" compiled by ")
    if fault.startswith("another gelu"):
        block = model.blocks[int(fault[-1])]
        block.forward = lambda x: x + block.down(functional.gelu(block.up(block.norm(x)), approximate="tanh"))
    if backend:
        model.blocks[2].compile(backend=backend)
    model = _laid_out(model, layout, fault)
    words = _words()
    if layout in ("fsdp", "ddp"):
        words = words.chunk(dist.get_world_size())[0 if fault == "batch of another rank" else dist.get_rank()]
    chosen, count = _optimizer(model, optimizer), int(microbatches or 1)
    if backend:  # before the recording, as torch.compile traces no function under a dispatch mode
        _loss(model(words), words).backward()
    with trace.record(model, level=level, engine="python") as recorder:
        for _ in range(2):
            chosen.zero_grad()
            for number, part in enumerate(words.chunk(count) if count > 1 else [words]):
                if layout == "fsdp":
                    model.set_requires_gradient_sync(number == count - 1)
                with model.no_sync() if layout == "ddp" and number < count - 1 else contextlib.nullcontext():
                    loss = _loss(model(part), (part + 1) % WORDS)
                    (loss if count == 1 or fault == "gradients not scaled" else loss / count).backward()
            if fault == "gradient of a rank" and dist.get_rank() == 1:
                model.get_submodule(f"{'module.' * (layout == 'ddp')}blocks.1.norm").weight.grad.mul_(1.5)
            if "clipped" in optimizer:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            chosen.step()
    return recorder.trace
