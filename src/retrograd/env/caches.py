"""Folders of compiled files: ours, Triton's, torch's; where they are and how large."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path
from typing import Any

from retrograd import config

# Beyond so many files the sum is a lower bound: a shared cache may hold millions.
_MOST_FILES = 100_000


def caches() -> list[dict[str, Any]]:
    """Name, path, number of files and their bytes; `complete` is false where there were too many to count."""
    return [{"name": name, "path": str(path), **_size(path)} for name, path in _folders()]


def _folders() -> list[tuple[str, Path]]:
    chosen = config.variables(["TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR"])
    home = Path(chosen.get("TRITON_HOME") or Path.home())
    triton = Path(chosen.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no name for this number, as in a container
        user = "unknown"
    inductor = Path(chosen.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"torchinductor_{user}")
    return [("retrograd", config.cache_home() / "retrograd"), ("triton", triton), ("torch.compile", inductor)]


def _size(path: Path) -> dict[str, Any]:
    files, total = 0, 0
    for folder, _, names in os.walk(path):
        for name in names:
            files += 1
            try:
                total += (Path(folder) / name).lstat().st_size
            except OSError:  # removed meanwhile
                continue
        if files > _MOST_FILES:
            return {"files": files, "bytes": total, "complete": False}
    return {"files": files, "bytes": total, "complete": True}
