"""What ranks tell each other beside their collectives: through the store by which they found each other.

A store needs no collective, so it works while one hangs and after a rank has died. Waiting polls: a blocking wait
would hold the store's lock, and with it the watchdog.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

_FIRST, _LONGEST = 0.0002, 0.01  # seconds between two looks


class Exchange:
    """Names with values that every rank can read.

    Args:
        store: a torch.distributed store, or an object with its `set`, `get`, `check` and `delete_key`.
        rank: which rank this is.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def post(self, name: str, value: str) -> None:
        """Say something under a name of this rank's own."""
        self.store.set(f"{name}/{self.rank}", value)

    def forget(self, name: str) -> None:
        """Take back what was said."""
        self.store.delete_key(f"{name}/{self.rank}")

    def look(self, name: str, rank: int) -> str | None:
        """What a rank has said by now, None if nothing."""
        key = f"{name}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def gather(
        self, name: str, ranks: Sequence[int], seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> dict[int, str]:
        """What ranks say under a name; those are missing that say nothing in time.

        Args:
            name: the name.
            ranks: who is to answer.
            seconds: how long to wait for them.
            given_up: asked between looks; ends the wait.
        """
        keys = [f"{name}/{rank}" for rank in ranks]
        end, pause = time.monotonic() + seconds, _FIRST
        while keys and not self.store.check(keys):
            if time.monotonic() >= end or given_up():
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)
        found = ((rank, self.look(name, rank)) for rank in ranks)
        return {rank: said for rank, said in found if said is not None}


def of_default_group(use: str = "order") -> Exchange | None:
    """Over all ranks of the job; None for a job of one rank, or as long as there is no process group.

    Args:
        use: what for; each use of each kind has names of its own, and ranks begin those of a kind in the same order.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Exchange(dist.PrefixStore(_prefix(use), store), dist.get_rank(), dist.get_world_size())


_uses: Counter[str] = Counter()


def _prefix(use: str) -> str:
    _uses[use] += 1
    return f"retrograd.fsdp/{use}/{_uses[use]}"
