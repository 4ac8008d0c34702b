"""The file that torch_xla saves its graphs in, read while it grows: one block a cut."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from retrograd.errors import GraphError
from retrograd.graph.readers import torch_xla
from retrograd.graph.source_lines import is_library


@dataclass(frozen=True)
class Block:
    """One saved graph: torch_xla's hash, the user's line of the cut, the text."""

    key: str
    where: str
    text: str


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

    def read(self) -> list[Block]:
        """The blocks since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            fresh = file.read().decode("utf-8", "replace")
            self._at = file.tell()
        if self.mine:
            # torch_xla opens the file anew for each block, so that its next one begins at 0.
            self.path.write_bytes(b"")
            self._at = 0
        return blocks(fresh, str(self.path))


def blocks(text: str, source: str = "") -> list[Block]:
    """The blocks of a save-file.

    Raises:
        GraphError: the file is damaged, or holds something else than HLO.
    """
    saved: list[Block] = []
    for block in torch_xla.blocks(text, source):
        body = block.body.strip("\n")
        if "HloModule" not in body[:200]:
            raise GraphError(
                f"{source or 'the save-file'} holds graphs that are not HLO (they begin with {body[:40]!r}); "
                "set XLA_SAVE_TENSORS_FMT=hlo before the first cut"
            )
        file, line = next(((f, n) for f, n in block.frames if not is_library(f)), ("", 0))
        where = f"{file.rpartition('/')[2]}:{line}" if file else ""
        saved.append(Block(block.key, where, body))
    return saved
