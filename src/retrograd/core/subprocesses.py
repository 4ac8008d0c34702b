"""Subprocesses that may die, hang, leak or print without end: limits, the end of their output, messages in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from retrograd import config
from retrograd.core.schema import plain

_KEPT = 16 * 1024  # bytes of output, which may be endless
_FRAMES = 6  # of a traceback, innermost first: the rest is what called us
_DUMP = 1.0  # seconds that a child has to say where it is
_PAUSE = 0.02  # seconds between two looks at a child
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Messages:
    """The file in which a child tells its parent things, as lines of JSON."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: TextIO = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (open until the process ends)

    def send(self, *words: Any) -> None:
        """One line of JSON, on its way to the disk before this returns."""
        self._file.write(json.dumps(plain(words)) + "\n")
        self._file.flush()


def _complete_lines(file: Any) -> Iterator[list[Any]]:
    """Lines that are complete, read; half a line stays for the next time."""
    while True:
        at = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(at)
            return
        yield json.loads(line)


class Child:
    """A process without input, in a group of its own, that is ended with all that it started when the block is left.

    Args:
        command: the program and its arguments.
        changes: variables of the environment that differ from ours.
        dump: Where it hangs, let faulthandler say first where it is.
    """

    def __init__(self, command: Sequence[str], changes: Mapping[str, str] | None = None, *, dump: bool = False) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=config.child_environment(changes or {}),
            start_new_session=True,
        )
        self.silent = 0.0  # seconds since the last message
        self._dump, self._hung = dump, False
        self._output = b""
        # A thread reads, so that the process never waits for us.
        self._reader = threading.Thread(target=self._drain, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._reader.join(timeout=1)  # a grandchild may hold the pipe open for ever

    def wait(self, seconds: float) -> str | None:
        """How it ended, as `death` says; None if it still runs after so long."""
        try:
            return death(self.process.wait(seconds))
        except subprocess.TimeoutExpired:
            return None

    def follow(
        self,
        messages: Path,
        hear: Callable[[list[Any]], bool],
        patience: Callable[[], float],
        *,
        memory: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> str:
        """Read messages until there is no more to hear.

        Args:
            messages: the file, which is there.
            hear: takes a message; whether it was the last.
            patience: how many seconds it may be silent just now.
            memory: bytes that it may hold; 0 is any number.
            stop: whether to leave it.

        Returns:
            "end", "hung", "memory", "stopped", or how it died.
        """
        last = time.monotonic()
        with messages.open(encoding="utf-8") as lines:
            while True:
                code = self.process.poll()
                for words in _complete_lines(lines):
                    last = time.monotonic()
                    if hear(words):
                        return "end"
                self.silent = time.monotonic() - last
                if code is not None:
                    return death(code)
                if self.silent > patience():
                    self._hung = True
                    return "hung"
                if memory and _resident(self.process) > memory:
                    return "memory"
                if stop():
                    return "stopped"
                time.sleep(_PAUSE)

    def output(self) -> str:
        """The last lines that it printed; where it died or hung, the innermost frames."""
        lines = self._output.decode("utf-8", "replace").splitlines()
        dumps = [at for at, line in enumerate(lines) if line.startswith(("Fatal Python error", "Timeout ("))]
        if not dumps:
            return "\n".join(lines)[-2000:].strip()
        frames = [line for line in lines[dumps[-1] :] if line.strip()]
        # Other threads may come first, one of autograd for each GPU among them, which have no frames to show.
        current = next((at for at, line in enumerate(frames) if line.startswith("Current thread")), 1)
        return "\n".join([*frames[:1], *frames[current:], *frames[1:current]][:_FRAMES])

    def _drain(self, pipe: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            for piece in iter(lambda: pipe.read1(65536), b""):
                self._output = (self._output + piece)[-_KEPT:]

    def _end(self) -> None:
        child = self.process
        if self._hung and self._dump and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=_DUMP)
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def death(code: int) -> str:
    """How a process ended, from its return code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _resident(child: subprocess.Popen[bytes]) -> int:
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
