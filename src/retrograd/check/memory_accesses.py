"""Memory accesses of kernels in Triton's interpreter, checked against the memory of the launch's tensors.

Those outside are recorded and not made: a stray write harms nobody, and a wild address does not end the process.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrograd.check import cpu_kernels
from retrograd.check.guard_bands import BAND, SIDES, Guard
from retrograd.compat.triton_interpreter.memory_hooks import kernel_line, watches_memory, watching_memory
from retrograd.core import gc_pause
from retrograd.ttir.faults import KernelFault

__all__ = ["AccessWatch", "OutsideAccess", "watch", "watches_memory"]


@dataclass
class OutsideAccess:
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
        sentence = (
            f"kernel {self.kernel} {does} {place} ({self.count} element{'s' * (self.count != 1)}{away}) in program"
        )
        return f"{sentence} {self.program}{others}; {Path(self.file).name}:{self.line}: {source}"


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
class AccessWatch:
    """Accesses outside, of the launches that were watched.

    Attributes:
        guards: tensors inside bands; of others all of the storage counts.
        missing: why addresses were not checked although kernels are interpreted; "" if they were.
        accesses: those outside, by where they are in the source and what they miss.
        launched: whether there was a launch.
        faults: accesses outside, of kernels that are executed as a GPU would run them.
    """

    guards: Sequence[Guard]
    missing: str = ""
    accesses: dict[Any, OutsideAccess] = field(default_factory=dict)
    launch: _Launch | None = None
    launched: bool = False
    faults: list[KernelFault] = field(default_factory=list)

    def begin(self, kernel: str, arguments: Sequence[tuple[str, Any, Any]]) -> None:
        """A launch starts, with names of arguments, these, and their copies in the interpreter's memory."""
        self.launched = True
        guarded = {g.flat.untyped_storage().data_ptr(): g for g in self.guards}
        spans: list[tuple[int, int, str]] = []
        named: dict[str, None] = {}
        known: set[int] = set()
        for name, argument, copied in arguments:
            for original, copy in zip(_tensors(argument), _tensors(copied), strict=True):
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
        self.launch = _Launch(kernel, list(named), _live(spans))

    def end(self) -> None:
        """It has ended."""
        self.launch = None

    def refused(self, addresses: np.ndarray, wanted: np.ndarray, size: int) -> np.ndarray | None:
        """The lanes that are outside."""
        if self.launch is None:
            return None
        outside = wanted & self.launch.live.outside(addresses, size)
        if outside.any():
            outside &= ~self._elsewhere(addresses, size)
        return outside if outside.any() else None

    def note(self, addresses: np.ndarray, size: int, write: bool, program: tuple[int, ...]) -> None:
        """Record accesses outside, by their lines."""
        if self.launch is not None:
            self._record(self.launch, np.sort(addresses.ravel()), size, write, program)

    def _elsewhere(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which are in another tensor of the process and not in a band: kernels may find pointers in a table."""
        banded = {g.flat.untyped_storage().data_ptr() for g in self.guards}
        spans = []
        for thing in gc_pause.objects():
            plain = type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.layout == torch.strided
            if plain and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in banded:
                    spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), ""))
        return ~_live(spans).outside(addresses, size) if spans else np.zeros(addresses.shape, dtype=bool)

    def _record(self, launch: _Launch, addresses: np.ndarray, size: int, write: bool, program: tuple[int, ...]) -> None:
        frame = kernel_line()
        function, file, line = frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno
        kernel = launch.kernel if function == launch.kernel else f"{launch.kernel} (in {function})"
        named = [a for a in launch.arguments if re.search(rf"\b{re.escape(a)}\b", linecache.getline(file, line))]
        by_place: dict[tuple[str, str], list[int]] = {}
        for address in addresses.tolist():
            owner, side, away = launch.live.nearest(address)
            # Where the line names one pointer, it is that one, however near another tensor is.
            if not owner and len(named) == 1:
                owner = f"`{named[0]}`"
            by_place.setdefault((owner, side), []).append(away)
        for (owner, side), away in by_place.items():
            # From an end to the first byte beyond it is 0, from the last byte before a start to it `size`.
            steps = min(away) // size + (side != SIDES[0]) if owner and side in SIDES else 0
            key = (kernel, file, line, write, owner, side)
            new = OutsideAccess(kernel, file, line, write, owner, side, steps, 0, program, set())
            access = self.accesses.setdefault(key, new)
            access.count += len(away)
            access.away = min(access.away, steps)
            access.programs.add(program)


def _tensors(argument: Any) -> list[torch.Tensor]:
    """The tensors of a kernel's argument: itself, what a wrapper or a descriptor holds, those of a tuple."""
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, tuple):
        return [t for item in argument for t in _tensors(item)]
    return _tensors(argument.base) if hasattr(argument, "base") else []


def watches_kernels() -> bool:
    """Whether addresses of kernels are checked here, interpreted ones or those that are executed without a GPU."""
    return cpu_kernels.current() is not None or watches_memory()


@contextmanager
def watch(guards: Sequence[Guard]) -> Iterator[AccessWatch]:
    """Check every access of kernels that are interpreted meanwhile; does nothing where none are.

    Args:
        guards: tensors in bands; read again at each launch, so it may grow.
    """
    watch = AccessWatch(guards)
    if cpu_kernels.current() is None:
        with watching_memory(watch):
            yield watch
        return
    with cpu_kernels.session() as session:
        yield watch
    watch.launched = bool(session.launches)
    watch.faults = [fault for fault in session.faults if fault.kind in ("out of bounds", "between rows", "misaligned")]
