"""Batches in processes of their own: started, read, timed, cut off, and started again for what is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core import subprocesses
from retrograd.core.schema import decode
from retrograd.errors import UsageError
from retrograd.flake.plan import Batch
from retrograd.flake.schema import Run

# Imports and collection of a large suite take long where a single test does not.
STARTUP = 120.0
# A test that takes its process down this often in a row will not stop doing so.
_ENOUGH = 3


@dataclass
class Outcome:
    """What the processes of a batch said."""

    items: list[str] = field(default_factory=list[str])
    runs: list[Run] = field(default_factory=list[Run])
    problem: str = ""
    torch: bool = False
    unrecorded: int = 0
    left: int = 0  # trials that were given up


def execute(batch: Batch, timeout: float, pytest_args: tuple[str, ...], process: int, stop: threading.Event) -> Outcome:
    """Run a batch; nothing that a test does to its process raises here.

    A process that dies or goes silent for `timeout` seconds ends the run that it was in ("crashed", "hung"); a new
    process takes the rest, until three in a row got nowhere. `stop` ends the process and what it made so far is lost.
    """
    out = Outcome()
    trials = list(batch.trials)
    in_a_row = 0
    while trials or not batch.trials:  # without trials a process collects only
        part = _Process(replace(batch, trials=tuple(trials)), timeout, pytest_args, stop)
        ended = part.wait(out)
        for index, data in part.runs.items():
            out.runs.append(_run(batch, trials[index], data, process, index))
        if ended in ("end", "problem", "stopped"):
            break
        if part.started is None:
            out.problem = _ended(ended, part.log(), "while the test was being imported")
            break
        message = _ended(ended, part.log(), "in the middle of a run")
        failed = dict(
            outcome="hung" if ended == "hung" else "crashed", message=message, seconds=part.silent, margins=[]
        )
        out.runs.append(_run(batch, trials[part.started], failed, process, part.started))
        in_a_row = in_a_row + 1 if part.started == 0 else 1
        trials = trials[part.started + 1 :]
        if in_a_row >= _ENOUGH:
            out.left = len(trials)
            break
    return out


def _run(batch: Batch, trial: Any, data: dict[str, Any], process: int, place: int) -> Run:
    known = dict(
        seed=trial.seed, stage=batch.stage, setting=batch.setting.name, process=process, place=place,
        hash_seed=batch.hash_seed, before=list(trial.before), fill=trial.fill,
    )  # fmt: skip
    return decode(Run, known | data)


def _ended(how: str, log: str, where: str) -> str:
    said = f"no answer {where}; the process was ended" if how == "hung" else f"the process ended {where} ({how})"
    return f"{said}\n{log}".strip()


class _Process:
    """One child: its files, its output, its state."""

    def __init__(self, batch: Batch, timeout: float, pytest_args: tuple[str, ...], stop: threading.Event) -> None:
        self._batch, self._pytest_args, self._stop = batch, pytest_args, stop
        # The limit is one test's; others may run before it.
        self._timeout = timeout * (1 + max((len(trial.before) for trial in batch.trials), default=0))
        self.started: int | None = None  # the trial that it is in
        self.runs: dict[int, dict[str, Any]] = {}
        self.silent = 0.0
        self._tail: subprocesses.Tail | None = None

    def log(self) -> str:
        """The end of what the process printed; where it died or hung, the innermost frames."""
        return self._tail.text() if self._tail else ""

    def wait(self, out: Outcome) -> str:
        """Read until the process ends: "end", "problem", "hung", or how it died."""
        with tempfile.TemporaryDirectory(prefix="retrograd-flake-") as folder:
            results = Path(folder) / "results"
            results.touch()
            job = self._batch.job() | dict(timeout=self._timeout, pytest_args=self._pytest_args)
            job["arguments"] = _arguments(self._batch)
            (Path(folder) / "job").write_text(json.dumps(job), encoding="utf-8")
            child = self._start(str(Path(folder) / "job"), str(results))
            self._tail = subprocesses.Tail(child)
            try:
                ended = self._follow(child, results, out)
            finally:
                subprocesses.end(child)
                self._tail.close()
            if ended == "problem":
                # What pytest says of it is printed, and only now read for certain.
                said = [line for line in self.log().splitlines() if line.startswith("ERROR")]
                out.problem = "\n".join([out.problem, *said])
            return ended

    def _start(self, job: str, results: str) -> subprocess.Popen[bytes]:
        changes = self._batch.setting.variables()
        if self._batch.hash_seed is not None:
            changes = config.hash_seed(self._batch.hash_seed) | changes
        return subprocesses.start([sys.executable, "-m", "retrograd.flake.worker", job, results], changes)

    def _follow(self, child: subprocess.Popen[bytes], results: Path, out: Outcome) -> str:
        heard = time.monotonic()
        with results.open(encoding="utf-8") as lines:
            while True:
                code = child.poll()
                for words in subprocesses.whole_lines(lines):
                    heard = time.monotonic()
                    if self._hear(words, out):
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            child.wait(timeout=5)  # tests leave threads behind; their end is not waited for
                        return str(words[0])
                self.silent = time.monotonic() - heard
                if code is not None:
                    return subprocesses.death(code)
                # The child prints where it hangs when its time is up; let it.
                limit = self._timeout + 1 if self.started is not None else max(self._timeout, STARTUP)
                if self.silent > limit:
                    return "hung"
                if self._stop.is_set():
                    return "stopped"
                subprocesses.sleep()

    def _hear(self, words: list[Any], out: Outcome) -> bool:
        """Take a line in; whether it was the last."""
        if words[0] == "items":
            out.items = words[1]
        elif words[0] == "start":
            self.started = words[1]
        elif words[0] == "run":
            self.runs[words[1]] = words[2]
        elif words[0] == "facts":
            out.torch |= words[1]["torch"]
            out.unrecorded += words[1]["unrecorded"]
        elif words[0] == "problem":
            out.problem = words[1]
        return words[0] in ("end", "problem")


def _arguments(batch: Batch) -> list[str]:
    """What pytest is to collect: the test, or its whole file where others go before it."""
    argument = batch.target.argument
    if any(trial.before for trial in batch.trials):
        return [argument.partition("::")[0]]
    return [argument]


def require(target: Any) -> None:
    """UsageError for a target that this system cannot run."""
    if os.name != "posix":
        raise UsageError(f"cannot run {target.name!r}: `retrograd flake` needs processes of POSIX (Linux, macOS)")
