"""Healthy programs and faults of one rank that no other list here has, on 2 or 4 gloo ranks under `record_collectives()`.

    python benchmarks/fsdp_programs.py                 all; the tables of benchmarks/results/fsdp-programs.md
    python benchmarks/fsdp_programs.py NAME ...        some, with what each rank printed

Written before any of them had run. Of a fault one rank errs in step 2 of 5 (or from the first on, where a setting is its
own): it is told if the ranks' words name that rank, the module or collective, and the line. Of a healthy program nothing
may be said and no rank may be stopped.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor.parallel
from fsdp_fresh import words
from fsdp_sweep import Net, adam, batch, ddp, loss_of, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

STEPS, WRONG = 5, 2
Program = Callable[[int], None]
HEALTHY: dict[str, tuple[Program, int]] = {}
FAULTS: dict[str, tuple[Program, int, tuple[str, str, str], float]] = {}


def healthy(ranks: int = 2) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        HEALTHY[program.__name__] = (program, ranks)
        return program

    return register


def fault(rank: str, what: str, line: str = "", ranks: int = 2, timeout: float = 60) -> Callable[[Program], Program]:
    """Regular expressions over what all ranks printed; the line is in the program if nothing else is said."""

    def register(program: Program) -> Program:
        expected = (rank, what, line or rf"fsdp_programs\.py:\d+ \({program.__name__}")
        FAULTS[program.__name__] = (program, ranks, expected, timeout)
        return program

    return register


def update(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


# ---- healthy ----


@healthy()
def zero_with_accumulation(rank: int) -> None:
    """ZeroRedundancyOptimizer with bucket views, DDP with accumulation, its state brought together every second step"""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp(Net(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, rank, step).backward()
        loss_of(model, rank, step + 50).backward()
        update(optimizer)
        if step % 2:
            optimizer.consolidate_state_dict(to=0)


@healthy()
def static_graph(rank: int) -> None:
    """DDP with static_graph, blocks recomputed by reentrant checkpoints"""

    class Recomputed(Net):
        def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(x)

    model = ddp(Recomputed(), static_graph=True)
    optimizer = adam(model)
    for step in range(STEPS):
        model(batch(rank, step).requires_grad_()).square().mean().backward()
        update(optimizer)


@healthy()
def local_updates(rank: int) -> None:
    """DDP with the hook of post-local SGD, which stops reducing at step 2; parameters are averaged every second step"""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = ddp(Net())
    model.register_comm_hook(
        PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2), post_localSGD_hook
    )
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    for step in range(2 * STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)


@healthy()
def offloaded(rank: int) -> None:
    """FSDP2 with parameters and gradients offloaded to the CPU, gradients clipped"""
    model = sharded(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizer)


@healthy(4)
def resharded_to_two(rank: int) -> None:
    """FSDP2 on four ranks, after the forward sharded over two"""
    model = sharded(Net(), reshard_after_forward=2)
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)


@healthy(4)
def sequence_parallel_and_sharded(rank: int) -> None:
    """Tensor and sequence parallel in pairs, norms on a part of the rows, FSDP2 over the pairs"""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Net()
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh["tp"], plan)
    kept = dict(use_local_output=True)
    first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), **kept)
    last = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), **kept)
    parallelize_module(model, mesh["tp"], {"blocks.0": first, "head": last})
    model = sharded(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    for step in range(STEPS):
        loss_of(model, mesh.get_local_rank("dp"), step).backward()
        update(optimizer)


@healthy(4)
def evaluated_by_a_half(rank: int) -> None:
    """DDP on four ranks; after each step ranks 0 and 1 evaluate, with barriers and sums of their own group"""
    model, half = ddp(Net()), dist.new_group([0, 1])
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        if rank < 2:
            dist.barrier(group=half)
            with torch.no_grad():
                seen = loss_of(model.module, rank, 100)
            for _ in range(step):
                dist.all_reduce(seen, group=half)
            dist.barrier(group=half)


@healthy()
def objects_of_any_size(rank: int) -> None:
    """FSDP2, and objects: metrics of other sizes gathered everywhere and on rank 0, settings broadcast and scattered"""
    model = sharded(Net())
    optimizer, settings = adam(model), [{"rate": 1e-3}] if rank == 0 else [None]
    dist.broadcast_object_list(settings)
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        update(optimizer)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, {"loss": loss.item(), "text": "x" * (100 * rank + step)})
        dist.gather_object("y" * (30 * rank + 1), rows if rank == 0 else None)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, ["a", {"b": step}] if rank == 0 else None)


@healthy(4)
def stages_that_are_sharded(rank: int) -> None:
    """Two stages of a 1F1B pipeline, each sharded by FSDP2 over two ranks, the norm of all gradients by hand"""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, whole = mesh.get_local_rank("pp"), Net(4)
    part = nn.Sequential(*whole.blocks[:2]) if at == 0 else nn.Sequential(*whole.blocks[2:], whole.head)
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    run, optimizer = Schedule1F1B(stage, 4, loss_fn=lambda out, want: (out - want).square().mean()), adam(part)
    for step in range(STEPS):
        if at == 0:
            run.step(batch(mesh.get_local_rank("dp"), step, 8))
        else:
            run.step(target=torch.zeros(8, 4), losses=[])
        total = sum(p.grad.to_local().square().sum() for p in part.parameters())
        dist.all_reduce(total)
        update(optimizer)


@healthy()
def saved_and_loaded(rank: int) -> None:
    """FSDP2, the whole state saved by torch.distributed.checkpoint after step 1 and loaded after step 3"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(Net())
    optimizer, folder = adam(model), str(Path(os.environ["PROGRAM_FOLDER"]) / "saved")
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        if step in (1, 3):
            weights, state = get_state_dict(model, optimizer)
            content = {"model": weights, "optimizer": state}
            if step == 1:
                dcp.save(content, checkpoint_id=folder)
            else:
                dcp.load(content, checkpoint_id=folder)
                set_state_dict(
                    model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"]
                )


