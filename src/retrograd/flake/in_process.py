"""`flake_rate`: how often a function fails over seeds, in the process that asks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from retrograd.errors import UsageError
from retrograd.flake import binomial
from retrograd.flake.callables import call, returned, takes_seed
from retrograd.flake.examination import describe
from retrograd.flake.plan import FlakeOptions
from retrograd.flake.schema import Flake, Run
from retrograd.flake.seeding import preserved, seed_all


def flake_rate(function: Callable[..., Any], seeds: int = 100, *, first: int = 0, repeats: int = 1) -> Flake:
    """Call a function once a seed, and say how often it fails, with an exact interval and the tail of its margins.

    Args:
        function: fails by raising, by returning False, or by returning a margin err / tol above 1 (NaN too); is
            given the seed if it has a parameter. Margins that it returns are extrapolated.
        seeds: how many seeds.
        first: the first of them.
        repeats: calls of each seed; with two or more, a run flake is told from a seed flake.

    Returns:
        A Flake: `.rate`, `.tail`, `.failing_seeds`, `.assert_below(0.01, confidence=0.95)`. Threads, variables and
        fresh processes need `retrograd.flake.run`.

    Raises:
        UsageError: an argument makes no sense.
        MissingExtraError: SciPy is not installed.

    Numerics: `random`, NumPy and torch are seeded before each call and left as they were found.
    """
    if not callable(function):
        raise UsageError(f"`function` is {type(function).__name__}, expected something to call, once a seed")
    settings = FlakeOptions(seeds=seeds, first=first, repeats=repeats)
    binomial.special_functions()
    wants_seed = takes_seed(function)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    runs: list[Run] = []
    with preserved():
        for repeat in range(repeats):
            for place, seed in enumerate(range(first, first + seeds)):
                seed_all(seed)
                began = time.perf_counter()
                outcome, message, margin = call(function, seed if wants_seed else None)
                margins = () if margin is None else (returned(margin),)
                seconds = time.perf_counter() - began
                runs.append(
                    Run(seed, outcome, process=repeat, place=place, message=message, seconds=seconds, margins=margins)
                )
    return describe(name, runs, (), settings)
