"""Examination of tests: make the planned runs, look closer where they differ, and say what was found."""

from __future__ import annotations

import os
import platform
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count

from retrograd.env import versions
from retrograd.errors import UsageError
from retrograd.flake import binomial, classify, messages, processes, rates, reasons
from retrograd.flake.plan import Batch, FlakeOptions, FlakeTarget, Trial, parse
from retrograd.flake.schema import Flake, FlakeReport, Run

Progress = Callable[[str, str], None]

# Processes in which a seed is looked at alone, and its runs in each: a coin would show the same row of five in three
# processes once in a thousand.
_ALONE, _TIMES = 3, 5
# Orders are halved until one test is left, or this many have been tried.
_HALVINGS = 12


class Examination:
    """One target: its runs so far, and what its processes said beside them."""

    def __init__(self, target: FlakeTarget, settings: FlakeOptions, tell: Progress, stopping: threading.Event) -> None:
        self.target, self.settings, self._tell, self._stopping = target, settings, tell, stopping
        self.runs: list[Run] = []
        self.items: list[str] = []
        self.notes: list[str] = []
        self.torch = False
        self._unrecorded = self._left = 0
        self._processes = count()

    def go(self, batches: Sequence[Batch]) -> list[Run]:
        """Execute batches, `jobs` at a time; their runs, which are kept too, in the order of the batches.

        Raises:
            UsageError: a batch cannot be run at all: no such test, a file that cannot be imported.
            KeyboardInterrupt: Ctrl-C, after what was run until then has been kept.
        """
        numbers = [next(self._processes) for _ in batches]
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            running = [pool.submit(self._execute, *each) for each in zip(batches, numbers, strict=True)]
            try:
                outcomes = [each.result() for each in running]
            except BaseException as error:
                self._stopping.set()  # Ctrl-C comes to this thread only; the others must end their processes
                if not isinstance(error, KeyboardInterrupt):
                    raise
                outcomes = [each.result() for each in running]
        runs: list[Run] = []
        for outcome in outcomes:
            if outcome.problem:
                raise UsageError(f"cannot run {self.target.name!r}: {outcome.problem}")
            runs += outcome.runs
            self.items = self.items or outcome.items
            self.torch |= outcome.torch
            self._unrecorded += outcome.unrecorded
            self._left += outcome.left
        self.runs += runs
        if self._stopping.is_set():
            raise KeyboardInterrupt
        return runs

    def _execute(self, batch: Batch, number: int) -> processes.BatchResult:
        where = f" with {batch.setting.name}" if batch.setting.name else ""
        self._tell(self.target.name, f"{batch.stage}: process {number + 1}, {len(batch.trials)} runs{where}")
        return processes.execute(batch, self.settings.timeout, self.settings.pytest_args, number, self._stopping)

    def first(self) -> list[str]:
        """The first process, which says what the argument stands for; returns the other tests that it stands for."""
        self.go(self.settings.main(self.target)[:1])
        if self.target.item or not self.target.is_test:
            return []
        self.target = FlakeTarget(self.target.argument, self.items[0])
        return self.items[1:]

    def rest(self) -> None:
        """The other planned runs, and the closer looks."""
        batches = self.settings.main(self.target)[1:]
        if self._left:
            # Minutes for each more run, if it hangs, and nothing new.
            self._left += sum(len(batch.trials) for batch in batches)
        else:
            self.go(batches)
        main = classify.main_runs(self.runs, classify.focus(self.runs))
        if main and not all(run.failed for run in classify.counted(self.runs)):
            self._closer(main)
            self._fill(main)
        if main and not self._left:
            self._orders(main)
        if self._left:
            self.notes.append(f"{self._left} runs were given up, since three in a row ended their process or hung")
        if self._unrecorded:
            self.notes.append(f"{self._unrecorded} comparisons could not be measured")

    def _batch(self, stage: str, trials: Iterable[Trial], hash_seed: int = 1) -> Batch:
        looked_at = classify.focus(self.runs)
        settings = self.settings.settings()
        setting = next((s for s in settings if s.name == looked_at), settings[0])
        return Batch(self.target, tuple(trials), stage, setting, hash_seed)

    def _closer(self, main: list[Run]) -> None:
        """A seed that wavers, or else one that fails, alone in processes of its own."""
        candidates = [
            *classify.mixed(main, "failed"),
            *classify.mixed(main, "bits"),
            *(run.seed for run in main if run.failed),
        ]
        if not candidates:
            return
        seed = candidates[0]
        # Where a run costs its process, or all the time there is, one in each has to do.
        lost = any(run.outcome in ("crashed", "hung") for run in main if run.seed == seed)
        self.go([self._batch("alone", [Trial(seed)] * (1 if lost else _TIMES), i + 1) for i in range(_ALONE)])
        pattern = classify.pattern(self.runs)
        if pattern == "process":
            self.go([self._batch("hash", [Trial(seed)], i + 1) for i in range(_ALONE)])
        elif pattern == "steady":
            self._replay(main, seed)
        elif pattern == "runs" and self.torch:
            self.go([self._batch("control", [Trial(seed, fill="control")] * _TIMES)])

    def _replay(self, main: list[Run], seed: int) -> None:
        """The runs that went before one that differs from the seed alone, made again, twice."""
        alone = next(run for run in self.runs if run.stage == "alone")
        odd = next((run for run in main if run.seed == seed and run.failed != alone.failed), None)
        if odd is None or odd.place == 0:
            return
        earlier = sorted((r for r in main if r.process == odd.process and r.place <= odd.place), key=lambda r: r.place)
        trials = [Trial(run.seed) for run in earlier]
        kept = list(self.runs)
        replayed = self.go([self._batch("replay", trials, odd.hash_seed or 1) for _ in range(2)])
        # Only what became of the seed says something.
        self.runs = kept + [run for run in replayed if run.place == odd.place]

    def _fill(self, main: list[Run]) -> None:
        """A seed that passes, with fresh memory filled with NaN, and without for comparison."""
        bad = {run.seed for run in main if run.failed}
        seed = next((run.seed for run in main if run.seed not in bad), None)
        if seed is not None and self.torch:
            # The control first: memory that was filled once may come again.
            trials = [Trial(seed, fill=fill) for fill in ("control", "control", "nan", "nan")]
            filled = self.go([self._batch("fill", trials)])
            if any(run.failed for run in filled if run.fill == "control"):
                self.notes.append(
                    "uninitialised memory was not looked for: the test fails in torch's deterministic mode"
                )

    def _orders(self, main: list[Run]) -> None:
        """Other tests of the file before this one: in the order of the file, then shuffled."""
        if not self.settings.orders or not self.target.is_test:
            return
        file = self.target.argument.partition("::")[0]
        whole = Examination(FlakeTarget(file), self.settings, self._tell, self._stopping)
        others = [name for name in whole.collected() if name != self.target.item]
        if not others:
            self.notes.append("order: there is no other test in the file")
            return
        seed = next((run.seed for run in main if not run.failed), main[0].seed)
        expected = {run.failed for run in main if run.seed == seed}
        for number in range(self.settings.orders):
            before = list(others)
            if number:
                random.Random(number).shuffle(before)
            ordered = self.go([self._batch("order", [Trial(seed, tuple(before))])])
            if len(expected) == 1 and ordered[0].failed not in expected:
                self._halve(seed, before, ordered[0].failed)
                return

    def collected(self) -> list[str]:
        """The node ids of everything that the argument stands for; nothing is run."""
        self.go([Batch(self.target, ())])
        return self.items

    def _halve(self, seed: int, before: list[str], failed: bool) -> None:
        """Fewest tests that still change the outcome; what is left is run once more, to be sure."""
        for _ in range(_HALVINGS):
            if len(before) < 2:
                break
            middle = len(before) // 2
            for half in (before[:middle], before[middle:]):
                if self.go([self._batch("order", [Trial(seed, tuple(half))])])[0].failed == failed:
                    before = half
                    break
            else:
                break
        self.go([self._batch("order", [Trial(seed, tuple(before))])])


