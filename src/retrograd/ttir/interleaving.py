"""Programs in turns: each may be stopped before any access to memory, and which goes on is drawn from a seed.

For kernels in which programs learn of each other, by the result of an atomic or by a loop that waits: all at once they
would wait for ever, one after another they would never show what the order decides.
"""

from __future__ import annotations

import random

import numpy as np

from retrograd.ttir.control_flow import walk_blocks
from retrograd.ttir.element_types import Array
from retrograd.ttir.frames import Again, EndlessLoopError, Frame, LaunchState
from retrograd.ttir.ir import SourcePlace
from retrograd.ttir.program import NumpyKernel

# A change of memory may send all others round once more: programs at a ticket lock make 0.9 rounds times the square of
# their number together.
_ROUNDS_EACH = 64


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
    frames = [Frame(list(registers), programs[i : i + 1], {}, launch) for i in range(len(programs))]
    walks = [walk_blocks(kernel.blocks, frame) for frame in frames]
    ready = list(range(len(walks)))
    waiting: dict[int, SourcePlace] = {}
    ended: list[int] = []
    turns = 0
    looked = [-1] * len(walks)  # memory's version at a program's last round
    version = launch.memory.version
    while ready or waiting:
        if waiting and launch.memory.version != version:
            ready += waiting
            waiting.clear()
        if not ready:
            place, why = next(iter(waiting.values())), f"{len(waiting)} programs wait here for what no program will do"
            raise EndlessLoopError(launch.memory.kernel, place, why)
        turns += 1
        at = len(ready) - 1
        if draws and not (stays and draws.random() < stays):
            at = draws.randrange(len(ready))
        number = ready[at]
        if stays:
            ready[at], ready[-1], at = ready[-1], number, len(ready) - 1
        stopped = next(walks[number], None)
        if stopped is None or (isinstance(stopped, Again) and stopped.same and looked[number] == launch.memory.version):
            ready[at] = ready[-1]
            ready.pop()
            if stopped is None:
                ended.append(int(programs[number]))
            else:
                waiting[number] = stopped.place  # type: ignore[union-attr]
                version = launch.memory.version
        if isinstance(stopped, Again):
            looked[number] = launch.memory.version
    return ended, turns


def orders(count: int, seed: int) -> Array:
    """Numbers of the programs in an order drawn from a seed; as they are for seed 0."""
    numbers = np.arange(count, dtype=np.int64)
    return np.random.default_rng(seed).permutation(numbers) if seed else numbers
