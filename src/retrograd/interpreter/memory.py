"""Launches that Triton's interpreter has made before, remembered by what they read.

A kernel's results depend on its arguments and on the memory it reads before it writes there, on nothing else. Both are
kept with what it wrote, for the time of `remembering`: where the same launch meets the same bytes in all places that it
read, the bytes that it wrote are put in place and no program runs. Everything outside kernels, such as the Python that
launches them and the memory that they find, is as ever. Launches with other arguments than plain tensors and numbers
are made each time, and so are those that print or reach beyond their tensors' memory.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrograd import config
from retrograd.interpreter import tapes

_MODULE = "triton.runtime.interpreter"
_NOTED = ("create_atomic_rmw", "create_atomic_cas", "create_print")
_ACCESSES = ("create_masked_load", "create_masked_store", *_NOTED)
_SAME = 16  # launches kept that differ only in what they read
_MOST_BYTES = 64 << 20  # kept in all
_paused = 0


@contextmanager
def afresh() -> Iterator[None]:
    """Make every launch meanwhile, whatever is remembered of what it reads and writes."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1


@contextmanager
def remembering(store: dict[Any, Any]) -> Iterator[None]:
    """Remember launches in `store` (empty at first) and take them from there; nothing where none is interpreted."""
    module = sys.modules.get(_MODULE)
    if module is None or not config.interpreting() or not _fits(module):
        yield
        return
    builder, executor = module.InterpreterBuilder, module.GridExecutor
    changes: list[tuple[Any, str, Any]] = [
        *((builder, name, _noting(name, getattr(builder, name))) for name in _NOTED),
        (builder, "create_masked_load", _loading(module, builder.create_masked_load)),
        (builder, "create_masked_store", _storing(builder.create_masked_store)),
        (executor, "__call__", _calling(module, executor.__call__, store)),
    ]
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, function in changes:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


def _fits(module: Any) -> bool:
    builder = getattr(module, "InterpreterBuilder", None)
    return hasattr(module, "GridExecutor") and all(hasattr(builder, name) for name in _ACCESSES)


class _Trace:
    """What a launch reads first and writes, byte by byte, in the memory of its tensors."""

    now: _Trace | None = None

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
        self.whole = bool(memories)  # whether everything that the launch does can be told

    def undone(self) -> _Trace:
        """A trace of the same launch, with nothing made yet."""
        if any(written.any() for written in self.written):
            for memory, before in zip(self.memories, self.before, strict=True):
                memory[:] = before
        return _Trace(self.memories)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """What lies at the addresses where the mask is set, elsewhere `other`; noted. None if not all in one tensor.

        The values that the interpreter's own load gives, which takes one element after another.
        """
        import numpy as np

        found = self._find(addresses, mask, dtype.itemsize)
        if found is None or (other is not None and (other.shape != addresses.shape or other.dtype != dtype)):
            return None
        index, where, size = found
        read, written, memory = (_by(a[index], size) for a in (self.read, self.written, self.memories))
        read[where] |= ~written[where]
        values = memory[where].view(dtype).ravel()
        if values.size == addresses.size:
            return values.reshape(addresses.shape).copy()
        result = np.zeros(addresses.shape, dtype) if other is None else other.copy()
        result[mask] = values
        return result

    def store(self, addresses: Any, mask: Any, values: Any) -> bool:
        """Write the values where the mask is set; noted. False, and nothing done, if that is not all in one tensor."""
        import numpy as np

        found = None if values.shape != addresses.shape else self._find(addresses, mask, values.dtype.itemsize)
        if found is None:
            return False
        index, where, size = found
        written, memory = _by(self.written[index], size), _by(self.memories[index], size)
        written[where] = True
        given = np.ascontiguousarray(values[mask]).view(np.uint8)
        memory[where] = given if size == 1 else given.reshape(-1, size)
        return True

    def _find(self, addresses: Any, mask: Any, size: int) -> tuple[int, Any, int] | None:
        """Where accesses lie: in which memory, at which places of it, and of how many bytes these are."""
        import numpy as np

        if addresses.dtype != np.uint64 or mask.dtype != np.bool_ or mask.shape != addresses.shape or not self.whole:
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
        if found := self._find(addresses, chosen, size):
            index, where, step = found
            read, written = _by(self.read[index], step), _by(self.written[index], step)
            if reads:
                read[where] |= ~written[where]
            if writes:
                written[where] = True
            return
        addresses = addresses[np.broadcast_to(chosen, addresses.shape)].ravel().astype(np.uint64)
        if not addresses.size or not self.whole:
            return
        places = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        if places.min() < 0:
            self.whole = False
            return
        for place in np.unique(places).tolist():
            index = self.order[place]
            offsets = (addresses[places == place] - self.starts[place]).astype(np.int64)
            if int(offsets.max()) + size > len(self.memories[index]):
                self.whole = False
                return
            every = (offsets[:, None] + np.arange(size)).ravel()
            read, written = self.read[index], self.written[index]
            if reads:
                read[every] |= ~written[every]
            if writes:
                written[every] = True

    def entry(self) -> tuple[list[Any], list[Any], int]:
        """Places and bytes that were read, places and bytes that were written, and how much that is to keep."""
        reads, writes, total = [], [], 0
        for i, memory in enumerate(self.memories):
            for found, marks, source in ((reads, self.read, self.before), (writes, self.written, [memory] * (i + 1))):
                places = marks[i].nonzero()[0]
                if len(places):
                    run = len(places) == places[-1] - places[0] + 1
                    where = slice(int(places[0]), int(places[-1]) + 1) if run else places
                    found.append((i, where, source[i][where].copy()))
                    total += len(places) * (1 if run else 9)
        return reads, writes, total


