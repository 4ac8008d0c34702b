"""Cache of launches in Triton's interpreter, by their arguments and the memory that they read.

A kernel's results depend on its arguments and on the memory it reads before it writes there, on nothing else. Both are
kept with what it wrote, for the time of `caching_launches`: where the same launch meets the same bytes in all places
that it read, the bytes that it wrote are put in place and no program runs. Everything outside kernels, such as the
Python that launches them and the memory that they find, is as ever. Launches with other arguments than plain tensors
and numbers are made each time, and so are those that print or reach beyond their tensors' memory.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrograd.compat.registry import Part, register, works
from retrograd.compat.triton_interpreter import program_recorder, self_test
from retrograd.compat.triton_interpreter.footprint import Footprint
from retrograd.compat.triton_interpreter.patches import Patches
from retrograd.compat.triton_interpreter.preparation import RAN, SPEED_UPS, while_interpreting

_NOTED = ("create_atomic_rmw", "create_atomic_cas", "create_print")
_SAME = 16  # launches kept that differ only in what they read
_MOST_BYTES = 64 << 20  # kept in all
_pauses = 0


@contextmanager
def uncached() -> Iterator[None]:
    """Make every launch meanwhile, whatever is kept of what it reads and writes."""
    global _pauses
    _pauses += 1
    try:
        yield
    finally:
        _pauses -= 1


@contextmanager
def caching_launches(store: dict[Any, Any]) -> Iterator[None]:
    """Keep launches in `store` (empty at first) and take them from there; nothing where none is interpreted."""

    def install(patches: Patches, module: Any) -> None:
        if works(SPEED_UPS) and works(LAUNCH_CACHE):
            _install(patches, module, store)

    with while_interpreting(install):
        yield


def _install(patches: Patches, module: Any, store: dict[Any, Any]) -> None:
    builder, executor = module.InterpreterBuilder, module.GridExecutor
    # Whoever else replaces launches looks at each: then no program is replayed.
    replays = executor.__call__.__module__ == module.__name__
    for name in _NOTED:
        patches.set(builder, name, _noting(name, getattr(builder, name)))
    patches.set(builder, "create_masked_load", _loading(module, builder.create_masked_load))
    patches.set(builder, "create_masked_store", _storing(builder.create_masked_store))
    patches.set(executor, "__call__", _calling(module, executor.__call__, store, replays))


def _self_test() -> str:
    from triton.runtime import interpreter as module

    return self_test.of_launch_cache(lambda patches, store: _install(patches, module, store))


LAUNCH_CACHE = register(
    Part(
        id="triton.interpreter.launch_cache",
        package="triton",
        purpose="keeps launches and programs of its interpreter that it has seen",
        names=("GridExecutor", "create_masked_load", "create_masked_store", "interpreter_semantic", "TensorHandle"),
        ran=RAN,
        otherwise="every launch is interpreted, 10 times as slowly for small kernels",
        self_test=_self_test,
    )
)


def _noting(name: str, stock: Any) -> Any:
    """An operation of the interpreter that tells the footprint of the launch which memory it accesses."""
    at_pointer, at_mask = (1, 3) if name == "create_atomic_rmw" else (0, None)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        footprint = Footprint.current
        if footprint is not None:
            if name == "create_print":
                footprint.complete = False
            else:
                mask = None if at_mask is None else args[at_mask]
                footprint.note(args[at_pointer], mask, reads=True, writes=True)
        return stock(self, *args, **kwargs)

    return method


def _loading(module: Any, stock: Any) -> Any:
    """A load, made here where it is known what memory it reads."""
    import numpy as np

    def create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *rest: Any, **more: Any) -> Any:
        footprint = Footprint.current
        if footprint is not None:
            element = ptrs.get_element_ty()
            default = None if other is None else other.data
            values = footprint.load(ptrs, np.asarray(mask.data), default, module._get_np_dtype(element))
            if values is not None:
                return module.TensorHandle(values, element)
            footprint.note(ptrs, mask, reads=True, writes=False)
        return stock(self, ptrs, mask, other, *rest, **more)

    return create_masked_load


def _storing(stock: Any) -> Any:
    """A store, made here where it is known what memory it writes."""
    import numpy as np

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        footprint = Footprint.current
        if footprint is not None:
            if footprint.store(ptrs, np.asarray(mask.data), value.data):
                return None
            footprint.note(ptrs, mask, reads=False, writes=True)
        return stock(self, ptrs, value, mask, *rest, **more)

    return create_masked_store


def _calling(module: Any, stock: Any, store: dict[Any, Any], replays: bool) -> Any:
    """What replaces a launch."""

    def execute(self: Any, request: _Request, args: Any, kwargs: Any) -> Any:
        """Make a launch, by recordings if they fit; its footprint."""
        footprint = Footprint.current = Footprint(request.memories)
        try:
            recordings = store.setdefault(request.kind(self), []) if replays else None
            if recordings is None or not program_recorder.launch(
                module, self, request.arguments, request.key[1], recordings
            ):
                footprint = Footprint.current = footprint.undone()
                if _pauses:  # there will be more of what is to be seen line by line
                    store["refused", self.fn] = True
                stock(self, *args, **kwargs)
        finally:
            Footprint.current = None
        return footprint

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        nested = Footprint.current is not None or self.pre_run_hooks
        request = None if nested else _request(module, self, args, kwargs)
        if request is None or (_pauses and (not replays or ("refused", self.fn) in store)):
            return stock(self, *args, **kwargs)
        if _pauses:
            named = {k: v for k, v in kwargs.items() if k in self.arg_names}
            self._init_args_hst(args, named)  # whoever watches launches learns there of the arguments
            execute(self, request, args, kwargs)
            return None
        memories = request.memories
        kept = store.setdefault(request.key, [])
        for reads, writes in kept:
            if all(memories[i][where].tobytes() == held for i, where, held in reads):
                for i, where, held in writes:
                    memories[i][where] = held
                return None
        footprint = execute(self, request, args, kwargs)
        if footprint.complete and len(kept) < _SAME:
            reads, writes, size = footprint.entry()
            store["bytes"] = store.get("bytes", 0) + size
            if store["bytes"] < _MOST_BYTES:
                kept.append(([(i, where, held.tobytes()) for i, where, held in reads], writes))
        return None

    return __call__


@dataclass
class _Request:
    """A launch: its key, its arguments by name, the memory of its tensors."""

    key: Any
    arguments: dict[str, Any]
    memories: list[Any]

    def kind(self, executor: Any) -> Any:
        """What is the same for all launches that the same recordings serve."""
        types = [
            word if name in executor.constexprs else _type(word)
            for name, word in zip(self.arguments, self.key[2], strict=True)
        ]
        return "recordings", executor.fn, tuple(types)


def _request(module: Any, executor: Any, args: Any, kwargs: Any) -> _Request | None:
    """The launch; None for one that is not kept."""
    memories: dict[int, Any] = {}
    words = []
    try:
        arguments = module.inspect.getcallargs(
            executor.fn, *args, **{k: v for k, v in kwargs.items() if k in executor.arg_names}
        )
        for value in arguments.values():
            words.append(None if value is None else _key_of(value, memories))
        grid = executor.grid
        if callable(grid):
            grid = grid({k: v if k in executor.constexprs else module._implicit_cvt(v) for k, v in arguments.items()})
        key = (executor.fn, tuple([int(n) for n in grid]), tuple(words))
        hash(key)
    except (TypeError, ValueError):
        return None
    executor.grid = grid
    return _Request(key, arguments, [memory for _, memory in memories.values()])


def _type(word: Any) -> Any:
    """Of an argument's key, as much as its type in a kernel depends on."""
    if word is not None and len(word) > 2:
        return word[0]  # of a tensor: where it lies is a number to the kernel
    return program_recorder.kind(word[1]) if word is not None and word[0] is int else word


def _bytes(start: int, size: int) -> Any:
    """Memory as an array, for as long as somebody keeps it: a launch has its arguments. A tensor of it takes 5 us."""
    import ctypes

    import numpy as np

    return np.frombuffer((ctypes.c_uint8 * size).from_address(start), np.uint8) if size else np.empty(0, np.uint8)


def _key_of(value: Any, memories: dict[int, Any]) -> Any:
    """The key of an argument; TypeError for one of a kind that has none."""
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