def run(
    *targets: str,
    seeds: int = 30,
    first: int = 0,
    repeats: int = 2,
    threads: Sequence[int] = (),
    env: Mapping[str, Sequence[str]] | None = None,
    orders: int = 0,
    timeout: float = 300.0,
    jobs: int = 1,
    fresh: bool = False,
    pytest_args: Sequence[str] = (),
    progress: Progress | None = None,
    command: str = "",
    stopping: threading.Event | None = None,
) -> FlakeReport:
    """Run tests again and again in processes of their own, and say whether, how often, when and why they fail.

    Args:
        targets: node ids of pytest (a file or a class stands for its tests), or callables "module:function",
            "file.py:function": they fail by raising, returning False, or returning a margin err / tol above 1; one
            with a parameter gets the seed.
        seeds: how many seeds, from `first` on; `random`, NumPy and torch are seeded before each run.
        repeats: fresh processes in which all seeds are run, every other one backwards.
        threads: numbers of threads to compare; env: variables with the values to compare.
        orders: orders of the other tests of the file to run before the test, the file's own first.
        timeout: seconds after which a run is cut off.
        jobs: processes at a time.
        fresh: every run in a process of its own, so that what is drawn on import is seeded by it too.
        pytest_args: more arguments for pytest.
        progress: called with the target and what is being done.
        stopping: is set at Ctrl-C; the report is of what was run until then, with a note.

    Returns:
        A FlakeReport with one Flake a test.

    Raises:
        UsageError: an argument is wrong, a test does not exist or cannot be imported.
        MissingExtraError: pytest or SciPy is not installed.
        KeyboardInterrupt: Ctrl-C, before there was a run to report.
    """
    started = time.perf_counter()
    settings = FlakeOptions(
        seeds, first, repeats, tuple(threads), env or {}, orders, timeout, jobs, fresh, tuple(pytest_args)
    )  # fmt: skip
    if not targets:
        raise UsageError("`targets` is empty, expected a node id of pytest or a callable module:function")
    asked = [parse(target) for target in targets]
    binomial.special_functions()
    if os.name != "posix":
        raise UsageError(f"cannot run {asked[0].name!r}: `retrograd flake` needs processes of POSIX (Linux, macOS)")
    tell: Progress = progress or (lambda target, doing: None)
    stopping = stopping or threading.Event()
    flakes = [flake for target in asked for flake in _examine(target, settings, tell, stopping)]
    return FlakeReport(
        tuple(flakes),
        seconds=time.perf_counter() - started,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        # Versions only: to ask for devices would import torch here, where nothing else needs it.
        environment={"python": platform.python_version(), "platform": platform.platform()} | versions(),
    )


