"""Runs a person's program under a recorder, as Python runs it: as `__main__`, with its own arguments and folder."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrograd.errors import RetrogradError, UsageError

if TYPE_CHECKING:
    from retrograd.trace.recorder import Recorder


class Enough(BaseException):
    """As many steps as were wanted have been recorded. No Exception: a program's own handlers must not take it."""


def run(program: Sequence[str], out: Path, options: dict[str, Any]) -> tuple[Recorder, int]:
    """Run a program and record it.

    Args:
        program: a script, "-m" and a module, or "-c" and code; then its arguments. A leading "python" is left out.
        out: the file to write.
        options: of `retrograd.trace.record`.

    Returns:
        The recorder, and the exit code of the program; its exception has been printed.

    Raises:
        UsageError: there is no such program.
        MissingExtraError: torch is not installed.
    """
    from retrograd.trace import record

    command = [*program[1:]] if program and Path(program[0]).name.startswith("python") else [*program]
    _check(command)
    recorder = record(None, out=out, **options)
    recorder.on_last_step = _enough
    arguments, path = sys.argv, list(sys.path)
    code = 0
    try:
        with recorder:
            _run(command)
    except Enough:
        pass
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except (KeyboardInterrupt, RetrogradError):
        raise
    except BaseException as error:
        code = 1
        if isinstance(error, BdbQuit) and options.get("breakpoint_on"):
            sys.stderr.write("retrograd: the debugger was left, and the program with it\n")
        else:
            traceback.print_exc()
    finally:
        sys.argv, sys.path[:] = arguments, path
    return recorder, code


def _enough() -> None:
    raise Enough


def _check(command: Sequence[str]) -> None:
    if not command:
        raise UsageError("there is no program; expected `retrograd trace record [options] -- train.py ...`")
    first = command[0]
    if first in ("-m", "-c"):
        if len(command) < 2:
            raise UsageError(f"{first} needs what to run after it")
    elif not Path(first).is_file():
        raise UsageError(f"there is no file {first!r}; expected a script, -m MODULE or -c CODE")


def _run(command: Sequence[str]) -> None:
    first, rest = command[0], list(command[1:])
    if first == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (a text, as Python puts it there)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
