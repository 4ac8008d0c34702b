"""Run of a person's Triton program without a GPU, with a record of what was noticed of its kernels."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing import util
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core import run_program
from retrograd.errors import UndecidedError, UsageError
from retrograd.runtime.gpu_targets import target_named
from retrograd.ttir.frames import EndlessLoopError
from retrograd.ttir.launch import cpu_triton
from retrograd.ttir.run_records import joined, record_of
from retrograd.ttir.schema import KernelRun
from retrograd.ttir.started_processes import hearing_processes

_USAGE = "`retrograd run-kernel [options] -- script.py ...`"


def run_kernels(
    program: Sequence[str], seed: int = 0, multiprocessors: int | None = None, orders: int = 1, gpu: str = "sm_90",
    tell: Callable[[KernelRun], None] | None = None,
) -> KernelRun:  # fmt: skip
    """Run a program, as Python does, with its Triton kernels executed on CPU tensors.

    Args:
        program: a script, "-m" and a module, or "-c" and code; then its arguments.
        seed, multiprocessors, orders, gpu: as of `retrograd.cpu_triton`.
        tell: is given what there is where SIGTERM, of `timeout` or CI, ends the program.

    Raises:
        UsageError: there is no such program or GPU, or TRITON_INTERPRET is set.
        UnsupportedVersionError: this Triton compiles or launches otherwise.
    """
    command = run_program.command_of(program, _USAGE)
    if config.interpreting():
        raise UsageError("TRITON_INTERPRET is set, so that Triton interprets kernels itself; unset it")
    refusals: list[str] = []
    multiprocessors = multiprocessors or target_named(gpu).num_sms
    options: dict[str, Any] = dict(seed=seed, multiprocessors=multiprocessors, orders=orders, gpu=gpu)
    with cpu_triton(**options) as session:

        def record(code: int = 0) -> KernelRun:
            return replace(record_of(session, " ".join(program), multiprocessors, code, refusals), gpu=gpu)

        with _terminable(record, tell), hearing_processes(options, session, record) as started:
            code = run_program.run(command, _going_on(refusals))
        run = joined(record(code), started)
        return replace(run, notes=(*run.notes, *_unwritten_reports(command)))


def _unwritten_reports(command: Sequence[str]) -> Iterator[str]:
    """Notes on files that were named behind the program, which is given them, and has made none of this name."""
    for word, name in pairwise(command[1:]):
        if word in ("-o", "--output") and Path(name).suffix in (".html", ".json", ".txt") and not Path(name).exists():
            yield f"no report is in {name}: `{word} {name}` stands behind the program, which got it; put it before"


@contextmanager
def _terminable(record: Callable[[int], KernelRun], tell: Callable[[KernelRun], None] | None) -> Iterator[None]:
    """Have SIGTERM end the program as ever, after what there is has been told."""
    is_main = threading.current_thread() is threading.main_thread()
    if tell is None or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    stdout, process = os.dup(1), os.getpid()

    def terminated(number: int, _: Any) -> None:
        if os.getpid() == process:
            # While a test runs pytest has its own descriptor 1, a file.
            sys.stdout = os.fdopen(stdout, "w", closefd=False)
            note = "SIGTERM ended the program: this is of what it had launched until then"
            run = record(128 + number)
            tell(replace(run, notes=(*run.notes, note)))
            sys.stdout.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminated)
    # A fork of multiprocessing leaves a record of its own, and takes the signal for it.
    util.register_after_fork(terminated, lambda _: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    try:
        yield
    finally:
        os.close(stdout)
        if signal.getsignal(signal.SIGTERM) is terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _going_on(refusals: list[str]) -> Iterator[None]:
    """What cannot be executed, or does not end, ends the program and not its report."""
    try:
        yield
    except EndlessLoopError:
        pass  # noted as a fault
    except UndecidedError as error:
        refusals.append(str(error))
