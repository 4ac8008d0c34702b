"""Runner of benchmarks: each provider is checked, then timed in its turn; one row each, forward and backward."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from retrograd.bench import registry
from retrograd.bench.accuracy import judge
from retrograd.bench.benchmark import Benchmark, Data, Implementation, Problem, Tensors, UnavailableError
from retrograd.bench.cpu import CpuTimer, threads
from retrograd.bench.rows import DIRECTIONS, OVER, Row, device_of, in_words, rate
from retrograd.bench.selection import Selection
from retrograd.bench.timing import CudaTimer, Results, Timing, first_line, host_us
from retrograd.env.facts import busy_cpus, cpu_count, package_version
from retrograd.errors import UsageError

# What one provider may take at one shape, all rounds together, where there are several.
_ROUNDS_SECONDS = 20.0
# Of all CPUs, by other processes: from here on it is said before anything starts.
_BUSY = 0.25


Timer = CudaTimer | CpuTimer
# What is timed, and on which data; or None and a row that says why nothing is.
Work = tuple[Implementation, Problem]
Prepared = tuple[Row, Work | None]


def make_timer(device: str, timing: str = "graph") -> Timer:
    """The timer for a device; `timing` as the option has it. UsageError if there is no such device."""
    if device == "cpu":
        return CpuTimer()
    if not torch.cuda.is_available():
        raise UsageError(
            "retrograd bench measures a CUDA device and torch sees none here; for times on the CPU add --device cpu; "
            "to show results from elsewhere, run: retrograd bench --load FILE [--plot FILE]"
        )
    return CudaTimer(timing)


def results_name(selection: Selection, timer: Timer) -> str:
    """What a file of results is called without more: groups of ops, what was special, device."""
    special = "-host" if selection.host else f"-{selection.timing}" * (selection.timing != "graph")
    device = device_of(timer.facts()).split(" (")[0]
    return f"{'-'.join(selection.groups())}{special}-{device.lower().replace(' ', '-')}"


def run(
    selection: Selection, timer: Timer, tell: Callable[[str], None], keep: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Measure everything that is selected: rows by op, shape, dtype and provider, each given to `keep` when complete.

    `tell` hears one line of progress at a time. A provider that is missing is told once and has no row; one that is
    wrong, fails or comes after `max_seconds` says so in `skipped`.
    """
    rows: list[Row] = []
    busy = busy_cpus()
    if selection.device == "cpu" and busy is not None and busy > _BUSY * cpu_count():
        tell(f"other processes load {cpu_count()} CPUs by {busy:.1f}: times will be long and spreads wide")
    with threads(selection.threads):
        for benchmarks in selection.groups().values():
            rows += _Run(selection, benchmarks, timer, tell).rows(keep)
    return rows


def machine(timer: Timer, packages: Mapping[str, str]) -> dict[str, str]:
    """Name of the device and versions of everything that is compared; `packages` by the names to show."""
    facts = timer.facts()
    facts |= {name: version for name, package in packages.items() if (version := package_version(package))}
    return {**facts, "torch": str(torch.__version__)}


