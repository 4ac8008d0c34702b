"""Recording of a person's program, from its first line to its last."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrograd.core import run_program
from retrograd.trace import record

if TYPE_CHECKING:
    from retrograd.trace.recorder import Recorder

_USAGE = "`retrograd trace record [options] -- train.py ...`"


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


def _stop() -> None:
    raise _Enough


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    with suppress(_Enough):
        try:
            with recorder:
                yield
        except BdbQuit:
            # Left by the person, so no traceback of the debugger.
            raise SystemExit("retrograd: the debugger was left, and the program with it") from None
