"""Origins of memory that nobody has written: the line that allocated it, or the kernel that handed it on."""

from __future__ import annotations

from collections.abc import Iterable

from retrograd.core.source_text import statement


class Origins:
    """Keeps where what nobody has written comes from, by addresses of storages."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, int] | str] = {}

    def allocated(self, start: int, file: str, line: int) -> None:
        """Note the line that allocates a storage."""
        self._known[start] = file, line

    def handed_on(self, start: int, kernel: str) -> None:
        """Note what a kernel has read of it that stored it to a storage."""
        self._known[start] = kernel

    def follow(self, sources: Iterable[int], start: int) -> None:
        """Note that an operator made elements of a storage from those of others."""
        origin = next((self._known[source] for source in sources if source in self._known), None)
        if origin is not None:
            self._known[start] = origin

    def forget(self, start: int) -> None:
        """Another storage lies at an address, or all of it is written."""
        self._known.pop(start, None)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def text(self, starts: Iterable[int]) -> str:
        """What to say behind a finding; "" where nothing is known."""
        origin = next((self._known[start] for start in starts if start in self._known), "")
        if isinstance(origin, str):
            return f": {origin}" if origin else ""
        file, line = origin
        return f": it is allocated in {file.rpartition('/')[2]}:{line}: {statement(file, line)}"
