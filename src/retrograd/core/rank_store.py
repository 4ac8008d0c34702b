"""Store of what ranks tell each other beside their collectives: through torch.distributed's store, or a folder.

A store needs no collective, so it works while one hangs and after a rank has died. Waiting polls: a blocking wait
would hold the store's lock, and with it the watchdog.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_FIRST, _LONGEST = 0.0002, 0.01  # seconds between two looks


class FolderStore:
    """A folder on a file system that all ranks see, with the methods of a torch.distributed store.

    Args:
        path: the folder, empty at the start of the run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str) -> Path:
        return self.path / urllib.parse.quote(key, safe=" ,")

    def set(self, key: str, value: str) -> None:
        """Keep a value: written beside and renamed, so that nobody reads half of it."""
        file = self._file(key)
        draft = file.with_name(f".{file.name}")
        draft.write_text(value, encoding="utf-8")
        draft.replace(file)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._file(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values by now."""
        return all(self._file(key).exists() for key in keys)

    def delete_key(self, key: str) -> None:
        """Take a value away, if there is one."""
        self._file(key).unlink(missing_ok=True)


class RankStore:
    """Names under which each rank posts a value that every rank can read.

    Args:
        store: a torch.distributed store, or an object with its `set`, `get`, `check` and `delete_key`.
        rank: which rank this is.
        size: how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def post(self, name: str, value: str) -> None:
        """Post this rank's value under a name."""
        self.store.set(f"{name}/{self.rank}", value)

    def claim(self, name: str, value: str) -> str:
        """The value under a name that all ranks share: this one if nobody was here before (torch's stores only)."""
        return self.store.compare_set(name, "", value).decode()

    def forget(self, name: str) -> None:
        """Take this rank's value back."""
        self.store.delete_key(f"{name}/{self.rank}")

    def look(self, name: str, rank: int) -> str | None:
        """A rank's value by now, None if it has posted none."""
        key = f"{name}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def wait(self, name: str, rank: int, seconds: float) -> str | None:
        """A rank's value, None if it posts none in time."""
        return self.gather(name, [rank], seconds).get(rank)

    def gather(
        self, name: str, ranks: Sequence[int], seconds: float, given_up: Callable[[], bool] = lambda: False
    ) -> dict[int, str]:
        """Values of ranks under a name; those are missing that post none in time.

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
        values = ((rank, self.look(name, rank)) for rank in ranks)
        return {rank: value for rank, value in values if value is not None}