class _Run:
    """The jobs of a group of ops, one by one or in cases whose providers take turns."""

    def __init__(
        self, selection: Selection, benchmarks: Sequence[Benchmark], timer: Timer, tell: Callable[[str], None]
    ) -> None:
        self.host, self.timer = selection.host, timer
        self._tell = tell
        self._jobs = selection.jobs(benchmarks)
        self._providers = selection.providers_of(benchmarks)
        self._machine = machine(timer, benchmarks[0].packages)
        self._rounds = 1 if selection.host else selection.rounds or timer.rounds
        self._max_seconds = selection.max_seconds
        self._began = time.monotonic()
        self._missing: set[tuple[str, str]] = set()
        self._problem: tuple[tuple[str, ...], Problem] | None = None  # of the latest case

    def rows(self, keep: Callable[[Row], None]) -> list[Row]:
        """Complete rows in order. With one round a provider has the device to itself, else all of a case take turns."""
        cases = list(dict.fromkeys(job.case for job in self._jobs))
        if self._rounds == 1 and not self.timer.keeps_data:
            groups = [[job] for job in self._jobs]
        else:
            groups = [[job for job in self._jobs if job.case == case] for case in cases]
        done: list[Row] = []
        with self.timer.scope():
            speed = None if self.host else self.timer.copy_gb_per_s()
            for row in itertools.chain.from_iterable(self._group(group, speed) for group in groups):
                keep(row)
                self._tell(_progress(row))
                done.append(row)
        return sorted(done, key=lambda row: (cases.index(row.case), self._providers.index(row.provider)))

    def _group(self, jobs: Sequence[Row], copy_gb_per_s: float | None) -> Iterator[Row]:
        if any("compile" in job.provider for job in jobs):
            torch.compiler.reset()
        shared: list[Callable[[], Data]] = []
        turns: list[_Turn] = []
        for job in jobs:
            if (job.provider, job.op) in self._missing:
                continue
            row = replace(job, machine=self._machine, copy_gb_per_s=copy_gb_per_s)
            if time.monotonic() - self._began > self._max_seconds:
                yield replace(row, skipped=OVER)
                continue
            try:
                turns.append(_Turn(row, self, shared))
            except UnavailableError as error:
                self._missing.add((row.provider, row.op))
                self._tell(f"left out: {error}")
        for i in range(self._rounds + self.timer.discarded * (not self.host)):
            for turn in turns[::-1] if i % 2 else turns:  # nobody always comes after the same neighbour
                turn.take()
        for turn in turns:
            yield turn.result(self._rounds)

    def prepared(self, row: Row) -> Prepared:
        """The row with its work, or with the reason why there is none."""
        provider = registry.find(row.op, row.provider)
        if provider is None:
            raise UnavailableError(f"{row.provider} has no {row.op}")
        implementation = registry.make(row.op, provider, row.shape, row.dtype)
        if provider.compiled:
            implementation = replace(implementation, call=torch.compile(implementation.call, dynamic=False))
        problem = self._problem_of(row)
        implementation = replace(implementation, backward=implementation.backward and bool(problem.leaves))
        inputs, grads = next(problem.data())
        wrong, coarse = judge(implementation, problem, inputs, grads)
        if wrong:
            return replace(row, skipped=f"wrong: {wrong}"), None
        fwd, bwd = problem.bytes_moved
        row = replace(row, fwd_bytes=fwd, bwd_bytes=bwd, note=f"coarse: {coarse}" if coarse else "")
        if "fwd_extra_bytes" in registry.kind_of(row.op).fields:
            fwd_extra, bwd_extra = _extra_bytes(implementation, problem, inputs, grads, self.timer)
            row = replace(row, fwd_extra_bytes=fwd_extra, bwd_extra_bytes=bwd_extra)
        return row, (implementation, problem)

    def _problem_of(self, row: Row) -> Problem:
        """Kept while the case is the same: it may hold a truth that took longer than all that is timed."""
        if self._problem is None or self._problem[0] != row.case:
            self._problem = None  # frees the older one first
            benchmark = registry.BENCHMARKS[row.op]
            self._problem = row.case, benchmark.problem(row.shape, row.dtype, row.beside, self.timer.device)
        return self._problem[1]


class _Turn:
    """One provider of a case: checked when made, then timed as often as it is its turn."""

    def __init__(self, row: Row, run: _Run, shared: list[Callable[[], Data]]) -> None:
        self._host, self._timer, self._shared, self._row = run.host, run.timer, shared, row
        self._timed: list[Row] = []
        self._seconds = 0.0
        self._row, self._work = self._guarded(lambda: run.prepared(row))

    def take(self) -> None:
        """Measure once more, unless there is nothing to measure or it has taken too long already."""
        if self._work is None or (self._timed and self._seconds > _ROUNDS_SECONDS):
            return
        implementation, problem = self._work
        if self._timer.keeps_data:
            self._shared[:] = self._shared or [_kept(problem.data)]
            problem = replace(problem, data=self._shared[0])
        began = time.monotonic()
        measure = hosted if self._host else timed
        row, self._work = self._guarded(lambda: (measure(self._row, implementation, problem, self._timer), self._work))
        self._seconds += time.monotonic() - began
        self._timed.append(row)

    def result(self, rounds: int) -> Row:
        """The row with its times: of one round as they are, of several medians."""
        if not self._timed:
            return self._row
        last = self._timed[-1]
        kept = self._timed[self._timer.discarded :] or [last]
        if last.skipped or rounds == 1 or self._host:
            return last
        # What went wrong in one round only must not be lost.
        merged: dict[str, Any] = {"note": "; ".join(dict.fromkeys(row.note for row in kept if row.note))}
        for direction in DIRECTIONS:
            times = tuple(ms for row in kept if (ms := row.ms(direction)) is not None)
            merged |= {f"{direction}_rounds": times, f"{direction}_ms": statistics.median(times) if times else None}
        return replace(last, **merged)

    def _guarded(self, measure: Callable[[], Prepared]) -> Prepared:
        """What `measure` returns, or the row with the error it raised; afterwards no memory of a GPU is kept."""
        try:
            return measure()
        except UnavailableError:
            raise
        except Exception as error:
            return replace(self._row, skipped=first_line(error)), None
        finally:
            if self._timer.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def _kept(data: Callable[[], Data]) -> Callable[[], Data]:
    """`data` whose sets are made once, as many as anybody asks for."""
    (beginning,) = itertools.tee(data(), 1)
    return lambda: copy.copy(beginning)


