"""What recording adds before each collective: a rank notes it in its ring file and looks at those of its peers.

    python benchmarks/fsdp_recording.py

Ranks of one machine take turns in one process, without the collectives themselves: CPU microseconds a collective and
rank.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from retrograd.core.rank_store import RankStore
from retrograd.fsdp.peers import Peers
from retrograd.fsdp.rank_verification import RankVerifier
from retrograd.fsdp.ring_file import RingWriter
from retrograd.fsdp.schema import Collective
from retrograd.fsdp.step_patterns import Journal

GROUPS, STEPS = 48, 40  # all-gathers of so many modules a step


def price(size: int, folder: Path) -> float:
    """Median over the steps."""
    store, ranks = dist.HashStore(), list[RankVerifier]()
    for rank in range(size):
        exchange = RankStore(store, rank, size)
        peers = Peers(exchange, RingWriter(folder / f"{size}-{rank}", rank))
        ranks.append(RankVerifier(exchange, Journal(rank, size), 5, peers))
    everyone = tuple(range(size))
    gathers = [
        Collective("all-gather", "forward", (f"blocks.{k}",), 4096, "float32", "", everyone, by="fsdp")
        for k in range(GROUPS)
    ]
    steps: list[float] = []
    for step in range(STEPS):
        begin = time.process_time_ns()
        for index, gather in enumerate(gathers):
            for rank in ranks:
                assert rank.peers is not None
                rank.peers.own.add(gather, "train.py:7 (main)", step, index)
                rank.look(gather, first=False)
        steps.append((time.process_time_ns() - begin) / 1e3 / GROUPS / size)
    return statistics.median(steps)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 4, 8):
            print(f"{size} ranks: {price(size, Path(folder)):.1f} us a collective and rank (torch {torch.__version__})")


if __name__ == "__main__":
    main()
