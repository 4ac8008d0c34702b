"""One rank of a job that errs, and then dumps what Flight Recorder has: `dump_job.py FOLDER RANK SIZE`.

Three process groups, in which the last rank does as the others, leaves one collective out, or ends early. Nothing waits
for it: collectives are only begun, and the process ends once it has written its dump.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    healthy, leaves_out, ends_early = (dist.new_group(range(size)) for _ in range(3))
    dist.all_reduce(torch.ones(4), group=ends_early)
    for group in (healthy, leaves_out):
        layers(group, size, gathers=group is healthy or rank < size - 1)
    if rank < size - 1:
        layers(ends_early, size)
    folder.joinpath(f"dump_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    os._exit(0)


def layers(group: dist.ProcessGroup, size: int, gathers: bool = True) -> None:
    dist.all_reduce(torch.ones(5), group=group, async_op=True)
    if gathers:
        dist.all_gather([torch.empty(7) for _ in range(size)], torch.ones(7), group=group, async_op=True)
    dist.all_reduce(torch.ones(3), group=group, async_op=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
