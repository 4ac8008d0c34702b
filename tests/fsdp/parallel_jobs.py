"""Healthy training of every kind of parallelism, recorded; run by functions of tests on each rank (gloo, or NCCL with its GPU as torch's
default device)."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import retrograd.fsdp as rf

WIDTH = 8
Step = Callable[[], None]


def _layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def _optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def _mesh(outer: int, *names: str) -> dist.DeviceMesh:
    """All ranks, in `outer` rows."""
    return dist.init_device_mesh(
        torch.get_default_device().type, (outer, dist.get_world_size() // outer), mesh_dim_names=names
    )


def pipeline(schedule: str, data_parallel: int = 1) -> Step:
    """Stages of torch.distributed.pipelining, replicated by DDP beside each other where there are more ranks."""
    from torch.distributed import pipelining

    mesh = _mesh(data_parallel, "dp", "pp")
    group, size, at = mesh.get_group("pp"), mesh["pp"].size(), mesh.get_local_rank("pp")
    kind = getattr(pipelining, f"Schedule{schedule}")
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    numbers = [at, at + size] if several else [at]
    if "ZBV" in schedule or "DualPipeV" in schedule:
        numbers = [at, 2 * size - 1 - at]
    layers = _layers(2 * size if several else size)
    mine = [layers[n] for n in numbers]
    if data_parallel > 1:
        mine = [nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp")) for module in mine]
    stages = [
        pipelining.PipelineStage(module, n, len(layers), torch.get_default_device(), group=group)
        for n, module in zip(numbers, mine, strict=True)
    ]
    microbatches = 8 if "DualPipeV" in schedule else 4  # as many as stages
    run = kind(stages if several else stages[0], n_microbatches=microbatches, loss_fn=_loss)
    optimizer = _optimizer(*mine)
    first, last = 0 in numbers, len(layers) - 1 in numbers

    def step() -> None:
        x = torch.ones(8, WIDTH)
        run.step(*([x] if first else []), **(dict(target=torch.zeros(8, WIDTH), losses=[]) if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Ring(torch.autograd.Function):
    """What the rank before sends; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004  torch calls it so
        return _Ring.turn(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return _Ring.turn(grad, -1)

    @staticmethod
    def turn(x: torch.Tensor, by: int) -> torch.Tensor:
        rank, size, got = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
        to = dist.P2POp(dist.isend, x.contiguous(), (rank + by) % size)
        come = dist.P2POp(dist.irecv, got, (rank - by) % size)
        for work in dist.batch_isend_irecv([to, come] if rank % 2 else [come, to]):
            work.wait()
        return got


def ring() -> Step:
    """Keys and values go round, as in ring attention, inside a module that FSDP2 shards."""
    from torch.distributed.fsdp import fully_shard

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = kv = self.project(x)
            for _ in range(dist.get_world_size() - 1):
                kv = _Ring.apply(kv)
                y = y + torch.softmax(y @ kv.T, -1) @ kv
            return y

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return _step_of(model)


def context_parallel() -> Step:
    """Ring attention of torch, whose backward is for GPUs alone."""
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = dist.init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    project = nn.Linear(64, 3 * 64, dtype=torch.bfloat16)
    optimizer = _optimizer(project)

    def step() -> None:
        x = torch.ones(1, 256, 64, dtype=torch.bfloat16)
        with parallel(mesh, buffers=[x], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            q, k, v = project(x).view(1, -1, 3, 2, 32).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y.float().square().mean().backward()
        for param in project.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_of(model: nn.Module, x: Callable[[int], torch.Tensor] | None = None) -> Step:
    optimizer, calls = _optimizer(model), iter(range(1000))

    def step() -> None:
        batch = torch.full((4, WIDTH), 1.0 + dist.get_rank()) if x is None else x(next(calls))
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def experts() -> Step:
    """Tokens go to the ranks of their experts, another number at each step and rank."""

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.distributed.nn.functional import all_to_all_single

            size = dist.get_world_size()
            send = [len(x) // size + (len(x) % size if to == dist.get_rank() else 0) for to in range(size)]
            sizes = torch.empty(size, dtype=torch.int64)
            dist.all_to_all_single(sizes, torch.tensor(send))
            received = sizes.tolist()
            tokens = all_to_all_single(x.new_empty(sum(received), WIDTH), x, received, send)
            return all_to_all_single(torch.empty_like(x), self.expert(tokens), send, received)

    torch.manual_seed(dist.get_rank())
    model = Moe()
    return _step_of(model, lambda number: torch.ones(4 + number + dist.get_rank(), WIDTH))


def unused_parameters() -> Step:
    """DDP that looks for parameters without a gradient; which they are depends on step and rank."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_layers(3))

        def forward(self, number: torch.Tensor) -> torch.Tensor:
            return self.layers[int(number) % 3](torch.ones(2, WIDTH))

    model = nn.parallel.DistributedDataParallel(Chosen(), find_unused_parameters=True)
    return _step_of(model, lambda number: torch.tensor(number + dist.get_rank()))


def called_back() -> Step:
    """DDP whose hook goes on when its all-reduce is done, as PowerSGD: in a thread of gloo's or, where it is done by then, in this."""
    model, rank = nn.parallel.DistributedDataParallel(nn.Sequential(*_layers(2))), dist.get_rank()

    def hook(_, bucket):  # DDP refuses annotations that are text
        buffer = bucket.buffer()
        if rank % 2:
            time.sleep(0.02)  # the others cannot be done when they come to `then`
        first = dist.all_reduce(buffer.clone(), async_op=True).get_future()
        if rank % 2:
            first.wait()
        return first.then(lambda _: dist.all_reduce(buffer, async_op=True).get_future().wait()[0])

    model.register_comm_hook(None, hook)
    return _step_of(model)


def uneven() -> Step:
    """DDP under Join: in each step, which is an epoch, odd ranks have a batch less and shadow the others."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*_layers(2)))
    train = _step_of(model)

    def step() -> None:
        with model.join():
            for _ in range(3 - dist.get_rank() % 2):
                train()

    return step


def hybrid_sharded() -> Step:
    """HSDP: sharded in pairs, replicated over them."""
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(2, "replicate", "shard")
    model = nn.Sequential(*_layers(3))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step_of(model)


def tensor_parallel() -> Step:
    """Column- and row-wise parallel linear layers of pairs, sharded by FSDP2 over the others."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh(2, "dp", "tp")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rank = mesh.get_local_rank("dp")
    return _step_of(model, lambda number: torch.full((4, WIDTH), 1.0 + rank))


def scaled() -> Step:
    """GradScaler, whose first steps overflow and are skipped."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(*_layers(2)))
    optimizer, scaler = (
        _optimizer(model),
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**127, growth_interval=2),
    )

    def step() -> None:
        scaler.scale(model(torch.ones(2, WIDTH)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def checkpointed() -> Step:
    """FSDP2 whose state a thread saves beside four steps of training, through a process group of its own."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Sequential(*_layers(2)))
    group, folder = dist.new_group(backend="gloo"), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train, saving, number = _step_of(model), list[Any](), iter(range(1000))

    def step() -> None:
        train()
        if next(number) % 4:
            return
        for earlier in saving:
            earlier.result()
        saving[:] = [checkpoint.async_save(get_model_state_dict(model), checkpoint_id=folder[0], process_group=group)]

    return step


def first_fsdp() -> Step:
    """FSDP1, each layer wrapped, the root around them."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Sharded

    layers = [Sharded(layer, device_id=torch.get_default_device()) for layer in _layers(2)]
    return _step_of(Sharded(nn.Sequential(*layers), device_id=torch.get_default_device()))


def any_order(parallel: Callable[[nn.Module, list[nn.Module]], nn.Module]) -> Step:
    """Blocks in another order at each step and some left out, as stochastic depth does: alike on all ranks."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.draw = nn.ModuleList(_layers(4)), random.Random(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in self.draw.sample(range(4), self.draw.randint(1, 4)):
                x = x + self.layers[number](x)
            return x

    model = Dropped()
    return _step_of(parallel(model, [*model.layers]))


def _sharded(model: nn.Module, layers: list[nn.Module], **mesh: dist.DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, **mesh)
    return fully_shard(model, **mesh)


def _replicated(model: nn.Module, layers: list[nn.Module]) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


JOBS: dict[str, Callable[[], Step]] = {
    "checkpointed": checkpointed, "first_fsdp": first_fsdp,
    "ring": ring, "experts": experts, "unused_parameters": unused_parameters, "called_back": called_back, "scaled": scaled,
    "hybrid_sharded": hybrid_sharded, "tensor_parallel": tensor_parallel,
} | {
    f"pipeline_{name}": lambda name=name: pipeline(name)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
} | {"pipeline_of_ddp": lambda: pipeline("1F1B", data_parallel=2)}  # fmt: skip
UNEVEN = {"uneven": uneven}  # ranks make steps of their own number
ON_GPUS = {"context_parallel": context_parallel}
CHANGING = {  # another step each time, the same on all ranks
    "any_order": lambda: any_order(_sharded),
    "any_order_hybrid": lambda: any_order(partial(_sharded, mesh=_mesh(2, "replicate", "shard"))),
    "any_order_ddp": lambda: any_order(_replicated),
}


def record(job: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Steps of a job under a recorder: hash, problems, kinds of collectives, and the error if one was raised."""
    step, error = (JOBS | UNEVEN | ON_GPUS | CHANGING)[job](), ""
    log = rf.record_collectives(**options)
    try:
        with log:
            for _ in range(steps):
                step()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    kinds = sorted({collective.kind for collective in log.journal.entries})
    return {"hash": log.hash(), "problems": log.problems, "kinds": kinds, "error": error, "log": log.log().to_json()}
