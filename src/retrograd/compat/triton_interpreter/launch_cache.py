"""Launches that Triton's interpreter has made before, remembered by what they read.

A kernel's results depend on its arguments and on the memory it reads before it writes there, on nothing else. Both are
kept with what it wrote, for the time of `remembering`: where the same launch meets the same bytes in all places that it
read, the bytes that it wrote are put in place and no program runs. Everything outside kernels, such as the Python that
launches them and the memory that they find, is as ever. Launches with other arguments than plain tensors and numbers
are made each time, and so are those that print or reach beyond their tensors' memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrograd import config
from retrograd.compat.triton_interpreter import program_recorder
from retrograd.compat.triton_interpreter.footprint import Trace

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


def _noting(name: str, stock: Any) -> Any:
    """An operation of the interpreter that tells the trace of the launch what it touches."""
    at_pointer, at_mask = (1, 3) if name == "create_atomic_rmw" else (0, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = Trace.now
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
        trace = Trace.now
        if trace is not None:
            element = ptrs.get_element_ty()
            given = None if other is None else other.data
            made = trace.load(ptrs, np.asarray(mask.data), given, module._get_np_dtype(element))
            if made is not None:
                return module.TensorHandle(made, element)
            trace.note(ptrs, mask, reads=True, writes=False)
        return stock(self, ptrs, mask, other, *rest, **more)

    return create_masked_load


def _storing(stock: Any) -> Any:
    """A store, likewise."""
    import numpy as np

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        trace = Trace.now
        if trace is not None:
            if trace.store(ptrs, np.asarray(mask.data), value.data):
                return None
            trace.note(ptrs, mask, reads=False, writes=True)
        return stock(self, ptrs, value, mask, *rest, **more)

    return create_masked_store


def _calling(module: Any, stock: Any, store: dict[Any, Any]) -> Any:
    """What replaces a launch."""
    taped = program_recorder.fits(module)  # asked while the launch is not yet replaced

    def made(self: Any, asked: _Asked, args: Any, kwargs: Any) -> Any:
        """Make a launch, by tapes if they fit; what it touched."""
        trace = Trace.now = Trace(asked.memories)
        try:
            same = store.setdefault(asked.alike(self), []) if taped else None
            if same is None or not program_recorder.launch(module, self, asked.given, asked.key[1], same):
                trace = Trace.now = trace.undone()
                if _paused:  # there will be more of what is to be seen line by line
                    store["refused", self.fn] = True
                stock(self, *args, **kwargs)
        finally:
            Trace.now = None
        return trace

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = None if Trace.now is not None or self.pre_run_hooks else _asked(module, self, args, kwargs)
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
    return program_recorder.kind(word[1]) if word is not None and word[0] is int else word


def _bytes(start: int, size: int) -> Any:
    """Memory as an array, for as long as somebody keeps it: a launch has its arguments. A tensor of it takes 5 us."""
    import ctypes

    import numpy as np

    return np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8) if size else np.empty(0, np.uint8)


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
        size = storage.nbytes()
        if known is None:
            known = memories[start] = len(memories), _bytes(start, size)
        return value.dtype, known[0], value.storage_offset(), size
    if kind is int or kind is bool or kind is str:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if hasattr(value, "primitive_bitwidth"):
        return kind, value.name
    raise TypeError
