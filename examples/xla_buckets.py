"""pytorch/xla#4160 on a CPU: gradient buckets of torch_xla 2.9 make four graphs out of two, and wrong losses.

    pip install torch==2.9.0 torch-xla==2.9.0 numpy 'retrograd'      (7 GB; torch_xla goes with this torch alone)
    python examples/xla_buckets.py [--save DIR]

Three blocks, each in XlaFullyShardedDataParallel, the first used twice in a forward; six steps of SGD with momentum,
three times: without buckets, with them, and with them and the repair. docs/graph-4160.md explains what is seen.
Exit code 0 if the first and the last run have two graphs and the same losses to the last bit, and the one between
neither.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

# One device needs no second thread, and torch_xla reads where to write its graphs before the first of them.
_FOLDER = tempfile.TemporaryDirectory(prefix="xla-buckets-")
for _name, _value in (
    ("PJRT_DEVICE", "CPU"),
    ("CPU_NUM_DEVICES", "1"),
    ("XLA_SAVE_TENSORS_FILE", f"{_FOLDER.name}/graphs"),
    ("XLA_SAVE_TENSORS_FMT", "hlo"),
):
    os.environ.setdefault(_name, _value)

import torch_xla  # noqa: E402 (after its environment)
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP  # noqa: E402

import retrograd.fsdp.xla  # noqa: E402
import retrograd.graph  # noqa: E402

# A block has 6 gradients, padded by torch_xla to 512 bytes each: what one step leaves overflows at the end of the next.
STEPS, BATCH, WIDTH, BUCKET_MB = 6, 4, 8, 0.0056


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def sharded(module: nn.Module, bucket_mb: float) -> FSDP:
    """In torch_xla's FSDP. Pinned layouts end a process in which a bucket is reduced (torch_xla 2.9, CPU)."""
    return FSDP(module, reduce_scatter_bucket_size_mb=bucket_mb, pin_layout_in_collective_ops=False)


class Net(nn.Module):
    """Layers before and behind three blocks, of which the first is used again at the end."""

    def __init__(self, bucket_mb: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(sharded(Block(), bucket_mb) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.last(x)


def train(bucket_mb: float, repaired: bool, save: Path | None) -> tuple[list[float], Any, int]:
    """Losses, the watcher's report, and how many gradients are left in buckets after the last step."""
    torch.manual_seed(0)
    model = sharded(Net(bucket_mb), bucket_mb)
    if repaired:
        retrograd.fsdp.xla.flush_before_end_of_backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    device = torch_xla.device()
    x, y = torch.randn(BATCH, WIDTH).to(device), torch.randn(BATCH, WIDTH).to(device)
    torch_xla.sync()
    losses = []
    with retrograd.graph.watch("xla", expect=2, save=save) as w:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            w.step()
            losses.append(loss.item())
    buckets = [m.reduce_scatter_op for m in model.modules() if isinstance(m, FSDP)] if bucket_mb else []
    left = sum(len(one.bucket) for one in buckets)
    return losses, w.report(), left


def main() -> int:
    """Run the three, print what is seen."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--save", type=Path, metavar="DIR", help="keep the graphs of each run in a folder of its own")
    save = options.parse_args().save
    seen = {}
    for name in ("no bucket", "bucket", "repaired"):
        bucket_mb = 0 if name == "no bucket" else BUCKET_MB
        losses, report, left = seen[name] = train(bucket_mb, name == "repaired", save and save / name.replace(" ", "-"))
        shown = " ".join(f"{loss:.5f}" for loss in losses)
        print(f"{name:10} {len(report.graphs)} graphs, {left} gradients left in buckets, losses {shown}", flush=True)
        if report.unexpected:
            cause = report.unexpected[0].causes[0]
            print(f"           the first too many, in step {report.unexpected[0].step}: {cause.text()}")
    right = len(seen["no bucket"][1].graphs) == len(seen["repaired"][1].graphs) == 2
    same = seen["no bucket"][0] == seen["repaired"][0] != seen["bucket"][0]
    return 0 if right and same and len(seen["bucket"][1].graphs) > 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
