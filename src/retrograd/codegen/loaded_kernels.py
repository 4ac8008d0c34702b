"""Kernels of this process as they ran on its GPU: the code that was loaded, and with a profiler how long each took."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from retrograd.codegen import tuning
from retrograd.codegen.compile import require_triton
from retrograd.codegen.kernel_facts import facts_of_compiled
from retrograd.codegen.listing import kernel_record
from retrograd.codegen.schema import Codegen, Kernel, Measured, Tuning
from retrograd.compat.triton_compile import KernelSignature
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_launches, through_triton
from retrograd.errors import UndecidedError, UsageError
from retrograd.runtime.gpu_targets import target_named

REPEATS = 20


@dataclass(frozen=True)
class LoadedLaunch:
    """One launch that was executed: the kernel function, Triton's CompiledKernel, its grid, bytes of its tensors."""

    fn: Any
    compiled: Any
    grid: tuple[int, ...]
    bytes: int = 0
    tuning: Tuning | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name of the kernel as a profiler has it."""
        return str(self.compiled.metadata.name)

    @property
    def code(self) -> str:
        """Triton's hash of everything that went into the code."""
        return str(self.compiled.hash)

    @property
    def target(self) -> str:
        """ "sm_90", "gfx942"."""
        arch = str(self.compiled.metadata.target.arch).partition(":")[0]
        return f"sm_{arch}" if arch.isdecimal() else arch

    @property
    def signature(self) -> KernelSignature:
        return KernelSignature.of_compiled(self.compiled)


@contextmanager
def captured() -> Iterator[list[LoadedLaunch]]:
    """Note every kernel that this process launches inside; the list fills as they run.

    Kernels run as they would; the runs by which `@triton.autotune` finds its configuration are not noted.

    Raises:
        MissingExtraError: Triton is not installed.
        RetrogradError: this process interprets kernels.
    """
    require_triton()
    ran: list[LoadedLaunch] = []

    def note(launch: KernelLaunch, proceed: Proceed) -> Any:
        compiled = proceed()
        if hasattr(compiled, "asm") and not tuning.under_way():
            size = _bytes(launch.args, launch.kwargs.values())
            ran.append(LoadedLaunch(launch.function, compiled, launch.grid, size, tuning.current()))
        return compiled

    with tuning.chosen_configuration(), around_launches(note), through_triton():
        yield ran


def of_run(name: str, workload: Callable[[], object], *, only: Sequence[str] = ()) -> Codegen:
    """Run a workload on this machine's GPU and read the code of the kernels that it launched.

    Raises:
        UsageError: there is no GPU, or one of an architecture that is not known here.
        UndecidedError: no kernel is launched.
    """
    device = need_gpu("--run")
    began = time.perf_counter()
    with captured() as ran:
        workload()
    kernels = _kernels([launch for launch in ran if not only or any(word in launch.name for word in only)])
    if not kernels:
        raise UndecidedError(f"{name} launched no Triton kernel{' of that name' if ran else ''} on {device}")
    return Codegen(
        target=name,
        architectures=tuple(dict.fromkeys(kernel.target for kernel in kernels)),
        kernels=kernels,
        origin=f"run on {device}",
        versions={"triton": require_triton().__version__},
        seconds=time.perf_counter() - began,
    )


def profiled(record: Codegen, workload: Callable[[], object], copy_gb_per_s: float, repeats: int = REPEATS) -> Codegen:
    """`record` with the device time of each kernel, the median over `repeats` runs of the workload.

    Args:
        record: what `of_run` said; the workload has been warmed up and tuned by it.
        workload: the same.
        copy_gb_per_s: bandwidth of a large device copy on this GPU; 0 if unknown.
        repeats: number of runs.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with captured() as ran, profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            workload()
        torch.cuda.synchronize()
    autograd: Any = torch.autograd  # documents DeviceType and does not export it
    device = autograd.DeviceType.CUDA
    events = sorted((e for e in prof.events() or () if e.device_type == device), key=lambda e: e.time_range.start)
    times, notes = assigned(ran, [(event.name, event.time_range.elapsed_us() / 1e3) for event in events])
    kernels = []
    sizes = {launch.code: launch.bytes for launch in ran}
    for kernel in record.kernels:
        if ms := times.get(kernel.code):
            kernel = replace(
                kernel, measured=Measured(statistics.median(ms), len(ms), sizes[kernel.code], copy_gb_per_s)
            )
        kernels.append(kernel)
    return replace(record, kernels=tuple(kernels), notes=(*record.notes, *notes))


def assigned(
    ran: Sequence[LoadedLaunch], events: Iterable[tuple[str, float]]
) -> tuple[dict[str, list[float]], tuple[str, ...]]:
    """Times of the profiler's (kernel name, ms) by code, given to launches of that name in their order.

    A name with another number of events than launches is left out, and a note says so.
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, ms in events:
        by_name[name].append(ms)
    times: dict[str, list[float]] = defaultdict(list)
    notes = []
    for name in dict.fromkeys(launch.name for launch in ran):
        launches = [launch for launch in ran if launch.name == name]
        durations = by_name.get(name, [])
        if len(durations) != len(launches):
            notes.append(f"{name} is not timed: {len(launches)} launches, but the profiler saw {len(durations)}")
            continue
        for launch, ms in zip(launches, durations, strict=True):
            times[launch.code].append(ms)
    return dict(times), tuple(notes)


def _kernels(ran: Sequence[LoadedLaunch]) -> tuple[Kernel, ...]:
    """One entry for each code."""
    groups: dict[str, list[LoadedLaunch]] = defaultdict(list)
    for launch in ran:
        groups[launch.code].append(launch)
    kernels = []
    for launches in groups.values():
        first = launches[0]
        facts = facts_of_compiled(first.compiled, first.name, target_named(first.target), first.signature)
        kernels.append(kernel_record(first, facts, first.name, first.target, len(launches), first.code))
    return tuple(kernels)


def _bytes(*groups: Iterable[Any]) -> int:
    """Bytes of all tensors among the arguments, each once."""
    tensors = {a.data_ptr(): a.numel() * a.element_size() for g in groups for a in g if hasattr(a, "element_size")}
    return sum(tensors.values())


def need_gpu(option: str) -> str:
    """Name of the GPU of this process.

    Raises:
        UsageError: there is none.
    """
    require_triton()
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"`{option}` needs a GPU, and torch sees none here; leave it out to cross-compile, which needs none"
        )
    return torch.cuda.get_device_name()
