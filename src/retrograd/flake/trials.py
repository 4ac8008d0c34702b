"""Trials of one batch: what every way of running a test shares, seeds, threads, margins, the clock, hanging runs."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

from retrograd.core.subprocesses import Messages
from retrograd.flake.margins import MarginRecorder
from retrograd.flake.seeding import seed_all

LONGEST_MESSAGE = 2000


class Trials:
    """What the ways of running a test share: seeds, threads, margins, the clock, and the dump of a run that hangs."""

    def __init__(self, job: dict[str, Any], results: Messages) -> None:
        self.job, self.results = job, results
        self.recorder = MarginRecorder()
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
                if "torch" in sys.modules and self.job["threads"]:
                    sys.modules["torch"].set_num_threads(self.job["threads"])
                self.restart(trial["seed"])
                outcome, message = run(trial)
            seconds = time.perf_counter() - began
            faulthandler.cancel_dump_traceback_later()
            result = dict(outcome=outcome, message=shorten(message), seconds=seconds, margins=self.recorder.take())
            self.results.send("run", index, result)
        facts = dict(torch="torch" in sys.modules, unrecorded=self.recorder.unrecorded)
        self.results.send("facts", facts)
        self.results.send("end")

    def restart(self, seed: int) -> None:
        """Seed and forget the margins of what ran before."""
        seed_all(seed)
        self.recorder.take()


def shorten(text: str, most: int = LONGEST_MESSAGE) -> str:
    """The text, or its two ends."""
    return text if len(text) <= most else f"{text[: most // 2]}\n[...]\n{text[-most // 2 :]}"


@contextlib.contextmanager
def _filled(fill: str) -> Generator[None, None, None]:
    """Torch's deterministic mode, which fills fresh memory with NaN where `fill` is "nan"; nothing if ""."""
    if not fill or "torch" not in sys.modules:
        yield
        return
    from retrograd.check.stages.poison import deterministic

    with deterministic(fill=fill == "nan"):
        yield
