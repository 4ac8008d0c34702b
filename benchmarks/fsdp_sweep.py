"""Healthy training programs and planted faults on two gloo ranks under `record_collectives` and `trace.record`.

    python benchmarks/fsdp_sweep.py > sweep.md             all; the tables stand at the end of
                                                           benchmarks/results/fsdp-faults.md
    python benchmarks/fsdp_sweep.py gan hang ...           some, with what each rank printed

Written before any of them had run, and kept as they were. Of a fault rank 1 errs in step 2 of 5: it is told if a rank's
words name the rank, the module or collective, and the line. Of a healthy program nothing may be said, no rank may be
stopped, and the trace may have lost no operator.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fsdp"))

import faults
import recipes
from fsdp_fresh import words

from retrograd import trace

STEPS, WRONG, WIDTH = 5, 2, 16


class Mlp(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.checkpointed = checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Net(nn.Module):
    def __init__(self, depth: int = 3, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Mlp(checkpointed) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
        for number in order or range(len(self.blocks)):
            x = self.blocks[number](x)
        return self.head(x)


def batch(rank: int, step: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def ddp(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)


def loss_of(model: Any, rank: int, step: int, size: int = 4, **more: Any) -> torch.Tensor:
    return model(batch(rank, step, size), **more).square().mean()


def steps(model: Any, rank: int, optimizer: Any = None, size: int = 4) -> None:
    optimizer = optimizer or adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step, size).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- healthy ----


def plain_fsdp(rank: int) -> None:
    """FSDP2"""
    steps(sharded(Net()), rank)


def plain_ddp(rank: int) -> None:
    """DDP"""
    steps(ddp(Net()), rank)


def tensor_parallel(rank: int) -> None:
    """Tensor parallel MLPs, gradients clipped as DTensors"""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        loss_of(model, 0, step).backward()
        nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if ".up." in n or "down.weight" in n], 1.0)
        optimizer.step()
        optimizer.zero_grad()


def hybrid(rank: int) -> None:
    """HSDP, one shard of two replicas"""
    steps(sharded(Net(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))), rank)


def pipeline(rank: int) -> None:
    """1F1B with four micro-batches"""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = Net(4)
    part = nn.Sequential(*model.blocks[:2]) if rank == 0 else nn.Sequential(*model.blocks[2:], model.head)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule, optimizer = Schedule1F1B(stage, 4, loss_fn=lambda out, want: (out - want).square().mean()), adam(part)
    for step in range(STEPS):
        if rank == 0:
            schedule.step(batch(0, step, 8))
        else:
            schedule.step(target=torch.zeros(8, 4), losses=[])
        optimizer.step()
        optimizer.zero_grad()


def accumulated_ddp(rank: int) -> None:
    """DDP, three micro-batches, two in no_sync"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                loss_of(model, rank, 3 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated_fsdp(rank: int) -> None:
    """FSDP2, three micro-batches, gradients synchronised in the last"""
    model = sharded(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss_of(model, rank, 3 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()


def averaged(rank: int) -> None:
    """DDP with an exponential moving average, evaluated on both ranks every second step"""
    model = ddp(Net())
    optimizer, average = adam(model), copy.deepcopy(model.module)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, new in zip(average.parameters(), model.module.parameters(), strict=True):
                mine.lerp_(new, 0.1)
            if step % 2:
                dist.all_reduce(loss_of(average, rank, 100))


def recomputed(rank: int) -> None:
    """FSDP2, activations recomputed, in mixed precision"""
    steps(sharded(Net(checkpointed=True), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), rank)


def compiled_blocks(rank: int) -> None:
    """DDP, each block compiled (aot_eager)"""
    model = Net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    steps(ddp(model), rank)


def frozen(rank: int) -> None:
    """FSDP2, the first two blocks frozen"""
    model = Net()
    model.blocks[:2].requires_grad_(False)
    steps(sharded(model), rank)


class Lora(nn.Module):
    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def low_rank(rank: int) -> None:
    """FSDP2 with LoRA, the rest frozen"""
    model = Net().requires_grad_(False)
    for block in model.blocks:
        block.up = Lora(block.up)
    steps(sharded(model), rank)


def gan(rank: int) -> None:
    """Two models under DDP with an optimizer each, in turn"""
    maker, judge = ddp(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())), ddp(Net(), broadcast_buffers=False)
    first, second = adam(judge), adam(maker)
    for step in range(STEPS):
        with torch.no_grad():
            made = maker(batch(rank, step))
        (judge(batch(rank, step + 50)).mean() - judge.module(made).mean()).backward()
        first.step()
        first.zero_grad()
        judge.module(maker(batch(rank, step))).mean().backward()
        second.step()
        second.zero_grad()
        first.zero_grad()


def clipped(rank: int) -> None:
    """FSDP2, the norm of all gradients clipped, a schedule of learning rates"""
    model = sharded(Net())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def saved(rank: int) -> None:
    """FSDP2, an asynchronous checkpoint every second step"""
    import torch.distributed.checkpoint as dcp

    model, waiting, beside = sharded(Net()), None, dist.new_group()
    optimizer = adam(model)
    folder = Path(os.environ["SWEEP_FOLDER"])
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            if waiting is not None:
                waiting.result()
            where = str(folder / str(step))
            waiting = dcp.async_save({"model": model.state_dict()}, checkpoint_id=where, process_group=beside)
    if waiting is not None:
        waiting.result()


def uneven(rank: int) -> None:
    """DDP under Join, rank 1 with two batches less"""
    model = ddp(Net())
    optimizer = adam(model)
    with model.join():
        for step in range(STEPS - 2 * rank):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()


def sized(rank: int) -> None:
    """FSDP2, batches of each rank's own size, the last of one"""
    model = sharded(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step, 1 if step == STEPS - 1 else 2 + (3 * step + rank) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups(rank: int) -> None:
    """FSDP2, and metrics in groups made of groups, one of a rank alone"""
    model = sharded(Net())
    optimizer, both = adam(model), dist.new_group([0, 1])
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = loss.detach().clone()
        dist.all_reduce(seen, group=alone)
        dist.all_reduce(seen, group=both)


class Experts(nn.Module):
    """One expert a rank; each rank sends half of its tokens, and both directions have a backward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        x = self.router(x)
        there = all_to_all_single(torch.empty_like(x), x)
        return all_to_all_single(torch.empty_like(x), self.expert(there))


def experts(rank: int) -> None:
    """Experts over both ranks by all_to_all, the router's gradients averaged by hand"""
    model = Experts(rank)
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        for p in model.router.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def evaluated(rank: int) -> None:
    """FSDP2, rank 0 alone looks at its own numbers, both evaluate every second step"""
    model = sharded(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            loss.item()
        if step % 2:
            model.eval()
            with torch.no_grad():
                seen = loss_of(model, rank, 100)
            model.train()
            dist.all_reduce(seen)


HEALTHY: dict[str, Callable[[int], None]] = {
    program.__name__: program
    for program in (
        plain_fsdp, plain_ddp, tensor_parallel, hybrid, pipeline, accumulated_ddp, accumulated_fsdp, averaged,
        recomputed, compiled_blocks, frozen, low_rank, gan, clipped, saved, uneven, sized, groups, experts, evaluated,
    )
}  # fmt: skip

# ---- faults ----


def fault(rank: int, kind: str) -> None:
    """A step of FSDP2, or of DDP where the kind begins so, in which rank 1 errs."""
    model = Net()
    model = ddp(model) if kind.startswith("ddp_") else sharded(model)
    inner = getattr(model, "module", model)
    optimizer, other = adam(model), dist.new_group([0, 1])
    if kind == "flag" and rank == 1:
        torch.use_deterministic_algorithms(True)
    for step in range(STEPS):
        wrong = step == WRONG and rank == 1
        orders = {"skip": (0, 2), "swap": (1, 0, 2), "twice": (0, 1, 1, 2), "ddp_skip": (0, 1)}
        order = orders.get(kind) if wrong else None
        x = batch(rank, step)
        if wrong and kind == "nan":
            x = x * float("nan")
        if wrong and kind in ("raise", "ddp_raise"):
            raise ValueError("bad batch")
        loss = model(x, order).square().mean()
        if wrong and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong and kind == "exit":
            sys.exit(3)
        if wrong and kind == "no_backward":
            continue
        loss.backward()
        if kind in ("dtype", "shape", "operation", "group", "ddp_metric"):
            dtype = torch.float64 if wrong and kind == "dtype" else None
            seen = torch.ones(3 if wrong and kind == "shape" else 4, dtype=dtype)
            if wrong and kind == "operation":
                dist.broadcast(seen, 0)
            elif not (wrong and kind == "ddp_metric"):
                dist.all_reduce(seen, group=other if wrong and kind == "group" else None)
        if wrong and kind in ("clip", "ddp_more"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            dist.all_reduce(torch.ones(2))
        if wrong and kind == "evaluates":
            with torch.no_grad():
                model(batch(rank, 100))
        optimizer.step()
        if not (wrong and kind == "ddp_no_zero"):
            optimizer.zero_grad()
        if wrong and kind == "ends":
            break
        if wrong and kind == "saves":
            inner.state_dict()["head.weight"].full_tensor()
    if kind == "flag" and rank == 1:
        torch.use_deterministic_algorithms(False)


HERE = r"fsdp_sweep\.py:\d+ \(fault"
FAULTS = {  # what must be said of rank, of module or collective, and of the line
    "skip": (r"rank 1 (departs|gathers)", r"blocks\.[12]", r"fsdp_sweep\.py:\d+ \((fault|forward)"),
    "swap": (r"rank 1 (departs|gathers)", r"blocks\.[01]", r"fsdp_sweep\.py:\d+ \((fault|forward)"),
    "twice": (r"rank 1 (departs|gathers)", r"blocks\.[12]", r"fsdp_sweep\.py:\d+ \((fault|forward)"),
    "ddp_skip": (r"rank 1", r"blocks\.2", HERE),
    "nan": (r"rank 1", r"blocks|head|\(root\)", HERE),
    "raise": (r"rank 1 raised ValueError", r"after ", HERE),
    "ddp_raise": (r"rank 1 raised ValueError", r"after ", HERE),
    "kill": (r"rank 1 is gone", r"blocks|root|head", HERE),
    "exit": (r"rank 1 raised SystemExit", r"blocks|root|head", HERE),
    "no_backward": (r"rank 1 (departs|gathers|is)", r"blocks|root|head", HERE),
    "dtype": (r"rank 1", r"float64", HERE),
    "shape": (r"rank 1", r"3 float32", HERE),
    "operation": (r"rank 1", r"broadcast", HERE),
    "group": (r"rank 1", r"all-reduce|reduces", HERE),
    "ddp_metric": (r"rank 1", r"all-reduce|reduces", HERE),
    "clip": (r"rank 1", r"all-reduce|reduces", HERE),
    "evaluates": (r"rank 1", r"blocks|root", HERE),
    "ends": (r"rank 1", r"stopped|after", HERE),
    "saves": (r"rank 1", r"head|unnamed|root", HERE),
    "flag": (r"rank 1", r"determin", r"before the first update"),
    "ddp_no_zero": (r"rank 1", r"", r""),
}


def train(case: str, rank: int, folder: Path) -> None:
    (folder / "fault").write_text(repr(time.monotonic()))
    os.environ["SWEEP_FOLDER"] = str(folder)
    if case in FAULTS:
        return fault(rank, case)
    with trace.record(level="fast") as recorder:
        HEALTHY[case](rank)
    lost = [f"{key}: {text}" for key, text in recorder.trace.meta.items() if key in ("lost", "raised")]
    nowhere = sum(not op.owner for op in recorder.trace.ops)
    print(f"TRACE {recorder.engine} {len(recorder.trace.ops)} operators, {nowhere} of nothing, {lost}", file=sys.stderr)
    return None


def fault_row(case: str) -> str:
    ends = faults.run(case, record=True)
    said = words(ends)
    named = [bool(said) and bool(re.search(pattern, said)) for pattern in FAULTS[case]]
    words_in = [(len(re.findall("departs|raised", line)), len(line), line) for line in said.splitlines()]
    longest = max(words_in)[2] if words_in else "nothing"
    cells = [case, *("yes" if right else "**no**" for right in named)]
    return f"| {' | '.join([*cells, longest[:400].replace('|', '')])} |"


def healthy_row(case: str) -> str:
    ends = faults.run(case, record=True)
    stopped = sum(end["code"] != 0 for end in ends.values())
    traces = {line for end in ends.values() for line in re.findall(r"^TRACE (.*)", end["text"], re.M)}
    said = words(ends)[:400].replace("|", "").replace("\n", " / ")
    return f"| {case}: {HEALTHY[case].__doc__} | {stopped} | {said} | {' / '.join(sorted(traces))} |"


def main(cases: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    faults.train, faults.job = train, functools.partial(recipes.job, begun=recipes.job.__defaults__[0])
    for case in cases:
        for rank, end in faults.run(case, record=True).items():
            print(f"{case}, rank {rank}: exit {end['code']}\n{end['text']}", flush=True)
    if cases:
        return
    print(f"torch {torch.__version__}, two gloo ranks\n")
    print("| healthy program | stopped ranks | words | trace |\n|" + " --- |" * 4, flush=True)
    for case in HEALTHY:
        print(healthy_row(case), flush=True)
    print("\n| fault | rank | module | line | |\n|" + " --- |" * 5, flush=True)
    for case in FAULTS:
        print(fault_row(case), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
