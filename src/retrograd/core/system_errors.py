"""System errors that become errors of usage: a file cannot be read or written, a program not started."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from retrograd.errors import UsageError


@contextmanager
def as_usage_error(problem: str) -> Generator[None]:
    """What the system refuses inside becomes a UsageError: the problem, and why."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{problem}: {getattr(error, 'strerror', None) or error}") from None
