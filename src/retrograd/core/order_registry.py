"""Orders that a program keeps to beside its graphs, as a plan of gradient buckets. Standard library only.

Hooks of FSDP2 run outside of what torch.compile compiles, so the order of reductions is in no graph. Who makes such an
order announces it here, who watches a run reads it at each step, and neither imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(frozen=True)
class Order:
    """An order that is fixed before the steps that keep to it."""

    kind: str  # what it is in words, "bucket plan"
    key: str  # equal for equal orders, in every process; "" for one that was withdrawn
    rows: tuple[str, ...]  # what comes, in order, in words
    unit: str = "row"  # what a row is, "bucket"
    advice: str = ""  # what to do where it changes

    @property
    def title(self) -> str:
        """What it is, with its key."""
        return f"{self.kind} {self.key}"


_current: WeakKeyDictionary[Any, tuple[int, Order]] = WeakKeyDictionary()
_places = count()


def announce(owner: Any, order: Order) -> None:
    """Say that `order` holds from now on for its owner, the model; it takes the place of the one before."""
    place = _current[owner][0] if owner in _current else next(_places)
    _current[owner] = (place, order)


def withdraw(owner: Any) -> None:
    """Say that nothing holds for this owner any more; what becomes of an owner that is gone is no change."""
    if owner in _current:
        place, order = _current[owner]
        _current[owner] = (place, replace(order, key="", rows=()))


def current() -> dict[int, Order]:
    """The orders that hold now, by a number that an owner keeps; one that was withdrawn has no key."""
    return dict(sorted(_current.values(), key=lambda pair: pair[0]))
