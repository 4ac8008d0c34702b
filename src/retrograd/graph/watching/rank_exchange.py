"""What ranks tell each other, through a folder that all see or through torch.distributed's store."""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path
from typing import Any, Protocol

from retrograd.errors import UsageError

_POLL = 0.01  # seconds


class Exchange(Protocol):
    """Keys with values that every rank can read."""

    rank: int
    size: int

    def post(self, name: str, value: bytes) -> None:
        """Say something under a name that was not used before."""

    def get(self, name: str, seconds: float) -> bytes | None:
        """What was said under a name; None if nobody says it in time."""


class Folder:
    """Through a folder on a file system that all ranks see.

    Args:
        path: the folder, empty at the start of the run.
        rank: which rank this is.
        size: how many there are.
    """

    def __init__(self, path: str | Path, rank: int, size: int) -> None:
        self.path, self.rank, self.size = Path(path), rank, size
        self.path.mkdir(parents=True, exist_ok=True)

    def post(self, name: str, value: bytes) -> None:
        """Written beside and renamed, so that nobody reads half of it."""
        target = self.path / name.replace("/", "-")
        draft = target.with_name(f".{target.name}.{self.rank}")
        draft.write_bytes(value)
        draft.replace(target)

    def get(self, name: str, seconds: float) -> bytes | None:
        """Looks again and again."""
        target = self.path / name.replace("/", "-")
        end = time.monotonic() + seconds
        while True:
            try:
                return target.read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= end:
                    return None
            time.sleep(_POLL)


class Store:
    """Through the store by which the processes of torch.distributed found each other."""

    _runs = 0  # each watch gets names of its own; ranks watch in the same order

    def __init__(self, store: Any, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore

        Store._runs += 1
        self.store = PrefixStore(f"retrograd.graph.watch/{Store._runs}", store)
        self.rank, self.size = rank, size

    def post(self, name: str, value: bytes) -> None:
        """As text: stores take strings."""
        self.store.set(name, value.hex())

    def get(self, name: str, seconds: float) -> bytes | None:
        """Waits in small portions, since some stores cannot be interrupted."""
        end = time.monotonic() + seconds
        while not self.store.check([name]):
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL)
        return bytes.fromhex(self.store.get(name).decode())


def find(ranks: str | Path | Exchange | None, number: tuple[int, int] | None) -> Exchange | None:
    """The exchange that `ranks=` means.

    Args:
        ranks: None for none, "compare" for torch.distributed's store, a folder, or an exchange.
        number: (rank, size) as the launcher says, for a folder.

    Raises:
        UsageError: there is no process group, or nobody says which rank this is.
    """
    if ranks is None or not isinstance(ranks, (str, Path)):
        return ranks
    if ranks == "compare":
        torch = sys.modules.get("torch")
        group = getattr(torch, "distributed", None)
        if group is None or not group.is_available() or not group.is_initialized():
            raise UsageError(
                "`ranks` is 'compare', but torch.distributed has no process group; initialise it before "
                "retrograd.graph.watch, or give a folder that all ranks see"
            )
        return Store(group.distributed_c10d._get_default_store(), group.get_rank(), group.get_world_size())
    if number is None:
        raise UsageError(
            f"`ranks` is the folder {str(ranks)!r}, but RANK and WORLD_SIZE are not set; set them as torchrun does, "
            "or give retrograd.graph.watching.rank_exchange.Folder(path, rank, size)"
        )
    return Folder(ranks, *number)


def packed(text: str) -> bytes:
    """A text, compressed."""
    return zlib.compress(text.encode("utf-8", "surrogatepass"))


def unpacked(value: bytes) -> str:
    """The text again."""
    return zlib.decompress(value).decode("utf-8", "surrogatepass")
