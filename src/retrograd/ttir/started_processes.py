"""Processes that a program under `run-kernel` starts itself: each hears of the GPU, and leaves a record of its own."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core.import_hook import AfterImport
from retrograd.errors import RetrogradError
from retrograd.ttir.run_records import record_of
from retrograd.ttir.schema import KernelRun

_LAST = -100  # of the finalizers of multiprocessing
Recording = Callable[[], KernelRun]


@contextmanager
def hearing_processes(options: dict[str, Any], session: Any, record: Recording) -> Iterator[list[KernelRun]]:
    """Have Python processes that are started inside run in a `cpu_triton` of their own, as soon as they have torch.

    Args:
        options: of `cpu_triton`.
        session: of this process; what a fork of it does from then on is the fork's.
        record: makes the record of that session.

    Yields:
        A list that has at the end the records of those that launched kernels.
    """
    records: list[KernelRun] = []
    with tempfile.TemporaryDirectory(prefix="retrograd-kernels-") as name:
        folder = Path(name)
        util.register_after_fork(session, lambda session: _Report(folder, session, record).begin_anew())
        with config.requested_at_start(__name__, json.dumps({"folder": name, **options})):
            yield records
        for path in sorted(folder.iterdir()):
            if text := path.read_text():
                records.append(KernelRun.from_json(text))
            else:
                why = f"process {path.name} that the program started was killed, and left no report of its launches"
                records.append(KernelRun("", "undecided", 0, 0, (), (), (why,)))


def begin(encoded: str) -> None:
    """In a process that the program has started: run it with a GPU once it has torch. Called by `sitecustomize`."""
    if "torch" in sys.modules:  # by the user's own sitecustomize
        _run(json.loads(encoded))
    else:
        sys.meta_path.insert(0, AfterImport(("torch",), lambda name: _run(json.loads(encoded))))


def _run(options: dict[str, Any]) -> None:
    from retrograd.ttir.launch import cpu_triton

    folder, refusals, hook = Path(options.pop("folder")), list[str](), sys.excepthook
    context = cpu_triton(**options)
    session = context.__enter__()
    atexit.register(context.__exit__, None, None, None)  # after the report, since what is registered last runs first

    def record() -> KernelRun:
        return record_of(session, " ".join(sys.argv), options["multiprocessors"], refusals=refusals)

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        if isinstance(error, RetrogradError):
            refusals.append(str(error))
        hook(kind, error, trace)

    sys.excepthook = excepthook
    util.register_after_fork(session, lambda session: _Report(folder, session, record).begin_anew())
    _Report(folder, session, record).begin()


@dataclass
class _Report:
    """What this process leaves however it ends: by itself, as a worker of multiprocessing, or told to end."""

    folder: Path
    session: Any
    record: Recording

    def begin_anew(self) -> None:
        """In a fork, which has what its parent did."""
        self.session.launches = []
        self.session.forget_faults()
        self.begin()

    def begin(self) -> None:
        """Keep a record from the first launch on."""
        self._path = self.folder / str(os.getpid())
        self.session.begins = self._path.touch
        atexit.register(self._save)
        util.Finalize(None, self._save, exitpriority=_LAST)
        stays = threading.current_thread() is threading.main_thread()
        if stays and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def _save(self) -> None:
        if self._path.name == str(os.getpid()) and self._path.exists():
            self._path.write_text(self.record().to_json())

    def _terminated(self, number: int, frame: Any) -> None:
        self._save()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
