"""Folders for what is compiled on the user's machine, and files in them that no process sees half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from retrograd import config


def folder(kind: str) -> Path:
    """Where files of this kind are kept; a folder of this process where the user's cache cannot be written."""
    wanted = user_folder(kind)
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return _spare_folder()
    return wanted if os.access(wanted, os.W_OK) else _spare_folder()


def user_folder(kind: str) -> Path:
    """The folder of this kind in the user's cache, which may not exist or may only be readable."""
    return config.cache_home() / "retrograd" / kind


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another path to write the file to; it takes the place of `path` at the end, unless an exception is raised.

    Each process writes a file of its own and renames it: whoever comes last replaces one by its equal.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as inner:
        written = Path(inner) / path.name
        yield written
        written.replace(path)


@cache
def _spare_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="retrograd-"))
