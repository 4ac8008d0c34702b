"""The process that runs the trials of one batch: `python -m retrograd.flake.worker JOB RESULTS`.

It reads a job, seeds before every run, runs the test, and appends one line of JSON to the results as soon as
something is known: ["items", [...]], ["start", i], ["run", i, {...}], ["problem", text], ["end"]. A line is on its way
to the disk before the next run begins, so nothing is lost where a test takes the process down. What the test prints
goes where the process's output goes; the results have a file of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from retrograd.core.loading import is_path, load
from retrograd.core.subprocesses import Messages
from retrograd.errors import RetrogradError, UsageError
from retrograd.flake.callables import call, returned, takes_seed
from retrograd.flake.seeding import seed_imports
from retrograd.flake.trials import Trials


def call_target(trials: Trials, argument: str) -> None:
    """Run a callable: it fails by raising, by returning False, or by returning a margin err / tol above 1."""
    place, _, name = argument.rpartition(":")
    try:
        if is_path(place):
            sys.path.insert(0, str(Path(place).resolve().parent))  # for what it imports when it is called
        module = load(place, argument, "'package.module:name' or 'path/file.py:name'")
        function = getattr(module, name)
        if not callable(function):
            raise UsageError(f"{argument!r} is {type(function).__name__}, expected something to call")
    except RetrogradError as error:
        trials.results.send("problem", str(error).removeprefix(f"unknown target {argument!r}: "))  # who asks names it
        return
    except Exception as error:
        trials.results.send("problem", f"cannot import {argument!r}: {type(error).__name__}: {error}")
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
