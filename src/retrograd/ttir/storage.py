"""Storages and what leads to them: pointer arguments, and the accesses of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch

from retrograd.core import gc_pause
from retrograd.ttir.element_types import Array, ElementType
from retrograd.ttir.exact_addresses import ExactAddresses
from retrograd.ttir.ir import SourcePlace

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_NOTHING = np.empty(0, np.uint8)
_OFTEN = 4  # elements of a storage to each that is read at once, up to which all of them are decoded


class Undefined(Protocol):
    """Says which bytes of a tensor's storage nobody has written, None where all are; `begin`: some will be."""

    def __call__(self, tensor: torch.Tensor, begin: bool = False) -> Array | None: ...


class _Octets:
    """Memory as NumPy takes it from others; a tensor of a storage takes five times as long."""

    def __init__(self, start: int, size: int) -> None:
        self.__array_interface__ = dict(data=(start, False), shape=(size,), typestr="|u1", version=3)


@dataclass(eq=False)
class MemoryAccess:
    """A load, store or atomic of a kernel.

    Attributes:
        number: among the accesses of the kernel.
        does: "load", "store" or "atomic".
        operation: of an atomic: "fadd", "exch", "cas", ...
        place: line of the source.
        kind: element type in memory.
        shape: of the tensor of addresses.
        order, scope: of an atomic, and of a volatile load.
        in_loop: whether it is in a loop that may wait for others (scf.while).
        result: slot of the values that it gives.
        arguments: numbers of the pointer arguments that the address may come from; None if it may be any memory.
        exact, address: what arithmetic without end gives for the slot of the address; None where it is not known.
        decides: whether what it gives may decide that such a loop goes on.
    """

    number: int
    does: str
    operation: str
    place: SourcePlace
    kind: ElementType
    shape: tuple[int, ...] = ()
    order: str = ""
    scope: str = "gpu"
    in_loop: bool = False
    result: int = -1
    arguments: frozenset[int] | None = None
    exact: ExactAddresses | None = None
    address: int = -1
    decides: bool = False

    @property
    def is_atomic(self) -> bool:
        """Whether it orders or is at least not in conflict with atomics of other programs."""
        return self.order != "" and self.scope not in ("cta",)


