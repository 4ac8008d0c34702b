"""Execution of one launch: its arguments as registers and storages, then all programs in chunks, or in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from retrograd.compat.triton_ttir import LaunchedKernel
from retrograd.errors import RetrogradError
from retrograd.ttir.control_flow import run_blocks
from retrograd.ttir.element_types import Array, element_type
from retrograd.ttir.faults import FaultList
from retrograd.ttir.frames import Frame, LaunchState
from retrograd.ttir.interleaving import orders, run_in_turns
from retrograd.ttir.ir import SsaValue
from retrograd.ttir.memory import Memory
from retrograd.ttir.program import NumpyKernel, compile_text
from retrograd.ttir.races import OrderedRaces, UnorderedRaces
from retrograd.ttir.storage import LearnedStorages, Pointer, Storage, Undefined

_CHUNK = 1 << 18  # elements of the largest tensor of a kernel that are computed at once: about 1 MiB a value
_LEAVES_32_BITS = 1 << 31
_MOST_ORDERED = 4096  # programs whose clocks are kept: a matrix of that many rows and columns


@dataclass(eq=False)
class Execution:
    """One launch, ready to be run, once or again in another order.

    Attributes:
        kernel: compiled.
        grid: programs along each axis.
        pointers: tensors by the number of their argument.
        scalars: values by slot, of pointers their addresses.
        library: folder of Triton's own functions on the device.
        learned: tensors that pointers in memory lead to.
        ended: numbers of programs that ran in turns, in the order in which they came to their ends in the latest run.
        turns: how many it had.
    """

    kernel: NumpyKernel
    grid: tuple[int, int, int]
    pointers: dict[int, Pointer]
    scalars: dict[int, Array]
    library: str
    learned: LearnedStorages = field(default_factory=LearnedStorages)
    ended: list[int] = field(default_factory=list[int])
    turns: int = 0

    @classmethod
    def of(
        cls, launched: LaunchedKernel, grid: tuple[int, int, int], values: dict[str, Any], undefined: Undefined,
        library: str,
    ) -> Execution:  # fmt: skip
        """Of a launch of Triton's; `undefined` says which bytes of a tensor's storage nobody has written.

        Raises:
            UnsupportedOperationError: it has an operation that cannot be executed; names it and its line.
            RetrogradError: a tensor is not on the CPU.
        """
        kernel = launched.kept.get("program")
        if kernel is None:
            kernel = launched.kept["program"] = compile_text(launched.text)
        names = launched.kept.get("names")
        if names is None:
            names = launched.kept["names"] = _plain_names(launched.signature)
        if names:
            leaves = [(name, values[name]) for name in names]
        else:
            leaves = _leaves(launched.signature, values, [value.type.element for value in kernel.arguments])
        return cls(kernel, grid, *_arguments(kernel.arguments, leaves, undefined), library, LearnedStorages(undefined))

    @property
    def storages(self) -> list[Storage]:
        """Where the tensors lie, in the order of the arguments."""
        return list({id(p.storage): p.storage for p in self.pointers.values()}.values())

    @property
    def programs(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def memory(self, faults: FaultList) -> Memory:
        """A view of the tensors that notes faults."""
        accesses, name = self.kernel.accesses, self.kernel.name
        memory = Memory(self.pointers, accesses, name, faults, self.grid, self.library, self.learned)
        memory.may_overflow = self._may_overflow
        return memory

    @property
    def _may_overflow(self) -> bool:
        """Whether the two largest numbers of the launch, multiplied, leave 32 bits: programs, arguments, extents."""
        pointers = {self.kernel.arguments[number].slot for number in self.pointers}
        numbers = [abs(int(v[0])) for slot, v in self.scalars.items() if slot not in pointers and v.dtype.kind == "i"]
        *_, second, first = sorted([self.programs, self.kernel.largest, self.kernel.bound, *numbers])
        return first * second >= _LEAVES_32_BITS

    def in_turns(self, memory: Memory) -> bool:
        """Whether programs can learn of each other, so that they have to run in turns."""
        spins = any(
            access.decides and access.does == "load" and any(s.cell for s in memory.storages_of(access))
            for access in self.kernel.accesses
        )
        return self.programs > 1 and (self.kernel.waits or spins)

    @property
    def undecided(self) -> str:
        """Why races cannot be looked for; "" if they can."""
        if self.programs <= _MOST_ORDERED:
            return ""
        return f"{self.programs} programs wait for each other, and clocks are kept of {_MOST_ORDERED} at most"

    def run(
        self, memory: Memory, seed: int | None, limit: int, printed: Callable[[str], Any],
        programs: Array | None = None, stays: float = 0.0,
    ) -> None:  # fmt: skip
        """Run all programs; seed 0 is the order of their numbers, None that of `programs`, the last first.

        Raises:
            EndlessLoopError: they do not end.
        """
        kernel, count = self.kernel, self.programs
        registers: list[Any] = [None] * kernel.registers
        for slot, value in kernel.constants.items():
            registers[slot] = value
        launch = LaunchState(memory, self.grid, list(registers), limit, printed)
        for slot, value in self.scalars.items():
            registers[slot] = value
        if programs is None:
            programs = orders(count, seed or 0)
        with np.errstate(all="ignore"):
            if self.in_turns(memory):
                # Without clocks all are in conflict that meet: nothing is said then.
                ordered = OrderedRaces(memory.conflict, count) if not self.undecided else None
                memory.races = ordered
                self.ended, self.turns = run_in_turns(kernel, launch, registers, programs, seed, stays)
                return
            if count > 1:
                memory.races = UnorderedRaces(memory.conflict, len(kernel.accesses), count)
            together = max(1, _CHUNK // kernel.largest)
            for start in range(0, count, together):
                launch.restart()
                frame = Frame(list(registers), programs[start : start + together], {}, launch)
                run_blocks(kernel.blocks, frame)


def _arguments(
    arguments: list[SsaValue], leaves: list[tuple[str, Any]], undefined: Undefined
) -> tuple[dict[int, Pointer], dict[int, Array]]:
    """Tensors by the number of their argument, and values by slot."""
    pointers: dict[int, Pointer] = {}
    scalars: dict[int, Array] = {}
    storages: dict[int, Storage] = {}
    for number, (argument, (name, leaf)) in enumerate(zip(arguments, leaves, strict=True)):
        if (element := argument.type.element) != "ptr":
            scalars[argument.slot] = (_whole if type(leaf) in (int, bool) else _number)(leaf, element)
            continue
        tensor = _tensor(leaf)
        if tensor is None:
            scalars[argument.slot] = np.array([leaf if isinstance(leaf, int) else leaf.data_ptr()], np.int64)
            continue
        if tensor.device.type != "cpu":
            raise RetrogradError(f"`{name}` is on {tensor.device}, expected cpu: kernels are executed without a GPU")
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = Storage.of(storage)
            storages[key].undefined = undefined(tensor)
            storages[key].begin = functools.partial(undefined, tensor, True)
        pointer = pointers[number] = Pointer.of(name, tensor, storages[key])
        storages[key].note_view(pointer)
        start = pointer.start if tensor is leaf and pointer.start != pointer.end else leaf.data_ptr()
        scalars[argument.slot] = np.array([start], np.int64)
    return pointers, scalars


def _number(value: Any, element: str) -> Array:
    kind = element_type(element)
    number = _scalar(value, kind.compute)
    return kind.round(number) if kind.round else number


@functools.lru_cache(1024, typed=True)
def _whole(value: int, element: str) -> Array:
    """Of a whole number: sizes and strides are the same at most launches. Of floats 0.0 and -0.0 would be one."""
    number = _number(value, element)
    number.flags.writeable = False
    return number


def _scalar(value: Any, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "i":
        bits = 8 * dtype.itemsize
        return np.array([int(value) & ((1 << bits) - 1)], f"u{dtype.itemsize}").view(dtype)
    return np.array([value]).astype(dtype)


def _tensor(leaf: Any) -> torch.Tensor | None:
    """The tensor of an argument: Triton takes what has a data_ptr, and wrappers keep the tensor that it points into."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    for held in getattr(leaf, "__dict__", {}).values():
        if isinstance(held, torch.Tensor):
            storage = held.untyped_storage()
            if 0 <= leaf.data_ptr() - storage.data_ptr() < max(storage.nbytes(), 1):
                return held.detach()
    return None


