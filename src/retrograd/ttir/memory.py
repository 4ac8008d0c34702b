"""Memory of a launch: the tensors that pointers lead to, and every load, store and atomic checked against them.

Accesses outside are noted and not made: a stray write harms nobody, and a wild address does not end the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from retrograd.ttir.atomics import CHANGE_NOTHING_BY_ZERO, UPDATES, bitwise_equal, update_in_turns
from retrograd.ttir.element_types import Array, chosen
from retrograd.ttir.faults import FaultList
from retrograd.ttir.memory_faults import AccessFaults
from retrograd.ttir.races import Cells, EqualBits, OrderedRaces, UnorderedRaces, atomic_of
from retrograd.ttir.storage import LearnedStorages, MemoryAccess, Pointer, Storage

_KINDS = {"load": "read", "store": "write"}


class Memory(AccessFaults):
    """What a launch may touch.

    Args:
        pointers: of the pointer arguments, by their number among all arguments of the function.
        accesses: of the kernel.
        kernel: its name.
        faults: where faults go.
        races: the detector; None where races are not looked for.
        grid: programs along each axis.
        changed: is called when a store or an atomic changes memory.
        may_overflow: whether every address is held against the exact one, and not only those outside of tensors.
        learned: storages that pointers in memory led to in other runs of the launch.
        on_learning: is called with each that they lead to in this one, before it is touched.
        looks: storage, elements and their size, of what loops that may wait load or update; None to note nothing.
    """

    def __init__(
        self, pointers: dict[int, Pointer], accesses: Sequence[MemoryAccess], kernel: str, faults: FaultList,
        grid: tuple[int, int, int], library: str = "", learned: LearnedStorages | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pointers, accesses, kernel, faults, grid, library)
        self.races: UnorderedRaces | OrderedRaces | None = None
        self.version, self.may_overflow = 0, False
        self.order_matters: dict[int, int] = {}
        self.on_access: list[Callable[[MemoryAccess, Array, Array], None]] = []
        self.on_learning: list[Callable[[Storage], None]] = []
        self.looks: list[tuple[Storage, Array, int]] | None = None
        self._who: dict[tuple[int, ...], tuple[Array, Array]] = {}  # shape -> programs, and that of each lane
        self._learned = learned if learned is not None else LearnedStorages()
        self._storages = list({id(p.storage): p.storage for p in pointers.values()}.values())
        self._storages += self._learned.storages
        self._mark_shadows()

    def _mark_shadows(self) -> None:
        """Decide which storages need a shadow: those that the kernel writes to, in cells of its narrowest access."""
        for storage in self._storages:
            storage.cell, storage.readable = 0, False
        for access in self.accesses:
            if access.does != "load":
                for storage in self.storages_of(access):
                    storage.cell = 16
        for access in self.accesses:
            for storage in self.storages_of(access):
                if storage.cell:
                    storage.cell = min(storage.cell, access.kind.size)
                    storage.readable |= access.does == "load"

    def storages_of(self, access: MemoryAccess) -> list[Storage]:
        """Where an access may lead: anywhere by a pointer from memory, or by an argument that is an address alone."""
        named = access.arguments or ()
        if access.arguments is None or not all(number in self.pointers for number in named):
            return self._storages
        return [self.pointers[number].storage for number in named]

    def load(
        self, access: MemoryAccess, programs: Array, addresses: Array, mask: Array | None, other: Array | None
    ) -> tuple[Array, Array | None]:
        """Values at addresses, and which of them nobody has written; None if all are defined."""
        kind = access.kind
        result: Array | None = None
        undefined: Array | None = None
        for storage, index, allowed in self._split(access, programs, addresses, mask):
            if access.in_loop and self.looks is not None:
                self.looks.append((storage, index, kind.size))
            values = storage.taken(kind, index)
            if storage.undefined is not None:
                unknown = storage.undefined[index * kind.size]
                unknown = unknown if allowed is None else unknown & allowed
                if unknown.any():
                    self.unknown_reads.add(access.number)
                    undefined = unknown if undefined is None else undefined | unknown
            result = values if allowed is None else chosen(allowed, values, other if result is None else result)
            if storage.cell and self.races is not None:
                self._touch(access, storage, index, allowed, programs)
        if result is None:
            shape = np.broadcast_shapes(addresses.shape, (1,) if mask is None else mask.shape)
            result = other if other is not None else np.zeros(shape, kind.compute)
        return result, undefined

    def store(
        self, access: MemoryAccess, programs: Array, addresses: Array, values: Array, mask: Array | None,
        undefined: Array | None = None,
    ) -> None:  # fmt: skip
        """Put values to addresses; `undefined`: which of them come from memory that nobody has written."""
        kind = access.kind
        for storage, index, allowed in self._split(access, programs, addresses, mask):
            index, (bits, unknown), who = self._lanes(index, programs, (values, undefined), allowed)
            bits, plain = kind.encode(bits).view(unsigned := f"u{kind.size}"), storage.view(kind.memory).view(unsigned)
            storage.note_written(index, kind.size)
            storage.note_undefined(index, kind.size, unknown)
            if unknown is not None:
                self.handed_on.add(storage.start)
            if storage.cell and self.races is not None:
                self._mark(access, storage, index, who, EqualBits(plain, index, bits))
                self.version += self.races.ordered and bool((plain[index] != bits).any())
            else:
                self.version += 1
            plain[index] = bits
            if len(index) > 1 and (lost := plain.take(index) != bits).any():
                self.lanes_meet(access, storage, index, who, bits, lost)

    def atomic(
        self, access: MemoryAccess, programs: Array, addresses: Array, values: Sequence[Array], mask: Array | None,
        wanted: bool, undefined: Array | None = None,
    ) -> tuple[Array, Array | None]:  # fmt: skip
        """Update memory atomically in the order of the programs and lanes; the values before, where they are wanted.

        `undefined`, and the second result: as of stores, and as of loads.
        """
        kind = access.kind
        # Each lane counts, also where all of them update one element by one value.
        shape = (len(programs), *access.shape)
        addresses = _spread(addresses, shape)
        before = np.zeros(shape if wanted else (1,) * len(shape), kind.compute)
        unknown_before: Array | None = None
        idle = values[0] == 0 if access.operation in CHANGE_NOTHING_BY_ZERO else None
        for storage, index, allowed in self._split(access, programs, addresses, mask, idle):
            index, (*lanes, unknown), who = self._lanes(index, programs, (*values, undefined), allowed)
            if not len(index):
                continue
            view = storage.view(kind.memory)
            if access.in_loop and self.looks is not None:
                self.looks.append((storage, index, kind.size))
            if self.races is not None:
                swaps = access.operation != "cas" or bitwise_equal(kind.decode(view[index]), lanes[0]).any()
                self._synchronise(access, storage, index, who, bool(swaps), wanted)
            storage.note_written(index, kind.size)
            update = UPDATES[access.operation]
            unknown_old = storage.update_undefined(index, kind.size, unknown, update.replaces)
            if unknown_old is not None:
                self.unknown_reads.add(access.number)
            if unknown is not None or unknown_old is not None:
                self.handed_on.add(storage.start)
            direct = update.ufunc if kind.round is None and kind.name != "i1" else None
            if direct is not None and not wanted:
                unsigned = f"u{kind.size}" if update.unsigned else view.dtype
                direct.at(view.view(unsigned), index, lanes[0].view(unsigned))
                self.version += 1
                self._note_order(access, index, who)
                continue
            old, changed = update_in_turns(update, kind, view, index, lanes)
            self.version += changed
            if wanted:
                at = _spread(allowed, shape) if allowed is not None else np.ones(shape, bool)
                before[at] = old
                if unknown_old is not None:
                    unknown_before = np.zeros(shape, bool) if unknown_before is None else unknown_before
                    unknown_before[at] = unknown_old
        return before, unknown_before

    def _lanes(
        self, index: Array, programs: Array, values: tuple[Array | None, ...], allowed: Array | None
    ) -> tuple[Array, list[Any], Array]:
        """Flat indices, values and programs of the lanes that are accessed."""
        shapes = {x.shape for x in (index, allowed, *values) if x is not None}
        shapes.add((len(programs),) + (1,) * (index.ndim - 1))
        shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)
        if self._who.get(shape, (None,))[0] is not programs:  # a loop stores in the same way, round after round
            column = programs.astype(np.int32).reshape(-1, *(1,) * (len(shape) - 1))
            self._who[shape] = programs, _spread(column, shape).reshape(-1)
        flat = [None if x is None else _spread(x, shape).reshape(-1) for x in (index, *values)]
        flat.append(self._who[shape][1])
        if allowed is not None:
            lanes = np.flatnonzero(_spread(allowed, shape))
            flat = [None if x is None else x.take(lanes) for x in flat]
        first, *each, who = flat
        assert first is not None
        assert who is not None
        return first, each, who

    def _split(
        self, access: MemoryAccess, programs: Array, addresses: Array, mask: Array | None, idle: Array | None = None
    ) -> list[tuple[Storage, Array, Array | None]]:
        """Storages that an access leads to, at which element each lane is, and the lanes that do; None for all of them.

        Those that do not are at an element too, which says nothing. `idle`: lanes that change nothing where they are.
        """
        if mask is not None:
            count = np.count_nonzero(mask)  # a tenth of what mask.all() and mask.any() take of a small one
            if not count:
                return []
            mask = None if count == mask.size else mask
        if self.may_overflow and access.exact is not None and self.registers is not None:
            self._note_overflow(access, access.exact.of(access.address, self.registers), programs, addresses, mask)
        size = access.kind.size
        pointer = self.only(access)
        whole = pointer if pointer is not None and pointer.covered is None else None
        if whole is not None and (index := _within(whole, addresses, mask, size)) is not None:
            return [(whole.storage, index, mask)]
        shape = addresses.shape if mask is None else np.broadcast_shapes(addresses.shape, mask.shape)
        lanes, addresses = np.ones(shape, bool) if mask is None else _spread(mask, shape), _spread(addresses, shape)
        parts = self._checked(access, programs, addresses, lanes, pointer, idle)
        shift = size.bit_length() - 1
        return [(storage, np.where(led, (addresses - storage.start) >> shift, 0), led) for storage, led in parts]

    def _checked(
        self, access: MemoryAccess, programs: Array, addresses: Array, lanes: Array, pointer: Pointer | None,
        idle: Array | None,
    ) -> list[tuple[Storage, Array]]:  # fmt: skip
        """Storages that lanes lead to one by one, with those that do; what is wrong with the others is noted."""
        size = access.kind.size
        crooked = lanes & ((addresses & (size - 1)) != 0)
        if crooked.any():
            self.fault("misaligned", access, programs, addresses, crooked, pointer)
            lanes = lanes & ~crooked
        if pointer is not None:
            return self._in_tensor(access, programs, addresses, lanes, pointer, idle)
        return self._anywhere(access, programs, addresses, lanes)

    def _note_overflow(
        self, access: MemoryAccess, exact: Array, programs: Array, addresses: Array, mask: Array | None
    ) -> None:
        """Note addresses in a tensor that are not those which arithmetic without end gives."""
        pointer = self.only(access)
        wrong = exact != addresses
        if pointer is None or not wrong.any():
            return
        wrong = wrong & (addresses >= pointer.start) & (addresses < pointer.end)
        wrong = wrong if mask is None else wrong & mask
        if wrong.any():
            self.fault("overflow", access, programs, _spread(addresses, wrong.shape), wrong, pointer)

    def _in_tensor(
        self, access: MemoryAccess, programs: Array, addresses: Array, lanes: Array, pointer: Pointer,
        idle: Array | None,
    ) -> list[tuple[Storage, Array]]:  # fmt: skip
        size = access.kind.size
        outside = lanes & ((addresses < pointer.start) | (addresses + size > pointer.end))
        between = np.zeros_like(outside)
        if pointer.covered is not None and pointer.whole is None:
            element = np.where(inside := lanes & ~outside, (addresses - pointer.start) // pointer.size, 0)
            between = inside & ~pointer.covered[element]
        if pointer.whole is not None:
            meant = (addresses >= pointer.whole[0]) & (addresses + size <= pointer.whole[1])
        elif idle is not None:  # whatever lies there is left as it is
            meant = idle & (addresses >= pointer.storage.start) & (addresses + size <= pointer.storage.end)
        else:  # padding that a launcher has allocated beside the view: a store harms nobody whose number lies there
            meant = pointer.storage.is_spare(addresses, size) if access.does == "store" else None
        if meant is not None and (beyond := (outside | between) & meant).any():
            self.fault("beyond a view", access, programs, addresses, beyond, pointer)
            outside, between = outside & ~meant, between & ~meant
        if outside.any():
            self.fault("out of bounds", access, programs, addresses, outside, pointer)
        if between.any():
            self.fault("between rows", access, programs, addresses, between, pointer)
        storage = pointer.storage
        lanes = lanes & (addresses >= storage.start) & (addresses + size <= storage.end)
        return [(storage, lanes)] if lanes.any() else []

    def _anywhere(
        self, access: MemoryAccess, programs: Array, addresses: Array, lanes: Array
    ) -> list[tuple[Storage, Array]]:
        """Lanes whose pointers come from memory or from several arguments, by the storage that they are in."""
        size = access.kind.size
        if not lanes.any():
            return []
        if self.storages_of(access) is self._storages:
            self._learn(addresses[lanes], size)
        parts: list[tuple[Storage, Array]] = []
        missing = lanes
        for storage in self.storages_of(access):
            within = missing & (addresses >= storage.start) & (addresses + size <= storage.end)
            if within.any():
                parts.append((storage, within))
                missing = missing & ~within
        if missing.any():
            self.fault("out of bounds", access, programs, addresses, missing, None)
        return parts

    def _learn(self, addresses: Array, size: int) -> None:
        """Add tensors of the process that pointers in memory lead to and no argument names."""
        unknown = addresses
        for storage in self._storages:
            unknown = unknown[(unknown < storage.start) | (unknown + size > storage.end)]
        if not len(unknown):
            return
        for storage in self._learned.behind(unknown):
            self._storages.append(storage)
            for notify in self.on_learning:
                notify(storage)
        self._mark_shadows()

    def _touch(
        self, access: MemoryAccess, storage: Storage, index: Array, allowed: Array | None, programs: Array
    ) -> None:
        """Note a load where stores of the kernel may meet it."""
        index, _, who = self._lanes(index, programs, (), allowed)
        if access.is_atomic:
            self._synchronise(access, storage, index, who)
        else:
            self._mark(access, storage, index, who)

    def _synchronise(
        self, access: MemoryAccess, storage: Storage, index: Array, who: Array, writes: bool = False, looks: bool = True
    ) -> None:
        """Note atomics: they are in conflict with plain accesses only, and order programs if they are told to."""
        if not access.is_atomic:
            self._mark(access, storage, index, who, kind="write")
            return
        assert self.races is not None
        if isinstance(self.races, OrderedRaces):
            if access.operation == "store" and access.does == "atomic":
                self.races.overwrite(storage, index * access.kind.size)
            self.races.synchronise(int(who[0]), storage, index * access.kind.size, access.order, writes, looks)
        self._mark(access, storage, index, who, kind=atomic_of(access.kind.size // storage.cell))

    def _mark(
        self, access: MemoryAccess, storage: Storage, index: Array, who: Array,
        equal: EqualBits | None = None, kind: str = "",
    ) -> None:  # fmt: skip
        if not len(index) or self.races is None:
            return
        per = access.kind.size // storage.cell
        cells = index
        if per > 1:
            cells = (index[:, None] * per + np.arange(per)).reshape(-1)
            who = np.repeat(who, per)
            if equal is not None:
                equal.per = per
        kind = kind or _KINDS[access.does]
        if kind == "write" and isinstance(self.races, OrderedRaces) and access.does == "store":
            self.races.overwrite(storage, index * access.kind.size)
        if kind != "read" or storage.readable:
            size = -(-len(storage.octets) // storage.cell)
            self.races.touch(kind, Cells(storage, cells, who, access.number, equal), size)

    def _note_order(self, access: MemoryAccess, index: Array, who: Array) -> None:
        """Remember float additions of several programs to one element: their order decides bits."""
        if access.operation == "fadd" and access.number not in self.order_matters:
            order = np.argsort(index, kind="stable")
            same = (index[order][1:] == index[order][:-1]) & (who[order][1:] != who[order][:-1])
            if same.any():
                self.order_matters[access.number] = int(same.sum())

    def written(self) -> list[Storage]:
        """Storages that the kernel may write to."""
        storages = [s for access in self.accesses if access.does != "load" for s in self.storages_of(access)]
        return list({id(storage): storage for storage in storages}.values())

    def last_writers(self, storage: Storage, octets: Array) -> Iterator[tuple[MemoryAccess, Array]]:
        """Accesses that wrote bytes of a storage last, each with those bytes."""
        if self.races is None or not storage.cell:
            return
        numbers = self.races.last_writers(storage, octets // storage.cell)
        for number in np.unique(numbers[numbers >= 0]).tolist():
            yield self.accesses[number], octets[numbers == number]


def _spread(values: Array, shape: tuple[int, ...]) -> Array:
    """np.broadcast_to, which takes its time also where nothing is to be done."""
    return values if values.shape == shape else np.broadcast_to(values, shape)


def _within(pointer: Pointer, addresses: Array, mask: Array | None, size: int) -> Array | None:
    """At which elements of this size of its storage addresses are that all lie in a tensor; None where one does not.

    What is masked away is at the tensor's first element.
    """
    offsets, start = addresses - pointer.start, pointer.storage.start
    if mask is not None:
        if start & (size - 1):
            return None
        offsets = offsets * mask
    # Reductions by name: methods of arrays take twice as long for a few numbers. What is before the tensor is a huge
    # number without a sign, and so is what has any bit of one.
    places = offsets.view(np.uint64)
    last, bits = pointer.end - pointer.start - size, int(np.bitwise_or.reduce(places, axis=None))
    if bits > last and int(np.maximum.reduce(places, axis=None)) > last:
        return None
    if ahead := pointer.start - start:
        offsets += ahead
    if (bits | ahead) & (size - 1) and int(np.bitwise_or.reduce(offsets, axis=None)) & (size - 1):
        return None
    offsets >>= size.bit_length() - 1
    return offsets