def _by(array: Any, size: int) -> Any:
    """An array by elements of so many bytes."""
    return array if size == 1 else array.reshape(-1, size)


def _noting(name: str, stock: Any) -> Any:
    """An operation of the interpreter that tells the trace of the launch what it touches."""
    at_pointer, at_mask = (1, 3) if name == "create_atomic_rmw" else (0, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = _Trace.now
        if trace is not None:
            if name == "create_print":
                trace.whole = False
            else:
                mask = None if at_mask is None else args[at_mask]
                trace.note(args[at_pointer], mask, reads=True, writes=True)
        return stock(self, *args, **kwargs)

    return method


def _loading(module: Any, stock: Any) -> Any:
    """A load, made here where it is known what memory it reads."""
    import numpy as np

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any) -> Any:
        trace = _Trace.now
        if trace is not None:
            element = ptrs.get_element_ty()
            given = None if other is None else other.data
            made = trace.load(ptrs.data, np.asarray(mask.data), given, module._get_np_dtype(element))
            if made is not None:
                return module.TensorHandle(made, element)
            trace.note(ptrs, mask, reads=True, writes=False)
        return stock(self, ptrs, mask, other, *rest, **more)

    return create_masked_load


def _storing(stock: Any) -> Any:
    """A store, likewise."""
    import numpy as np

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        trace = _Trace.now
        if trace is not None:
            if trace.store(ptrs.data, np.asarray(mask.data), value.data):
                return None
            trace.note(ptrs, mask, reads=False, writes=True)
        return stock(self, ptrs, value, mask, *rest, **more)

    return create_masked_store


def _calling(module: Any, stock: Any, store: dict[Any, Any]) -> Any:
    """What replaces a launch."""
    taped = tapes.fits(module)  # asked while the launch is not yet replaced

    def made(self: Any, asked: _Asked, args: Any, kwargs: Any) -> Any:
        """Make a launch, by tapes if they fit; what it touched."""
        trace = _Trace.now = _Trace(asked.memories)
        try:
            same = store.setdefault(asked.alike(self), []) if taped else None
            if same is None or not tapes.launch(module, self, asked.given, asked.key[1], same):
                trace = _Trace.now = trace.undone()
                if _paused:  # there will be more of what is to be seen line by line
                    store["refused", self.fn] = True
                stock(self, *args, **kwargs)
        finally:
            _Trace.now = None
        return trace

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = None if _Trace.now is not None or self.pre_run_hooks else _asked(module, self, args, kwargs)
        if asked is None or (_paused and (not taped or ("refused", self.fn) in store)):
            return stock(self, *args, **kwargs)
        if _paused:
            named = {k: v for k, v in kwargs.items() if k in self.arg_names}
            self._init_args_hst(args, named)  # whoever watches launches learns there what is given
            made(self, asked, args, kwargs)
            return None
        memories = asked.memories
        kept = store.setdefault(asked.key, [])
        for reads, writes in kept:
            if all(memories[i][where].tobytes() == held for i, where, held in reads):
                for i, where, held in writes:
                    memories[i][where] = held
                return None
        trace = made(self, asked, args, kwargs)
        if trace.whole and len(kept) < _SAME:
            reads, writes, size = trace.entry()
            store["bytes"] = store.get("bytes", 0) + size
            if store["bytes"] < _MOST_BYTES:
                kept.append(([(i, where, held.tobytes()) for i, where, held in reads], writes))
        return None

    return __call__


@dataclass
class _Asked:
    """A launch: what it is known by, its arguments by name, the memory of its tensors."""

    key: Any
    given: dict[str, Any]
    memories: list[Any]

    def alike(self, executor: Any) -> Any:
        """What is the same for all launches that the same tapes serve."""
        types = [
            word if name in executor.constexprs else _type(word)
            for name, word in zip(self.given, self.key[2], strict=True)
        ]
        return "tapes", executor.fn, tuple(types)


def _asked(module: Any, executor: Any, args: Any, kwargs: Any) -> _Asked | None:
    """The launch that is asked for; None for one that is not remembered."""
    memories: dict[int, Any] = {}
    words = []
    try:
        given = module.inspect.getcallargs(
            executor.fn, *args, **{k: v for k, v in kwargs.items() if k in executor.arg_names}
        )
        for value in given.values():
            words.append(None if value is None else _word(value, memories))
        grid = executor.grid
        if callable(grid):
            grid = grid({k: v if k in executor.constexprs else module._implicit_cvt(v) for k, v in given.items()})
        key = (executor.fn, tuple([int(n) for n in grid]), tuple(words))
        hash(key)
    except (TypeError, ValueError):
        return None
    executor.grid = grid
    return _Asked(key, given, [memory for _, memory in memories.values()])


def _type(word: Any) -> Any:
    """Of what an argument is known by, as much as its type in a kernel depends on."""
    if word is not None and len(word) > 2:
        return word[0]  # of a tensor: where it lies is a number to the kernel
    return tapes.kind(word[1]) if word is not None and word[0] is int else word


def _word(value: Any, memories: dict[int, Any]) -> Any:
    """What an argument is known by; TypeError for one of a kind that is not."""
    import torch

    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        storage = value.untyped_storage()
        if not value.is_cpu or value.layout is not torch.strided:
            raise TypeError
        start = storage.data_ptr()
        known = memories.get(start)
        if known is None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            known = memories[start] = len(memories), whole.numpy()
        return value.dtype, known[0], value.storage_offset(), storage.nbytes()
    if kind is int or kind is bool or kind is str:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if hasattr(value, "primitive_bitwidth"):
        return kind, value.name
    raise TypeError
