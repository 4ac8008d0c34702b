"""What every benchmark does alike: providers in turn, one row each, forward and backward timed. Knows no op."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Generic, TypeVar

import torch

from retrograd.bench import registry
from retrograd.bench.cpu import CpuTimer
from retrograd.bench.rows import OVER, WAYS, Measured
from retrograd.bench.timing import CudaTimer, Timer, Timing, first_line, host_us
from retrograd.errors import UsageError

Tensors = dict[str, torch.Tensor]
Data = Iterator[tuple[Tensors, Tensors]]
Function = Callable[[Tensors], tuple[torch.Tensor, ...]]
R = TypeVar("R", bound=Measured)

# What one provider may take at one shape, all rounds together, where there are several.
_ROUNDS_SECONDS = 20.0


class UnavailableError(Exception):
    """A provider has no such op, or is not installed."""


@dataclass(frozen=True)
class Provider:
    """A function from inputs by name to results, and whether it has a backward."""

    call: Function
    backward: bool = True


@dataclass(frozen=True)
class Work:
    """One provider on one kind of data.

    Attributes:
        provider: what is timed.
        leaves: names of the inputs that get gradients.
        data: makes sets of inputs and of gradients of the results by name, without end.
        fwd_bytes: the least that a forward must move; decides how many sets keep the cache cold.
        bwd_bytes: likewise for a backward.
    """

    provider: Provider
    leaves: tuple[str, ...]
    data: Callable[[], Data]
    fwd_bytes: int
    bwd_bytes: int


Prepared = tuple[R, Work | None]


@dataclass(frozen=True)
class Plan(Generic[R]):
    """What `run` does.

    Attributes:
        jobs: a row without times for each measurement, in the order in which they run.
        prepare: makes a row's provider and checks it: the row with what is to be timed, or with None and the reason
            why nothing is.
        line: a row in one line of progress.
        providers: their order within a group.
        max_seconds: start no measurement after this long.
        machine: what `machine` found.
        host: whether the host's time of a call is measured, instead of the device's.
        rounds: how often providers take turns; None: as the timer has it.
    """

    jobs: Sequence[R]
    prepare: Callable[[R], Prepared[R]]
    line: Callable[[R], str]
    providers: tuple[str, ...]
    max_seconds: float
    machine: dict[str, str]
    host: bool = False
    rounds: int | None = None


def make(op: str, name: str, *what: object) -> Provider:
    """The op by a provider's name.

    Raises:
        UnavailableError: it is not installed or has no such op.
    """
    entry = registry.find(op, name)
    if entry is None:
        raise UnavailableError(f"{name} has no {op}")
    try:
        return entry.build(*what)
    except (ImportError, AttributeError, OSError) as error:
        raise UnavailableError(f"{name} cannot be imported or lacks this op: {error}") from None


def compiled_provider(call: Function) -> Provider:
    """`call` in one graph of torch.compile, whose backward can run more than once."""
    import torch._functorch.config as functorch

    # A backward that may overwrite what the forward saved can run once only.
    functorch.donated_buffer = False
    return Provider(torch.compile(call, dynamic=False))


def make_timer(device: str, timing: str = "graph") -> Timer:
    """The timer for a device; `timing` "eager" puts events around calls and replays no graphs.

    Raises:
        UsageError: there is no such device.
    """
    if device == "cpu":
        return CpuTimer()
    if not torch.cuda.is_available():
        raise UsageError(
            "retrograd bench measures a CUDA device and torch sees none here; for times on the CPU add --device cpu; "
            "to show results from elsewhere, run: retrograd bench --load FILE [--plot FILE]"
        )
    return CudaTimer(graphs=timing == "graph")


def machine(timer: Timer, packages: Mapping[str, str]) -> dict[str, str]:
    """Name of the device and versions of everything that is compared; `packages` by the names to show."""
    facts = timer.facts()
    for name, package in packages.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(package)
    facts["torch"] = str(torch.__version__)
    return facts


def check_names(given: Mapping[str, tuple[Sequence[str], Sequence[str] | Mapping[str, Any]]]) -> None:
    """Refuse unknown names: for each option what was given and what there is.

    Raises:
        UsageError: a name is unknown.
    """
    for option, (names, known) in given.items():
        for name in names:
            if name not in known:
                raise UsageError(f"`{option}` has {name!r}, expected some of {', '.join(known)}")


def run(plan: Plan[R], timer: Timer, tell: Callable[[str], None], keep: Callable[[R], None]) -> list[R]:
    """Measure every job; a provider that is missing is said once and has no rows.

    Args:
        plan: what.
        timer: how, and on which device.
        tell: given one line of progress at a time.
        keep: given each row as soon as it is complete.
    """
    rounds = 1 if plan.host else plan.rounds or timer.rounds
    with timer.scope():
        base = {"machine": plan.machine, "copy_gb_per_s": None if plan.host else timer.copy_gb_per_s()}
        done: list[R] = []
        for row in _Run(plan, timer, tell, base).rows(rounds):
            keep(row)
            tell(plan.line(row))
            done.append(row)
    order = {row.place: i for i, row in reversed(list(enumerate(plan.jobs)))}
    return sorted(done, key=lambda row: (order[row.place], plan.providers.index(row.provider)))


class _Run(Generic[R]):
    """The jobs of a plan, one by one or in groups that take turns."""

    def __init__(self, plan: Plan[R], timer: Timer, tell: Callable[[str], None], base: Mapping[str, Any]) -> None:
        self._plan, self._timer, self._tell, self._base = plan, timer, tell, base
        self._began = time.monotonic()
        self._gone: set[tuple[str, str]] = set()

    def rows(self, rounds: int) -> Iterator[R]:
        """Complete rows. With one round a provider has the device to itself; with more all of a place take turns."""
        if rounds == 1 and not self._timer.keeps_data:
            groups = [[job] for job in self._plan.jobs]
        else:
            places = dict.fromkeys(job.place for job in self._plan.jobs)
            groups = [[job for job in self._plan.jobs if job.place == place] for place in places]
        for group in groups:
            yield from self._group(group, rounds)

    def _group(self, jobs: Sequence[R], rounds: int) -> Iterator[R]:
        if any("compile" in job.provider for job in jobs):
            torch.compiler.reset()
        shared: list[Callable[[], Data]] = []
        turns: list[_Turn[R]] = []
        for job in jobs:
            if (job.provider, job.op) in self._gone:
                continue
            row = replace(job, **self._base)
            if time.monotonic() - self._began > self._plan.max_seconds:
                yield replace(row, skipped=OVER)
                continue
            try:
                turn = _Turn(job, row, self._plan, self._timer, shared)
            except UnavailableError as error:
                self._gone.add((row.provider, row.op))
                self._tell(f"left out: {error}")
                continue
            turns.append(turn)
        for _ in range(rounds + self._timer.discarded * (not self._plan.host)):
            for turn in turns:
                turn.take()
            turns.reverse()  # nobody always comes after the same neighbour
        turns.sort(key=lambda turn: jobs.index(turn.job))
        for turn in turns:
            yield turn.result(rounds)


class _Turn(Generic[R]):
    """One provider at one place: checked when made, then timed as often as it is its turn."""

    def __init__(self, job: R, row: R, plan: Plan[R], timer: Timer, shared: list[Callable[[], Data]]) -> None:
        self._plan, self._timer, self._shared = plan, timer, shared
        self.job, self._row, self._work = job, row, None
        self._timed: list[R] = []
        self._seconds = 0.0
        self._row, self._work = self._guarded(lambda: plan.prepare(row))

    def take(self) -> None:
        """Measure once more, unless there is nothing to measure or it has taken too long already."""
        if self._work is None or (self._timed and self._seconds > _ROUNDS_SECONDS):
            return
        work = self._work
        if self._timer.keeps_data:
            self._shared[:] = self._shared or [_kept(work.data)]
            work = replace(work, data=self._shared[0])
        began = time.monotonic()
        measure = hosted if self._plan.host else timed
        row, self._work = self._guarded(lambda: (measure(self._row, work, self._timer), self._work))
        self._seconds += time.monotonic() - began
        self._timed.append(row)

    def result(self, rounds: int) -> R:
        """The row with its times: of one round as they are, of several medians."""
        if not self._timed:
            return self._row
        last = self._timed[-1]
        kept = self._timed[self._timer.discarded :] or [last]
        if last.skipped or rounds == 1 or self._plan.host:
            return last
        # What went wrong in one round only must not be lost.
        found: dict[str, Any] = {"note": "; ".join(dict.fromkeys(row.note for row in kept if row.note))}
        for way in WAYS:
            times = tuple(ms for row in kept if (ms := row.ms(way)) is not None)
            found |= {f"{way}_rounds": times, f"{way}_ms": statistics.median(times) if times else None}
        return replace(last, **found)

    def _guarded(self, measure: Callable[[], Prepared[R]]) -> Prepared[R]:
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
    made: list[tuple[Tensors, Tensors]] = []
    source = data()

    def again() -> Data:
        for i in itertools.count():
            if i == len(made):
                made.append(next(source))
            yield made[i]

    return again


def hosted(row: R, work: Work, timer: Timer) -> R:
    """The row with the host's time of one forward, and backward if there is one, with nothing in between."""
    inputs, grads = next(work.data())
    return replace(row, host_us=host_us(_both(work, inputs, grads)))


