"""Batches in processes of their own: started, read, timed, cut off, and started again for what is left."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core import subprocesses
from retrograd.core.schema import decode
from retrograd.flake.plan import Batch
from retrograd.flake.schema import Run

# Imports and collection of a large suite take long where a single test does not.
STARTUP = 120.0
# A test that takes its process down this often in a row will not stop doing so.
_ENOUGH = 3
_GOODBYE = 5.0  # seconds; tests leave threads behind, whose end is not waited for


@dataclass
class BatchResult:
    """What the processes of a batch said."""

    items: list[str] = field(default_factory=list[str])
    runs: list[Run] = field(default_factory=list[Run])
    problem: str = ""
    torch: bool = False
    unrecorded: int = 0
    left: int = 0  # trials that were given up


def execute(
    batch: Batch, timeout: float, pytest_args: tuple[str, ...], process: int, stop: threading.Event
) -> BatchResult:
    """Run a batch; nothing that a test does to its process raises here.

    A process that dies or goes silent for `timeout` seconds ends the run that it was in ("crashed", "hung"); a new
    process takes the rest, until three in a row got nowhere. `stop` ends the process and what it made so far is lost.
    """
    out = BatchResult()
    trials = list(batch.trials)
    in_a_row = 0
    while trials or not batch.trials:  # without trials a process collects only
        part = _Process(replace(batch, trials=tuple(trials)), timeout, pytest_args, stop)
        ended = part.wait(out)
        for index, data in part.runs.items():
            out.runs.append(_run(batch, trials[index], data, process, index))
        if ended in ("end", "stopped"):
            break
        if part.started is None:
            out.problem = _ended(ended, part.output, "while the test was being imported")
            break
        message = _ended(ended, part.output, "in the middle of a run")
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
    text = f"no answer {where}; the process was ended" if how == "hung" else f"the process ended {where} ({how})"
    return f"{text}\n{log}".strip()


class _Process:
    """One child: its files, its output, its state."""

    def __init__(self, batch: Batch, timeout: float, pytest_args: tuple[str, ...], stop: threading.Event) -> None:
        self._batch, self._pytest_args, self._stop = batch, pytest_args, stop
        # The limit is one test's; others may run before it.
        self._timeout = timeout * (1 + max((len(trial.before) for trial in batch.trials), default=0))
        self.started: int | None = None  # the trial that it is in
        self.runs: dict[int, dict[str, Any]] = {}
        self.silent = 0.0
        self.output = ""  # its end; where the process died or hung, the innermost frames

    def wait(self, out: BatchResult) -> str:
        """Read until the process ends: "end", "stopped", "hung", or how it died."""
        with tempfile.TemporaryDirectory(prefix="retrograd-flake-") as folder:
            results = Path(folder) / "results"
            results.touch()
            job = self._batch.job() | dict(timeout=self._timeout, pytest_args=self._pytest_args)
            (Path(folder) / "job").write_text(json.dumps(job), encoding="utf-8")
            command = [sys.executable, "-m", "retrograd.flake.worker", str(Path(folder) / "job"), str(results)]
            hash_seed = self._batch.hash_seed
            fixed = {} if hash_seed is None else config.hash_seed(hash_seed)
            with subprocesses.Child(command, fixed | self._batch.setting.variables()) as child:
                # The child prints where it hangs when its time is up; let it.
                starting, running = max(self._timeout, STARTUP), self._timeout + 1
                ended = child.follow(
                    results, lambda words: self._hear(words, out),
                    lambda: starting if self.started is None else running, stop=self._stop.is_set,
                )  # fmt: skip
                if ended == "end":
                    child.wait(_GOODBYE)
            self.silent, self.output = child.silent, child.output()
            if out.problem:
                # What pytest says of it is printed, and only now read for certain.
                errors = [line for line in self.output.splitlines() if line.startswith("ERROR")]
                out.problem = "\n".join([out.problem, *errors])
            return ended

    def _hear(self, words: list[Any], out: BatchResult) -> bool:
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
