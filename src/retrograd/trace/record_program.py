"""Recording of a person's program, from its first line to its last."""

from __future__ import annotations

import signal
import threading
from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from retrograd.core import run_program
from retrograd.errors import ExecutionsDifferError
from retrograd.trace import record, repeat_steps

if TYPE_CHECKING:
    from retrograd.trace.recorder import Recorder
    from retrograd.trace.repeating.schema import RepeatedSteps
    from retrograd.trace.repeating.steps import StepRepeater

_USAGE = "`retrograd trace record [options] -- train.py ...`"
_REPEAT_USAGE = "`retrograd trace repeat --every N [options] -- train.py ...`"


class _Enough(BaseException):
    """As many steps as were wanted have been recorded. No Exception: a program's own handlers must not take it."""


def record_program(program: Sequence[str], out: Path, options: dict[str, Any]) -> tuple[Recorder, int]:
    """Run a program, as Python does, and record it.

    Args:
        program: a script, "-m" and a module, or "-c" and code; then its arguments.
        out: the file to write.
        options: of `retrograd.trace.record`.

    Returns:
        The recorder, and the exit code of the program; its exception has been printed.

    Raises:
        UsageError: there is no such program.
        MissingExtraError: torch is not installed.
    """
    command = run_program.command_of(program, _USAGE)
    recorder = record(None, out=out, **options)
    recorder.on_last_step = _stop
    return recorder, run_program.run(command, _recording(recorder))


def repeat_program(program: Sequence[str], options: dict[str, Any]) -> tuple[RepeatedSteps, int]:
    """Run a program, as Python does, and repeat the operators of sampled steps.

    Args:
        program: as of `record_program`.
        options: of `retrograd.trace.repeat_steps`.

    Returns:
        What has been shown, and the exit code of the program, 0 where it was ended for what was shown.

    Raises:
        UsageError: there is no such program.
        MissingExtraError: torch is not installed.
    """
    command = run_program.command_of(program, _REPEAT_USAGE)
    steps = repeat_steps(**options)
    steps.on_last_step = _stop
    try:
        code = run_program.run(command, _recording(steps))
    except ExecutionsDifferError:
        code = 0
    return steps.outcome, code


def _stop() -> None:
    raise _Enough


def _terminated(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def _ended_by_launchers() -> Iterator[None]:
    """SIGTERM, by which a launcher ends the other ranks when one fails, as an exit: the file is to be whole."""
    before = signal.getsignal(signal.SIGTERM)
    ours = before is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if ours:  # a program may have set its own
        signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is _terminated:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _recording(recorder: Recorder | StepRepeater) -> Iterator[None]:
    with suppress(_Enough):
        try:
            with _ended_by_launchers(), recorder:
                yield
        except BdbQuit:
            # Left by the person, so no traceback of the debugger.
            raise SystemExit("retrograd: the debugger was left, and the program with it") from None
