"""A session of launches: executes each, in several orders if asked, and keeps what was noticed."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from retrograd.compat import triton_autotuning
from retrograd.compat.numpy_blas import one_thread
from retrograd.compat.registry import works
from retrograd.compat.torch_dispatch import without_functions
from retrograd.compat.triton_launch import KernelLaunch, Proceed
from retrograd.compat.triton_ttir import LaunchedKernel, library_folder
from retrograd.runtime.triton.fake_cuda_module import timings
from retrograd.ttir.element_types import Array
from retrograd.ttir.execution import Execution
from retrograd.ttir.faults import AccessAt, FaultList, KernelFault, LaunchRecord
from retrograd.ttir.frames import EndlessLoopError
from retrograd.ttir.kept_launches import RACES, KeptLaunches
from retrograd.ttir.memory import Memory
from retrograd.ttir.source_remarks import source_remarks
from retrograd.ttir.storage import Storage, Undefined

_STAYS = 0.8  # how often a program keeps its turn where turns are long
_MOST_DRAWN = 8  # further orders that are drawn
_TURNS = 4_000  # turns of 1,024 elements that these have together
_FEWER = 64  # how many times fewer rounds a kernel has that did not end before in the same verification
TF32 = re.compile(r"tt\.dot .*inputPrecision = tf32 : tensor<[\dx]+xf32>|cvt\.\w+\.tf32\.f32")


def _with_exact_factors(launched: LaunchedKernel) -> LaunchedKernel:
    """The kernel as if tl.dot had been asked for input_precision="ieee", and nothing were converted to tf32."""
    if "exact factors" not in launched.kept:
        text = re.sub(r"cvt\.\w+\.tf32\.f32", "mov.b32", launched.text)
        text = text.replace("inputPrecision = tf32 ", "inputPrecision = ieee ")
        launched.kept["exact factors"] = replace(launched, text=text, kept={})
    return launched.kept["exact factors"]


@dataclass(eq=False)
class _Snapshot:
    """Storages that a launch writes to, as they were."""

    kept: dict[int, tuple[Storage, Array, Array | None]] = field(default_factory=dict)

    def add(self, memory: Memory) -> None:
        for storage in memory.written():
            self.add_storage(storage)
        memory.on_learning.append(self.add_storage)

    def add_storage(self, storage: Storage) -> None:
        if storage.start not in self.kept:
            marks = None if storage.undefined is None else storage.undefined.copy()
            self.kept[storage.start] = storage, storage.octets.copy(), marks

    def restore(self) -> None:
        for storage, octets, marks in self.kept.values():
            storage.octets[:] = octets
            if storage.undefined is not None:
                storage.undefined[:] = False if marks is None else marks

    def octets(self) -> dict[int, Array]:
        """The same storages as they are now."""
        return {start: storage.octets.copy() for start, (storage, _, _) in self.kept.items()}


class Session:
    """Executes launches of kernels and keeps what was noticed of them.

    Args:
        seed: of the order of programs and atomics; 0 is the order of their numbers.
        orders: in how many orders each launch is run, to say which bits depend on it; memory is as after the first.
        limit: rounds of loops with a condition that programs may make together before they never end.
        printed: takes lines of tl.device_print; they go to standard output by default.
        configuration: number of the configuration that autotuned kernels run with, modulo how many pruning leaves.
        tuned_kernel: the only kernel of which it is, where others run with their first; "" for all.

    Attributes:
        faults: what was noticed, over all launches.
        launches: what was executed.
        elsewhere: how many launches sessions inside of this one have executed.
        tf32: whether any of it multiplied matrices of float32 that are rounded to tf32.
        exact_factors: whether such matrices are multiplied as they are, to see what that rounding leaves.
        undefined: which bytes of a tensor's storage nobody has written, None where all are written.
        handed_on: takes the address of a storage to which a kernel hands on what nobody has written, and whence.
        alone: makes a context in which operators of torch are the executor's, and nobody's who looks on.
        apart: makes a context in which a session inside of this one executes what is launched.
        kept: launches that need not be executed again; None where each is.
        trials: whether what an autotuner times is executed, to see what it leaves behind, or only compiled.
        configurations: of autotuned kernels by name, those that pruning leaves, at most.
        lock: held by the thread whose launch is executed.
        begins: called before each launch.
        chosen: of these kernels, the configuration that the latest launch ran with.
    """

    def __init__(
        self, seed: int = 0, orders: int = 1, limit: int = 1_000_000, printed: Callable[[str], Any] | None = None,
        configuration: int = 0, tuned_kernel: str = "",
    ) -> None:  # fmt: skip
        self.faults = FaultList()
        self.launches: list[LaunchRecord] = []
        self.elsewhere = 0
        self.tf32 = self.exact_factors = False
        self.seed, self.lock = seed, threading.RLock()
        self._functions: dict[int, Any] = {}  # of Triton, that were launched
        self.undefined: Undefined = lambda tensor, begin=False: None
        self.handed_on: Callable[[int, str], Any] = lambda start, kernel: None
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext
        self.apart: Callable[[], AbstractContextManager[None]] = nullcontext
        self.kept: KeptLaunches | None = None
        self.trials = True
        self._orders, self._limit = orders, limit
        self.printed = printed or (lambda line: sys.stdout.write(line + "\n"))
        self.begins: Callable[[], Any] = lambda: None
        self._library = library_folder()
        self._last: Memory | None = None
        self._configuration, self._tuned_kernel = configuration, tuned_kernel
        self._tuned = self._compiling = False
        self._tuning = ""  # the autotuned kernel that is launched
        self._choices = triton_autotuning.ChosenConfigurations(self._start)
        self.configurations, self.chosen = self._choices.known, self._choices.latest
        self._trial: _Snapshot | None = None

    @property
    def times_itself(self) -> bool:
        """Whether somebody has timed launches in this verification, who may choose by it: a library's own tuner."""
        return self.kept is not None and timings() > self.kept.timings

    def keep(self, kept: KeptLaunches) -> None:
        """Put launches in place that come again, with the choices of other sessions that try nothing else."""
        self.kept = kept
        if not (self.trials or self._configuration or self._tuned_kernel):
            kept.choices = self._choices = triton_autotuning.ChosenConfigurations(self._start, others=kept.choices)
            self.configurations, self.chosen = self._choices.known, self._choices.latest

    def forget_faults(self) -> None:
        """Begin the list of faults anew."""
        self.faults = FaultList()

    def execute(self, launched: LaunchedKernel, grid: tuple[int, int, int], values: dict[str, Any]) -> None:
        """Run a kernel on the memory of its arguments.

        Raises:
            UnsupportedOperationError: it has an operation that cannot be executed; names it and its line.
            EndlessLoopError: it does not end.
        """
        if not grid[0] * grid[1] * grid[2] or self._compiling:
            return
        self.begins()
        if "products" not in launched.kept:
            launched.kept["products"] = "tt.dot" in launched.text
        calm = one_thread() if launched.kept["products"] else nullcontext()
        with self.lock, self.alone(), without_functions(), calm:
            self._execute(launched, grid, values)

    def _execute(self, launched: LaunchedKernel, grid: tuple[int, int, int], values: dict[str, Any]) -> None:
        if "tf32" not in launched.kept:
            launched.kept["tf32"] = TF32.search(launched.text) is not None
        self.tf32 = self.tf32 or launched.kept["tf32"]
        self._functions.setdefault(id(launched.jit_function), launched.jit_function)
        if self.exact_factors and launched.kept["tf32"]:
            launched = _with_exact_factors(launched)
        execution = Execution.of(launched, grid, values, self.undefined, self._library)
        # Each launch has an order of its own.
        seed = self.seed and self.seed + len(self.launches) + 1
        kept = self.kept if self._trial is None and self._orders == 1 else None
        key = None if kept is None else kept.key(execution)
        if kept is None or key is None:
            self.launches.append(self._run(execution, seed, self.faults))
            return
        launch = kept.find(key, seed)
        if launch is None:
            faults = FaultList()
            try:
                launch = kept.keep(key, seed, execution, self._run(execution, seed, faults, noted=True), faults)
            except EndlessLoopError:
                self.faults.add_all(faults)
                raise
        else:
            launch.put(execution.storages)
        self.faults.add_all(launch.faults)
        self.launches.append(launch.record)

    def _run(self, execution: Execution, seed: int, faults: FaultList, noted: bool = False) -> LaunchRecord:
        """Execute a launch; `noted`: note which bytes it writes."""
        memory = self._last = execution.memory(faults)
        if noted:
            for storage in memory.written():
                storage.written = np.zeros(len(storage.octets), bool)
        in_turns = execution.in_turns(memory)
        undecided = execution.undecided if in_turns else ""
        record = LaunchRecord(execution.kernel.name, execution.grid, in_turns, undecided)
        if self._trial is not None:
            self._trial.add(memory)
        others = self._orders - 1 if execution.programs > 1 and self._trial is None else 0
        opposite = in_turns and not undecided and self._trial is None
        before = _Snapshot()
        if others or opposite:
            before.add(memory)
        stuck = self.kept.stuck if self.kept is not None else dict[str, EndlessLoopError]()
        try:
            limit = self._limit // _FEWER if execution.kernel.name in stuck else self._limit
            execution.run(memory, seed, limit, self.printed)
            if opposite and not any(f.is_between_programs and f.kernel == execution.kernel.name for f in faults):
                self._in_further_orders(execution, before, memory, seed, faults)
            if others:
                self._in_other_orders(execution, before, memory, seed, others)
        except EndlessLoopError as error:
            first = stuck.setdefault(execution.kernel.name, error)
            file, line = first.place.outside_of(self._library)
            at = AccessAt("loops", file, line)
            faults.add(KernelFault("endless loop", execution.kernel.name, at, detail=first.why))
            raise first.with_traceback(None) from None
        if memory.unknown_reads and memory.handed_on:
            origin = memory.origin()
            for start in memory.handed_on:
                self.handed_on(start, origin)
        record.order_matters = [memory.where(memory.accesses[number]) for number in sorted(memory.order_matters)]
        return record

    def _in_further_orders(
        self, execution: Execution, before: _Snapshot, first: Memory, seed: int, faults: FaultList
    ) -> None:
        """Run a launch again until it shows a race: by who came to its end last, by who came first, in drawn turns.

        Who holds a lock before all others orders them by its release, whether or not they would have waited for it; a
        consumer that keeps up with its producer hides that this one does not wait.
        """
        after, ended = _Snapshot(), np.array(execution.ended)
        after.add(first)
        work = max(execution.turns, 1) * max(execution.kernel.largest >> 10, 1)
        drawn = min(_MOST_DRAWN, _TURNS // work)
        orders: list[Array | None] = [ended, *([ended[::-1], *[None] * drawn] if drawn else [])]
        for number, order in enumerate(orders):
            before.restore()
            noticed = FaultList()
            # Programs that take turns by themselves may want others to go on meanwhile.
            with suppress(EndlessLoopError):
                memory, fewer = execution.memory(noticed), self._limit // _FEWER
                draws, stays = (seed + 104_729 * number, _STAYS * (number % 2)) if order is None else (None, 0.0)
                execution.run(memory, draws, fewer, lambda line: None, order, stays)
            races = [fault for fault in noticed if fault.kind in RACES and fault.other is not None]
            faults.add_all(races)
            if any(fault.is_between_programs for fault in races):
                break
        after.restore()

    def _in_other_orders(self, execution: Execution, before: _Snapshot, first: Memory, seed: int, others: int) -> None:
        """Run a launch again in other orders of its programs, and note which stores leave other bits."""
        wanted = before.octets()
        after = _Snapshot()
        after.add(first)
        for other in range(others):
            before.restore()
            memory = execution.memory(FaultList())
            execution.run(memory, seed + 7919 * (other + 1), self._limit, lambda line: None)
            for start, octets in wanted.items():
                storage = before.kept[start][0]
                changed = np.flatnonzero(octets != storage.octets)
                if len(changed):
                    self._note_order(memory, storage, changed)
        after.restore()

    def _note_order(self, memory: Memory, storage: Storage, changed: Array) -> None:
        for access, octets in memory.last_writers(storage, changed):
            pointer = memory.named(access, storage, storage.start + int(octets[0]))
            element = None if pointer is None else (storage.start + int(octets[0]) - pointer.start) // pointer.size
            size = pointer.size if pointer else 1
            detail = "its bits differ between orders of the programs"
            name = pointer.name if pointer else ""
            count = len(np.unique(octets // size))
            self.faults.add(
                KernelFault("order", memory.kernel, memory.where(access), None, name, element, detail, count)
            )

    def tuning(self, launch: KernelLaunch, proceed: Proceed) -> Any:
        """A launch of an autotuned kernel begins."""
        if not works(triton_autotuning.TUNING):
            return proceed()
        with self.lock:
            self._tuned, self._tuning = False, triton_autotuning.kernel_name(launch.function)
            return self._choices.launch(launch.function, proceed)

    def _start(self, name: str, configs: list[Any]) -> int:
        return self._configuration % len(configs) if self._tuned_kernel in ("", name) else 0

    def tune(self, call: Callable[[], Any]) -> None:
        """Launch a configuration of an autotuned kernel twice, as its autotuner does many times, and undo it.

        What the second launch changes once more, a user finds changed by as many launches as were timed.
        """
        if self._tuned or self._trial is not None:
            return
        if not (self.trials and self._tuned_kernel in ("", self._tuning)):  # the others are tried where all are
            self._compiling = True
            try:
                call()  # raises where it does not compile, and the autotuner goes on to the next
            finally:
                self._compiling = False
            self._tuned = True
            return
        self._tuned, kept = True, (self.faults, self.launches)
        self.faults, self.launches, self._trial = FaultList(), [], _Snapshot()
        changes: list[KernelFault] = []
        try:
            call()
            once = self._trial.octets()
            self.launches = []  # the same order again: sums of floats are the same in no other
            call()
            for start, (storage, _, _) in self._trial.kept.items():
                changed = np.flatnonzero(once[start] != storage.octets)
                if len(changed) and self._last is not None:
                    changes += self._left_by_tuning(self._last, storage, changed)
        except Exception:
            self._tuned = False  # where it does not compile, the autotuner goes on to the next
            raise
        finally:
            self._trial.restore()
            self._trial = None
            self.faults, self.launches = kept
        for fault in changes:
            self.faults.add(fault)

    @staticmethod
    def _left_by_tuning(memory: Memory, storage: Storage, changed: Array) -> list[KernelFault]:
        """A fault for each argument in which bytes have changed, several of which may lie in one storage."""
        detail = "each configuration that is timed changes it again: reset_to_zero or restore_value is missing"
        faults: list[KernelFault] = []
        # Additions before stores: where a launch stores some tiles and adds to others, what is stored is so again.
        for access in sorted(
            (access for access in memory.accesses if access.does != "load"), key=lambda access: access.does == "store"
        ):
            numbers = memory.pointers if access.arguments is None else access.arguments
            for pointer in (memory.pointers[number] for number in numbers if number in memory.pointers):
                addresses = storage.start + changed
                mine = (addresses >= pointer.start) & (addresses < pointer.end)
                if mine.any():
                    element = (int(addresses[mine][0]) - pointer.start) // pointer.size
                    where = memory.where(access)
                    faults.append(KernelFault("autotune", memory.kernel, where, None, pointer.name, element, detail, 1))
                    changed = changed[~mine]
        return faults

    @property
    def undecided(self) -> tuple[str, ...]:
        """Why races of some kernels were not looked for."""
        return tuple(
            sorted({f"races of {r.kernel} are undecided: {r.undecided}" for r in self.launches if r.undecided})
        )

    @property
    def order_remarks(self) -> tuple[str, ...]:
        """Lines whose order of programs may decide bits."""
        order = {(r.kernel, at.text()) for r in self.launches for at in r.order_matters}
        return tuple(f"bits of {name} may depend on the order of programs: it {text}" for name, text in sorted(order))

    @property
    def source_remarks(self) -> tuple[str, ...]:
        """What Triton reads otherwise than the kernels' authors wrote."""
        return source_remarks(self._functions.values())

    def report(self) -> str:
        """What was executed and noticed, a line each."""
        kernels = sorted({record.kernel for record in self.launches})
        plural = "es" * (len(self.launches) != 1)
        lines = [f"{len(self.launches)} launch{plural} of {', '.join(kernels) or 'no kernel'}, seed {self.seed}"]
        lines += [fault.text() for fault in sorted(self.faults, key=lambda fault: fault.is_mild)]
        lines += [*self.undecided, *self.order_remarks, *self.source_remarks]
        return "\n".join(lines if len(lines) > 1 else [*lines, "no fault"])

    def close(self) -> None:
        """Give autotuned kernels back what was chosen for them before."""
        self._choices.close()
