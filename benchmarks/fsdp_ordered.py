"""The ordered reduce-scatter beside the group's own: bits under several groupings, then time by size.

    torchrun --nproc-per-node 4 benchmarks/fsdp_ordered.py                    NCCL where there are GPUs, else gloo
    torchrun --nproc-per-node 2 benchmarks/fsdp_ordered.py --out fsdp.md --json fsdp.json
    NCCL_ALGO=Ring torchrun --nproc-per-node 4 benchmarks/fsdp_ordered.py --bits

Size is that of a rank's input in float32. Providers take turns within a repeat and the slowest rank counts; a ratio is
the median over repeats of ours / native of the same repeat, with its smallest and largest. On a GPU a repeat is a run
of calls between two events on one stream, which includes what the host needs. Each rank needs a GPU of its own: NCCL
2.28 refuses two ranks on one. Exit code 1 if a bit that is promised differs; nothing is timed then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from retrograd.fsdp import fixed_order, ordered_reduce_scatter
from retrograd.fsdp.rank_sum import Scale, rank_sum

MIB = 1 << 20
SIZES = (1, 4, 16, 32, 64, 128, 256)
F32, BF16 = torch.float32, torch.bfloat16
# Tensors of about 5 million elements, of which each rank has an equal shard, and how they are grouped.
TENSORS = (1000003, 262147, 65537, 1500001, 12345, 2000003, 430001)
GROUPINGS = {"7 groups": [[i] for i in range(7)], "3 groups": [[0, 1, 2], [3, 4], [5, 6]], "1 group": [[*range(7)]]}
Reduce = Callable[[torch.Tensor, torch.Tensor], Any]  # (output [N], input [W * N])


def native(output: torch.Tensor, given: torch.Tensor) -> None:
    # torch 2.13 renames it and warns of the old name.
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, given, op=dist.ReduceOp.SUM)


def ordered(output: torch.Tensor, given: torch.Tensor, wire: torch.dtype | None = None) -> None:
    ordered_reduce_scatter(output, given, wire_dtype=wire)


# Name -> how, dtype of what is given, dtype of the result.
PROVIDERS: dict[str, tuple[Reduce, torch.dtype, torch.dtype]] = {
    "native f32": (native, F32, F32),
    "ordered f32": (ordered, F32, F32),
    "ordered f32, bf16 wire": (partial(ordered, wire=BF16), F32, F32),
    "native bf16": (native, BF16, BF16),
    "ordered bf16": (ordered, BF16, BF16),
    "ordered bf16 to f32": (ordered, BF16, F32),
}
BESIDE = {"ordered bf16": "native bf16"}  # the others beside native f32


class Here:
    """This rank, its device and its clock."""

    def __init__(self, backend: str | None) -> None:
        self.gpu = (backend or ("nccl" if torch.cuda.is_available() else "gloo")) == "nccl"
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu and local >= torch.cuda.device_count():
            sys.exit(f"rank {local} of this host has no GPU of its own: {torch.cuda.device_count()} found; start fewer")
        if self.gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.gpu else "gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def seconds(self, call: Callable[[], Any], times: int) -> float:
        """A call's time, of `times` in a row, on the slowest rank."""
        dist.barrier()
        if self.gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(times):
                call()
            end.record()
            torch.cuda.synchronize()
            took = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            for _ in range(times):
                call()
            took = time.perf_counter() - start
        slowest = torch.tensor([took / times], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def random(self, count: int, seed: int, dtype: torch.dtype = F32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        return torch.randn(count, generator=generator).to(dtype).to(self.device)

    def words(self) -> str:
        what = torch.cuda.get_device_name(self.device) if self.gpu else f"{platform.processor() or 'CPU'}"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.gpu else "none"
        chosen = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS", "OMP_"))}
        return f"{self.ranks} ranks, {what}, torch {torch.__version__}, NCCL {nccl}, {chosen}"


def padded(count: int, ranks: int) -> int:
    return -(-count // ranks) * ranks


def by_groups(here: Here, tensors: list[torch.Tensor], grouping: list[list[int]], how: Reduce, out: torch.dtype):
    """The shards of all tensors of this rank, reduced in groups that are laid out as FSDP2 does: shard by shard."""
    shards: dict[int, torch.Tensor] = {}
    for group in grouping:
        pieces = [tensors[i].view(here.ranks, -1) for i in group]
        given = torch.cat(pieces, dim=1).view(-1)  # [W * N]
        output = torch.empty(given.numel() // here.ranks, dtype=out, device=here.device)
        how(output, given)
        shards |= dict(zip(group, output.split([piece.shape[1] for piece in pieces]), strict=True))
    return torch.cat([shards[i] for i in range(len(tensors))])


def rank_order(here: Here, tensors: list[torch.Tensor], wire: torch.dtype | None, out: torch.dtype) -> torch.Tensor:
    """The definition, by other means: everything is gathered and added in a loop."""
    shards = []
    for tensor in tensors:
        sent = tensor if wire is None else tensor.to(wire)
        everyone = [torch.empty_like(sent) for _ in range(here.ranks)]
        dist.all_gather(everyone, sent)
        mine = [each.view(here.ranks, -1)[here.rank].float() for each in everyone]
        total = mine[0].clone()
        for each in mine[1:]:
            total += each
        shards.append(total.to(out))
    return torch.cat(shards)


def everywhere(here: Here, count: int) -> int:
    """The sum over ranks."""
    total = torch.tensor([count], device=here.device)
    dist.all_reduce(total)
    return int(total)


def bits(here: Here) -> tuple[list[list[Any]], int]:
    """Rows of the table of bits, and how many promised bits differ."""
    rows, wrong = [], 0
    for name, (how, dtype, out) in PROVIDERS.items():
        tensors = [here.random(padded(n, here.ranks), i, dtype) for i, n in enumerate(TENSORS)]
        made = {label: by_groups(here, tensors, grouping, how, out) for label, grouping in GROUPINGS.items()}
        want = rank_order(here, tensors, BF16 if "wire" in name else None, out)
        alike = {label: everywhere(here, int((got != made["1 group"]).sum())) for label, got in made.items()}
        apart = everywhere(here, int((made["1 group"] != want).sum()))
        again = by_groups(here, tensors, GROUPINGS["1 group"], how, out)
        repeat = everywhere(here, int((again != made["1 group"]).sum()))
        rows.append([name, alike["7 groups"], alike["3 groups"], repeat, apart])
        wrong += 0 if name.startswith("native") else alike["7 groups"] + alike["3 groups"] + repeat + apart
    return rows, wrong


def kernel_bits(here: Here) -> int:
    """How many elements the kernel has otherwise than the loop, over numbers of ranks, sizes, dtypes and scales."""
    count = 0
    for ranks in (1, 2, 3, 4, 8, 16):
        for n in (1, 7, 1000, 1 << 16, 100003):
            for dtype in (F32, BF16, torch.float16):
                received = here.random(ranks * n, n, dtype).view(ranks, n)
                for scale in (Scale(), Scale("divide", 3), Scale("multiply", 0.3)):
                    ours, loop = (torch.empty(n, dtype=dtype, device=here.device) for _ in range(2))
                    rank_sum(received, ours, scale, impl="triton")
                    rank_sum(received, loop, scale, impl="loop")
                    count += int((ours != loop).sum())
    return everywhere(here, count)


class Block(torch.nn.Module):
    """Sizes that no number of ranks divides, so that every parameter is padded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width + 1)
        self.down = torch.nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_net(here: Here) -> torch.nn.Sequential:
    torch.manual_seed(0)
    width = 1021 if here.gpu else 61
    return torch.nn.Sequential(torch.nn.Linear(64, width), *(Block(width) for _ in range(8))).to(here.device)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], here: Here, step: int) -> torch.Tensor:
    return model(here.random(64 * 512, step + 1).view(512, 64)).float().square().mean()


def train(
    here: Here, together: int, order: dict[str, Any] | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Three steps under FSDP2 with that many blocks a group: all gradients of the first, all parameters at the end."""
    model = make_net(here)
    options = {
        "mesh": init_device_mesh(here.device.type, (here.ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=F32),
    }
    blocks = list(model)[1:]
    for first in range(0, len(blocks), together):
        fully_shard(blocks[first : first + together], **options)
    fully_shard(model, **options)
    if order is not None:
        fixed_order(model, **order)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    first_gradients = torch.empty(0)
    for step in range(3):
        loss_of(model, here, step).backward()
        if not step:
            first_gradients = torch.cat([p.grad.full_tensor().view(-1) for p in model.parameters()])
        optimiser.step()
        optimiser.zero_grad()
    return first_gradients, torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()])


def first_gradients(here: Here, dtype: torch.dtype) -> torch.Tensor:
    """The definition, without FSDP: each rank's own gradients, gathered and added in rank order, divided once."""
    model = make_net(here)
    cast = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    loss = loss_of(lambda x: torch.func.functional_call(model, cast, (x.to(dtype),)), here, 0)
    mine = torch.cat([g.view(-1) for g in torch.autograd.grad(loss, list(cast.values()))])
    everyone = [torch.empty_like(mine) for _ in range(here.ranks)]
    dist.all_gather(everyone, mine)
    total = everyone[0].float()
    for each in everyone[1:]:
        total += each
    # By a tensor: by a number torch multiplies with the inverse on CUDA.
    return total / torch.full((), float(here.ranks), device=here.device)


def through_fsdp(here: Here) -> tuple[list[list[Any]], int]:
    """Rows of the table of training steps, and how many promised bits differ."""
    rows, wrong = [], 0
    # Four bfloat16 mostly add up in float32 without any rounding: there the order hardly shows, natively either.
    for name, order, dtype in (
        ("native, float32", None, F32),
        ("ordered, float32", {}, F32),
        ("native, bfloat16 added in float32", None, BF16),
        ("ordered, bfloat16 added in float32", {"wire_dtype": BF16}, BF16),
    ):
        want = first_gradients(here, dtype)
        made = [train(here, together, order, dtype) for together in (1, 2, 8)]
        apart = [int((gradients != want).sum()) for gradients, _ in made]
        alike = [int((parameters != made[0][1]).sum()) for _, parameters in made[1:]]
        counts = [everywhere(here, count) for count in (*apart, *alike)]
        rows.append([name, *counts])
        wrong += sum(counts) if order is not None else 0
    return rows, wrong


def timed(here: Here, mib: int, repeats: int) -> dict[str, list[float]]:
    """Seconds a call of each provider and of the parts of ours, by repeat."""
    n = mib * MIB // 4 // here.ranks
    calls: dict[str, Callable[[], Any]] = {}
    for name, (how, dtype, out) in PROVIDERS.items():
        given = here.random(n * here.ranks, 1, dtype)
        calls[name] = partial(how, torch.empty(n, dtype=out, device=here.device), given)
    received = here.random(n * here.ranks, 2).view(here.ranks, n)
    calls["the all-to-all alone, f32"] = partial(dist.all_to_all_single, torch.empty_like(received), received)
    calls["the sum alone, f32"] = partial(rank_sum, received, torch.empty(n, device=here.device))
    times = max(1, min(50, 2048 // mib)) if here.gpu else 1
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            taken[name].append(here.seconds(call, times))
    return taken


def peak(here: Here, mib: int) -> dict[str, float]:
    """MiB above the input and the output that a call takes, where the allocator counts."""
    n, found = mib * MIB // 4 // here.ranks, {}
    for name, (how, dtype, out) in PROVIDERS.items():
        given, output = here.random(n * here.ranks, 1, dtype), torch.empty(n, dtype=out, device=here.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        how(output, given)
        torch.cuda.synchronize()
        found[name] = (torch.cuda.max_memory_allocated() - before) / MIB
    return found


def time_rows(mib: int, taken: dict[str, list[float]]) -> list[list[Any]]:
    """A row for each provider: median, spread, ratio to the native one of the same repeat."""
    rows = []
    for name, seconds in taken.items():
        spread = f"{1e3 * min(seconds):.3f} to {1e3 * max(seconds):.3f}"
        ratio = ""
        if name.startswith("ordered"):
            ratios = [a / b for a, b in zip(seconds, taken[BESIDE.get(name, "native f32")], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([mib, name, f"{1e3 * statistics.median(seconds):.3f}", spread, ratio])
    return rows


def table(head: list[str], rows: list[list[Any]]) -> str:
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def report(here: Here, args: argparse.Namespace, say: Callable[[str], None]) -> tuple[int, dict[str, Any]]:
    """Say everything; how many promised bits differ, and what was measured."""
    say(f"{here.words()}\n")
    rows, wrong = bits(here)
    say("Elements that differ, over all ranks: from one group when the same tensors are reduced in 7 and in 3, from")
    say("the same call again, and from rank order.\n")
    say(table(["", "7 groups", "3 groups", "again", "from rank order"], rows))
    steps, differ = through_fsdp(here)
    wrong += differ
    say("\nTraining under FSDP2 with 1, 2 and 8 blocks a group: first gradients that differ from rank order, then")
    say("parameters after three steps that differ from those with 1 block a group.\n")
    say(table(["", "1", "2", "8", "2 beside 1", "8 beside 1"], steps))
    if here.gpu:
        differ = kernel_bits(here)
        wrong += differ
        say(f"\nKernel beside loop: {differ} elements differ")
    seconds: dict[int, dict[str, list[float]]] = {}
    if not wrong and not args.bits:
        seconds = {mib: timed(here, mib, args.repeats) for mib in args.sizes}
        made = [row for mib, taken in seconds.items() for row in time_rows(mib, taken)]
        say("\n" + table(["MiB", "", "ms", "spread", "ours / native"], made))
        if here.gpu:
            most = max(args.sizes)
            say(f"\nMemory of a call of {most} MiB besides input and output:\n")
            say(table(["", "MiB"], [[name, f"{mib:.0f}"] for name, mib in peak(here, most).items()]))
    say(f"\n{wrong} promised bits differ")
    return wrong, {"where": here.words(), "bits": rows, "steps": steps, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["nccl", "gloo"])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="MiB of float32 that a rank gives")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bits", action="store_true", help="bits alone")
    parser.add_argument("--out", type=Path, help="write the tables here")
    parser.add_argument("--json", type=Path, help="write seconds of every repeat here")
    args = parser.parse_args()
    here = Here(args.backend)
    text: list[str] = []

    def say(words: str) -> None:
        text.append(words)
        if here.rank == 0:
            print(words, flush=True)

    wrong, found = report(here, args, say)
    if here.rank == 0:
        if args.out:
            args.out.write_text("\n".join(text) + "\n")
        if args.json:
            args.json.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
