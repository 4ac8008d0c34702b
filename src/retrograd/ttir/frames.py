"""Frames: the values of some programs of a launch, which can be split by program and merged again; compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrograd.errors import RetrogradError, UnsupportedOperationError
from retrograd.ttir.element_types import Array
from retrograd.ttir.ir import SourcePlace
from retrograd.ttir.memory import Memory
from retrograd.ttir.storage import MemoryAccess

_MOST_COUNTED = 1 << 24  # rounds of counted loops of a launch: minutes

# A walk stops with the access that comes next, or with the place of a loop that goes round once more.
Walk = Generator["MemoryAccess | Again", None, None]


class EndlessLoopError(RetrogradError):
    """A loop of a kernel does not end; the message has the kernel, the file and the line."""

    def __init__(self, kernel: str, place: SourcePlace, why: str) -> None:
        self.place, self.why = place, why
        super().__init__(f"a loop of kernel {kernel} at {place.file}:{place.line} does not end: {why}")


@dataclass
class Again:
    """A loop that may wait for other programs goes round again.

    Attributes:
        place: its line.
        same: whether the program would do exactly the same again if memory stays as it is.
    """

    place: SourcePlace
    same: bool


class Frame:
    """Values of some programs.

    Attributes:
        registers: arrays by slot, None where nothing was computed yet.
        programs: numbers of the programs, in the order in which they act.
        taint: slot -> which elements come from memory that nobody has written; only slots that have such.
        launch: what all frames of a launch share.
    """

    __slots__ = ("launch", "programs", "registers", "taint")

    def __init__(self, registers: list[Any], programs: Array, taint: dict[int, Array], launch: LaunchState) -> None:
        self.registers, self.programs, self.taint, self.launch = registers, programs, taint, launch

    def take(self, index: Array, slots: Iterable[int]) -> Frame:
        """A frame of some of the programs, with the values in these slots."""
        registers = list(self.launch.constants)
        for slot in slots:
            value = self.registers[slot]
            if value is not None:
                registers[slot] = value if value.shape[0] == 1 else value[index]
        taint = {s: t if t.shape[0] == 1 else t[index] for s, t in self.taint.items()} if self.taint else {}
        return Frame(registers, self.programs[index], taint, self.launch)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give values of some slots to others, all at once."""
        values = [self.registers[slot] for slot in sources]
        taints = [self.taint.get(slot) for slot in sources] if self.taint else ()
        for slot, value in zip(targets, values, strict=True):
            self.registers[slot] = value
        for slot, taint in zip(targets, taints, strict=False):
            self._set_taint(slot, taint)

    def _set_taint(self, slot: int, taint: Array | None) -> None:
        if taint is not None:
            self.taint[slot] = taint
        else:
            self.taint.pop(slot, None)

    def merge(self, parts: Sequence[tuple[Array, Frame, Sequence[int]]], targets: Sequence[int]) -> None:
        """Values of parts of the programs, each with the indices of its programs and its slots, into target slots."""
        count = len(self.programs)
        for position, target in enumerate(targets):
            values = [(index, part.registers[slots[position]]) for index, part, slots in parts]
            self.registers[target] = _joined(values, count)
            if any(part.taint for _, part, _ in parts):
                none = np.zeros((1,) * self.registers[target].ndim, bool)
                taints = [(index, part.taint.get(slots[position], none)) for index, part, slots in parts]
                joined = _joined(taints, count)
                self._set_taint(target, joined if joined.any() else None)


def _joined(parts: Sequence[tuple[Array, Array]], count: int) -> Array:
    first = parts[0][1]
    if first.shape[0] == 1 and all(value is first for _, value in parts):
        return first
    shape = np.broadcast_shapes(*(value.shape[1:] for _, value in parts))
    out = np.zeros((count, *shape), first.dtype)
    for index, value in parts:
        out[index] = value
    return out


@dataclass
class LaunchState:
    """What the frames of a launch share.

    Attributes:
        memory: tensors and checks.
        grid: programs along each axis.
        constants: registers of a new frame, which hold constants only.
        limit: rounds of loops with a condition, which may never end, that may be made from `restart` on.
        printed: lines that tt.print wrote.
    """

    memory: Memory
    grid: tuple[int, int, int]
    constants: list[Any]
    limit: int
    printed: Callable[[str], Any]

    def __post_init__(self) -> None:
        self.counted = _MOST_COUNTED
        self.restart()

    def restart(self) -> None:
        """Other programs begin, whose rounds are their own."""
        self.left = self.limit

    def spend(self, place: SourcePlace) -> None:
        """A loop with a condition goes round once more.

        Raises:
            EndlessLoopError: the limit is reached.
        """
        self.left -= 1
        if self.left < 0:
            raise EndlessLoopError(self.memory.kernel, place, f"its programs have gone round {self.limit:,} times")

    def count(self, place: SourcePlace) -> None:
        """A loop from a number to another, which ends by itself, goes round once more.

        Raises:
            UnsupportedOperationError: it is far from its end.
        """
        self.counted -= 1
        if self.counted < 0:
            where = f"{self.memory.kernel} ({place.file}:{place.line})"
            raise UnsupportedOperationError(
                f"scf.for of {where} is not executed to its end without a GPU: {_MOST_COUNTED:,} rounds were made"
            )


@dataclass(eq=False, slots=True)
class Step:
    """One operation of a block.

    Attributes:
        run: for all programs of a frame.
        walk: for a frame of one program that runs in turns with others; None where `run` does it.
        access: the access to memory that it makes, before which others may act.
    """

    run: Callable[[Frame], None]
    walk: Callable[[Frame], Walk] | None = None
    access: MemoryAccess | None = None


@dataclass(eq=False, slots=True)
class Code:
    """A block, compiled.

    Attributes:
        arguments: slots of its arguments.
        steps: its operations but for the last.
        last: name of the operation that ends it.
        operands: slots of the operands of that.
        successors: index of each block that may follow, and the slots that go to its arguments.
        live: slots of values from before the region that something in it uses.
        place: line of the operation that ends it.
    """

    arguments: list[int]
    steps: list[Step] = field(default_factory=list)
    runs: list[Callable[[Frame], None]] = field(default_factory=list)
    last: str = ""
    operands: list[int] = field(default_factory=list)
    successors: list[tuple[int, list[int]]] = field(default_factory=list)
    live: frozenset[int] = frozenset()
    place: SourcePlace = field(default_factory=SourcePlace)

    def run(self, frame: Frame) -> None:
        for run in self.runs:
            run(frame)

    def walk(self, frame: Frame) -> Walk:
        for step in self.steps:
            if step.walk is not None:
                yield from step.walk(frame)
                continue
            if step.access is not None:
                yield step.access
            step.run(frame)
