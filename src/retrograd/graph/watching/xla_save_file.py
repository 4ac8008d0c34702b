"""The file that torch_xla saves its graphs in, read while it grows: one block a cut."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from retrograd.errors import GraphError
from retrograd.graph.readers.torch_xla import SaveFileBlock, blocks


@functools.cache
def own() -> Path:
    """The file that is used where the user has chosen none; one a process, since torch_xla reads its name once."""
    folder = tempfile.mkdtemp(prefix="retrograd-graphs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder) / "saved"


class Follower:
    """Reads what is appended. A file that is `mine` is emptied after each read: a dump of each step fills a disk."""

    def __init__(self, path: Path, mine: bool) -> None:
        self.path, self.mine = path, mine
        if mine:
            path.unlink(missing_ok=True)
        self._at = path.stat().st_size if path.exists() else 0

    def close(self) -> None:
        """Let nothing grow when nobody reads: torch_xla goes on writing until the process ends."""
        if self.mine:
            self.path.unlink(missing_ok=True)
            self.path.symlink_to(os.devnull)

    def read(self) -> SaveFileBlock | None:
        """The last block since the last call; GraphError if the file is damaged, or holds something else than HLO."""
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            file.seek(self._at)
            fresh = file.read().decode("utf-8", "replace")
            self._at = file.tell()
        if self.mine:
            # torch_xla opens the file anew for each block, so that its next one begins at 0.
            self.path.write_bytes(b"")
            self._at = 0
        saved = list(blocks(fresh, str(self.path)))
        for block in saved:
            if "HloModule" not in block.body[:200]:
                raise GraphError(
                    f"{self.path} holds graphs that are not HLO (they begin with {block.body[:40]!r}); "
                    "set XLA_SAVE_TENSORS_FMT=hlo before the first cut"
                )
        return saved[-1] if saved else None
