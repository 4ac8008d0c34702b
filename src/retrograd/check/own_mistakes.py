"""Mistakes of the checker itself, told from what an op or its reference refuses. Torch-free."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, TypeVar

from retrograd.core.program_lines import folders
from retrograd.errors import SpecError

_MISTAKES = (AssertionError, AttributeError, KeyError, NameError, TypeError)
_OURS = folders(__file__)
_CALLERS = set[CodeType]()

F = TypeVar("F", bound=Callable[..., Any])


def calls_theirs(function: F) -> F:
    """Mark a function that calls a person's: what ends in one of its lines may be an error of that one, in C."""
    _CALLERS.add(function.__code__)  # type: ignore[attr-defined]
    return function


def is_own_mistake(error: Exception) -> bool:
    """Whether a line of the checker raised what mistakes in code raise, and called no function of anybody else."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    code = frame.f_code
    return isinstance(error, _MISTAKES) and code.co_filename.startswith(_OURS) and code not in _CALLERS


@contextmanager
def may_refuse() -> Iterator[None]:
    """A block that ends where an op or its reference raises, and what comes after it goes on.

    Mistakes of the checker itself, and of the description, are raised.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        if is_own_mistake(error):
            raise
