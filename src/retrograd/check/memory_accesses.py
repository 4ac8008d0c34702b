"""Every address that a kernel touches in Triton's interpreter, checked against the memory of the launch's tensors.

The interpreter's loads, stores and atomics are replaced while `watch` is active and put back after it. Accesses outside
are recorded and not made: a stray write harms nobody, and a wild address does not end the process.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrograd import config
from retrograd.check.guard_bands import BAND, SIDES, Guard
from retrograd.compat.triton_interpreter.launch_cache import afresh
from retrograd.compat.triton_interpreter.program_recorder import refuse
from retrograd.core import gc_pause

_MODULE = "triton.runtime.interpreter"
_BUILDER = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
_EXECUTOR = ("_init_args_hst", "__call__")


def checks() -> bool:
    """Whether this process runs kernels in an interpreter that can be watched."""
    return config.interpreting() and _MODULE in sys.modules and not _lacking(sys.modules[_MODULE])


def _lacking(module: Any) -> str:
    """What the watch needs and this version of Triton does not have; "" if nothing."""
    wanted = [(module, ("InterpreterBuilder", "GridExecutor", "TensorHandle", "interpreter_builder"))]
    if not [n for n in wanted[0][1] if not hasattr(module, n)]:
        wanted += [(module.InterpreterBuilder, _BUILDER), (module.GridExecutor, _EXECUTOR)]
    return ", ".join(n for owner, names in wanted for n in names if not hasattr(owner, n))


@dataclass
class Access:
    """Accesses outside, of one line of a kernel to the surroundings of one tensor.

    Attributes:
        kernel, file, line: where.
        write: whether it writes.
        argument: the pointer argument whose tensor is nearest, or that the line names; "" if neither says.
        side: one of guards.SIDES, or "far from any tensor".
        away: elements from the tensor to the nearest one touched, 1 being the next to it; 0 if far.
        count: elements touched, over all programs.
        program: the first program that did.
        programs: how many did.
    """

    kernel: str
    file: str
    line: int
    write: bool
    argument: str
    side: str
    away: int
    count: int
    program: tuple[int, ...]
    programs: set[tuple[int, ...]]

    def text(self) -> str:
        """One or two sentences for a report."""
        does = "writes" if self.write else "reads"
        place = f"outside {self.argument}, {self.side}" if self.argument else self.side
        place = place if self.away else place.replace("outside", "through")
        away = f", the nearest {self.away} away" if self.away > 1 else ""
        others = f" and {len(self.programs) - 1} more" if len(self.programs) > 1 else ""
        source = linecache.getline(self.file, self.line).partition("#")[0].strip()
        what = f"kernel {self.kernel} {does} {place} ({self.count} element{'s' * (self.count != 1)}{away}) in program"
        return f"{what} {self.program}{others}; {Path(self.file).name}:{self.line}: {source}"


@dataclass
class _Live:
    """Memory that a launch may touch: runs of bytes, sorted, and whose they are."""

    starts: np.ndarray
    ends: np.ndarray
    owner: np.ndarray
    names: list[str]

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which accesses of `size` bytes are not wholly inside."""
        at = np.searchsorted(self.starts, addresses, side="right") - 1
        return addresses.astype(np.uint64) + np.uint64(size - 1) >= self.ends[at]

    def nearest(self, address: int) -> tuple[str, str, int]:
        """The owner of the nearest memory, the side of it, and how many bytes away; "" if more than a band."""
        at = int(np.searchsorted(self.starts, np.uint64(address), side="right")) - 1
        below = address - int(self.ends[at]) if at else BAND + 1
        above = int(self.starts[at + 1]) - address if at + 1 < len(self.starts) else BAND + 1
        if min(below, above) > BAND:
            return "", "far from any tensor", 0
        if at + 1 < len(self.starts) and self.owner[at] == self.owner[at + 1]:
            return self.names[self.owner[at]], SIDES[2], max(min(below, above), 0)
        is_after = below <= above
        return self.names[self.owner[at if is_after else at + 1]], SIDES[is_after], below if is_after else above


