"""Calling a function as a test: what it returns or raises becomes an outcome, a message and a margin."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from retrograd.flake.schema import Margin, Outcome


def takes_seed(function: Callable[..., Any]) -> bool:
    """Whether the callable has a parameter to give the seed to."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def call(function: Callable[..., Any], seed: int | None) -> tuple[Outcome, str, float | None]:
    """Outcome, message and margin of one call: it fails by raising, by False, or by a number above 1 (or NaN).

    Only KeyboardInterrupt gets through.
    """
    try:
        value = function() if seed is None else function(seed)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own failures are no Exceptions
        outcome: Outcome = "skipped" if type(error).__name__ == "Skipped" else "failed"
        # The line in the function that raised, or called what raised; the first frame is ours.
        frames = traceback.extract_tb(error.__traceback__)[1:2]
        at = f"{frames[0].filename}:{frames[0].lineno}: " if frames else ""
        return outcome, f"{at}{type(error).__name__}: {error}", None
    if isinstance(value, bool):
        return ("passed", "", None) if value else ("failed", "returned False", None)
    try:
        margin = None if value is None else float(value)
    except (TypeError, ValueError):
        margin = None  # a test may return what it likes
    if margin is None or margin <= 1:
        return "passed", "", margin
    return "failed", f"returned the margin {margin:.6g}, above 1", margin


def returned(margin: float) -> Margin:
    """The Margin of a callable that returns its own."""
    worst = margin if margin == margin else float("inf")
    bits = float(margin).hex()
    return Margin("returned", "err / tol", worst, worst if worst <= 1 else 0.0, int(worst > 1), 1, got_bits=bits)
