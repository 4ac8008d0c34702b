"""Launches kept with what they read and wrote: one that comes again with the same bytes is put in place, not executed.

A kernel's results depend on its code, its grid, its arguments and the memory that it reads, and on the order of its
programs only where two of them touch the same memory, which is looked for at every launch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrograd.compat.triton_autotuning import ChosenConfigurations
from retrograd.runtime.triton.fake_cuda_module import timings
from retrograd.ttir.element_types import Array
from retrograd.ttir.execution import Execution
from retrograd.ttir.faults import FaultList, KernelFault, LaunchRecord
from retrograd.ttir.frames import EndlessLoopError
from retrograd.ttir.program import NumpyKernel
from retrograd.ttir.storage import Storage

_MOST_READ = 16 << 20  # bytes of a launch's storages, beyond which hashing them is not tried
_MOST_KEPT = 64 << 20  # bytes written by all launches that are kept
RACES = frozenset({"race", "same value"})


@dataclass
class KeptLaunch:
    """What a launch did.

    Attributes:
        record: of the session.
        faults: what was noticed.
        writes: number of a storage, its bytes that were written (None for all), and what they hold.
    """

    record: LaunchRecord
    faults: list[KernelFault]
    writes: list[tuple[int, Array | None, Array]]

    def put(self, storages: Sequence[Storage]) -> None:
        """Write what it wrote."""
        for number, octets, values in self.writes:
            storages[number].octets[slice(None) if octets is None else octets] = values


class KeptLaunches:
    """Launches of a verification, by all that their results depend on.

    Attributes:
        stuck: what was said of kernels that did not end, by name: their other launches have fewer rounds to end.
        choices: of autotuners, in sessions that run them with their first configurations.
        timings: how often programs had asked before how long something takes.
    """

    def __init__(self) -> None:
        self.choices: ChosenConfigurations | None = None
        self.stuck: dict[str, EndlessLoopError] = {}
        self._launches: dict[Any, KeptLaunch] = {}
        self._bytes = 0
        self.timings = timings()

    @staticmethod
    def key(execution: Execution) -> Any:
        """Of a launch but for the order of its programs; None where it is not to be kept."""
        kernel, storages = execution.kernel, execution.storages
        if not kernel.repeats or not _touched(kernel) <= execution.pointers.keys():
            return None
        if any(s.undefined is not None for s in storages):
            return None
        if sum(len(s.octets) for s in storages) > _MOST_READ:
            return None
        return kernel, execution.grid, _digest(execution, storages)

    def find(self, key: Any, seed: int) -> KeptLaunch | None:
        """The launch with this key, in whatever order where that decides nothing."""
        return self._launches.get(key) or self._launches.get((key, seed))

    def keep(self, key: Any, seed: int, execution: Execution, record: LaunchRecord, faults: FaultList) -> KeptLaunch:
        """Keep a launch that was executed with its writes noted."""
        writes: list[tuple[int, Array | None, Array]] = []
        for number, storage in enumerate(execution.storages):
            if storage.written is not None:
                octets = None if storage.written.all() else np.flatnonzero(storage.written)
                values = storage.octets[slice(None) if octets is None else octets].copy()
                self._bytes += values.nbytes + (0 if octets is None else octets.nbytes)
                writes.append((number, octets, values))
        meet = execution.kernel.updates or record.in_turns or any(fault.kind in RACES for fault in faults)
        kept = KeptLaunch(record, list(faults), writes)
        if self._bytes < _MOST_KEPT:
            self._launches[(key, seed) if meet and execution.programs > 1 else key] = kept
        return kept


@functools.lru_cache(256)
def _touched(kernel: NumpyKernel) -> frozenset[int]:
    """Numbers of the arguments to which accesses may lead."""
    return frozenset(number for access in kernel.accesses for number in access.arguments or ())


def _digest(execution: Execution, storages: Sequence[Storage]) -> bytes:
    """Of arguments, where they lie in their storages, and the memory that may be read."""
    digest = hashlib.blake2b(digest_size=16)
    number = {id(storage): at for at, storage in enumerate(storages)}
    words: list[Any] = [(len(s.octets), s.start & 15) for s in storages]
    read: set[int] = set()
    for position, pointer in execution.pointers.items():
        at, start = number[id(pointer.storage)], pointer.storage.start
        words.append((position, at, pointer.start - start, pointer.end - start, pointer.size))
        if pointer.covered is not None:
            digest.update(pointer.covered.data)
        if position in execution.kernel.read and at not in read:
            read.add(at)
            digest.update(pointer.storage.octets.data)
    arguments = execution.kernel.arguments
    words += [
        (argument.slot, execution.scalars[argument.slot].tobytes())
        for position, argument in enumerate(arguments)
        if position not in execution.pointers
    ]
    digest.update(repr(words).encode())
    return digest.digest()
