"""Latest accesses of each program, by blocks of cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrograd.ttir.element_types import Array

BLOCK = 512  # cells whose clocks are kept together: 4 KiB for each program that touches some of them


class LatestAccesses:
    """The latest accesses of one kind to a block of cells, a row a program: its clock then, and which access it was.

    Attributes:
        programs: of the rows.
        clocks, accesses: [rows that there is room for, BLOCK], 0 where a program has not been.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._programs = np.zeros(1, np.int64)
        self.clocks = np.zeros((1, BLOCK), np.int32)
        self.accesses = np.zeros((1, BLOCK), np.int32)

    @property
    def programs(self) -> Array:
        return self._programs[: len(self._rows)]

    def row(self, program: int) -> int:
        """The row of a program, a new one where it has none."""
        row = self._rows.setdefault(program, len(self._rows))
        if row == len(self.clocks):
            self._programs = np.concatenate([self._programs, np.zeros_like(self._programs)])
            self.clocks = np.concatenate([self.clocks, np.zeros_like(self.clocks)])
            self.accesses = np.concatenate([self.accesses, np.zeros_like(self.accesses)])
        self._programs[row] = program
        return row


NOWHERE = LatestAccesses()


def _as_slice(inside: Array) -> Array | slice:
    """Cells as a slice where they follow each other, of which NumPy makes no copy."""
    first = int(inside[0])
    follow = int(inside[-1]) - first == len(inside) - 1 and (len(inside) < 2 or bool((np.diff(inside) == 1).all()))
    return slice(first, first + len(inside)) if follow else inside


def blocks_of(cells: Array) -> list[tuple[int, Any, Array | slice]]:
    """Cells by the block that they are in: its number, which of them, and where they lie in it."""
    numbers, inside = cells // BLOCK, cells % BLOCK
    first = int(numbers[0]) if len(numbers) else 0
    if (numbers == first).all():
        return [(first, slice(None), _as_slice(inside))] if len(numbers) else []
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    parts = np.split(order, starts[1:])
    return [(int(numbers[lanes[0]]), lanes, _as_slice(inside[lanes])) for lanes in parts]