def _examine(target: FlakeTarget, settings: FlakeOptions, tell: Progress, stopping: threading.Event) -> Iterable[Flake]:
    if stopping.is_set():
        return
    examination = Examination(target, settings, tell, stopping)
    others: list[str] = []
    try:
        others = examination.first()
        examination.rest()
    except KeyboardInterrupt:
        if not examination.runs:
            raise
        examination.notes.append("interrupted: the other runs that were planned were not made")
    yield describe(examination.target.name, examination.runs, examination.notes, settings, examination.target)
    for name in others:
        yield from _examine(FlakeTarget(target.argument, name), settings, tell, stopping)


def describe(
    name: str, runs: Sequence[Run], notes: Sequence[str], settings: FlakeOptions, target: FlakeTarget | None = None
) -> Flake:
    """All that the runs of one test say, in one record."""
    main = classify.main_runs(runs)
    remarks = [*notes]
    if not main:
        skipped = next((run.message for run in runs), "nothing ran")
        remarks.insert(0, f"every run was skipped: {skipped}")
        return Flake(name, "undecided", rates.rate(0, 0), notes=tuple(remarks), runs=tuple(runs))
    ignored = classify.no_checks(runs)
    kinds = classify.kinds(runs)
    rate = classify.rate_of(runs, kinds)
    margins = [classify.margin(run, ignored) for run in classify.independent(runs, kinds)]
    known = [m for m in margins if m is not None]
    tail = rates.tail(known) if any(run.margins for run in main) else None
    failed = [run for run in classify.counted(runs) if run.failed and (not run.fill or run in classify.poisoned(runs))]
    everything = classify.counted(run for run in runs if run.stage == "seeds")
    broken = all(run.failed for run in everything) and "order" not in kinds
    kinds = () if broken else kinds
    why = reasons.find(runs, kinds, tail, ignored)
    verdict = "broken" if broken else "flaky" if kinds else "steady"
    shown = failed[0] if failed else None
    return Flake(
        name,
        verdict,
        rate,
        kinds=kinds,
        tail=tail,
        reasons=why,
        shows=rates.shows(rate),
        repro=messages.repro(target, failed, kinds, why) if shown and target else (),
        settings=classify.settings_rates(runs, kinds),
        failing_seeds=tuple(dict.fromkeys(run.seed for run in failed if run.stage == "seeds")),
        message=shown.message if shown else "",
        counting=classify.unit(runs, kinds),
        notes=(*remarks, *messages.notes(runs, settings, target)),
        runs=tuple(runs),
    )