def hosted(row: Row, implementation: Implementation, problem: Problem, _: Timer) -> Row:
    """The row with the host's time of one forward, and backward if there is one, with nothing in between."""
    inputs, grads = next(problem.data())
    leaves, grad_outs = [inputs[name] for name in problem.leaves], list(grads.values())

    def both() -> object:
        return torch.autograd.grad(implementation.call(inputs), leaves, grad_outs)

    return replace(row, host_us=host_us(both if implementation.backward else lambda: implementation.call(inputs)))


def timed(row: Row, implementation: Implementation, problem: Problem, timer: Timer) -> Row:
    """The row with the times of forward and backward."""
    fwd_bytes, _ = problem.bytes_moved
    sets, calls = timer.plan(fwd_bytes)
    data = problem.data()
    inputs = [next(data)[0] for _ in range(sets)]
    fwd = timer.time(lambda i: implementation.call(inputs[i]), sets, calls)
    warm = "" if timer.cold(fwd_bytes) else "inputs fit in the cache"
    row = replace(row, fwd_ms=fwd.ms, fwd_how=fwd.how, note=" ".join(filter(None, (row.note, fwd.note, warm))))
    if not implementation.backward:
        return replace(row, note=f"{row.note} no backward".strip())
    try:
        # Forward sets are at least as many as backward sets: a backward touches more.
        bwd = _backward(implementation, problem, timer, inputs)
    except Exception as error:
        return replace(row, note=f"{row.note} backward: {first_line(error)}".strip())
    return replace(row, bwd_ms=bwd.ms, bwd_how=bwd.how, note=f"{row.note} {bwd.note}".strip())


def _backward(implementation: Implementation, problem: Problem, timer: Timer, inputs: list[Tensors]) -> Timing:
    """Time of torch.autograd.grad for all leaves; the forward has run before, on the same stream."""
    sets, calls = timer.plan(problem.bytes_moved[1])
    del inputs[sets:]
    data = problem.data()
    leaves = [[t[name] for name in problem.leaves] for t in inputs]
    graphs = [(implementation.call(t), list(next(data)[1].values())) for t in inputs]

    def call(i: int) -> Sequence[torch.Tensor | None]:
        results, grads = graphs[i]
        # Replays read what the forward saved, so it must stay.
        return torch.autograd.grad(results, leaves[i], grads, retain_graph=True)

    return timer.time(call, sets, calls)


def _extra_bytes(
    implementation: Implementation, problem: Problem, inputs: Tensors, grads: Tensors, timer: Timer
) -> tuple[int | None, int | None]:
    """Memory of a forward and of its backward."""
    results: list[torch.Tensor] = []

    def forward() -> Results:
        results.extend(implementation.call(inputs))
        return results

    def backward() -> Results:
        return torch.autograd.grad(results, [inputs[name] for name in problem.leaves], list(grads.values()))

    return timer.extra_bytes(forward), timer.extra_bytes(backward)


def _progress(row: Row) -> str:
    parts = [" ".join(filter(None, (*row.case, row.provider))) + ":"]
    parts += [row.skipped] * bool(row.skipped)
    for direction in DIRECTIONS:
        ms, speed = row.ms(direction), row.gb_per_s(direction)
        parts += [f"{direction} {in_words(ms)}"] if ms is not None else []
        parts += [f"{rate(speed)} GB/s"] if speed else []
    parts += [f"{row.host_us:.1f} us host"] if row.host_us is not None else []
    parts += [f"({row.note})"] * bool(row.note)
    return " ".join(parts)
