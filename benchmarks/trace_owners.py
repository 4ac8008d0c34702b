"""What operators belong to: shares of the operators of a tiny Llama's steps, plain, under DDP and under FSDP2.

    python benchmarks/trace_owners.py [--steps 2] [--engine tape]

Two gloo ranks on the CPU, rank 0 counts. Printed for each: operators in all, without a line, without a module below the
model itself, and with neither a module nor anything else that they belong to (`Op.owner`); then what they belong to.
`--list` prints the operators of the last kind.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from retrograd import trace

Block = import_module("trace").LlamaBlock  # the one beside this file


class Llama(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4, words: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    """The model as `kind` trains it."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.get_submodule("blocks").children():
            fully_shard(block)
        fully_shard(model)
    return model


def count(kind: str, options: argparse.Namespace) -> None:
    """Record and print."""
    torch.manual_seed(0)
    model = wrapped(Llama(), kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, 512, (4, 65))
    with trace.record(model, level="names", engine=options.engine) as recorder:
        for _ in range(options.steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
    if dist.is_initialized() and dist.get_rank():
        return
    ops = recorder.trace.ops
    below = [op for op in ops if op.phase != "other" and op.module in ("", "module")]
    unknown = [op for op in ops if not op.owner]
    shares = " ".join(
        f"{100 * len(some) / len(ops):5.2f}" for some in ([o for o in ops if not o.place], below, unknown)
    )
    print(f"{kind:6} {recorder.engine:6} {len(ops):6} {shares}   ", end="")
    owners = Counter(op.owner.partition(" of ")[0] or "nothing" for op in ops)
    print(", ".join(f"{owner} {number}" for owner, number in owners.most_common()), flush=True)
    if options.list:
        for key, number in Counter(
            (o.owner, o.phase, o.name, o.node, o.place, o.code[:60]) for o in below
        ).most_common():
            print("    ", number, *key)


def rank(number: int, kind: str, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    count(kind, options)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--engine", default="tape")
    parser.add_argument("--kinds", default="plain,ddp,fsdp")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    print(
        "kind   engine operators, % without a line, a module below the model, anything; what they belong to", flush=True
    )
    fork: Any = multiprocessing.get_context("fork")  # before a thread of torch's has started
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [fork.Process(target=rank, args=(k, kind, options, str(Path(folder) / "store"))) for k in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()


if __name__ == "__main__":
    main()
