"""Footprint of a launch in Triton's interpreter: what it reads and writes, byte by byte in its tensors' memory."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

# Of so many bytes that are each True.
_SET = {1: 1, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class Footprint:
    """What a launch reads first and writes, byte by byte, in the memory of its tensors."""

    current: Footprint | None = None

    def __init__(self, memories: list[Any]) -> None:
        import numpy as np

        self.memories = memories  # arrays of bytes
        self.before = [m.copy() for m in memories]
        self.read = [np.zeros(len(m), dtype=bool) for m in memories]
        self.written = [np.zeros(len(m), dtype=bool) for m in memories]
        starts = [(m.ctypes.data, i) for i, m in enumerate(memories)]
        self.order = [i for _, i in sorted(starts)]
        self.begins = sorted(start for start, _ in starts)
        self.starts = np.array([memories[i].ctypes.data for i in self.order], dtype=np.uint64)
        self.complete = bool(memories)  # whether it has all that the launch does

    def undone(self) -> Footprint:
        """The footprint of the same launch with nothing made yet."""
        if any(written.any() for written in self.written):
            for memory, before in zip(self.memories, self.before, strict=True):
                memory[:] = before
        return Footprint(self.memories)

    def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """What lies at the addresses where the mask is set, elsewhere `other`; noted. None if not all in one tensor.

        The values that the interpreter's own load gives, which takes one element after another.
        """
        import numpy as np

        location = self._look_up(ptrs, mask, dtype.itemsize)
        if location is None or (other is not None and (other.shape != mask.shape or other.dtype != dtype)):
            return None
        index, where, size = location
        read, written, memory = (_by(a[index], size) for a in (self.read, self.written, self.memories))
        read[where] |= written[where] ^ _SET[size]
        values = memory[where].view(dtype)
        if values.size == mask.size:
            values = values.reshape(mask.shape)
            return values.copy() if isinstance(where, slice) else values
        result = np.zeros(mask.shape, dtype) if other is None else other.copy()
        result[mask] = values
        return result

    def store(self, ptrs: Any, mask: Any, values: Any) -> bool:
        """Write the values where the mask is set; noted. False, and nothing done, if that is not all in one tensor."""
        import numpy as np

        location = None if values.shape != mask.shape else self._look_up(ptrs, mask, values.dtype.itemsize)
        if location is None:
            return False
        index, where, size = location
        written, memory = _by(self.written[index], size), _by(self.memories[index], size)
        written[where] = _SET[size]
        memory[where] = np.ascontiguousarray(values[mask]).view(memory.dtype)
        return True

    def _look_up(self, ptrs: Any, mask: Any, size: int) -> tuple[int, Any, int] | None:
        """`_find`, which is done once for addresses that a tape knows by their distances from a pointer."""
        places = getattr(ptrs, "places", None)
        if places is None:
            return self._find(ptrs.data, mask, size)
        known = places.found.get(size)
        if known is None or known[0] is not mask:  # the same object if the tape has kept the mask too
            known = places.found[size] = mask, _distances(places.distances, mask, size)
        distances = known[1]
        if distances is None or not self.complete or not self.memories:
            return self._find(ptrs.data, mask, size)
        first, length, elements = distances
        low = int(ptrs.pointer[0]) + first
        place = bisect_right(self.begins, low) - 1
        index, start = self.order[place], self.begins[place]
        at = low - start
        if place < 0 or at + length > len(self.memories[index]):
            return None
        if elements is None:
            return index, slice(at, at + length), 1
        if at % size or len(self.memories[index]) % size:
            return None
        return index, elements + at // size, size

    def _find(self, addresses: Any, mask: Any, size: int) -> tuple[int, Any, int] | None:
        """Where accesses lie: in which memory, at which places of it, and of how many bytes these are."""
        import numpy as np

        if addresses.dtype != np.uint64 or mask.dtype != np.bool_ or mask.shape != addresses.shape or not self.complete:
            return None
        at = addresses[mask]
        if not at.size:
            return (0, slice(0, 0), 1) if self.memories else None
        low, high = int(at[0]), int(at[-1])
        run = high - low == (at.size - 1) * size and bool((at[1:] - at[:-1] == size).all())
        if not run:
            low, high = int(at.min()), int(at.max())
        place = bisect_right(self.begins, low) - 1
        index = self.order[place]
        start = self.begins[place]
        if place < 0 or high + size > start + len(self.memories[index]):
            return None
        if run:
            return index, slice(low - start, high - start + size), 1
        offsets = at - np.uint64(start)
        if len(self.memories[index]) % size or bool((offsets % np.uint64(size)).any()):
            return None
        return index, (offsets // np.uint64(size)).astype(np.int64), size

    def note(self, ptrs: Any, mask: Any, *, reads: bool, writes: bool) -> None:
        """Note one access of a program."""
        import numpy as np

        addresses = np.asarray(ptrs.data)
        chosen = np.ones(addresses.shape, bool) if mask is None else np.asarray(mask.data).astype(bool)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        if location := self._find(addresses, chosen, size):
            index, where, step = location
            read, written = _by(self.read[index], step), _by(self.written[index], step)
            if reads:
                read[where] |= written[where] ^ _SET[step]
            if writes:
                written[where] = _SET[step]
            return
        addresses = addresses[np.broadcast_to(chosen, addresses.shape)].ravel().astype(np.uint64)
        if not addresses.size or not self.complete:
            return
        places = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        if places.min() < 0:
            self.complete = False
            return
        for place in np.unique(places).tolist():
            index = self.order[place]
            offsets = (addresses[places == place] - self.starts[place]).astype(np.int64)
            if int(offsets.max()) + size > len(self.memories[index]):
                self.complete = False
                return
            every = (offsets[:, None] + np.arange(size)).ravel()
            read, written = self.read[index], self.written[index]
            if reads:
                read[every] |= ~written[every]
            if writes:
                written[every] = True

    def entry(self) -> tuple[list[Any], list[Any], int]:
        """AddressOffsets and bytes that were read, places and bytes that were written, and how much that is to keep."""
        reads, writes, total = [], [], 0
        for i, memory in enumerate(self.memories):
            for entries, marks, source in ((reads, self.read, self.before), (writes, self.written, [memory] * (i + 1))):
                places = marks[i].nonzero()[0]
                if len(places):
                    run = len(places) == places[-1] - places[0] + 1
                    where = slice(int(places[0]), int(places[-1]) + 1) if run else places
                    entries.append((i, where, source[i][where].copy()))
                    total += len(places) * (1 if run else 9)
        return reads, writes, total


def _by(array: Any, size: int) -> Any:
    """An array of bytes by elements of so many."""
    return array.view(f"u{size}")


def _distances(distances: Any, mask: Any, size: int) -> tuple[int, int, Any] | None:
    """The first byte of accesses, how many follow it to the last, and the elements from there on; None if all of them.

    Nothing for no accesses and for such as are not elements apart.
    """
    import numpy as np

    if mask.dtype != np.bool_ or mask.shape != distances.shape or size not in _SET:
        return None
    at = distances[mask].view(np.int64)
    if not at.size:
        return None
    first, last = int(at[0]), int(at[-1])
    if last - first == (at.size - 1) * size and bool((at[1:] - at[:-1] == size).all()):
        return first, last - first + size, None
    first, last = int(at.min()), int(at.max())
    at -= first
    if bool((at % size).any()):
        return None
    return first, last - first + size, at // size