@healthy()
def update_in_the_backward(rank: int) -> None:
    """FSDP2, an optimizer for each parameter that steps as soon as its gradient is there"""
    model = sharded(Net())
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: update(optimizers[p]))
    for step in range(STEPS):
        loss_of(model, rank, step).backward()


@healthy()
def prefetched(rank: int) -> None:
    """FSDP2 with explicit prefetching, two micro-batches between which parameters stay gathered"""
    model = sharded(Net())
    blocks = list(model.blocks)
    for here, after in itertools.pairwise(blocks):
        here.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([here])
    optimizer = adam(model)
    for step in range(STEPS):
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1)
            model.set_reshard_after_backward(micro == 1)
            loss_of(model, rank, 2 * step + micro).backward()
        update(optimizer)


@healthy()
def monitored(rank: int) -> None:
    """DDP, a monitored barrier and an uneven list of tensors gathered after each step, logs of rank 0"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        update(optimizer)
        dist.monitored_barrier()
        seen = [torch.empty(1), torch.empty(1)]
        dist.all_gather(seen, loss.detach()[None])
        if rank == 0:
            torch.stack(seen).mean().item()


# ---- faults ----


def errs(rank: int, step: int, who: int = 1) -> bool:
    return rank == who and step == WRONG


@fault(r"rank 1 (departs|waits at)", r"barrier")
def barrier_of_one(rank: int) -> None:
    """DDP: rank 1 alone comes to a barrier"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        if errs(rank, step):
            dist.barrier()


