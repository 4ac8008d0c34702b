"""A person's program, run as Python runs it: as `__main__`, with its own arguments, folder and exit code."""

from __future__ import annotations

import linecache
import os
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from retrograd.errors import RetrogradError, UsageError

# Files whose frames stand above the program's own in a traceback.
_MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")


def with_interpreter(program: Sequence[str]) -> list[str]:
    """The command line that runs a program with the Python that runs us, where it is Python's.

    A script, -m or -c gets the interpreter, and it takes the place of `python` and `python3`; another version or a path
    is somebody's choice and stays.
    """
    command = list(program)
    if command and command[0] in ("python", "python3"):
        del command[0]
    elif not command or not (command[0] in ("-m", "-c") or command[0].endswith(".py")):
        return command
    return [sys.executable, *command]


def command_of(program: Sequence[str], usage: str) -> list[str]:
    """The program without a leading "python".

    Args:
        program: a script, "-m" and a module, or "-c" and code; then its arguments.
        usage: what could have been written, for errors.

    Raises:
        UsageError: there is no such program.
    """
    command = list(program)
    if command and re.fullmatch(r"python[\d.]*(\.exe)?", Path(command[0]).name):
        del command[0]
    if not command:
        raise UsageError(f"there is no program; expected {usage}")
    if command[0] in ("-m", "-c"):
        if len(command) < 2:
            raise UsageError(f"{command[0]} needs what to run after it; expected {usage}")
    elif not Path(command[0]).is_file():
        raise UsageError(f"there is no file {command[0]!r}; expected a script, -m MODULE or -c CODE")
    return command


def run(command: Sequence[str], watcher: AbstractContextManager[Any]) -> int:
    """Run a program in this process.

    Args:
        command: of `command_of`.
        watcher: is entered before the program and left after it, with its exception.

    Returns:
        The exit code. What the program raised has been printed, from the program's first line on.

    Raises:
        KeyboardInterrupt, RetrogradError: the program was interrupted; something of ours refused to go on.
    """
    arguments, path = sys.argv, list(sys.path)
    try:
        with watcher:
            _execute(command[0], list(command[1:]))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except (KeyboardInterrupt, RetrogradError):
        raise
    except BaseException as error:
        # Not traceback.print_exc(): a program may have put a hook of its own there, as Python lets it.
        error.__traceback__ = _own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    finally:
        sys.argv, sys.path[:] = arguments, path
    return 0


def _execute(first: str, rest: list[str]) -> None:
    if first == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (a text, as Python puts it there)
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        if sys.version_info >= (3, 13):  # from there on Python shows the line of such a program in a traceback
            linecache.cache["<string>"] = (len(rest[0]), None, rest[0].splitlines(keepends=True), "<string>")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the program; None where nothing of it ran, as for a syntax error."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _MACHINERY:
        trace = trace.tb_next
    return trace
