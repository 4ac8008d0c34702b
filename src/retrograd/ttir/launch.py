"""Anybody's Triton program on CPU tensors: the context in which launches are executed here."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from retrograd import config
from retrograd.compat.registry import works
from retrograd.compat.torch_ddp import around_rebuilding
from retrograd.compat.torch_inductor import untimed
from retrograd.compat.triton_autotuning import TUNING
from retrograd.compat.triton_compile import GpuDescription
from retrograd.compat.triton_launch import KernelLaunch, Proceed, around_autotuning
from retrograd.compat.triton_ttir import executing
from retrograd.errors import InterpreterError, MissingExtraError
from retrograd.runtime.gpu_targets import target_named
from retrograd.runtime.triton import fake_gpu
from retrograd.runtime.triton.fake_cuda_module import launched_once
from retrograd.runtime.triton.fake_threads import hearing_threads
from retrograd.runtime.triton.planned_gpu import planning
from retrograd.ttir.kept_texts import kept_text
from retrograd.ttir.session import Session
from retrograd.ttir.undefined import UndefinedMemory

_GPU = target_named("sm_90")
_PLANNED: list[GpuDescription] = [_GPU]  # what programs are told of their GPU; the innermost last
_SESSIONS: list[Session] = []  # the innermost last


def pretended(
    gpu: GpuDescription = _GPU, devices: bool = True, repeats: bool = False, **more: Any
) -> contextlib.AbstractContextManager[None]:
    """A context in which torch says that it has a GPU, to all but this library; arguments as of `fake_gpu.gpu`."""
    return fake_gpu.gpu(gpu, knowing=("retrograd.",), devices=devices, repeats=repeats, **more)


@contextlib.contextmanager
def planned_for(gpu: GpuDescription) -> Iterator[None]:
    """Have programs inside told of this GPU, for who wants to know what they launch on it."""
    _PLANNED.append(gpu)
    try:
        yield
    finally:
        _PLANNED.remove(gpu)


@contextlib.contextmanager
def cpu_triton(
    seed: int = 0,
    multiprocessors: int | None = None,
    orders: int = 1,
    limit: int = 1_000_000,
    pretend: bool = True,
    follow_undefined: bool = True,
    configuration: int = 0,
    tuned_kernel: str = "",
    gpu: str | None = None,
) -> Iterator[Session]:
    """Run anybody's Triton program on CPU tensors, its kernels as a GPU would, with every access checked.

    Inside, torch says that it has a GPU, tensors made on it are on the CPU, and launches execute the TTIR that Triton
    makes for it.

    Args:
        seed: of the order of programs and atomics; 0 is the order of their numbers.
        multiprocessors: what the program is told of its GPU, an sm_90 of 132: many kernels have a program for each.
        orders: in how many orders of its programs each launch is run, to say which bits depend on it.
        limit: rounds of loops with a condition that programs may make together before they never end.
        pretend: whether torch says that it has a GPU; launchers of this library need no such thing.
        follow_undefined: whether memory of torch.empty is followed through operators of torch and through kernels.
        configuration: number of the configuration that autotuned kernels run with, modulo how many pruning leaves.
        tuned_kernel: the only kernel of which it is, where others run with their first; "" for all.
        gpu: which GPU the program is told of, "sm_90" or for options of Triton's AMD backend "gfx942"; where the two
            compute otherwise, values are those of an NVIDIA GPU.

    Yields:
        A session: `faults` has what was noticed, `launches` what was executed, `report()` says it in words.

    Raises:
        UsageError: there is no such GPU.
        InterpreterError: TRITON_INTERPRET is set.
        MissingExtraError: Triton is not installed.
        UnsupportedVersionError: this Triton compiles or launches otherwise.
        UnsupportedOperationError: a kernel has an operation that cannot be executed.
    """
    if find_spec("triton") is None:
        raise MissingExtraError("triton", "triton", "executing Triton kernels")
    if config.interpreting():
        raise InterpreterError("TRITON_INTERPRET=1 has kernels in Triton's interpreter; unset it to have them executed")
    import triton.testing

    session = Session(seed, orders, limit, configuration=configuration, tuned_kernel=tuned_kernel)

    def tuning(launch: KernelLaunch, proceed: Proceed) -> Any:
        return session.tuning(launch, proceed) if _SESSIONS[-1] is session else proceed()

    told = _PLANNED[-1] if gpu is None else target_named(gpu)
    told = told if multiprocessors is None else replace(told, num_sms=multiprocessors)
    with _left_at_exit() as stack:
        device = fake_gpu.FIRST if pretend else fake_gpu.HOST  # as tensors inside say
        stack.enter_context(executing(told, session.execute, session.tune, kept_text, device))
        works(TUNING)  # before launches pass by, those of its self-test among them
        stack.enter_context(around_autotuning(tuning))
        stack.enter_context(untimed())
        stack.enter_context(_innermost(session))
        undefined = UndefinedMemory(lambda: session.faults, pretends=pretend, lock=session.lock)
        if pretend:
            # Where memory is followed, what registered kernels do is followed as well.
            stack.enter_context(pretended(told, leaves=undefined.leaves, registered=not follow_undefined))
            timers = {name: launched_once(vars(triton.testing)[name]) for name in ("do_bench", "do_bench_cudagraph")}
            stack.enter_context(fake_gpu.replaced(triton.testing, timers))
        stack.enter_context(planning(told))
        if follow_undefined:
            stack.enter_context(hearing_threads(undefined))
            session.undefined, session.alone = stack.enter_context(undefined).of, undefined.paused
            session.apart, session.handed_on = undefined.elsewhere, undefined.origins.handed_on
            stack.enter_context(around_rebuilding(undefined.paused))
        stack.callback(session.close)
        yield session


@contextlib.contextmanager
def _left_at_exit() -> Iterator[contextlib.ExitStack]:
    """A stack for who enters at the top of a conftest.py and never leaves: before Python takes its modules away."""
    with contextlib.ExitStack() as stack:
        atexit.register(stack.close)
        try:
            yield stack
        finally:
            atexit.unregister(stack.close)


@contextlib.contextmanager
def _innermost(session: Session) -> Iterator[None]:
    """Have a session execute what is launched, of which those around it see nothing."""
    with contextlib.ExitStack() as stack:
        for outer in _SESSIONS:
            stack.enter_context(outer.apart())
        _SESSIONS.append(session)
        try:
            yield
        finally:
            _SESSIONS.remove(session)
            for outer in _SESSIONS:
                outer.elsewhere += len(session.launches)
