"""Programs in turns: each may be stopped before any access to memory, and which goes on is drawn from a seed.

For kernels in which programs learn of each other, by the result of an atomic or by a loop that waits: all at once they
would wait for ever, one after another they would never show what the order decides.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from retrograd.ttir.control_flow import walk_blocks
from retrograd.ttir.element_types import Array
from retrograd.ttir.frames import Again, EndlessLoopError, Frame, LaunchState
from retrograd.ttir.ir import SourcePlace
from retrograd.ttir.program import NumpyKernel
from retrograd.ttir.storage import Storage

# A change of memory may send all others round once more: programs at a ticket lock make 0.9 rounds times the square of
# their number together.
_ROUNDS_EACH = 64
Look = tuple[Storage, Array, int]  # elements of this size


class _Watch:
    """Programs that wait for a change of the same memory, in which they saw the same.

    Attributes:
        place: the line at which they wait.
        members: their numbers.
    """

    def __init__(self, places: list[tuple[Storage, Array]], seen: bytes, place: SourcePlace) -> None:
        self._places, self._seen, self.place = places, seen, place
        self.members: list[int] = []

    def changed(self) -> bool:
        """Whether they would see something else now."""
        return _seen(self._places) != self._seen


def _seen(places: list[tuple[Storage, Array]]) -> bytes:
    return b"".join(storage.octets[octets].tobytes() for storage, octets in places)


class _Waiting:
    """Programs that wait: one that would see what it has seen is not asked again.

    Of 500 programs that wait for a lock, 499 would look in vain each time that it is given back: 51 s instead of 2.
    """

    def __init__(self) -> None:
        self._watches: dict[tuple[Any, ...], _Watch] = {}
        self._awake: list[_Watch] = []
        self._version = -1
        self.programs = 0

    def park(self, number: int, place: SourcePlace, looks: list[Look]) -> None:
        """A program waits for a change of what it has looked at in its last round."""
        cells = [(storage, index.reshape(-1, 1) * size + np.arange(size)) for storage, index, size in looks]
        seen = _seen(cells)
        key = (tuple((storage.start, octets.tobytes()) for storage, octets in cells), seen)
        if key not in self._watches:
            self._watches[key] = _Watch(cells, seen, place)
        watch = self._watches.pop(key)  # the last that a program came to is the last of all
        watch.members.append(number)
        self._watches[key] = watch
        self.programs += 1
        self._version = -1

    def awake(self, version: int) -> list[_Watch]:
        """Those whose programs would see something else, at a version of memory."""
        if self._watches and version != self._version:
            for key in [key for key, watch in self._watches.items() if not watch.members]:
                del self._watches[key]
            self._awake = [watch for watch in self._watches.values() if watch.changed()]
            self._version = version
        return [watch for watch in self._awake if watch.members]

    def take(self, watch: _Watch, draws: random.Random) -> int:
        """One of the programs of a watch, which waits no longer."""
        self.programs -= 1
        return watch.members.pop(draws.randrange(len(watch.members)))

    def last(self, awake: list[_Watch]) -> int:
        """The program that has come last of those that are awake."""
        self.programs -= 1
        return awake[-1].members.pop()

    def first_place(self) -> SourcePlace:
        return next(watch.place for watch in self._watches.values() if watch.members)


def run_in_turns(
    kernel: NumpyKernel, launch: LaunchState, registers: list[object], programs: Array, seed: int | None,
    stays: float = 0.0,
) -> tuple[list[int], int]:  # fmt: skip
    """Run all programs of a launch to their ends; their numbers in the order of these, and how many turns there were.

    Args:
        kernel: compiled.
        launch: what they share.
        registers: of a program before its first step: constants and arguments.
        programs: their numbers, in the order in which they start.
        seed: of the draws; None where the last one that can goes on, until it waits or ends.
        stays: how often who has the turn keeps it, where turns are drawn.

    Raises:
        EndlessLoopError: all that have not ended wait for what none of them will do, or the limit is reached.
    """
    draws = None if seed is None else random.Random(seed)
    launch.limit = max(launch.limit, _ROUNDS_EACH * len(programs) ** 2)
    launch.restart()
    memory = launch.memory
    frames = (Frame(list(registers), programs[i : i + 1], {}, launch) for i in range(len(programs)))
    walks = [walk_blocks(kernel.blocks, frame) for frame in frames]
    ready, waiting = list(range(len(walks))), _Waiting()
    ended, turns = list[int](), 0
    looked = [-1] * len(walks)  # memory's version at a program's last round
    looks: list[list[Look]] = [[] for _ in walks]  # of a program in its round
    while ready or waiting.programs:
        awake = waiting.awake(memory.version)
        if not (ready or awake):
            why = f"{waiting.programs} programs wait here for what no program will do"
            raise EndlessLoopError(memory.kernel, waiting.first_place(), why)
        turns += 1
        if draws is None or (stays and ready and draws.random() < stays):
            if awake and (draws is None or not ready):
                ready.append(waiting.last(awake))
            at = len(ready) - 1
        else:
            # Those that wait for the same count as one: who looks first mostly changes it for the others.
            at = draws.randrange(len(ready) + len(awake))
            if at >= len(ready):
                ready, at = [*ready, waiting.take(awake[at - len(ready)], draws)], len(ready)
        number = ready[at]
        if stays:
            ready[at], ready[-1], at = ready[-1], number, len(ready) - 1
        memory.looks = looks[number]
        stopped = next(walks[number], None)
        if stopped is None or (isinstance(stopped, Again) and stopped.same and looked[number] == memory.version):
            ready[at] = ready[-1]
            ready.pop()
            if stopped is None:
                ended.append(int(programs[number]))
            else:
                waiting.park(number, stopped.place, looks[number])  # type: ignore[union-attr]
        if isinstance(stopped, Again):
            looked[number], looks[number] = memory.version, []
    memory.looks = None
    return ended, turns


def orders(count: int, seed: int) -> Array:
    """Numbers of the programs in an order drawn from a seed; as they are for seed 0."""
    numbers = np.arange(count, dtype=np.int64)
    return np.random.default_rng(seed).permutation(numbers) if seed else numbers
