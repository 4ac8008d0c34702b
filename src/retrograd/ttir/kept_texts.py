"""Texts of TTIR in the user's cache: Triton's frontend takes longer for a kernel than the kernel does here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from retrograd.runtime import disk_cache

EDITS: list[
    Callable[[str], str]
] = []  # what is made of each text before it is executed; the cache has the texts without


def kept_text(key: str, make: Callable[[], str]) -> str:
    """The text of this key, from the cache if it is there; where nothing can be written it is made each time.

    Args:
        key: of all that the text depends on; it is the name of a file.
        make: makes the text.
    """
    text = _kept(key, make)
    for edit in EDITS:
        text = edit(text)
    return text


def _kept(key: str, make: Callable[[], str]) -> str:
    path = disk_cache.folder("ttir") / f"{key}.ttir"
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    text = make()
    with suppress(OSError), disk_cache.replacing(path) as written:
        written.write_text(text, encoding="utf-8")
    return text
