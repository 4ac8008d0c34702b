"""Sharded training on two gloo ranks, healthy and with what must be caught; run by functions of tests on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import retrograd.fsdp as rf


class Blocks(nn.Module):
    """Independent blocks of equal size, y = b0 + b1 + b2, then a head: any order of blocks is the same mathematics."""

    def __init__(self, checkpoint: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.checkpoint = checkpoint
        if compiled:
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        """Run the blocks in an order, or some of them."""
        from torch.utils.checkpoint import checkpoint

        y = 0
        for i in order:
            y = y + (checkpoint(self.blocks[i], x, use_reentrant=False) if self.checkpoint else self.blocks[i](x))
        return self.head(y)


def sharded(model: Blocks, keep: bool = False) -> Blocks:
    """FSDP2 on blocks and root."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, reshard_after_forward=not keep)
    return fully_shard(model)


def batch() -> torch.Tensor:
    """Different on each rank; needs a gradient, so that blocks reduce when autograd comes to them."""
    return torch.full((2, 8), 1.0 + dist.get_rank(), requires_grad=True)


def train(case: str, **options: Any) -> dict[str, Any]:
    """Four updates of a case; hashes, patterns, notes, problems, and the error if one was raised."""
    torch.manual_seed(0)
    model = Blocks(checkpoint=case == "checkpoint", compiled=case == "compiled")
    if case == "frozen":
        model.blocks[1].requires_grad_(False)
    if case == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
    else:
        model = sharded(model, keep=case == "swap")
    buckets = rf.bucket_gradients(model, bucket_mb=0.0006) if case == "nan in buckets" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, error, notes = 0, "", []
    log = rf.record_collectives(**options)
    try:
        with log:
            for number in range(4):
                update(model, case, number, log)
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if case == "accumulate":
                    log.step()
    except Exception as raised:
        error, notes = f"{type(raised).__name__}: {raised}", getattr(raised, "__notes__", [])
    if buckets is not None:
        buckets.remove()
    patterns = [row.pattern for row in log.steps]
    return {
        "hash": log.hash(), "patterns": patterns, "notes": log.notes, "problems": log.problems, "error": error,
        "exception notes": notes, "updates": steps, "log": log.log().to_json(),
        "names": [c.name for c in log.collectives()] if patterns else [],
    }  # fmt: skip


def update(model: Any, case: str, number: int, log: Any) -> None:
    """Forward and backward of one update; rank 1 errs in update 2 of the cases that must fail."""
    wrong = number == 2 and dist.get_rank() == 1
    if case == "accumulate":
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model(batch()).sum().backward()
            if micro < 2:
                log.step()
        return
    if case == "unreduced":
        model.set_requires_gradient_sync(number != 2)
    if case == "swap":
        for block in model.blocks:
            block.unshard()
    order = (2, 1, 0) if wrong and case in ("swap", "strict") else (0, 1) if wrong and case == "skip" else (0, 1, 2)
    if case == "varies" and number > 0:
        order = ((0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 1, 2))[number]
    loss = model(batch(), order).sum()
    if wrong and case == "raise":
        raise ValueError("bad batch")
    (loss * float("nan") if wrong and case.startswith("nan") else loss).backward()


def compiled_autograd() -> tuple[str, int, list[str]]:
    """Two layers under compiled autograd, which FSDP2 of torch 2.12 on does not support and does not refuse.

    Returns:
        The error, how many updates were made before it, and the reduce-scatters of the last step that ended.
    """
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates, error = 0, ""
    log = rf.record_collectives()
    try:
        with log, torch._dynamo.config.patch(compiled_autograd=True):
            for _ in range(4):
                loss = model(batch()).sum()
                torch.compile(loss.backward, backend="eager")()
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        torch._dynamo.reset()
    return error, updates, [c.name for c in log.collectives() if c.kind == "reduce-scatter"] if updates else []


def accumulate_by_update() -> dict[str, Any]:
    """Accumulation whose program ends no step itself."""
    torch.manual_seed(0)
    model = sharded(Blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rf.record_collectives(on_change="raise") as log:
        for _ in range(3):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"patterns": [row.pattern for row in log.steps], "problems": log.problems}


def frames_compiled(record: bool) -> int:
    """How many frames torch.compile compiles in two steps of a compiled block, with or without a recording."""
    from contextlib import nullcontext

    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=counter)
    model = sharded(model)
    with rf.record_collectives() if record else nullcontext():
        for _ in range(2):
            model(batch()).sum().backward()
    return counter.frame_count


def left_as_it_was() -> tuple[int, int, int]:
    """Collectives recorded before, inside and after a recording."""
    x = torch.ones(3)
    log = rf.record_collectives()
    dist.all_reduce(x)
    before = log.journal.issued
    with log:
        dist.all_reduce(x)
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
        inside = log.journal.issued
    dist.all_reduce(x)
    return before, inside, log.journal.issued


def program_collectives() -> list[str]:
    """What a program issues itself, by functions, functionally and in a compiled graph."""
    import torch.distributed._functional_collectives as functional

    def compiled(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    with rf.record_collectives() as log:
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
        dist.broadcast(torch.ones(5), src=1)
        torch.compile(compiled, backend="aot_eager")(torch.ones(6))
        log.step()
    return [f"{c.kind} {c.numel} {c.op} {c.root}" for c in log.log().table]
