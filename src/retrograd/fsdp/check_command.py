"""`retrograd fsdp check`: a job whose processes record themselves, and the comparison of what they recorded.

The processes are told by an environment variable, through a `sitecustomize` of ours that Python imports at its start
and that imports the user's own one after it. This module loads torch only inside them, after the program did.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.core.import_hook import AfterImport
from retrograd.core.run_program import with_interpreter
from retrograd.core.system_errors import as_usage_error
from retrograd.errors import UsageError, VerificationError
from retrograd.fsdp.log_diff import LogDiff, diff
from retrograd.fsdp.peers import first_parting, states
from retrograd.fsdp.ring_file import RingReader
from retrograd.fsdp.schema import Log
from retrograd.runtime import disk_cache

_STOPPED = 70  # exit code of a process that the watchdog ended


@dataclass(frozen=True)
class Checked:
    code: int  # exit code of the program
    logs: tuple[Log, ...]  # of the ranks that left one
    diffs: tuple[LogDiff, ...]  # of rank 0, or the first that left a log, with the others: those that are not the same
    problems: tuple[str, ...]  # what ranks found while they ran, each once

    @property
    def exit_code(self) -> int:
        """0 same order everywhere, 1 a difference or another finding, 2 the program failed or recorded nothing."""
        if self.problems or self.diffs:
            return 1
        return 2 if self.code or not any(log.total for log in self.logs) else 0


def check(command: Sequence[str], options: dict[str, Any], keep: Path | None = None) -> Checked:
    """Run a job (torchrun and its arguments, or a script of one process) and compare its ranks.

    Options are "steps", after which the program ends, and those of record_collectives. Logs are kept in the folder
    `keep` as rank-0.json and so on. UsageError if the command cannot be started.
    """
    if not command:
        raise UsageError("there is no program; expected `retrograd fsdp check [options] -- torchrun ... train.py`")
    with tempfile.TemporaryDirectory(prefix="retrograd-fsdp-") as temporary:
        folder = keep if keep is not None else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("rank-*.json"), *folder.glob("rank-*.ring")):
            old.unlink()
        changes = config.request_at_start(__name__, json.dumps(options | {"folder": str(folder.resolve())}))
        with as_usage_error(f"{command[0]!r} cannot be started"):
            environment = config.child_environment(changes)
            code = subprocess.run(with_interpreter(command), env=environment, check=False).returncode
        logs = [Log.load(path) for path in folder.glob("rank-*.json")]
        rings = [RingReader(path) for path in sorted(folder.glob("rank-*.ring"))]
        if keep is not None:
            for ring in rings:
                ring.path.unlink()
    return judged(code, sorted(logs, key=lambda log: log.rank), rings)


def judged(code: int, logs: Sequence[Log], rings: Sequence[RingReader] = ()) -> Checked:
    diffs = [diff(logs[0], other) for other in logs[1:]]
    sentences = [text for log in logs for text in log.problems]
    gone = sorted(set(range(logs[0].size if logs else 0)) - {log.rank for log in logs} - {ring.rank for ring in rings})
    # Of a rank without a log its ring file says how far it came.
    silent = [ring for ring in rings if all(log.rank != ring.rank for log in logs)]
    if code and (gone or silent):
        texts = [f"rank {', '.join(map(str, gone))} left no log: killed, or ended without Python's exit"] * bool(gone)
        sentences = [*texts, *states(silent), *filter(None, [first_parting(rings)]), *sentences]
    return Checked(code, tuple(logs), tuple(d for d in diffs if not d.same), tuple(dict.fromkeys(sentences)))


def assert_same_order(*logs: Any) -> None:
    """Assert that ranks issued the same collectives in the same order, and that no step of a rank differs.

    Args:
        logs: of the ranks: what `record_collectives` gave, or its `log()`, or files that it saved.

    Raises:
        VerificationError: with the first difference.
        UsageError: there is no log.
    """
    read = [log.log() if hasattr(log, "log") else log if isinstance(log, Log) else Log.load(log) for log in logs]
    if not read:
        raise UsageError("assert_same_order was given no log; expected those of all ranks, or the one of this rank")
    checked = judged(0, sorted(read, key=lambda log: log.rank))
    if texts := [*checked.problems, *(d.words() for d in checked.diffs)]:
        raise VerificationError("\n".join(texts))


def begin(encoded: str) -> None:
    """In a process of the job: record from the moment at which torch has been imported. Called by `sitecustomize`."""
    rank = config.rank()
    if rank is None:
        return  # torchrun itself, and what else Python runs
    options = json.loads(encoded)
    sys.meta_path.insert(0, AfterImport(("torch",), lambda name: _record(options, rank[0])))


def _record(options: dict[str, Any], rank: int) -> None:
    from retrograd.fsdp.recorder import CollectiveLog, record_collectives

    CollectiveLog.folder = Path(options.pop("folder"))
    path = CollectiveLog.folder / f"rank-{rank}.json"
    last = options.pop("steps")
    logs = [record_collectives(steps="optimizer", on_change="record", **options)]

    def save() -> None:
        # Whole or not at all: a thread may be ended while it saves, beside another that does.
        with disk_cache.replacing(path) as written:
            logs[-1].save(written)

    def stalled(text: str) -> None:
        sys.stderr.write(f"retrograd.fsdp: {text}\n")
        save()

    def stepped(total: int) -> None:
        if last is not None and total >= last:
            raise SystemExit(0)

    def watch(log: CollectiveLog) -> None:
        """Take this log, which is ours or one of the program's own, as that of the rank."""
        logs.append(log)
        log.on_stall, log.on_step, log.replaced = stalled, stepped, watch
        log.on_stalled = lambda: os._exit(_STOPPED)  # the thread that hangs would never return

    hook = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        logs[-1].failed(error)
        save()
        hook(kind, error, trace)

    def terminated(number: int, frame: Any) -> None:
        save()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # torchrun ends the other ranks when one fails. Before a recorder, which takes a signal that nobody handles.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminated)
    watch(logs[0].start())
    sys.excepthook = excepthook
    atexit.register(save)
