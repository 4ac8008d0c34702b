"""Faults of accesses to memory, as what is known of a launch says them: argument, element, program, line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrograd.core.wording import count
from retrograd.ttir.element_types import Array
from retrograd.ttir.faults import AccessAt, FaultList, KernelFault, Program
from retrograd.ttir.ir import SourcePlace
from retrograd.ttir.races import Cells, Conflict
from retrograd.ttir.storage import MemoryAccess, Pointer, Storage

_DOES = {"load": "reads", "store": "writes", "atomic": "updates"}


class AccessFaults:
    """Notes faults of a launch.

    Args:
        pointers: of the pointer arguments, by their number among all arguments of the function.
        accesses: of the kernel.
        kernel: its name.
        faults: where faults go.
        grid: programs along each axis.
        library: folder of Triton's own functions on the device, whose lines are not the user's.
        registers: of the frame that makes an access.
        unknown: lanes of it whose addresses depend on memory that nobody has written, which is told as that.
    """

    def __init__(
        self, pointers: dict[int, Pointer], accesses: Sequence[MemoryAccess], kernel: str, faults: FaultList,
        grid: tuple[int, int, int], library: str = "",
    ) -> None:  # fmt: skip
        self.pointers = pointers
        self.accesses = accesses
        self.kernel, self._faults, self._grid, self._library = kernel, faults, grid, library
        self.registers: Sequence[Any] | None = None
        self.unknown: Array | None = None
        self.unknown_reads: set[int] = set()  # accesses that found what nobody has written
        self.handed_on: set[int] = set()  # addresses of the storages to which such was stored
        single = (a.arguments if a.arguments and len(a.arguments) == 1 else (-1,) for a in accesses)
        self._only = [pointers.get(number) for (number,) in single]

    def only(self, access: MemoryAccess) -> Pointer | None:
        """The argument that leads to where an access goes, if no other does."""
        return self._only[access.number]

    def origin(self) -> str:
        """Where the kernel reads what nobody has written."""
        first, *others = [self.where(self.accesses[number]).text() for number in sorted(self.unknown_reads)] or [""]
        more = f", and in {count(len(others), 'other place')}" if others else ""
        return f"kernel {self.kernel} {first}{more}"

    def decided_by_nothing(self, place: SourcePlace, program: int, what_for: str) -> None:
        """Note that memory which nobody has written decides an address, a mask or a branch."""
        file, line = place.outside_of(self._library)
        at = AccessAt("reads", file, line, self.program(program))
        self._faults.add(
            KernelFault(
                "uninitialised", self.kernel, at, detail=f"{what_for} depends on memory that nobody has written"
            )
        )

    def failed_assertion(self, place: SourcePlace, program: int, message: str) -> None:
        """Note that a tl.device_assert does not hold."""
        file, line = place.outside_of(self._library)
        self._faults.add(
            KernelFault("assertion", self.kernel, AccessAt("fails", file, line, self.program(program)), detail=message)
        )

    def program(self, number: int) -> Program:
        """Index of a program along each axis of the grid."""
        x, y, _ = self._grid
        return number % x, number // x % y, number // (x * y)

    def where(self, access: MemoryAccess, program: int | None = None) -> AccessAt:
        """An access for a report."""
        file, line = access.place.outside_of(self._library)
        does = _DOES[access.does] + (" atomically" if access.does == "atomic" else "")
        return AccessAt(does, file, line, None if program is None else self.program(program))

    def conflict(self, at: Cells, conflict: Conflict) -> None:
        """Note a race, as the detectors tell it."""
        storage: Storage = at.owner
        address = storage.start + int(conflict.cells[0]) * storage.cell
        second, first = self.accesses[conflict.second[1]], self.accesses[conflict.first[1]]
        pointer = self.named(second, storage, address) or self.named(first, storage, address)
        per = max((pointer.size if pointer else storage.cell) // storage.cell, 1)
        detail = ""
        if "cta" in (first.scope, second.scope) and "atomic" in (first.does, second.does):
            detail = 'scope="cta" orders and joins nothing between programs'
        elif first.does == second.does == "atomic":
            bits = sorted({8 * first.kind.size, 8 * second.kind.size})
            detail = f"atomics of {' and '.join(map(str, bits))} bits on the same bytes are not atomic to each other"
        self._faults.add(
            KernelFault(
                "same value" if conflict.same_value else "race",
                self.kernel,
                self.where(second, conflict.second[0]),
                self.where(first, conflict.first[0]),
                pointer.name if pointer else "",
                (address - pointer.start) // pointer.size if pointer else None,
                detail,
                -(-len(conflict.cells) // per),
            )
        )

    def lanes_meet(
        self, access: MemoryAccess, storage: Storage, index: Array, who: Array, bits: Array, lost: Array
    ) -> None:
        """Note elements to which lanes of one program store different bits at once; `lost`: lanes whose bits are gone.

        Threads have no order there. Where the lanes are of different programs it is a race of these.
        """
        lanes = np.flatnonzero(np.isin(index, index[lost]))
        lanes = lanes[np.lexsort((index[lanes], who[lanes]))]
        left, right = lanes[:-1], lanes[1:]
        meet = (index[left] == index[right]) & (who[left] == who[right]) & (bits[left] != bits[right])
        if not meet.any():
            return
        first, count = int(left[meet][0]), len(np.unique(np.stack([index[left], who[left]])[:, meet], axis=1).T)
        address = storage.start + int(index[first]) * access.kind.size
        pointer = self.named(access, storage, address)
        self._faults.add(
            KernelFault(
                "race",
                self.kernel,
                self.where(access, int(who[first])),
                argument=pointer.name if pointer else "",
                element=(address - pointer.start) // pointer.size if pointer else None,
                detail="lanes of this one store write different values to it, and nothing says which of them stays",
                count=count,
            )
        )

    def named(self, access: MemoryAccess, storage: Storage, address: int) -> Pointer | None:
        """The pointer argument by which an access comes to an address."""
        pointer = self.only(access)
        if pointer is not None:
            return pointer
        fitting = (p for p in self.pointers.values() if p.storage is storage and p.start <= address < p.end)
        return next(fitting, None)

    def _overflow(self, access: MemoryAccess, addresses: Array, index: tuple[Any, ...]) -> str:
        """Where an offset has overflowed, if the address at an index is not the exact one."""
        if access.exact is None or self.registers is None:
            return ""
        exact = access.exact.of(access.address, self.registers)
        if np.broadcast_to(exact, addresses.shape)[index] == addresses[index]:
            return ""
        wrap = access.exact.first_wrap(access.address, self.registers, int(index[0]))
        if wrap is None:
            return ""
        place, bits, value = wrap
        file, line = place.outside_of(self._library)
        return f"; its offset, {value}, overflows {bits} bits: it {AccessAt('is computed', file, line).text()}"

    def fault(
        self, kind: Any, access: MemoryAccess, programs: Array, addresses: Array, lanes: Array, pointer: Pointer | None
    ) -> None:
        if self.unknown is not None and np.broadcast_shapes(self.unknown.shape, lanes.shape) == lanes.shape:
            lanes = lanes & ~self.unknown
            if not lanes.any():
                return
        first = np.argwhere(lanes)[0]
        who = programs[first[0]] if lanes.shape[0] == len(programs) else programs[0]
        address = int(addresses[tuple(first)])
        element, detail = None, f"address {address:#x} is in no tensor of this launch"
        if pointer is not None:
            element = (address - pointer.start) // pointer.size
            holds = (pointer.end - pointer.start) // pointer.size
            detail = {
                "overflow": "an element that is not meant",
                "out of bounds": f"the tensor has {holds} element{'s' * (holds != 1)}",
                "beyond a view": f"the view has {holds} element{'s' * (holds != 1)}, the tensor that it is of has more",
                "between rows": "memory between the rows of a tensor that is not contiguous",
                "misaligned": f"an access of {access.kind.size} bytes at an address that is no multiple of that",
            }[kind]
        detail += self._overflow(access, addresses, tuple(first)) if kind != "misaligned" else ""
        name = pointer.name if pointer else ""
        at = self.where(access, int(who))
        self._faults.add(KernelFault(kind, self.kernel, at, None, name, element, detail, int(lanes.sum())))
