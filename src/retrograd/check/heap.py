"""Python's garbage collector while an op is verified: it looks at what is made meanwhile, not at all that is loaded.

A walk through the objects of torch and Triton takes 0.2 s and finds nothing, and a verification makes enough objects
for one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_aside = False
# New objects after which it looks at them, instead of 700: most are gone by then without it. 77 walks a verification
# took 2 % of it.
_YOUNG = 10_000


@contextmanager
def set_aside() -> Iterator[None]:
    """Set what there is aside, and put it back afterwards; does nothing where somebody has set objects aside before."""
    global _aside
    if gc.get_freeze_count():
        yield
        return
    threshold = gc.get_threshold()
    gc.freeze()
    _aside = True
    if threshold[0]:  # 0 is off
        gc.set_threshold(max(_YOUNG, threshold[0]), *threshold[1:])
    try:
        yield
    finally:
        _aside = False
        gc.set_threshold(*threshold)
        gc.unfreeze()


def objects() -> list[Any]:
    """Every object that the collector knows, also what is set aside here."""
    if not _aside:
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
