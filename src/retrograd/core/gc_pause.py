"""Pauses of Python's garbage collector, around work that makes many objects and no garbage."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_frozen_here = False
# New objects after which the collector looks at them while the rest is frozen, instead of 700: most are gone by then
# without it. 77 walks a verification took 2 % of it.
_YOUNG = 10_000


@contextmanager
def paused(*, age: bool = False) -> Generator[None, None, None]:
    """No collection meanwhile, where looking for garbage took a third of the time or more.

    Args:
        age: What was made counts as old afterwards, so that the next collection of young objects does not walk it:
            0.36 s of 11 with two graphs of 300,000 instructions.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if age and gc.get_freeze_count():
                gc.collect(1)
            elif age:
                gc.freeze()  # and back, but to the oldest: nothing is walked
                gc.unfreeze()
            gc.enable()


@contextmanager
def frozen() -> Generator[None, None, None]:
    """Collections look at what is made meanwhile, not at all that is loaded; does nothing where somebody froze before.

    A walk through the objects of torch and Triton takes 0.2 s and finds nothing.
    """
    global _frozen_here
    if gc.get_freeze_count():
        yield
        return
    threshold = gc.get_threshold()
    gc.freeze()
    _frozen_here = True
    if threshold[0]:  # 0 is off
        gc.set_threshold(max(_YOUNG, threshold[0]), *threshold[1:])
    try:
        yield
    finally:
        if threshold[0] and gc.isenabled():
            # Cycles may hold much: of 30 cases of grid_sample in 3d a process kept 20 GB, since they are few objects.
            gc.collect()
        _frozen_here = False
        gc.set_threshold(*threshold)
        gc.unfreeze()


def objects() -> list[Any]:
    """Every object that the collector knows, also what is frozen here."""
    if not _frozen_here:
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
