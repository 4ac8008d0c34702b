"""Delta debugging (ddmin, Zeller and Hildebrandt 2002): the smallest part of a list that still has a property. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def minimise(items: Sequence[Item], holds: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A part, in order, that has the property and loses it with any one item taken out (1-minimal).

    Nothing is assumed of the property but that all items have it: it may take several items, and be had by several
    parts, of which one is found. Of n items, k of them needed, about 2 k log2(n) calls if parts of those that have the
    property have it too, n^2 at worst; none is made twice.

    Args:
        items: distinct; all of them together have the property.
        holds: whether a part has it.
    """
    known: dict[tuple[Item, ...], bool] = {}

    def has_property(part: Sequence[Item]) -> bool:
        key = tuple(part)
        if key not in known:
            known[key] = holds(part)
        return known[key]

    left, pieces = list(items), 2
    while len(left) > 1:
        parts = _cut(left, pieces)
        rests: list[list[Item]] = (
            [[item for item in left if item not in set(part)] for part in parts] if len(parts) > 2 else []
        )
        smaller = next((part for part in parts if has_property(part)), None)
        if smaller is not None:
            left, pieces = smaller, 2
            continue
        smaller = next((rest for rest in rests if has_property(rest)), None)
        if smaller is not None:
            left, pieces = smaller, max(pieces - 1, 2)
        elif pieces >= len(left):
            break
        else:
            pieces = min(2 * pieces, len(left))
    return left


def _cut(items: list[Item], pieces: int) -> list[list[Item]]:
    ends = [len(items) * k // pieces for k in range(pieces + 1)]
    return [items[i:j] for i, j in pairwise(ends) if j > i]
