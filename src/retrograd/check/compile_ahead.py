"""Compilation ahead of the cases: while a process verifies an op on a GPU, another runs the same cases on the CPU.

What it launches is compiled for the GPU, several kernels at once. Triton's cache on disk hands them over; a lock for
each kernel lets whoever needs one wait for who compiles it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from retrograd.check import tuning
from retrograd.check.op_runner import DrawsRandomNumbers
from retrograd.check.schema import Case
from retrograd.check.spec import OpSpec
from retrograd.check.stages import CaseOutcome, Stage, StageContext, choose
from retrograd.check.verification import Verification
from retrograd.compat import triton_autotuning, triton_ttir
from retrograd.compat.triton_compile import GpuDescription, build_kernel, is_built, kernel_id
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_autotuning, around_compiling
from retrograd.env.facts import cpu_count
from retrograd.runtime import disk_cache
from retrograd.runtime.rehearsal import rehearsing

# What repeats, orders and compilers find is found with kernels that other stages have launched.
_WITHOUT_KERNELS = ("races", "determinism", "compiler")
_SPARE = 2  # cores: for the process that verifies, and for this one
_PATIENCE = 60.0  # seconds that the process that verifies has to say which configuration was the fastest


@contextmanager
def compiled_once(kernels: str | None, told: Callable[[str], None]) -> Iterator[None]:
    """Tell which kernel is compiled inside, "" at its end; where another process compiles it, wait for that.

    Args:
        kernels: folder of `compile_ahead` in another process; None where there is none.
        told: called with the kernel's name.
    """
    folder = None if kernels is None else Path(kernels)

    def compiling(launch: KernelLaunch, proceed: Proceed) -> Any:
        told(launch.name)
        try:
            with _locked(folder, launch.function, launch.args[0]) if folder else nullcontext():
                return proceed()
        finally:
            told("")

    def timed(kernel: str, config: str) -> None:
        if folder is not None:
            with disk_cache.replacing(folder / kernel) as path:
                path.write_text(config)

    with around_compiling(compiling):
        tuning.TIMED.append(timed)
        try:
            yield
        finally:
            tuning.TIMED.remove(timed)


def _locked(folder: Path, function: Any, key: Any) -> Any:
    return disk_cache.locked(folder / kernel_id(function, key))


def compile_ahead(spec: OpSpec, device: str, folder: Path, *, only: Any, skip: Any, **options: Any) -> None:
    """Run every case of every stage on the CPU, and compile for a GPU what it launches.

    Args:
        spec: the op.
        device: "cuda" or "cuda:1".
        folder: where processes find each other's locks.
        only, skip, options: as of `verify`.
    """
    from retrograd.ttir.launch import planned_for

    torch.set_num_threads(1)  # the cores are the compilers'
    compilers = _Compilers(folder)
    rehearsal = _Rehearsal(spec, device="cpu", **options)
    tuned = around_autotuning(partial(_tuned, folder, compilers))
    told = triton_ttir.told_of_kernels(compilers.compile)
    with planned_for(_description(device)), rehearsing(), told, tuned:
        for stage in choose(only, (*skip, *_WITHOUT_KERNELS)):
            with suppress(Exception):
                rehearsal.run_stage(stage)
            if rehearsal.calls() and not any(count.total for count in rehearsal.launch_counts):
                break  # it has no kernels of Triton's
    compilers.join()


def _description(device: str) -> GpuDescription:
    gpu = torch.cuda.get_device_properties(device)
    arch = 10 * gpu.major + gpu.minor
    shared, registers = gpu.shared_memory_per_block_optin, gpu.regs_per_multiprocessor
    return GpuDescription(f"sm_{arch}", "cuda", arch, gpu.warp_size, gpu.multi_processor_count, shared, registers)


class _Rehearsal(Verification):
    """Runs the cases that a GPU would run, and judges nothing."""

    def _try(self, stage: Stage, context: StageContext, case: Case) -> CaseOutcome | None:
        try:
            stage.check(context, case)
        except DrawsRandomNumbers:
            raise
        except Exception:  # it is for the other process to tell
            pass
        return CaseOutcome(power=None, power_text="")


class _Compilers:
    """Processes that compile one kernel each. They are forked from this one, which has prepared its launch."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._most = folder, max(cpu_count() - _SPARE, 1)
        self._known: set[str] = set()
        self._running: set[int] = set()  # by process id
        self.tuned: set[str] = set()  # autotuned kernels of which all configurations are compiled
        self.only_warmups = False  # whether launches are compiled that only ask for it

    def compile(self, function: Any, key: Any, source: Any, target: Any, options: Any, warmup: bool) -> bool:
        """Begin to compile a kernel that nobody has, as soon as few enough are compiled; whether that is all."""
        name = kernel_id(function, key)
        if name in self._known or (self.only_warmups and not warmup):
            return warmup
        self._known.add(name)
        with suppress(Exception):
            if is_built(source, target, options):
                return warmup
        while len(self._running) >= self._most:
            self._wait()
        child = os.fork()
        if not child:
            with suppress(BaseException), _locked(self._folder, function, key):
                build_kernel(function, source, target, options)
            os._exit(0)
        self._running.add(child)
        return warmup

    def _wait(self) -> None:
        self._running.discard(os.wait()[0])

    def join(self) -> None:
        """Wait for all."""
        while self._running:
            self._wait()


def _tuned(folder: Path, compilers: _Compilers, launch: KernelLaunch, proceed: Proceed) -> Any:
    """Have all configurations of an autotuned kernel compiled when it is first launched, then the fastest alone."""
    tuner = launch.function
    name = triton_autotuning.kernel_name(tuner)
    with suppress(Exception):
        chosen = _fastest(folder, name) if name in compilers.tuned else None
        compilers.tuned.add(name)
        triton_autotuning.compile_only(launch, chosen)
    compilers.only_warmups = True
    try:
        return proceed()
    finally:
        compilers.only_warmups = False


def _fastest(folder: Path, kernel: str) -> str:
    """The configuration that the process that verifies runs a kernel with, as it is written, once that is known."""
    end = time.monotonic() + _PATIENCE
    while not (folder / kernel).exists() and time.monotonic() < end:
        time.sleep(0.01)
    (folder / kernel).touch()  # where it was not told, it is not waited for again
    return (folder / kernel).read_text()
