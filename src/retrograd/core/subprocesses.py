"""Processes that may die, hang or print without end: what is kept of their output, how they ended, how to end them.

Standard library only. A child tells its parent what it does in lines of JSON in a file of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from retrograd import config

_KEPT = 16 * 1024  # bytes of output, which may be endless
_FRAMES = 6  # of a traceback, innermost first: the rest is what called us
_DUMP = 1.0  # seconds that a child has to say where it is
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Lines:
    """The file that a child says things in."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (open until the process ends)

    def say(self, *words: Any) -> None:
        """One line of JSON, on its way to the disk before this returns."""
        self._file.write(json.dumps(words) + "\n")
        self._file.flush()


def whole_lines(file: Any) -> Iterator[list[Any]]:
    """Lines that are complete, read; half a line stays for the next time."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


class Tail:
    """The end of what a process prints, read by a thread so that the process never waits for us."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._output: deque[bytes] = deque()
        self._kept = 0
        self._reader = threading.Thread(target=self._drain, args=(child.stdout,), daemon=True)
        self._reader.start()

    def _drain(self, pipe: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            for piece in iter(lambda: pipe.read1(65536), b""):
                self._output.append(piece[-_KEPT:])
                self._kept += len(self._output[-1])
                while self._kept - len(self._output[0]) > _KEPT:
                    self._kept -= len(self._output.popleft())

    def close(self) -> None:
        """Read what is left; a grandchild may hold the pipe open for ever."""
        self._reader.join(timeout=1)

    def text(self) -> str:
        """The last lines; where the process died or hung, the innermost frames."""
        lines = b"".join(self._output).decode("utf-8", "replace").splitlines()
        dumps = [at for at, line in enumerate(lines) if line.startswith(("Fatal Python error", "Timeout ("))]
        if not dumps:
            return "\n".join(lines)[-2000:].strip()
        frames = [line for line in lines[dumps[-1] :] if line.strip()]
        return "\n".join(frames[:_FRAMES])


def start(command: Sequence[str], changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process without input, whose output a `Tail` reads, in a group of its own that `end` ends as a whole.

    Args:
        command: the program and its arguments.
        changes: variables of the environment that differ from ours.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=config.child_environment(changes),
        start_new_session=True,
    )


def death(code: int) -> str:
    """How a process ended, from its return code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def end(child: subprocess.Popen[bytes], *, dump: bool = False) -> None:
    """End the child and what it started, if it still runs; with `dump` faulthandler may say first where it is."""
    if child.poll() is None and dump:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_DUMP)
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def resident(child: subprocess.Popen[bytes]) -> int:
    """Bytes of memory that the child holds; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{child.pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def available() -> int:
    """Bytes of memory that processes may still take; 0 where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def sleep() -> None:
    """Until it is worth looking again."""
    time.sleep(0.02)