@fault(r"rank 1 (departs|is at the end)", r"all-reduce|reduces", r"fsdp_programs\.py:\d+ \((never|update)")
def never_synchronised(rank: int) -> None:
    """DDP with two micro-batches: rank 1 does not leave no_sync"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        for micro in range(2):
            with model.no_sync() if micro == 0 or errs(rank, step) else nullcontext():
                loss_of(model, rank, 2 * step + micro).backward()
        update(optimizer)


@fault(r"rank 0 departs", r"gathers|all-gather")
def objects_of_rank_0(rank: int) -> None:
    """FSDP2: rank 0 alone gathers objects"""
    model = sharded(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        if errs(rank, step, 0):
            dist.all_gather_object([None, None], {"step": step})


@fault(r"rank 1[^;]*(root|source|from rank) ?1|rank 1: broadcast", r"broadcast")
def root_of_ones_own(rank: int) -> None:
    """DDP, a broadcast after each step: rank 1 takes itself for the source"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        dist.broadcast(torch.ones(4), 1 if errs(rank, step) else 0)


@fault(r"rank 1 (departs|:|reduces|gathers)|rank 1: ", r"up|down|blocks|unnamed", r"fsdp_(programs|sweep)\.py:\d+ \(")
def rows_of_ones_own(rank: int) -> None:
    """Tensor parallel: rank 1 has a row more in its batch"""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        loss_of(model, 0, step, 5 if errs(rank, step) else 4).backward()
        update(optimizer)


@fault(r"rank 1 (departs|is at the end|is after)", r"blocks\.2|head", r"fsdp_(programs|sweep)\.py:\d+ \(")
def early_exit(rank: int) -> None:
    """DDP: rank 1 leaves after the first block, so most gradients never come"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step, order=(0,) if errs(rank, step) else None).backward()
        update(optimizer)


@fault(r"rank 1 (departs|is at|goes on|does)|where rank 1", r"gather|scatter|broadcast|unnamed")
def save_left_out(rank: int) -> None:
    """FSDP2: rank 1 leaves out the save of step 2, as its own loss is not the best"""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = sharded(Net())
    optimizer, folder = adam(model), Path(os.environ["PROGRAM_FOLDER"])
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        if not errs(rank, step):
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=str(folder / str(step)))


@fault(r"rank 1", r"float16", r"fsdp_programs\.py:\d+ \((hook_of_rank_1|)")
def hook_of_rank_1(rank: int) -> None:
    """DDP: rank 1 alone compresses its gradients to float16, from the first step on"""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = ddp(Net())
    if rank == 1:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)


@fault(r"rank 1 (departs|reduces|is)", r"blocks\.[012]")
def resharding_of_rank_1(rank: int) -> None:
    """FSDP2: rank 1 keeps parameters after the forward, from the first step on"""
    model = sharded(Net(), reshard_after_forward=rank == 0)
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)


@fault(r"rank 1 departs", r"all-reduce|reduces")
def loader_that_ended(rank: int) -> None:
    """DDP: rank 1 has no batch left, and goes on to the metric at the end"""
    model = ddp(Net())
    optimizer = adam(model)
    for step in range(WRONG if rank else STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
    dist.all_reduce(torch.ones(3))


@fault(r"rank 1", r"all-reduce|reduces", timeout=4)
def groups_crossed(rank: int) -> None:
    """Two process groups, whose sums rank 1 takes in the other order"""
    model = sharded(Net())
    short = datetime.timedelta(seconds=4)  # a group made later has a timeout of its own
    optimizer, first, second = adam(model), *(dist.new_group([0, 1], timeout=short) for _ in range(2))
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        order = (second, first) if errs(rank, step) else (first, second)
        for group in order:
            dist.all_reduce(torch.ones(2), group=group)


@fault(r"rank 1: all-reduce[^;]*max|rank 1[^;]*max", r"max")
def largest_in_place_of_sum(rank: int) -> None:
    """FSDP2 and a metric, of which rank 1 takes the largest and rank 0 the sum"""
    model = sharded(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        update(optimizer)
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if errs(rank, step) else dist.ReduceOp.SUM)


@fault(r"rank 1 raised (torch\.)?OutOfMemoryError", r"after ")
def no_memory_in_the_backward(rank: int) -> None:
    """FSDP2: rank 1 has no memory left in the backward of a block"""
    model = sharded(Net())
    optimizer = adam(model)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 20.00 MiB")

    for step in range(STEPS):
        x = batch(rank, step).requires_grad_()
        loss = model(x).square().mean()
        if errs(rank, step):
            x.register_hook(fail)
        loss.backward()
        update(optimizer)


@fault(r"rank 3 (departs|gathers)", r"blocks\.[12]", r"fsdp_(programs|sweep)\.py:\d+ \(", ranks=4)
def block_left_out_of_four(rank: int) -> None:
    """HSDP on four ranks: rank 3 leaves a block out"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = sharded(Net(), mesh=mesh)
    optimizer = adam(model)
    for step in range(STEPS):
        loss_of(model, rank, step, order=(0, 2) if errs(rank, step, 3) else None).backward()
        update(optimizer)