@dataclass(eq=False)
class Storage:
    """Bytes that tensors share.

    Attributes:
        start: address of the first byte.
        octets: the bytes, as an array of uint8.
        kept: keeps the memory alive.
        undefined: which bytes nobody has written yet; None where all are defined.
        begin: makes `undefined` where nothing was, as a kernel hands on what nobody has written.
        spare: which bytes nobody had written before the launch, where an argument is a view of a part of them.
        written: which bytes the launch has written, where that is to be known.
    """

    start: int
    octets: Array
    kept: Any
    undefined: Array | None = None
    begin: Callable[[], Array | None] = lambda: None
    spare: Array | None = None
    written: Array | None = None
    views: dict[Any, Array] = field(default_factory=dict)
    cell: int = 0  # bytes of a cell of the shadow; 0 where no shadow is kept
    readable: bool = False  # whether loads of the kernel may meet its stores here

    @property
    def end(self) -> int:
        return self.start + len(self.octets)

    def view(self, dtype: np.dtype[Any]) -> Array:
        """All elements of a dtype; a rest of bytes at the end is left out."""
        if dtype not in self.views:
            count = len(self.octets) // dtype.itemsize
            self.views[dtype] = self.octets[: count * dtype.itemsize].view(dtype)
        return self.views[dtype]

    def taken(self, kind: ElementType, index: Array) -> Array:
        """Values of the elements at these places."""
        elements = self.view(kind.memory)
        # What the kernel does not write is decoded once, unless it asks for little of it. take: a third of elements[i].
        if kind.decodes and not self.cell and (kind.name in self.views or len(elements) <= _OFTEN * index.size):
            if kind.name not in self.views:
                self.views[kind.name] = kind.decode(elements)
            return self.views[kind.name].take(index, mode="clip")
        return kind.decode(elements.take(index, mode="clip"))

    def note_view(self, pointer: Pointer) -> None:
        """Note that an argument may be a view of a part."""
        part = pointer.covered is not None or pointer.start > self.start or pointer.end < self.end
        if part and self.spare is None and self.undefined is not None:
            self.spare = self.undefined.copy()

    def is_spare(self, addresses: Array, size: int) -> Array | None:
        """At which addresses elements of this size lie in bytes that nobody had written; None where there are none."""
        if self.spare is None:
            return None
        offsets = addresses - self.start
        inside = (offsets >= 0) & (offsets + size <= len(self.octets))
        first = np.where(inside, offsets, 0)
        return inside & self.spare[first] & self.spare[np.minimum(first + size, len(self.octets)) - 1]

    def note_written(self, index: Array, size: int) -> None:
        """Note that elements of this size were written."""
        if self.written is not None:
            whole = self.written[: len(self.octets) // size * size].view(f"u{size}")
            whole[index] = int.from_bytes(b"\1" * size, "little")

    def note_undefined(self, index: Array, size: int, unknown: Array | None) -> None:
        """Note what is stored in elements; `unknown`: which of it comes from memory that nobody has written."""
        if self.undefined is None and unknown is not None and unknown.any():
            self.undefined = self.begin()
        if self.undefined is not None:
            octets = (index[:, None] * size + np.arange(size)).reshape(-1)
            self.undefined[octets] = False if unknown is None else np.repeat(unknown, size)

    def update_undefined(self, index: Array, size: int, unknown: Array | None, replaces: bool) -> Array | None:
        """Note what atomics make of elements: a sum with what nobody has written is not defined either.

        `replaces`: whether nothing of what was there is left.

        Returns:
            Which lanes find what nobody has written; None for none.
        """
        unknown_old = None if self.undefined is None else self.undefined[index * size]
        if replaces:
            self.note_undefined(index, size, unknown)
            if unknown_old is not None:  # of several lanes at one element the first finds what was there
                later = np.ones(len(index), bool)
                later[np.unique(index, return_index=True)[1]] = False
                unknown_old &= ~later
        elif unknown is not None and (lanes := np.flatnonzero(unknown)).size:
            self.note_undefined(index[lanes], size, unknown[lanes])
        return unknown_old if unknown_old is not None and unknown_old.any() else None

    @staticmethod
    def of(storage: torch.UntypedStorage) -> Storage:
        start, size = storage.data_ptr(), storage.nbytes()
        return Storage(start, np.asarray(_Octets(start, size)) if size else _NOTHING, storage)


@dataclass(eq=False)
class Pointer:
    """A pointer argument: the tensor behind it.

    Attributes:
        name: of the argument.
        start, end: addresses of its first element and of the end of its last one.
        size: bytes of an element.
        storage: where it lies.
        covered: which elements between start and end are the tensor's; None if all are.
        whole: of a view of one row, say, addresses of the tensor that it is of: launchers mean a place in that by x[i].
    """

    name: str
    start: int
    end: int
    size: int
    storage: Storage
    covered: Array | None = None
    whole: tuple[int, int] | None = None

    @staticmethod
    def of(name: str, tensor: torch.Tensor, storage: Storage) -> Pointer:
        size, count = tensor.element_size(), tensor.numel()
        start = tensor.data_ptr() if count else storage.start
        whole = None if tensor._base is None else _selected_of(tensor, tensor._base)
        if not count or tensor.is_contiguous():
            return Pointer(name, start, start + count * size, size, storage, None, whole)
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        covered = None
        if count < extent:
            covered = torch.zeros(extent, dtype=torch.bool, device="cpu")
            covered.as_strided(tensor.shape, tensor.stride()).fill_(True)
            covered = covered.numpy()
            covered = None if covered.all() else covered
        return Pointer(name, start, start + extent * size, size, storage, covered, whole)


def _selected_of(view: torch.Tensor, base: torch.Tensor) -> tuple[int, int] | None:
    """Addresses of a tensor of which a view has one index of some dimensions; None for any other view."""
    if view.ndim >= base.ndim or not base.is_contiguous() or view.dtype != base.dtype:
        return None
    dims = iter(zip(base.shape, base.stride(), strict=True))
    if not all(dim in dims for dim in zip(view.shape, view.stride(), strict=True)):
        return None
    return base.data_ptr(), base.data_ptr() + base.numel() * base.element_size()


@dataclass(eq=False)
class LearnedStorages:
    """Storages that no argument names and pointers in memory lead to, over all runs of a launch.

    Attributes:
        undefined: says which bytes of a tensor's storage nobody has written.
        storages: so far.
    """

    undefined: Undefined = lambda tensor, begin=False: None
    storages: list[Storage] = field(default_factory=list[Storage])
    _tensors: list[ref[torch.Tensor]] = field(default_factory=list[ref[torch.Tensor]])

    def behind(self, addresses: Array) -> Iterator[Storage]:
        """Storages of the process's tensors that addresses lead to, none of which is known; each is added.

        A walk through half a million objects of the process takes 0.1 s, and programs come to one tensor of a table
        after the other: the tensors that there were are asked first.
        """
        for walk in (False, True):
            if walk and len(addresses):
                objects = gc_pause.objects()
                tensors = compress(objects, map(_TENSORS.__contains__, map(type, objects)))
                self._tensors = [ref(t) for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
            for tensor in [t for kept in self._tensors if (t := kept()) is not None] if len(addresses) else []:
                memory = tensor.untyped_storage()
                start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
                within = (addresses >= start) & (addresses < end)
                if within.any():
                    storage = Storage.of(memory)
                    storage.undefined, storage.begin = self.undefined(tensor), partial(self.undefined, tensor, True)
                    self.storages.append(storage)
                    addresses = addresses[~within]
                    yield storage
