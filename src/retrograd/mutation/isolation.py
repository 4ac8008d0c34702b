"""A process for each mutant, forked from one in which everything is imported and the original has run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrograd.core.subprocesses import death

_KEPT = 2000  # characters of what a mutant that died has printed


@dataclass
class Outcome:
    """How a process ended: "done" with its value, "crashed" or "timed out" with the end of what it printed."""

    state: str
    value: Any = None
    text: str = ""
    seconds: float = 0.0


@dataclass
class _Running:
    number: int
    process: Any
    connection: Connection
    output: Path
    begin: float = field(default_factory=time.monotonic)


def run_forked(
    tasks: Iterable[Callable[[], Any]], *, jobs: int = 1, timeout: float = 120.0, until: float = float("inf")
) -> Iterator[tuple[int, Outcome]]:
    """Run each task in a forked process and tell how it ended, in the order in which they end.

    Args:
        tasks: what to run; a value must pickle.
        jobs: how many processes at once.
        timeout: seconds that a task may take before all processes of its group are killed.
        until: the time of `time.monotonic` after which no task is begun.
    """
    running: list[_Running] = []
    waiting = enumerate(tasks)
    with TemporaryDirectory(prefix="retrograd-mutants-") as folder:
        try:
            while True:
                while len(running) < jobs and time.monotonic() < until and (task := next(waiting, None)) is not None:
                    running.append(_start(*task, Path(folder)))
                if not running:
                    return
                wait([r.connection for r in running] + [r.process.sentinel for r in running], timeout=0.2)
                for each in list(running):
                    if outcome := _ended(each, timeout):
                        running.remove(each)
                        yield each.number, outcome
        finally:
            for each in running:
                _kill(each)


def _start(number: int, task: Callable[[], Any], folder: Path) -> _Running:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    output = folder / f"{number}.txt"
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_child, args=(task, theirs, output), daemon=False)
    process.start()
    theirs.close()
    return _Running(number, process, ours, output)


def _child(task: Callable[[], Any], connection: Connection, output: Path) -> None:
    os.setsid()  # so that what the mutant starts is ended with it
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    connection.send(task())
    connection.close()
    # Without the ends of a process: the parent's threads, files and temporary folders are not this one's.
    os._exit(0)


def _ended(each: _Running, timeout: float) -> Outcome | None:
    seconds = time.monotonic() - each.begin
    if each.connection.poll():
        try:
            value = each.connection.recv()
        except EOFError:
            return _dead(each, seconds)
        _kill(each)
        return Outcome("done", value, seconds=seconds)
    if not each.process.is_alive():
        return _dead(each, seconds)
    if seconds > timeout:
        _kill(each)
        return Outcome("timed out", text=f"after {timeout:g} s", seconds=seconds)
    return None


def _dead(each: _Running, seconds: float) -> Outcome:
    each.process.join()
    printed = each.output.read_bytes()[-_KEPT:].decode(errors="replace") if each.output.exists() else ""
    _kill(each)
    last = printed.strip().splitlines()[-1:] or [""]
    return Outcome("crashed", text=f"{death(each.process.exitcode or 0)}: {last[0]}".rstrip(": "), seconds=seconds)


def _kill(each: _Running) -> None:
    """End a process and its group, which may outlive it."""
    for end in (os.killpg, os.kill):
        try:
            end(each.process.pid, signal.SIGKILL)
            break
        except (ProcessLookupError, PermissionError):
            continue
    each.process.join()
    each.connection.close()