def _live(spans: Sequence[tuple[int, int, str]]) -> _Live:
    order = sorted([(0, 0, ""), *spans])  # the first so that there is always one before an address
    names = list(dict.fromkeys(name for _, _, name in order))
    starts = np.array([a for a, _, _ in order], dtype=np.uint64)
    # The greatest end so far: a tensor may lie inside the memory of another.
    ends = np.maximum.accumulate(np.array([b for _, b, _ in order], dtype=np.uint64))
    return _Live(starts, ends, np.array([names.index(name) for _, _, name in order], dtype=int), names)


@dataclass
class _Launch:
    """One launch: the kernel, its arguments and their memory."""

    kernel: str
    arguments: list[str]
    live: _Live


@dataclass
class Watch:
    """What was seen.

    Attributes:
        guards: tensors inside bands; of others all of the storage counts.
        missing: why addresses were not checked although kernels are interpreted; "" if they were.
        accesses: those outside, by where they are in the source and what they miss.
    """

    guards: Sequence[Guard]
    missing: str = ""
    accesses: dict[Any, Access] = field(default_factory=dict)
    launch: _Launch | None = None

    def begin(self, executor: Any, given: Iterable[tuple[str, Any, Any]]) -> None:
        """A launch starts; `given` has names, arguments and their copies in the interpreter's memory."""
        guarded = {g.flat.untyped_storage().data_ptr(): g for g in self.guards}
        spans: list[tuple[int, int, str]] = []
        named: dict[str, None] = {}
        known: set[int] = set()
        for name, there, here in given:
            for original, copy in zip(_tensors(there), _tensors(here), strict=True):
                named[name] = None
                memory = original.untyped_storage().data_ptr()
                if memory not in known:
                    known.add(memory)
                    own = guarded[memory].spans() if memory in guarded else [(0, original.untyped_storage().nbytes())]
                    start = copy.untyped_storage().data_ptr()
                    spans += [(start + a, start + b, f"`{name}`") for a, b in own]
        for memory, guard in guarded.items():
            if memory not in known and guard.flat.device.type == "cpu":
                spans += [(memory + a, memory + b, guard.name) for a, b in guard.spans()]
        self.launch = _Launch(getattr(executor.fn, "__name__", "?"), list(named), _live(spans))

    def inside(self, module: Any, ptrs: Any, mask: Any, write: bool) -> Any:
        """The mask without the lanes that are outside, which are recorded."""
        if self.launch is None:
            return mask
        addresses = np.asarray(ptrs.data)
        # Block pointers hand their mask over as an array, whose `data` is a buffer of it.
        wanted = True if mask is None else np.asarray(mask.data).astype(bool)
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        bad = np.broadcast_to(wanted, addresses.shape) & self.launch.live.outside(addresses, size)
        if bad.any():
            bad &= ~self._elsewhere(addresses, size)
        if not bad.any():
            return mask
        refuse()
        self._record(module, np.sort(addresses[bad].ravel()), size, write)
        return module.TensorHandle(np.broadcast_to(wanted, addresses.shape) & ~bad, module.tl.int1)

    def _elsewhere(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which are in another tensor of the process and not in a band: kernels may find pointers in a table."""
        banded = {g.flat.untyped_storage().data_ptr() for g in self.guards}
        spans = []
        for thing in gc_pause.objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in banded:
                    spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), ""))
        return ~_live(spans).outside(addresses, size) if spans else np.zeros(addresses.shape, dtype=bool)

    def _record(self, module: Any, addresses: np.ndarray, size: int, write: bool) -> None:
        assert self.launch is not None
        kernel, file, line = _here(self.launch.kernel)
        program = tuple(int(i) for i in module.interpreter_builder.grid_idx)
        named = [a for a in self.launch.arguments if re.search(rf"\b{re.escape(a)}\b", linecache.getline(file, line))]
        by_place: dict[tuple[str, str], list[int]] = {}
        for address in addresses.tolist():
            owner, side, away = self.launch.live.nearest(address)
            # Where the line names one pointer, it is that one, however near another tensor is.
            if not owner and len(named) == 1:
                owner = f"`{named[0]}`"
            by_place.setdefault((owner, side), []).append(away)
        for (owner, side), away in by_place.items():
            # From an end to the first byte beyond it is 0, from the last byte before a start to it `size`.
            steps = min(away) // size + (side != SIDES[0]) if owner and side in SIDES else 0
            key = (kernel, file, line, write, owner, side)
            made = Access(kernel, file, line, write, owner, side, steps, 0, program, set())
            access = self.accesses.setdefault(key, made)
            access.count += len(away)
            access.away = min(access.away, steps)
            access.programs.add(program)


def _here(kernel: str) -> tuple[str, str, int]:
    """The kernel, and the innermost line of a kernel or of a function that it calls."""
    shim = sys.modules["retrograd.compat.triton_interpreter"]
    ours = (*(str(Path(m.__file__ or "").parent) for m in (sys.modules["triton"], shim)), __file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    inner = frame.f_code.co_name
    return kernel if inner == kernel else f"{kernel} (in {inner})", frame.f_code.co_filename, frame.f_lineno


def _tensors(argument: Any) -> list[torch.Tensor]:
    """The tensors of a kernel's argument: itself, what a wrapper or a descriptor holds, those of a tuple."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, tuple):
        return [t for item in argument for t in _tensors(item)]
    return _tensors(argument.base) if hasattr(argument, "base") else []


@contextmanager
def watch(guards: Sequence[Guard]) -> Iterator[Watch]:
    """Check every access of kernels that are interpreted meanwhile; does nothing where none are.

    Args:
        guards: tensors in bands; read again at each launch, so it may grow.
    """
    seen = Watch(guards)
    module = sys.modules.get(_MODULE)
    if module is None or not config.interpreting():
        yield seen
        return
    if lacking := _lacking(module):
        seen.missing = f"addresses in Triton's interpreter were not checked: this version of it has no {lacking}"
        yield seen
        return
    changes = [
        *((module.InterpreterBuilder, n, f) for n, f in _memory(module, seen).items()),
        *((module.GridExecutor, n, f) for n, f in _launching(module.GridExecutor, seen).items()),
    ]
    stock = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    try:
        for owner, name, function in changes:
            setattr(owner, name, function)
        with afresh():
            yield seen
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


def _memory(module: Any, seen: Watch) -> dict[str, Callable[..., Any]]:
    """What replaces the interpreter's accesses to memory."""
    load, store, rmw, cas = (getattr(module.InterpreterBuilder, name) for name in _BUILDER)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return load(self, ptrs, seen.inside(module, ptrs, mask, write=False), *rest, **more)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return store(self, ptrs, value, seen.inside(module, ptrs, mask, write=True), *rest, **more)

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return rmw(self, op, ptr, val, seen.inside(module, ptr, mask, write=True), *rest, **more)

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, *rest: Any, **more: Any) -> Any:
        if seen.inside(module, ptr, None, write=True) is None:
            return cas(self, ptr, cmp, val, *rest, **more)
        return module.TensorHandle(cmp.data.copy(), cmp.dtype.scalar)  # as if it had been exchanged: no lock waits

    made = (create_masked_load, create_masked_store, create_atomic_rmw, create_atomic_cas)
    return dict(zip(_BUILDER, made, strict=True))


def _launching(executor: Any, seen: Watch) -> dict[str, Callable[..., Any]]:
    """What replaces a launch: it says which arguments there are."""
    stock_arguments, stock_call = executor._init_args_hst, executor.__call__

    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args_hst, kwargs_hst = stock_arguments(self, args_dev, kwargs)
        by_place = zip(self.arg_names, args_dev, args_hst, strict=False)
        seen.begin(self, [*by_place, *((name, value, kwargs_hst[name]) for name, value in kwargs.items())])
        return args_hst, kwargs_hst

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return stock_call(self, *args, **kwargs)
        finally:
            seen.launch = None

    return {"_init_args_hst": _init_args_hst, "__call__": __call__}
