"""Folders for what is compiled on the user's machine, and files in them that no process sees half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from retrograd import config

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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


@contextmanager
def locked(path: Path) -> Iterator[int | None]:
    """Meanwhile no other process is in here for this path, nor a thread; a file beside it, which stays, is the lock.

    A process that inherits the descriptor handed out holds the lock as well, until both have closed it. None where the
    file system has no locks: then several may be in here.
    """
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        locks = False
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                locks = True
        yield descriptor if locks else None
    finally:
        os.close(descriptor)


@cache
def _spare_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="retrograd-"))