def _both(work: Work, inputs: Tensors, grads: Tensors) -> Callable[[], object]:
    if not work.provider.backward:
        return lambda: work.provider.call(inputs)
    leaves, grad_outs = [inputs[name] for name in work.leaves], list(grads.values())
    return lambda: torch.autograd.grad(work.provider.call(inputs), leaves, grad_outs)


def timed(row: R, work: Work, timer: Timer) -> R:
    """The row with the times of forward and backward."""
    sets, calls = timer.plan(work.fwd_bytes)
    data = work.data()
    inputs = [next(data)[0] for _ in range(sets)]
    fwd = timer.time(lambda i: work.provider.call(inputs[i]), sets, calls)
    warm = "" if timer.cold(work.fwd_bytes) else "inputs fit in the cache"
    row = replace(row, fwd_ms=fwd.ms, fwd_how=fwd.how, note=" ".join(filter(None, (row.note, fwd.note, warm))))
    if not work.provider.backward:
        return replace(row, note=f"{row.note} no backward".strip())
    try:
        # Forward sets are at least as many as backward sets: a backward touches more.
        bwd = _backward(work, timer, inputs)
    except Exception as error:
        return replace(row, note=f"{row.note} backward: {first_line(error)}".strip())
    return replace(row, bwd_ms=bwd.ms, bwd_how=bwd.how, note=f"{row.note} {bwd.note}".strip())


def _backward(work: Work, timer: Timer, inputs: list[Tensors]) -> Timing:
    """Time of torch.autograd.grad for all leaves; the forward has run before, on the same stream."""
    sets, calls = timer.plan(work.bwd_bytes)
    del inputs[sets:]
    data = work.data()
    graphs = [(work.provider.call(t), [t[name] for name in work.leaves], list(next(data)[1].values())) for t in inputs]

    def call(i: int) -> Sequence[torch.Tensor | None]:
        results, leaves, grads = graphs[i]
        # Replays read what the forward saved, so it must stay.
        return torch.autograd.grad(results, leaves, grads, retain_graph=True)

    return timer.time(call, sets, calls)
