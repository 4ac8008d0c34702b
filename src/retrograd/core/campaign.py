"""Campaigns: thousands of tasks whose results are kept in SQLite, so that a run that was stopped goes on where it was.

A task has one case or several. Work is a generator that says which case it begins, and what came of it; a process that
dies or hangs costs the case that it had begun, and the task goes on with the next (`core.worker_pool`). With a
scheduler's address the same tasks run on the workers of a cluster (`core.cluster`), and what a lost one had is done
again there.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from retrograd.core import cluster, worker_pool
from retrograd.core.schema import plain
from retrograd.core.tasks import Outcome, Prepare, Task, WorkerOptions
from retrograd.errors import UsageError

VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS results (
    campaign TEXT NOT NULL, task TEXT NOT NULL, "case" TEXT NOT NULL, state TEXT NOT NULL, value TEXT NOT NULL,
    text TEXT NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (campaign, task, "case")
)
"""


class ResultStore:
    """Outcomes by task and case in an SQLite file, each there as soon as it is known.

    Args:
        path: of the file, which other campaigns may share; ":memory:" keeps them in this process alone.
        campaign: what outcomes depend on and tasks do not name, such as a digest of the sources.

    Raises:
        UsageError: the file cannot be written, or is something else.
    """

    def __init__(self, path: str | Path = ":memory:", campaign: str = "") -> None:
        self.path, self.campaign = str(path), campaign
        with self._telling():
            if self.path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Several runs may share a file; each waits for its turn.
            self._base = sqlite3.connect(self.path, timeout=60)
            (version,) = self._base.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this retrograd reads {VERSION}")
            with self._base:
                self._base.execute(_TABLE)
                self._base.execute(f"PRAGMA user_version = {VERSION}")

    def of(self, task: str) -> dict[str, Outcome]:
        """Outcomes of a task by case, in the order in which they came."""
        query = 'SELECT "case", state, value, text, seconds FROM results WHERE campaign = ? AND task = ? ORDER BY rowid'
        with self._telling():
            rows = self._base.execute(query, (self.campaign, task)).fetchall()
        return {case: Outcome(state, json.loads(value), text, seconds) for case, state, value, text, seconds in rows}

    def tasks(self) -> list[str]:
        """Names of the tasks that have outcomes."""
        with self._telling():
            rows = self._base.execute("SELECT DISTINCT task FROM results WHERE campaign = ?", (self.campaign,))
            return [task for (task,) in rows.fetchall()]

    def add(self, task: str, case: str, outcome: Outcome) -> None:
        """Keep an outcome, on the disk before this returns; in the place of an earlier one."""
        value = json.dumps(plain(outcome.value))
        row = (self.campaign, task, case, outcome.state, value, outcome.text, outcome.seconds)
        with self._telling(), self._base:
            self._base.execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextlib.contextmanager
    def _telling(self) -> Generator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"{self.path!r} cannot be used for results: {error}; name another file") from None


def run(
    prepare: Prepare, tasks: Iterable[Task], results: ResultStore, options: WorkerOptions | None = None,
    until: float = math.inf,
) -> Iterator[tuple[str, str, Outcome]]:  # fmt: skip
    """Do tasks, keep what comes of each case, and tell it: task, case, outcome, in the order in which cases end.

    Args:
        prepare: makes the work, once in each process; it pickles where that is not forked from this one.
        tasks: those to do; work passes over cases that `results` has.
        results: where outcomes are kept.
        options: processes and their limits, or a cluster.
        until: the time of `time.monotonic` after which no task is begun.

    Raises:
        MissingExtraError: a cluster is named, and joblib or Dask is not installed.
        UsageError: no such cluster, or the work cannot be prepared on one of its workers.
    """
    options = options or WorkerOptions()
    engine = cluster if options.cluster else worker_pool
    for task, case, outcome in engine.run(prepare, tasks, results.of, options, until):
        results.add(task, case, outcome)
        yield task, case, outcome