def _plain_names(signature: dict[str, Any]) -> tuple[str, ...]:
    """The arguments of the function, but for constexprs; none where some are tuples or descriptors."""
    if any(isinstance(kind, (tuple, list)) or str(kind).startswith("tensordesc") for kind in signature.values()):
        return ()
    return tuple(name for name, kind in signature.items() if kind != "constexpr")


def _leaves(signature: dict[str, Any], values: dict[str, Any], types: list[str]) -> list[tuple[str, Any]]:
    """Names and values as the function takes them: tuples flat, descriptors in their parts, no constexprs."""
    leaves: list[tuple[str, Any]] = []

    def add(name: str, kind: Any, value: Any) -> None:
        if isinstance(kind, (tuple, list)):
            names = getattr(value, "_fields", range(len(kind)))
            for part, inner, item in zip(names, kind, value, strict=True):
                add(f"{name}.{part}" if isinstance(part, str) else f"{name}[{part}]", inner, item)
        elif str(kind).startswith("tensordesc"):
            leaves.append((name, value.base))
            leaves.extend((name, int(n)) for n in (*value.shape, *value.strides))
            flags = [value.padding == "nan", bool(getattr(value, "round_f32_to_tf32", False))]
            while len(leaves) < len(types) and types[len(leaves)] == "i1":
                leaves.append((name, flags.pop(0)))
            leaves.extend((name, int(n)) for n in (*value.shape, *value.strides))
        elif kind != "constexpr":
            leaves.append((name, value))

    for name, kind in signature.items():
        add(name, kind, values[name])
    return leaves
