"""`verify` in a process of its own, so that an op may crash, hang, leak or print without end, and is told so.

Imports no torch: the child does, and says in a file how far it is. A stage that takes the process down is a finding,
and a new process takes the stages that are left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrograd import config
from retrograd.check.acceptance import settle
from retrograd.check.schema import BUDGET_ENDED, Case, Finding, Report, StageResult
from retrograd.core import subprocesses
from retrograd.core.schema import decode
from retrograd.env.facts import cpu_count
from retrograd.errors import RetrogradError, UndecidedError, UsageError

Progress = Callable[[str, str], None]

# Imports of torch and of the user's module, before the first stage; a cold disk takes half a minute.
STARTUP = 120.0
# An op that ends the process in so many stages in a row will do so in the others.
_ENOUGH = 3
_SHARE = 0.8  # of the memory that is free at the start
# Seconds for which the case that runs at the end of a budget is waited for: most take milliseconds.
_GRACE = 2.0
_PROGRAM = (sys.executable, "-X", "faulthandler", "-m", "retrograd", "verify")
# What NVIDIA's driver makes, and how many cores a process that compiles needs not to be in the way of the other.
_GPU_DRIVER, _CORES = "/dev/nvidiactl", 4


@dataclass
class _Child:
    """What one process said until it ended."""

    stages: dict[str, StageResult] = field(default_factory=dict[str, StageResult])
    waiting: dict[str, StageResult] = field(default_factory=dict[str, StageResult])  # the results of those not begun
    header: Report | None = None
    running: str = ""
    title: str = ""
    case: str = ""
    dtype: str = ""
    failed: dict[str, list[str]] | None = None
    told: Finding | None = None  # of the stage that runs, before it is explained
    last: str = ""  # kind of the last message
    ended: str = ""  # "end", "error", "lost" (the GPU), "hung", "memory" or how it died
    error: tuple[str, int] = ("", 2)
    log: str = ""


@dataclass(frozen=True)
class VerifyCommand:
    """What to verify, as the options of the command line; all strings.

    Attributes:
        always: target, level, seed and device: what a repro line repeats.
        chosen: --only, --dtype, --case and --baseline, if given.
        skip: stages to leave out.
        share: (i, n): every n-th dtype from number i on.
    """

    always: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class ProcessLimits:
    """Of a process: seconds that a case may take, bytes that it may hold (0: any), seconds for all processes."""

    timeout: float
    memory: int
    budget: float | None = None


def process_limits(timeout: float = 300.0, memory: float | None = None, budget: float | None = None) -> ProcessLimits:
    """Limits from seconds and gigabytes; memory None is most of what is free.

    Raises:
        UsageError: one is not positive.
    """
    for name, value in (("timeout", timeout), ("memory", memory), ("budget", budget)):
        if value is not None and value <= 0:
            raise UsageError(f"`--{name}` is {value:g}, expected a number above 0")
    held = int(memory * 1e9) if memory is not None else int(_SHARE * subprocesses.available())
    return ProcessLimits(timeout, held, budget)


def verify_isolated(
    command: VerifyCommand,
    limits: ProcessLimits,
    progress: Progress | None = None,
    jobs: int = 1,
    stopping: threading.Event | None = None,
) -> Report:
    """What `retrograd verify` finds; `progress` is called with a stage id and a line of text as stages start and end.

    With `jobs` that many processes share the dtypes. Ctrl-C sets `stopping`, and the report is of what was run, as it
    is at the end of a budget.

    Raises:
        UsageError: `jobs` is not positive.
        UndecidedError: the budget ended before there was anything to report.
        RetrogradError: the command refused its arguments, or the process ended before the first stage; with the
            message and the exit code.
        KeyboardInterrupt: Ctrl-C before there was anything to report.
    """
    if jobs < 1:
        raise UsageError(f"`--jobs` is {jobs}, expected 1 or more")
    start = time.perf_counter()
    stopping = stopping or threading.Event()
    shares = [replace(command, share=(i, jobs)) for i in range(jobs)]
    with _compiling_ahead(command, limits.memory) as kernels, ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_verify_share, share, limits, progress, stopping, kernels) for share in shares]
        try:
            parts = [share.result() for share in running]
        except KeyboardInterrupt:
            stopping.set()
            parts = [share.result() for share in running]
    return replace(settle(_merged(parts)), seconds=round(time.perf_counter() - start, 3))


@contextlib.contextmanager
def _compiling_ahead(command: VerifyCommand, memory: int) -> Iterator[str | None]:
    """A process that compiles what those that verify will launch, where there are a GPU and cores for it.

    The folder where they find each other; None without such a process. It too is ended where it holds more `memory`.
    """
    on_cpu = ("--device", "cpu") in itertools.pairwise(command.always) or config.interpreting()
    if on_cpu or not Path(_GPU_DRIVER).exists() or cpu_count() < _CORES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="retrograd-kernels-") as folder, ThreadPoolExecutor(1) as pool:
        skip = ["--skip", ",".join(command.skip)] if command.skip else []
        words = [*_PROGRAM, *command.always, *command.chosen, *skip, "--child", json.dumps({"ahead": folder})]
        verified = threading.Event()
        pool.submit(_follow, words, Path(folder) / "events", memory, verified.is_set)
        try:
            yield folder
        finally:
            verified.set()


def _follow(words: list[str], events: Path, memory: int, stop: Callable[[], bool]) -> None:
    """Run a process that tells nothing, until it is not needed or holds too much."""
    events.touch()
    with subprocesses.Child(words) as process:
        process.follow(events, lambda words: False, lambda: math.inf, memory=memory, stop=stop)


def _merged(parts: Sequence[Report]) -> Report:
    """One report of those of several dtypes; a share without a dtype has no stages."""
    verified = [part for part in parts if part.dtypes]
    columns: dict[str, list[StageResult]] = {}
    for part in verified:
        for stage in part.stages:
            columns.setdefault(stage.id, []).append(stage)
    return replace(
        verified[0].with_stages(_joined(results) for results in columns.values()),
        dtypes=tuple(dtype for part in verified for dtype in part.dtypes),
        notes=tuple(dict.fromkeys(note for part in verified for note in part.notes)),
    )


def _joined(results: Sequence[StageResult]) -> StageResult:
    """One result of those of several dtypes: the worst status, everything that was found."""
    worst = next(r for status in ("failed", "undecided", "passed", "skipped") for r in results if r.status == status)
    if len(results) == 1:
        return worst
    texts = dict.fromkeys(r.power_text.removeprefix("relative error ") for r in results if r.power_text)
    text = ", ".join(texts)
    together = ("notes", "findings", "accepted", "compared", "gradients", "uncompared", "sizes", "profiles")
    each = {name: [value for r in results for value in getattr(r, name)] for name in together}
    once = {name: dict.fromkeys(each[name]) for name in ("notes", "compared", "gradients", "uncompared")}
    return replace(
        worst,
        reason="; ".join(dict.fromkeys(r.reason for r in results if r.reason)),
        cases=sum(r.cases for r in results),
        runs=sum(r.runs for r in results),
        seconds=max(r.seconds for r in results),
        power=max((r.power for r in results if r.power is not None), default=None),
        power_text=f"relative error {text}" if any(r.power for r in results) else text,
        **{name: tuple(values) for name, values in (each | once).items()},
    )


def _verify_share(
    command: VerifyCommand, limits: ProcessLimits, progress: Progress | None, stopping: threading.Event,
    kernels: str | None,
) -> Report:  # fmt: skip
    header, in_a_row, notes = None, 0, dict[str, None]()
    done: dict[str, StageResult] = {}
    failed: dict[str, list[str]] = {}
    end = time.monotonic() + (math.inf if limits.budget is None else limits.budget)
    while in_a_row < _ENOUGH and time.monotonic() < end:
        left_out = [*command.skip, *(name for name, stage in done.items() if BUDGET_ENDED not in stage.reason)]
        words = [*command.always, *command.chosen, *(["--skip", ",".join(left_out)] if left_out else [])]
        job = {"failed": failed, "share": command.share, "end": end if limits.budget else None, "kernels": kernels}
        child = _run(words, job, limits, progress, lambda: stopping.is_set() or time.monotonic() > end + _GRACE)
        done = (done or child.waiting) | child.stages
        header, failed = child.header if header is None else header, child.failed or failed
        notes |= dict.fromkeys(() if child.header is None else child.header.notes)
        if child.ended == "end":
            break
        if child.ended == "stopped":
            _stop(child, done, limits, stopping)
            break
        if child.ended == "lost":  # a new process gets a GPU that answers
            in_a_row = 1 if len(child.stages) > 1 else in_a_row + 1
            continue
        if child.ended == "error" or not child.running or header is None:
            raise _refused(child)
        in_a_row = 1 if child.stages else in_a_row + 1
        done[child.running] = _lost(child, command, limits)
        if progress:
            progress(child.running, f"failed ({child.ended})")
    stopped = ("stages that are left were not tried: three in a row ended the process",) if in_a_row == _ENOUGH else ()
    assert header is not None
    return replace(header.with_stages(done.values()), notes=(*notes, *stopped), budget=limits.budget)


def _stop(child: _Child, done: dict[str, StageResult], limits: ProcessLimits, stopping: threading.Event) -> None:
    """Note in the results that the process was ended, by Ctrl-C or at the end of the budget."""
    name = child.running
    if stopping.is_set():
        if child.header is None and not done:
            raise KeyboardInterrupt
        for waiting in [n for n, stage in done.items() if stage == child.waiting.get(n)]:
            del done[waiting]
        reason = "interrupted; it and the stages after it were not run to their end"
        done[name or "interrupted"] = StageResult(name or "interrupted", child.title, "undecided", reason)
    elif child.header is None and not done:
        raise UndecidedError(f"the op was still being imported at the end of the budget of {limits.budget:g} s")
    elif name:
        cut = f"the case {child.dtype} {child.case} had not ended when the budget did"
        done[name] = replace(done[name], notes=(*done[name].notes, cut))
        if child.told is not None and not done[name].findings:
            done[name] = replace(done[name], status="failed", findings=(child.told,), reason="")


def _refused(child: _Child) -> RetrogradError:
    if child.ended == "error":
        error = RetrogradError(child.error[0])
        error.exit_code = child.error[1]  # type: ignore[misc]
        return error
    how = "did not answer" if child.ended == "hung" else f"ended ({child.ended})"
    return RetrogradError(f"the process {how} before the first stage, while the op was imported\n{child.log}".strip())


def _lost(child: _Child, command: VerifyCommand, limits: ProcessLimits) -> StageResult:
    """The result of the stage that the process was in."""
    kind = {"hung": "hang", "memory": "memory"}.get(child.ended, "crash")
    hang = "the op hangs, or needs a longer --timeout"
    if not child.case:  # the op has not run: sizes are chosen and inputs drawn
        hang = "its cases take long to make; give `sizes=` an end, or a longer --timeout"
    message = {
        "hang": f"no answer for {limits.timeout:g} s: {hang}",
        "memory": f"the process came to hold {limits.memory / 1e9:.1f} GB: the op leaks, or needs more --memory",
        "crash": f"the op took the process down ({child.ended})",
    }[kind]
    at = f"{child.dtype} {child.case}".strip()
    again = ["retrograd", "verify", *command.always, "--only", child.running]
    again += ["--dtype", child.dtype] if child.dtype else []
    again += ["--case", child.case] if child.case else []
    again += ["--timeout", f"{limits.timeout:g}"] if kind == "hang" else []
    log = child.log.replace("Fatal Python error: Aborted\n", "") if kind == "hang" else child.log  # it was we who did
    finding = Finding(
        stage=child.running,
        kind=kind,
        what="\n".join(filter(None, [message, log])),
        case=Case(child.dtype),
        where=f"at {at}" if at else "before its first case",
        repro=shlex.join(again),
    )
    return StageResult(child.running, child.title, "failed", findings=(finding,))


def _run(
    arguments: Sequence[str],
    job: dict[str, Any],
    limits: ProcessLimits,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> _Child:
    child = _Child()
    with tempfile.TemporaryDirectory(prefix="retrograd-verify-") as folder:
        events = Path(folder) / "events"
        events.touch()
        command = [*_PROGRAM, *arguments, "--child", json.dumps({"events": str(events)} | job)]
        with subprocesses.Child(command, dump=True) as process:
            child.ended = process.follow(
                events,
                lambda words: _hear(words, child, progress),
                lambda: limits.timeout if child.running else max(limits.timeout, STARTUP),
                memory=limits.memory,
                stop=stop,
            )
        child.log = process.output()
    if child.ended == "end":
        child.ended = child.last
    return child


def _hear(words: list[Any], child: _Child, progress: Progress | None) -> bool:
    """Take a message in; whether it was the last."""
    kind, *rest = words
    if kind == "begin":
        child.header = Report.from_json(rest[0])
        child.waiting = {stage.id: stage for stage in child.header.stages}
    elif kind == "start":
        child.running, child.title = rest
        child.told = None
        child.case = child.dtype = ""
        if progress:
            progress(child.running, "running")
    elif kind == "case":
        child.dtype, child.case = rest
    elif kind == "compiling":
        if progress:
            progress(child.running, f"compiling {rest[0]}" if rest[0] else "running")
    elif kind == "finding":
        child.told = decode(Finding, rest[2])
        if progress:
            progress(*rest[:2])
    elif kind == "stage":
        part = Report.from_json(rest[0])
        (result,) = part.stages
        child.stages[result.id] = result
        # What is only known once something has run, as what the level left out so far.
        child.header = part if child.header is None else replace(child.header, notes=part.notes)
        child.failed = rest[1]
        child.running = ""
        if progress:
            progress(result.id, f"{result.status} ({result.seconds:.2f} s)")
    elif kind == "error":
        child.error = (rest[0], rest[1])
    child.last = kind
    return kind in ("end", "error", "lost")
