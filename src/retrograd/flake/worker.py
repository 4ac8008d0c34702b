"""The process that runs the trials of one batch: `python -m retrograd.flake.worker JOB RESULTS`.

It reads a job, seeds before every run, runs the test, and appends one line of JSON to the results as soon as
something is known: ["items", [...]], ["start", i], ["run", i, {...}], ["problem", text], ["end"]. A line is on its way
to the disk before the next run begins, so nothing is lost where a test takes the process down. What the test prints
goes where the process's output goes; the results have a file of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from retrograd.core.loading import is_path, load
from retrograd.core.subprocesses import Messages
from retrograd.errors import RetrogradError
from retrograd.flake.callables import call, returned, takes_seed
from retrograd.flake.margins import Recorder
from retrograd.flake.seeding import seed_all, seed_imports

LONGEST_MESSAGE = 2000


class Trials:
    """What the ways of running a test share: seeds, threads, margins, the clock, and the dump of a run that hangs."""

    def __init__(self, job: dict[str, Any], results: Messages) -> None:
        self.job, self.results = job, results
        self.recorder = Recorder()
        # Pytest redirects the process's stderr; the traceback of a hanging run must still get out.
        self._stderr = os.fdopen(os.dup(2), "w")

    def prepare(self, source: str) -> None:
        """After the test was imported: everything that it may draw from or compare with must be there to be wrapped."""
        if "torch" not in sys.modules and "torch" in source and importlib.util.find_spec("torch"):
            importlib.import_module("torch")
        if "torch" in sys.modules:
            importlib.import_module("torch.testing")
            with contextlib.suppress(ImportError):
                importlib.import_module("retrograd.check.asserts")
        if "numpy" in sys.modules:
            importlib.import_module("numpy.testing")
        self.recorder.install()

    def each(self, run: Callable[[dict[str, Any]], tuple[str, str]]) -> None:
        """Make every trial; `run` returns outcome and message."""
        for index, trial in enumerate(self.job["trials"]):
            self.results.send("start", index)
            faulthandler.dump_traceback_later(self.job["timeout"], file=self._stderr)
            began = time.perf_counter()
            with _filled(trial["fill"]):
                seed_all(trial["seed"])
                self._threads()
                self.recorder.take()
                outcome, message = run(trial)
            seconds = time.perf_counter() - began
            faulthandler.cancel_dump_traceback_later()
            result = dict(outcome=outcome, message=shorten(message), seconds=seconds, margins=self.recorder.take())
            self.results.send("run", index, result)
        facts = dict(torch="torch" in sys.modules, unrecorded=self.recorder.unrecorded)
        self.results.send("facts", facts)
        self.results.send("end")

    def restart(self, seed: int) -> None:
        """Seed again and forget the margins: other tests ran."""
        seed_all(seed)
        self.recorder.take()

    def _threads(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and self.job["threads"]:
            torch.set_num_threads(self.job["threads"])


def shorten(text: str, most: int = LONGEST_MESSAGE) -> str:
    """The text, or its two ends."""
    return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"


@contextlib.contextmanager
def _filled(fill: str) -> Iterator[None]:
    """Torch's deterministic mode, which fills fresh memory with NaN where `fill` is "nan"; nothing if ""."""
    if not fill or "torch" not in sys.modules:
        yield
        return
    from retrograd.check.stages.poison import deterministic

    with deterministic(fill=fill == "nan"):
        yield


def call_target(trials: Trials, argument: str) -> None:
    """Run a callable: it fails by raising, by returning False, or by returning a margin err / tol above 1."""
    place, _, name = argument.rpartition(":")
    try:
        if is_path(place):
            sys.path.insert(0, str(Path(place).resolve().parent))  # for what it imports when it is called
        module = load(place, argument, "'package.module:name' or 'path/file.py:name'")
        function = getattr(module, name)
    except RetrogradError as error:
        trials.results.send("problem", str(error).removeprefix(f"unknown target {argument!r}: "))  # who asks names it
        return
    except Exception as error:
        trials.results.send("problem", f"cannot import {argument!r}: {type(error).__name__}: {error}")
        return
    if not callable(function):
        trials.results.send("problem", f"{argument!r} is {type(function).__name__}, expected something to call")
        return
    file = getattr(module, "__file__", None)
    trials.prepare(Path(file).read_text(encoding="utf-8", errors="replace") if file else "")
    trials.results.send("items", [argument])
    wants_seed = takes_seed(function)

    def run(trial: dict[str, Any]) -> tuple[str, str]:
        outcome, message, margin = call(function, trial["seed"] if wants_seed else None)
        if margin is not None:
            trials.recorder.add(returned(margin))
        return outcome, message

    trials.each(run)


def main(job_path: str, results_path: str) -> None:
    """Run a job."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    results = Messages(results_path)
    seed_imports()
    trials = Trials(job, results)
    target = job["target"]
    if not target["is_test"]:
        call_target(trials, target["argument"])
        return
    from retrograd.flake.pytest_driver import run_tests

    run_tests(trials)


if __name__ == "__main__":
    main(*sys.argv[1:])
