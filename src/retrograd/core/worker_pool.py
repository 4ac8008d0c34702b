"""Pool of processes that do tasks of a campaign: each may die, hang or print without end, and ends alone."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrograd import config
from retrograd.core.subprocesses import death
from retrograd.core.tasks import WALL, Begin, End, Outcome, Prepare, Task, WorkerOptions

_KEPT = 2000  # characters of what a process that died has printed
_GRACE = 60  # seconds beyond its limit after which a process ends itself, where nobody is left to end it
_END = 1.0  # seconds that a process has to end what it started in groups of their own
Ended = tuple[str, str, Outcome]


@dataclass
class _Worker:
    """A process, and what it does just now; no case between two."""

    process: Any
    connection: Connection
    output: Path
    slot: int
    task: Task | None = None
    done: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    case: str | None = None
    limit: float = 0.0
    since: float = 0.0
    cases: int = 0


def run(
    prepare: Prepare, tasks: Iterable[Task], known: Callable[[str], dict[str, Outcome]], options: WorkerOptions,
    until: float, owner: Connection | None = None,
) -> Iterator[Ended]:  # fmt: skip
    """Do tasks in processes of this machine.

    Args:
        prepare, tasks, options, until: as of `campaign.run`.
        known: outcomes of a task that are there already.
        owner: whose end of this connection is closed when the work is wanted no more; EOFError then.
    """
    with TemporaryDirectory(prefix="retrograd-workers-") as folder:
        pool = _Pool(prepare, iter(tasks), known, options, until, Path(folder))
        try:
            while pool.fill():
                ready = wait([w.connection for w in pool.workers] + ([owner] if owner else []), timeout=0.2)
                if owner in ready:
                    raise EOFError
                yield from pool.look()
        finally:
            for worker in list(pool.workers):
                pool.end(worker)


@dataclass
class _Pool:
    prepare: Prepare
    tasks: Iterator[Task]
    known: Callable[[str], dict[str, Outcome]]
    options: WorkerOptions
    until: float
    folder: Path
    workers: list[_Worker] = field(default_factory=list[_Worker])
    _again: deque[tuple[Task, dict[str, Outcome]]] = field(default_factory=deque[tuple[Task, dict[str, Outcome]]])

    def fill(self) -> bool:
        """Hand tasks to workers that have none; whether any has one."""
        jobs = min(self.options.jobs, len(self.options.devices) or self.options.jobs)
        for slot in range(jobs):
            worker = next((w for w in self.workers if w.slot == slot), None)
            if (worker is None or worker.task is None) and (following := self._following()):
                worker = worker or self._start(slot)
                worker.task, worker.done = following
                worker.case, worker.limit, worker.since = None, self.options.startup, time.monotonic()
                with contextlib.suppress(OSError):  # it has died, which is seen when it is looked at
                    worker.connection.send((worker.task.argument, worker.done))
        return any(w.task for w in self.workers)

    def _following(self) -> tuple[Task, dict[str, Outcome]] | None:
        if self._again:
            return self._again.popleft()
        if time.monotonic() < self.until and (task := next(self.tasks, None)) is not None:
            return task, self.known(task.name)
        return None

    def _start(self, slot: int) -> _Worker:
        context: Any = multiprocessing.get_context(self.options.start)
        ours, theirs = context.Pipe()
        output = self.folder / f"{slot}.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        device = self.options.devices[slot] if self.options.devices else None
        process = context.Process(target=_serve, args=(self.prepare, theirs, output, device, self.options.timeout))
        process.start()
        theirs.close()
        self.workers.append(_Worker(process, ours, output, slot))
        return self.workers[-1]

    def look(self) -> Iterator[Ended]:
        """What workers tell, and what they no longer can."""
        for worker in [w for w in self.workers if w.task]:
            try:
                while worker.task and worker.connection.poll():
                    yield from self._hear(worker, worker.connection.recv())
            except (EOFError, OSError):
                worker.process.join(10)
                if worker.process.exitcode == -signal.SIGPROF:
                    yield from self._lost(worker, "timed out", f"after {worker.limit / WALL:g} s of CPU time")
                else:
                    yield from self._lost(worker, "crashed", _last_words(worker))
                continue
            if worker.task and time.monotonic() - worker.since > worker.limit:
                yield from self._lost(worker, "timed out", f"after {worker.limit:g} s")

    def _hear(self, worker: _Worker, event: Begin | End | None) -> Iterator[Ended]:
        assert worker.task is not None
        seconds, worker.since = time.monotonic() - worker.since, time.monotonic()
        if isinstance(event, Begin):
            if event.case in worker.done:  # what had died would die for ever
                raise ValueError(f"the work of {worker.task.name!r} begins {event.case!r} again, which has an outcome")
            worker.case, worker.limit = event.case, WALL * (event.limit or self.options.timeout)
        elif isinstance(event, End):
            begun, worker.case, worker.limit = worker.case == event.case, None, self.options.startup
            outcome = Outcome("done", event.value, seconds=round(seconds, 3) if begun else 0.0)
            worker.done[event.case], worker.cases = outcome, worker.cases + 1
            yield worker.task.name, event.case, outcome
        else:
            worker.task = None
            if worker.cases >= self.options.recycle:
                self.end(worker)

    def _lost(self, worker: _Worker, state: str, text: str) -> Iterator[Ended]:
        """A worker is gone: its case is an outcome, the others of its task go to the next worker.

        Where it had begun no case, no further one of the task can be had.
        """
        assert worker.task is not None
        self.end(worker)
        outcome = Outcome(state, None, text, round(time.monotonic() - worker.since, 3))
        case = worker.case or ""
        if case:
            self._again.append((worker.task, worker.done | {case: outcome}))
        yield worker.task.name, case, outcome

    def end(self, worker: _Worker) -> None:
        """End a process, with all that it started."""
        self.workers.remove(worker)
        worker.process.terminate()
        worker.process.join(_END)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()  # one that had no group yet; nothing once it is joined, whose number may be another's
        worker.process.join()
        worker.connection.close()


def _last_words(worker: _Worker) -> str:
    printed = worker.output.read_bytes()[-_KEPT:].decode(errors="replace") if worker.output.exists() else ""
    last = printed.strip().splitlines()[-1:] or [""]
    return f"{death(worker.process.exitcode or 0)}: {last[0]}".rstrip(": ")


class _Terminated(BaseException):
    """Passes through what the work does, so that each process that it started is ended on the way."""


def _terminated(number: int, frame: Any) -> None:
    raise _Terminated


def _serve(prepare: Prepare, connection: Connection, output: Path, device: str | None, timeout: float) -> None:
    """Do the tasks that come, until there are no more."""
    # Garbage of whom it was forked from is not ours to free: a process group of gloo waits for threads that are gone.
    gc.freeze()
    signal.signal(signal.SIGTERM, _terminated)
    os.setsid()  # so that what the work starts is ended with it
    faulthandler.disable()  # it would write over the last words, or to the terminal of whom it was forked from
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if device is not None:
        config.show_gpu(device)
    work = prepare()
    with contextlib.suppress(EOFError, _Terminated):
        while True:
            argument, done = connection.recv()
            os.ftruncate(file, 0)
            for event in work(argument, done):
                limit = (event.limit or timeout) if isinstance(event, Begin) else 0
                # CPU time of all threads, after which SIGPROF ends the process; what it starts has its own.
                signal.setitimer(signal.ITIMER_PROF, limit)
                if limit:
                    signal.alarm(int(WALL * limit) + _GRACE)
                connection.send(event)
            signal.alarm(0)
            connection.send(None)
    # Without the ends of a process: the parent's threads, files and temporary folders are not this one's.
    os._exit(0)
