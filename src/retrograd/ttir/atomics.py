"""Atomic updates of memory: several of one element one after another, in the order in which programs and lanes come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array, ElementType


def update_in_turns(
    update: Update, kind: ElementType, view: Array, index: Array, lanes: Sequence[Array]
) -> tuple[Array, bool]:
    """Update elements of a view, those that several lanes meet at in the order of the lanes.

    Returns:
        The values before each update, and whether memory has changed.
    """
    order = np.argsort(index, kind="stable")
    ranked = index[order]
    first = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]]))
    rank = np.arange(len(ranked)) - np.repeat(first, np.diff(np.concatenate([first, [len(ranked)]])))
    old = np.zeros(len(index), kind.compute)
    changed = False
    for turn in range(int(rank.max()) + 1):
        chosen = order[rank == turn]
        raw = view[index[chosen]]
        values = kind.decode(raw)
        old[chosen] = values
        encoded = kind.encode(update.apply(kind, values, *(lane[chosen] for lane in lanes)))
        changed |= bool((encoded != raw).any())
        view[index[chosen]] = encoded
    return old, changed


@dataclass(frozen=True)
class Update:
    """What an atomic does to a value: by a ufunc of NumPy, or by a function of the value and the operands.

    Attributes:
        replaces: whether the result is the operand, whatever was there.
    """

    ufunc: Any = None
    function: Callable[..., Array] | None = None
    unsigned: bool = False
    replaces: bool = False

    def apply(self, kind: ElementType, old: Array, *operands: Array) -> Array:
        if self.function is not None:
            return self.function(old, *operands)
        if self.unsigned:
            view = f"u{kind.size}"
            return self.ufunc(old.view(view), operands[0].view(view)).view(old.dtype)
        result = self.ufunc(old, operands[0])
        return kind.round(result) if kind.round else result


def bitwise_equal(a: Array, b: Array) -> Array:
    """Where values are the same to the bit, as swaps compare them."""
    if a.dtype.kind != "f":
        return a == b
    unsigned = f"u{a.dtype.itemsize}"
    return np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(b).view(unsigned)


UPDATES = {
    "fadd": Update(np.add), "add": Update(np.add), "max": Update(np.maximum), "min": Update(np.minimum),
    "umax": Update(np.maximum, unsigned=True), "umin": Update(np.minimum, unsigned=True),
    "and": Update(np.bitwise_and), "or": Update(np.bitwise_or), "xor": Update(np.bitwise_xor),
    "exch": Update(function=lambda old, new: new, replaces=True),
    "store": Update(function=lambda old, new: new, replaces=True),
    "cas": Update(function=lambda old, expected, new: np.where(bitwise_equal(old, expected), new, old)),
}  # fmt: skip
CHANGE_NOTHING_BY_ZERO = frozenset({"add", "fadd", "or", "xor"})