# ---- running ----


def child(name: str, rank: int, folder: Path) -> None:
    import retrograd.fsdp

    os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"PROGRAM_FOLDER": str(folder)}
    program, size = (HEALTHY[name] if name in HEALTHY else FAULTS[name])[:2]
    timeout = datetime.timedelta(seconds=FAULTS[name][3] if name in FAULTS else 60)
    code = 0
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        with retrograd.fsdp.record_collectives():
            program(rank)
        dist.destroy_process_group()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stderr.flush()
    os._exit(code)


def run(name: str) -> dict[int, dict[str, Any]]:
    """Exit code, seconds after the first end and what was printed, of each rank."""
    ranks = (HEALTHY[name] if name in HEALTHY else FAULTS[name])[1]
    with tempfile.TemporaryDirectory() as text:
        folder, left, ends = Path(text), {}, {}
        for rank in range(ranks):
            if not (pid := os.fork()):
                child(name, rank, folder)
            left[pid] = rank
        limit = time.monotonic() + 120
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                ends[left.pop(pid)] = os.waitstatus_to_exitcode(status), time.monotonic()
                limit = min(limit, time.monotonic() + 20)
            elif time.monotonic() > limit:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        first = min(at for _, at in ends.values())
        texts = {rank: (folder / f"{rank}.txt").read_text(errors="replace") for rank in ends}
        return {r: {"code": ends[r][0], "seconds": ends[r][1] - first, "text": texts[r]} for r in sorted(ends)}


def fault_row(name: str) -> tuple[str, bool]:
    ends = run(name)
    said = words(ends)
    named = [bool(said) and bool(re.search(pattern, said)) for pattern in FAULTS[name][2]]
    rated = [(len(re.findall("departs|raised", line)), len(line), line) for line in said.splitlines()]
    longest = max(rated)[2][:400].replace("|", "\\|") if rated else "nothing"
    cells = [f"{name}: {FAULTS[name][0].__doc__}", *("yes" if right else "**no**" for right in named)]
    seconds = max(end["seconds"] for end in ends.values())
    return f"| {' | '.join([*cells, f'{seconds:.1f}', longest])} |", all(named)


def healthy_row(name: str) -> tuple[str, bool]:
    ends = run(name)
    stopped = sum(end["code"] != 0 for end in ends.values())
    said = words(ends)
    other = "" if said or not stopped else ends[0]["text"].strip().splitlines()[-1]
    text = (said + other)[:400].replace("|", "\\|").replace("\n", " / ")
    return f"| {name}: {HEALTHY[name][0].__doc__} | {len(ends)} | {stopped} | {text} |", not stopped and not said


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    for name in names:
        for rank, end in run(name).items():
            print(f"{name}, rank {rank}: exit {end['code']}\n{end['text']}", flush=True)
    if names:
        return
    print(f"torch {torch.__version__}, gloo\n")
    for rows, row, head in (
        (HEALTHY, healthy_row, "| healthy program | ranks | stopped | words |\n|" + " --- |" * 4),
        (FAULTS, fault_row, "| fault | rank | module | line | s | |\n|" + " --- |" * 6),
    ):
        print(head, flush=True)
        good = 0
        for name in rows:
            text, well = row(name)
            good += well
            print(text, flush=True)
        print(f"\n{good} of {len(rows)}\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
