"""Launches of Triton kernels on CPU tensors: arguments, chunks of programs, and a session of several."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from retrograd.compat.triton_compile import GpuDescription
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_autotuning
from retrograd.compat.triton_ttir import LaunchedKernel, executing, library_folder
from retrograd.errors import RetrogradError
from retrograd.runtime.triton import fake_gpu
from retrograd.runtime.triton.launch import dry
from retrograd.ttir.control_flow import run_blocks
from retrograd.ttir.element_types import Array, element_type
from retrograd.ttir.faults import AccessAt, FaultList, KernelFault
from retrograd.ttir.frames import EndlessLoopError, Frame, LaunchState
from retrograd.ttir.interleaving import orders, run_in_turns
from retrograd.ttir.ir import SsaValue
from retrograd.ttir.memory import Memory
from retrograd.ttir.program import NumpyKernel, compile_text
from retrograd.ttir.races import OrderedRaces, UnorderedRaces
from retrograd.ttir.storage import MemoryAccess, Pointer, Storage

_GPU = GpuDescription("sm_90", "cuda", 90, 32, 132, 232448, 65536)
_CHUNK = 1 << 18  # elements of the largest tensor of a kernel that are computed at once: about 1 MiB a value
_MOST_ORDERED = 4096  # programs whose clocks are kept: a matrix of that many rows and columns


@dataclass
class LaunchRecord:
    """One launch that was executed.

    Attributes:
        kernel: name of its function.
        grid: programs along each axis.
        in_turns: whether programs learn of each other, and ran in turns.
        undecided: why races were not looked for; "" if they were.
        order_matters: lines whose order of programs decides bits: sums of floats by atomics.
    """

    kernel: str
    grid: tuple[int, int, int]
    in_turns: bool
    undecided: str = ""
    order_matters: list[AccessAt] = field(default_factory=list)


class Session:
    """Executes launches of kernels and keeps what was noticed of them.

    Args:
        seed: of the order of programs and atomics; 0 is the order of their numbers.
        limit: rounds of loops that the programs of a launch may make together.
        printed: takes lines of tl.device_print; they go to standard output by default.

    Attributes:
        faults: what was noticed, over all launches.
        launches: what was executed.
        on_access: are called with each access, its programs and addresses.
    """

    def __init__(self, seed: int = 0, limit: int = 1_000_000, printed: Callable[[str], Any] | None = None) -> None:
        self.faults = FaultList()
        self.launches: list[LaunchRecord] = []
        self.on_access: list[Callable[[MemoryAccess, Array, Array], None]] = []
        self.seed, self._limit = seed, limit
        self._printed = printed or (lambda line: sys.stdout.write(line + "\n"))
        self._library = library_folder()
        self._memory: Memory | None = None
        self._tuned = False
        self._tuners: dict[int, tuple[Any, Any]] = {}
        self._trial: dict[int, tuple[Storage, Array]] | None = None
        self.undefined: Callable[[torch.Tensor], Array | None] = lambda tensor: None

    def execute(self, launched: LaunchedKernel, grid: tuple[int, int, int], values: dict[str, Any]) -> None:
        """Run a kernel on the memory of its arguments.

        Raises:
            UnsupportedOperationError: it has an operation that cannot be executed; names it and its line.
            EndlessLoopError: it does not end.
        """
        count = grid[0] * grid[1] * grid[2]
        if not count:
            return
        kernel = launched.kept.get("program")
        if kernel is None:
            kernel = launched.kept["program"] = compile_text(launched.text)
        leaves = _leaves(launched.signature, values, [value.type.element for value in kernel.arguments])
        pointers, scalars = self._arguments(kernel.arguments, leaves)
        memory = Memory(pointers, kernel.accesses, kernel.name, self.faults, grid, self._library)
        registers: list[Any] = [None] * kernel.registers
        for slot, value in kernel.constants.items():
            registers[slot] = value
        launch = LaunchState(memory, grid, list(registers), self._limit, self._printed)
        for slot, value in scalars.items():
            registers[slot] = value
        self._keep(memory)
        in_turns = count > 1 and (kernel.waits or _spins(kernel.accesses, memory))
        record = LaunchRecord(kernel.name, grid, in_turns)
        self.launches.append(record)
        try:
            with np.errstate(all="ignore"):
                self._run(
                    kernel, launch, registers, record, orders(count, self.seed and self.seed + len(self.launches))
                )
        except EndlessLoopError as error:
            file, line = error.place.outside_of(self._library)
            self.faults.add(KernelFault("endless loop", kernel.name, AccessAt("loops", file, line), detail=error.why))
            raise
        record.order_matters = [memory.where(kernel.accesses[number]) for number in sorted(memory.order_matters)]

    def tuning(self, launch: KernelLaunch, proceed: Proceed) -> Any:
        """A launch of an autotuned kernel begins; what was chosen before, by a GPU or another session, is put aside."""
        tuner = launch.function
        if id(tuner) not in self._tuners:
            self._tuners[id(tuner)] = tuner, tuner.cache
            tuner.cache = {}
        self._tuned = False
        return proceed()

    def report(self) -> str:
        """What was executed and noticed, a line each."""
        kernels = sorted({record.kernel for record in self.launches})
        plural = "es" * (len(self.launches) != 1)
        lines = [f"{len(self.launches)} launch{plural} of {', '.join(kernels) or 'no kernel'}, seed {self.seed}"]
        lines += [fault.text() for fault in sorted(self.faults, key=lambda fault: fault.is_mild)]
        lines += sorted({f"races of {r.kernel} are undecided: {r.undecided}" for r in self.launches if r.undecided})
        order = {(r.kernel, at.text()) for r in self.launches for at in r.order_matters}
        lines += [f"bits of {kernel} depend on the order of programs: it {text}" for kernel, text in sorted(order)]
        return "\n".join(lines if len(lines) > 1 else [*lines, "no fault"])

    def close(self) -> None:
        """Give autotuned kernels back what was chosen for them before."""
        for tuner, cache in self._tuners.values():
            tuner.cache = cache

    def tune(self, call: Callable[[], Any]) -> None:
        """Launch the first configuration of an autotuned kernel twice, as its autotuner does many times, and undo it.

        What the second launch changes once more, a user finds changed by as many launches as were timed.
        """
        if self._tuned or self._trial is not None:
            return
        self._tuned = True
        kept = self.faults, self.launches
        self.faults, self.launches, self._trial = FaultList(), [], {}
        try:
            call()
            once = {key: storage.octets.copy() for key, (storage, _) in self._trial.items()}
            call()
            changed = {key for key, octets in once.items() if not np.array_equal(octets, self._trial[key][0].octets)}
            changes = [self._changed(key, once[key]) for key in changed]
        finally:
            for storage, before in self._trial.values():
                storage.octets[:] = before
            self.faults, self.launches = kept
            self._trial = None
        for fault in filter(None, changes):
            self.faults.add(fault)

    def _changed(self, key: int, once: Array) -> KernelFault | None:
        assert self._trial is not None
        storage = self._trial[key][0]
        memory = self._memory
        for access in memory.accesses if memory else ():
            for number in access.arguments or ():
                pointer = memory.pointers.get(number) if memory else None
                if memory and pointer and pointer.storage.start == storage.start and access.does != "load":
                    element = (
                        int(np.flatnonzero(once != storage.octets)[0]) + storage.start - pointer.start
                    ) // pointer.size
                    detail = (
                        "each configuration that is timed changes it again: reset_to_zero or restore_value is missing"
                    )
                    return KernelFault(
                        "autotune", memory.kernel, memory.where(access), None, pointer.name, element, detail, 1
                    )
        return None

    def _keep(self, memory: Memory) -> None:
        """Remember what a trial writes to as it is before."""
        self._memory = memory
        if self._trial is not None:
            for access in memory.accesses:
                for storage in memory.storages_of(access) if access.does != "load" else ():
                    self._trial.setdefault(storage.start, (storage, storage.octets.copy()))

    def _run(
        self, kernel: NumpyKernel, launch: LaunchState, registers: list[Any], record: LaunchRecord, programs: Array
    ) -> None:
        memory, count = launch.memory, len(programs)
        if record.in_turns and count <= _MOST_ORDERED:
            memory.races = OrderedRaces(memory.conflict, count)
            run_in_turns(kernel, launch, registers, programs, self.seed)
            return
        if record.in_turns:
            record.undecided = f"{count} programs wait for each other, and clocks are kept of {_MOST_ORDERED} at most"
            run_in_turns(kernel, launch, registers, programs, self.seed)
            return
        if count > 1:
            memory.races = UnorderedRaces(memory.conflict, len(kernel.accesses))
        together = max(1, _CHUNK // kernel.largest)
        for start in range(0, count, together):
            frame = Frame(list(registers), programs[start : start + together], {}, launch)
            run_blocks(kernel.blocks, frame)

    def _arguments(
        self, arguments: list[SsaValue], leaves: list[tuple[str, Any]]
    ) -> tuple[dict[int, Pointer], dict[int, Array]]:
        """Tensors by the number of their argument, and values by slot."""
        pointers: dict[int, Pointer] = {}
        scalars: dict[int, Array] = {}
        storages: dict[int, Storage] = {}
        for number, (argument, (name, leaf)) in enumerate(zip(arguments, leaves, strict=True)):
            if argument.type.element != "ptr":
                kind = element_type(argument.type.element)
                value = _scalar(leaf, kind.compute)
                scalars[argument.slot] = kind.round(value) if kind.round else value
                continue
            tensor = _tensor(leaf)
            if tensor is None:
                scalars[argument.slot] = np.array([leaf if isinstance(leaf, int) else leaf.data_ptr()], np.int64)
                continue
            if tensor.device.type != "cpu":
                raise RetrogradError(
                    f"`{name}` is on {tensor.device}, expected cpu: kernels are executed without a GPU"
                )
            key = tensor.untyped_storage().data_ptr()
            if key not in storages:
                storages[key] = Storage.of(tensor)
                storages[key].undefined = self.undefined(tensor)
            pointers[number] = Pointer.of(name, tensor, storages[key])
            scalars[argument.slot] = np.array([tensor.data_ptr()], np.int64)
        return pointers, scalars


def _scalar(value: Any, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "i":
        bits = 8 * dtype.itemsize
        return np.array([int(value) & ((1 << bits) - 1)], f"u{dtype.itemsize}").view(dtype)
    return np.array([value]).astype(dtype)


def _tensor(leaf: Any) -> torch.Tensor | None:
    """The tensor of an argument; wrappers such as TensorWrapper have it as `base`."""
    leaf = getattr(leaf, "base", leaf) if not isinstance(leaf, torch.Tensor) else leaf
    return leaf.detach() if isinstance(leaf, torch.Tensor) else None


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


def _spins(accesses: list[MemoryAccess], memory: Memory) -> bool:
    """Whether a loop may wait for what another program writes: it reads memory that the kernel writes to."""
    return any(a.in_loop and a.does == "load" and any(s.cell for s in memory.storages_of(a)) for a in accesses)


@contextlib.contextmanager
def cpu_triton(
    seed: int = 0, multiprocessors: int = 132, limit: int = 1_000_000, pretend: bool = True
) -> Iterator[Session]:
    """Run anybody's Triton program on CPU tensors, its kernels as a GPU would, with every access checked.

    Inside, torch says that it has a GPU, tensors made on it are on the CPU, and launches execute the TTIR that Triton
    makes for it. TRITON_INTERPRET must not be set.

    Args:
        seed: of the order of programs and atomics; 0 is the order of their numbers.
        multiprocessors: what the program is told of its GPU, an sm_90: many kernels have a program for each.
        limit: rounds of loops that the programs of a launch may make together.
        pretend: whether torch says that it has a GPU; launchers of this library need no such thing.

    Yields:
        A session: `faults` has what was noticed, `launches` what was executed, `report()` says it in words.

    Raises:
        UnsupportedVersionError: this Triton compiles or launches otherwise.
        UnsupportedOperationError: a kernel has an operation that cannot be executed.
    """
    session = Session(seed, limit)
    gpu = replace(_GPU, num_sms=multiprocessors)
    with contextlib.ExitStack() as stack:
        stack.enter_context(executing(gpu, session.execute, session.tune))
        stack.enter_context(around_autotuning(session.tuning))
        if pretend:
            stack.enter_context(fake_gpu.gpu(gpu, knowing=("retrograd.ops", "retrograd.runtime")))
        stack.enter_context(dry(gpu.num_sms))
        stack.callback(session.close)
        yield session
