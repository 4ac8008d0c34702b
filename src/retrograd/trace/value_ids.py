"""Value ids: a number for each storage, view and version of a tensor, and the statistics of the value.

A write through any view makes a new version of all that share the storage, also where PyTorch counts no versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from retrograd.compat.torch_tensors import storage_id
from retrograd.trace.schema import Stats
from retrograd.trace.statistics.cpu import NO_STATISTICS, StatisticsRow


@cache
def dtype_name(dtype: Any) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


class Value:
    """A tensor at one time.

    Attributes:
        number: its number in the trace.
        storage: number of its storage.
        offset: in elements, of its first.
        shape: its sizes.
        row: its statistics, once they are read.
        requested: whether they were requested, or need not be.
        source: the value that it is another view of, elements and their number alike but for `repeats`.
        repeats: how often each element of `source` occurs in it.
        ordered: whether its elements come in the order of `source`.
        fresh: whether a kernel received it as memory in which nobody had written.
    """

    __slots__ = (
        "_stats", "device", "dtype", "fresh", "name", "number", "offset", "ordered", "repeats", "requested", "row",
        "shape",        "source", "storage",
    )  # fmt: skip

    def __init__(
        self, number: int, storage: int, offset: int, shape: tuple[int, ...], dtype: Any, device: Any, name: str
    ) -> None:
        self.number, self.storage, self.offset, self.name = number, storage, offset, name
        self.shape, self.dtype, self.device = shape, dtype, device
        self.row: StatisticsRow | None = None
        self.requested = False
        self.source: Value | None = None
        self.repeats, self.ordered, self.fresh = 1, True, False
        self._stats: Stats | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Any, ...]:
        """The memory that it shows, of which later values are other versions; its own where that is unknown."""
        return (self.number,) if self.storage < 0 else (self.storage, self.offset, tuple(self.shape))

    def take(self, row: StatisticsRow) -> None:
        """Its statistics; of one that was made in a step before, after its record without any."""
        self.row, self._stats = row, None

    def stats(self) -> Stats:
        """The value as a record; made once the statistics are there."""
        if self._stats is None:
            # By position and without loops of Python: a step makes thousands.
            low, high, rms, nan, inf, subnormal, zero, digest, exponents = self._row()
            self._stats = Stats(
                self.number, tuple(map(int, self.shape)), dtype_name(self.dtype), str(self.device), low, high, rms, nan,
                inf, subnormal, zero, digest, self.storage, self.name, exponents,
            )  # fmt: skip
        return self._stats

    def _row(self) -> StatisticsRow:
        if self.row is not None or self.source is None:
            return self.row or NO_STATISTICS
        low, high, rms, *counts, digest, exponents = self.source._row()
        scaled = (None if n is None else n * self.repeats for n in counts)
        histogram = exponents if self.repeats == 1 else None
        return (low, high, rms, *scaled, digest if self.ordered else None, histogram)  # type: ignore[return-value]


class _Storage:
    __slots__ = ("number", "ref", "unwritten", "values")

    def __init__(self, ref: Any, number: int) -> None:
        self.ref, self.number = ref, number
        self.unwritten = False  # made by `empty`, and nobody seen has written to it
        self.values: dict[Any, Value] = {}  # of the present version


class ValueTable:
    """The values of one run, numbered.

    Args:
        names: parameters and buffers: name and elements by address of the storage object.
    """

    def __init__(self, names: Callable[[], dict[int, tuple[str, int]]]) -> None:
        self._tensor_names = names
        self._names: dict[int, tuple[str, int]] = {}
        self._storages: dict[int, _Storage] = {}
        self._numbers = self._storage_numbers = 0

    def value_of(self, tensor: torch.Tensor) -> Value:
        """What the tensor holds now."""
        if tensor.layout is not torch.strided:
            return self._new(-1, tensor, "")
        try:
            storage = tensor.untyped_storage()
            view = tensor.storage_offset(), tensor.shape, tensor.stride()
        except (NotImplementedError, RuntimeError, ValueError):  # without memory of its own, as a lazy parameter
            return self._new(-1, tensor, "")
        entry = self._entry(storage)
        key = *view, tensor.dtype, tensor.is_neg(), tensor.is_conj()
        value = entry.values.get(key)
        if value is None:
            name, count = self._names.get(storage_id(storage), ("", 0))
            value = self._new(entry.number, tensor, name if count == tensor.numel() else "", int(view[0]))
            entry.values[key] = value
        return value

    def bump_version(self, tensor: torch.Tensor, unwritten: bool = False) -> None:
        """All views of its storage hold new values: somebody wrote into it, or it is fresh memory (`unwritten`)."""
        entry = self._entry_of(tensor)
        if entry is not None:
            entry.values, entry.unwritten = {}, unwritten

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether nobody seen has written to the memory since it was made."""
        entry = self._entry_of(tensor)
        return entry is not None and entry.unwritten

    def refresh(self) -> None:
        """Look the names up again, and forget storages that are gone; between steps."""
        self.refresh_names()
        self._storages = {key: s for key, s in self._storages.items() if not s.ref.expired()}

    def refresh_names(self) -> None:
        """Look the names of parameters and buffers up again."""
        self._names = self._tensor_names()
        for address, (name, count) in self._names.items():
            entry = self._storages.get(address)
            for value in entry.values.values() if entry is not None else ():
                if value.count == count and value.name != name:
                    value.name, value._stats = name, None

    def _entry(self, storage: Any) -> _Storage:
        # The weak reference keeps the storage object's address from being used again, so the address is its name.
        address = storage_id(storage)
        entry = self._storages.get(address)
        if entry is None:
            self._storage_numbers += 1
            entry = self._storages[address] = _Storage(StorageWeakRef(storage), self._storage_numbers - 1)
        return entry

    def _entry_of(self, tensor: torch.Tensor) -> _Storage | None:
        if tensor.layout is not torch.strided:
            return None
        try:
            return self._entry(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError, ValueError):
            return None

    def _new(self, storage: int, tensor: torch.Tensor, name: str, offset: int = 0) -> Value:
        self._numbers += 1
        try:
            shape = tensor.shape
        except RuntimeError:  # a lazy parameter has none yet
            shape = ()
        return Value(self._numbers - 1, storage, offset, shape, tensor.dtype, tensor.device, name)
