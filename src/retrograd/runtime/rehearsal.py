"""Rehearsals: what an op would launch on a GPU, found out on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_RUNNING: list[None] = []  # one for each, of all threads


def rehearsed() -> bool:
    """Whether ops that choose by device choose for CPU tensors what they would run on a GPU."""
    return bool(_RUNNING)


@contextmanager
def rehearsing() -> Iterator[None]:
    """Have them do so."""
    _RUNNING.append(None)
    try:
        yield
    finally:
        _RUNNING.pop()
