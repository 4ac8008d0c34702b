"""Cluster of machines that do tasks of a campaign, by joblib's Dask backend.

Each thread of a Dask worker has a process of its own beside it (`python -m retrograd.core.cluster`), which prepares the
work once and then is a pool of one: a Dask worker may start no process that Python's multiprocessing knows of, and a
process with many threads must not be forked. It ends when the worker does; the scheduler gives what the worker had to
another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core import worker_pool
from retrograd.core.tasks import Outcome, Prepare, Task, WorkerOptions
from retrograd.errors import MissingExtraError, RetrogradError, UsageError

_agents = threading.local()
Ended = tuple[str, str, Outcome]


def run(
    prepare: Prepare, tasks: Iterable[Task], known: Callable[[str], dict[str, Outcome]], options: WorkerOptions,
    until: float,
) -> Iterator[Ended]:  # fmt: skip
    """Do tasks on the workers of `options.cluster`, one at a time on each of their threads.

    The workers need this version of retrograd, the folder that this process is in, and what it imports, at the same
    paths. Arguments as of `campaign.run`.

    Raises:
        MissingExtraError: joblib or Dask is not installed.
        UsageError: nothing answers at the address, or has no worker, or the work cannot be prepared on one.
    """
    joblib, distributed = _import("joblib"), _import("distributed")
    alone = replace(options, jobs=1, cluster="", devices=())
    # As bytes, which joblib sends with the task: what it keeps on a worker instead is lost with that worker.
    setup = pickle.dumps((sys.path, str(Path.cwd()), config.gpus_hidden(), pickle.dumps(prepare), alone))
    waiting = [pickle.dumps((task, known(task.name))) for task in tasks]
    calls = (joblib.delayed(_remote)(setup, task) for task in waiting if time.monotonic() < until)
    with _client(distributed, options.cluster) as client, joblib.parallel_config(backend="dask", client=client):
        if not client.ncores():
            raise UsageError(f"the scheduler at {options.cluster!r} has no worker; start one: dask worker ADDRESS")
        for ended in joblib.Parallel(n_jobs=-1, batch_size=1, return_as="generator_unordered")(calls):
            yield from ended


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise MissingExtraError(name, "cluster", "a cluster") from None


def _client(distributed: Any, address: str) -> Any:
    try:
        return distributed.Client(address, set_as_default=False, timeout="20s")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no Dask scheduler answers at {address!r} ({error}); expected an address such as tcp://host:8786"
        ) from None


# ----- in a thread of a Dask worker


def _remote(setup: bytes, task: bytes) -> list[Ended]:
    """What comes of a task, done by the process beside this thread."""
    agents: dict[bytes, _Agent] = vars(_agents).setdefault("by_setup", {})
    if setup not in agents:
        agents.clear()  # of an earlier campaign
        agents[setup] = _Agent(setup)
    try:
        outcome = agents[setup].ask(task)
    except BaseException:
        del agents[setup]
        raise
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class _Agent:
    """The process beside a thread; it ends when its connection does."""

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(setup)

    def ask(self, task: bytes) -> Any:
        """The outcomes of a task, or the error that made them impossible."""
        try:
            self._connection.send_bytes(task)
            return self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the process that works for this worker ended with {self._process.wait()}") from None

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


# ----- the process beside it


def _serve(connection: Connection) -> None:
    path, folder, hidden, prepare, options = pickle.loads(connection.recv_bytes())
    sys.path += [entry for entry in path if entry not in sys.path]
    os.chdir(folder)
    if hidden:
        config.hide_gpus()
    try:
        work = pickle.loads(prepare)()
    except Exception as error:
        kind = "" if isinstance(error, RetrogradError) else f"{type(error).__name__}: "
        connection.recv_bytes()
        connection.send(UsageError(f"the work cannot be prepared on a worker of the cluster: {kind}{error}"))
        return
    while True:
        task, done = pickle.loads(connection.recv_bytes())
        ended = worker_pool.run(lambda: work, [task], lambda _, d=done: d, options, float("inf"), connection)
        connection.send(list(ended))


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        _serve(Connection(int(sys.argv[1])))
