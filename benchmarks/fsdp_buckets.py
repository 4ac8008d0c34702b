"""Step time of a sharded model with buckets, beside FSDP2's own reductions, in one run.

    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py [--model transformer|small] [--rounds 7] [--steps 10]
    torchrun --nproc-per-node 2 benchmarks/fsdp_buckets.py --model tiny --device cpu     (a test of the script)

Variants take turns within a round on the same model and data, so that clocks and neighbours slow all alike; a ratio is
that of medians within a round, its spread that over rounds. One step is forward, backward and a fused AdamW. Before
anything is timed, gradients of every variant are compared with FSDP2's bit by bit at the same parameters.

Models: `transformer`, 18 layers of width 2048, 1.0 B parameters in bfloat16, one group a layer (100 MB); `small`, 200
groups of 1 MB; both reduce in bfloat16, as parameters are, or with --reduce-dtype float32 in that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from retrograd.fsdp import bucket_gradients

SIZES = (5.0, 10.0, 25.0, 50.0, 100.0)
WARM = 3


class Layer(nn.Module):
    """A transformer's layer, pre-norm, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Chain(nn.Module):
    """Token embedding, parts, head; a part is what one group holds."""

    def __init__(self, parts: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Small(nn.Module):
    """A residual layer of width * width parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(x))


def build(name: str) -> tuple[nn.Module, tuple[int, int], int]:
    """(model, (batch, length), vocabulary); small layers are 724 wide: 1 MB in bfloat16."""
    if name == "transformer":
        return Chain([Layer(2048, 16) for _ in range(18)], 2048, 32000), (2, 2048), 32000
    if name == "small":
        return Chain([Small(724) for _ in range(200)], 724, 1000), (4, 512), 1000
    return Chain([Small(32) for _ in range(8)], 32, 64), (2, 8), 64


def shard(model: nn.Module, device: str, reduce_dtype: torch.dtype) -> nn.Module:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for part in model.parts:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def variant(model: nn.Module, name: str) -> Iterator[Any]:
    """`native`, `ordered 25` or a bucket size in MB."""
    if name == "native":
        yield None
        return
    kind, _, size = name.rpartition(" ")
    handle = bucket_gradients(model, bucket_mb=float(size), reduce=kind or "native")
    try:
        yield handle
    finally:
        handle.remove()


class Stopwatch:
    """Milliseconds of each step: by CUDA events, or by the clock on the CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def time(self, step: Any, count: int) -> list[float]:
        if not self.cuda:
            marks = [time.perf_counter()]
            for _ in range(count):
                step()
                marks.append(time.perf_counter())
            return [1e3 * (b - a) for a, b in pairwise(marks)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]


def gradients(model: nn.Module, tokens: torch.Tensor, name: str) -> list[torch.Tensor]:
    with variant(model, name):
        model(tokens).backward()
    found = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    return found


def differing(model: nn.Module, tokens: torch.Tensor, names: list[str]) -> dict[str, int]:
    """Elements whose bits differ from FSDP2's, over all ranks; FSDP2 itself is asked twice."""
    want = gradients(model, tokens, "native")
    counts = {}
    for name in names:
        got = gradients(model, tokens, name)
        count = sum((a != b).sum() for a, b in zip(want, got, strict=True))
        dist.all_reduce(count)
        counts[name] = int(count)
    return counts


def measure(model: nn.Module, tokens: torch.Tensor, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Median step of each variant in each round, peak memory, and what the handle says."""
    fused = {"fused": True} if args.device == "cuda" else {}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)

    def step() -> None:
        model(tokens).backward()
        optimiser.step()
        optimiser.zero_grad()

    found: dict[str, Any] = {name: {"ms": [], "peak_mb": 0.0, "buckets": 0} for name in names}
    for _ in range(args.rounds):
        for name in names:
            with variant(model, name) as handle:
                for _ in range(WARM):
                    step()
                if args.device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                dist.barrier()
                found[name]["ms"].append(statistics.median(Stopwatch(args.device).time(step, args.steps)))
                if args.device == "cuda":
                    found[name]["peak_mb"] = max(found[name]["peak_mb"], torch.cuda.max_memory_allocated() / 2**20)
                if handle is not None:
                    found[name]["buckets"] = len(handle.plan.buckets)
                    found[name]["sequences"] = len(handle.sequences)
    return found


def show(found: dict[str, Any], bits: dict[str, int], args: argparse.Namespace, elements: int) -> None:
    base = found["native"]["ms"]
    print(
        f"{args.model}, {elements / 1e6:.0f} M parameters, {dist.get_world_size()} ranks on {args.device}, "
        f"torch {torch.__version__}, reduce {args.reduce_dtype}, {args.rounds} rounds of {args.steps} steps\n"
    )
    print(
        "| variant | reductions | ms a step | ratio to FSDP2 | spread of the ratio | peak, MB | elements that differ |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, row in found.items():
        ratios = [mine / theirs for mine, theirs in zip(row["ms"], base, strict=True)]
        print(
            f"| {name} | {row['buckets'] or 'one a group'} | {statistics.median(row['ms']):.2f} | "
            f"{statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} | {row['peak_mb']:.0f} | "
            f"{bits[name]} |"
        )
    if args.json:
        told = {"settings": vars(args), "ranks": dist.get_world_size(), "found": found, "bits": bits}
        Path(args.json).write_text(json.dumps(told), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("transformer", "small", "tiny"), default="transformer")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sizes", type=float, nargs="+", default=list(SIZES))
    parser.add_argument("--reduce-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", help="also write figures to this file")
    args = parser.parse_args()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(0)
    with torch.device(args.device):
        model, shape, vocabulary = build(args.model)
    elements = sum(param.numel() for param in model.parameters())
    model = shard(model, args.device, getattr(torch, args.reduce_dtype))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(vocabulary, shape, generator=generator).to(args.device)
    names = ["native", *(f"{size:g}" for size in args.sizes), "ordered 25"]
    bits = differing(model, tokens, names)
    found = measure(model, tokens, names, args)
    if dist.get_rank() == 0:
        show(found, bits, args, elements)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
