"""Hooks on the memory accesses of Triton's interpreter: which lanes are made is decided by a callback.

The interpreter's loads, stores and atomics are replaced for a time and put back after it.
"""

# The stubs do not have private names, or not as they are.
# pyright: reportArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import numpy as np

from retrograd import config
from retrograd.compat.registry import Part, register, status, works
from retrograd.compat.triton_interpreter.launch_cache import uncached
from retrograd.compat.triton_interpreter.patches import Patches
from retrograd.compat.triton_interpreter.preparation import RAN, TRITON, while_interpreting
from retrograd.compat.triton_interpreter.program_recorder import interpret_again
from retrograd.compat.triton_interpreter.self_test import in_plain_thread
from retrograd.compat.triton_launch import HOOK


class MemoryWatcher(Protocol):
    """What is told of interpreted launches and of their accesses; of nothing if a reason is `missing`."""

    missing: str

    def begin(self, kernel: str, arguments: Sequence[tuple[str, Any, Any]]) -> None:
        """A launch starts, with names of arguments, these, and their copies in the interpreter's memory."""

    def end(self) -> None:
        """It has ended, or raised."""

    def refused(self, addresses: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray | None:
        """Lanes that are not to be made, of those that are `wanted`, each of `size` bytes; None if all are."""

    def note(self, addresses: np.ndarray, size: int, write: bool, program: tuple[int, ...]) -> None:
        """These are not made; `kernel_line` says where."""


@contextmanager
def watching_memory(watcher: MemoryWatcher) -> Iterator[None]:
    """Have a watcher decide on every access of kernels that are interpreted meanwhile."""

    def install(patches: Patches, module: Any) -> None:
        if works(ACCESSES):
            _install(patches, module, watcher)
        else:
            watcher.missing = status(ACCESSES).note

    watcher.missing = _unhooked()
    with while_interpreting(install), uncached():
        yield


def watches_memory() -> bool:
    """Whether this process runs kernels in an interpreter whose accesses can be watched."""
    return config.interpreting() and TRITON in sys.modules and works(HOOK) and works(ACCESSES)


def _unhooked() -> str:
    """Why launches are not even seen; "" where they are, or where nothing is interpreted."""
    return status(HOOK).note if config.interpreting() and TRITON in sys.modules else ""


def kernel_line() -> FrameType:
    """The frame of the innermost line of a kernel, or of a function that it calls, that is being interpreted."""
    folders = str(Path(sys.modules["triton"].__file__ or "").parent), str(Path(__file__).parent)

    def is_machinery(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return file.startswith(folders) and not file.endswith("probe_kernels.py")

    frame = sys._getframe(1)
    while frame.f_back is not None and not is_machinery(frame):
        frame = frame.f_back  # the watcher's own
    while frame.f_back is not None and is_machinery(frame):
        frame = frame.f_back
    return frame


def _install(patches: Patches, module: Any, watcher: MemoryWatcher) -> None:
    builder, executor = module.InterpreterBuilder, module.GridExecutor
    for name, replacement in _accesses(module, watcher).items():
        patches.set(builder, name, replacement)
    stock_arguments, stock_call = executor._init_args_hst, executor.__call__

    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args_hst, kwargs_hst = stock_arguments(self, args_dev, kwargs)
        by_position = zip(self.arg_names, args_dev, args_hst, strict=False)
        by_name = ((name, value, kwargs_hst[name]) for name, value in kwargs.items())
        watcher.begin(getattr(self.fn, "__name__", "?"), [*by_position, *by_name])
        return args_hst, kwargs_hst

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_call(self, *args, **kwargs)
        finally:
            watcher.end()

    patches.set(executor, "_init_args_hst", _init_args_hst)
    patches.set(executor, "__call__", __call__)


def _accesses(module: Any, watcher: MemoryWatcher) -> dict[str, Callable[..., Any]]:
    builder = module.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def allowed(ptrs: Any, mask: Any, write: bool) -> Any:
        """The mask without the lanes that are refused."""
        addresses = np.asarray(ptrs.data)
        # Block pointers hand their mask over as an array, whose `data` is a buffer of it.
        wanted = np.broadcast_to(True if mask is None else np.asarray(mask.data).astype(bool), addresses.shape)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        refused = watcher.refused(addresses, wanted, size)
        if refused is None:
            return mask
        interpret_again()  # a program that is replayed has no line
        watcher.note(addresses[refused], size, write, tuple(int(i) for i in module.interpreter_builder.grid_idx))
        return module.TensorHandle(wanted & ~refused, module.tl.int1)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return load(self, ptrs, allowed(ptrs, mask, write=False), *rest, **more)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return store(self, ptrs, value, allowed(ptrs, mask, write=True), *rest, **more)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return rmw(self, op, ptr, val, allowed(ptr, mask, write=True), *rest, **more)

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any, **more: Any) -> Any:
        if allowed(ptr, None, write=True) is None:
            return cas(self, ptr, cmp, val, *rest, **more)
        return module.TensorHandle(cmp.data.copy(), cmp.dtype.scalar)  # as if it had been exchanged: no lock waits

    replacements = (create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas)
    return {replacement.__name__: replacement for replacement in replacements}


class _Stretch:
    """A watcher that knows one stretch of memory, for the self-test."""

    def __init__(self) -> None:
        self.missing = ""
        self.stretch, self.names, self.outside, self.line = (0, 0), [""], {}, 0

    def begin(self, kernel: str, arguments: Sequence[tuple[str, Any, Any]]) -> None:
        self.names = [kernel, *(name for name, _, _ in arguments)]
        copy = arguments[0][2]
        self.stretch = copy.data_ptr(), copy.data_ptr() + copy.numel() * copy.element_size()

    def end(self) -> None:
        self.names.append("end")

    def refused(self, addresses: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray:
        start, end = self.stretch
        return wanted & ((addresses < start) | (addresses + np.uint64(size) > end))

    def note(self, addresses: np.ndarray, size: int, write: bool, program: tuple[int, ...]) -> None:
        self.outside[write] = addresses.size
        self.line = kernel_line().f_lineno


def _self_test() -> str:
    """A kernel that reads two elements beyond its tensor and writes inside."""
    import torch
    from triton.runtime import interpreter as module

    from retrograd.compat.triton_interpreter.probe_kernels import beyond_kernel

    watcher, x = _Stretch(), torch.ones(14, dtype=torch.float32, device="cpu")

    def launch() -> str:
        patches = Patches()
        try:
            _install(patches, module, watcher)
            beyond_kernel[(1,)](x, N=16)
        finally:
            patches.undo()
        return ""

    in_plain_thread(launch)
    first = beyond_kernel.fn.__code__.co_firstlineno
    told = watcher.names, watcher.outside, watcher.line - first, x.tolist()
    if told != (["beyond_kernel", "x_ptr", "N", "end"], {False: 2, True: 2}, 4, [2.0] * 14):
        return f"accesses of a kernel that reads 2 elements too far are told as {told}"
    return ""


ACCESSES = register(
    Part(
        id="triton.interpreter.accesses",
        package="triton",
        purpose="looks at the addresses of its interpreter",
        names=("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas", "_init_args_hst"),
        ran=RAN,
        otherwise="addresses of interpreted kernels were not checked",
        self_test=_self_test,
    )
)
