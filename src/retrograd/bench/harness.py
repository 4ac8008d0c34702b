"""What every benchmark does alike: providers in turn, one row each, forward and backward timed. Knows no op."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Generic, TypeVar

import torch

from retrograd.bench.rows import Measured
from retrograd.bench.timing import CudaTimer, FakeTimer, Timer, Timing, first_line, plan_calls
from retrograd.errors import UsageError

Tensors = dict[str, torch.Tensor]
Data = Iterator[tuple[Tensors, Tensors]]
Function = Callable[[Tensors], tuple[torch.Tensor, ...]]
R = TypeVar("R", bound=Measured)

_OVER = "over --max-seconds"


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


@dataclass(frozen=True)
class Plan(Generic[R]):
    """What `run` does.

    Attributes:
        jobs: a row without times for each measurement, in the order in which they run.
        measure: the row with its times, or with the reason why there are none.
        place: what rows are grouped by in the end, in the order in which groups first come in `jobs`.
        line: a row in one line of progress.
        providers: their order within a group.
        max_seconds: start no measurement after this long.
        machine: what `machine` found.
        copy: whether the bandwidth of a device copy goes into each row.
    """

    jobs: Sequence[R]
    measure: Callable[[R], R]
    place: Callable[[R], tuple[Any, ...]]
    line: Callable[[R], str]
    providers: tuple[str, ...]
    max_seconds: float
    machine: dict[str, str]
    copy: bool = True


def make(providers: Mapping[str, Callable[..., Provider]], name: str, *what: object) -> Provider:
    """The op by a provider's name.

    Raises:
        UnavailableError: it is not installed or has no such op.
    """
    try:
        return providers[name](*what)
    except (ImportError, AttributeError, OSError) as error:
        raise UnavailableError(f"{name} cannot be imported or lacks this op: {error}") from None


def make_timer(device: str, timing: str = "graph") -> Timer:
    """The timer for a device; `timing` "eager" puts events around calls and replays no graphs.

    Raises:
        UsageError: there is no such device.
    """
    if device == "cpu":
        return FakeTimer()
    if not torch.cuda.is_available():
        raise UsageError(
            "retrograd bench measures a CUDA device and torch sees none here; "
            "to show results from elsewhere, run: retrograd bench norm --load FILE [--plot FILE], "
            "or retrograd bench msda --load FILE"
        )
    return CudaTimer(graphs=timing == "graph")


def machine(timer: Timer, packages: Mapping[str, str]) -> dict[str, str]:
    """Name of the device and versions of everything that is compared; `packages` by the names to show."""
    facts = {"gpu": torch.cuda.get_device_name() if timer.device == "cuda" else timer.device}
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
    with timer.scope():
        base = {"machine": plan.machine, "copy_gb_per_s": timer.copy_gb_per_s() if plan.copy else None}
        done = list(_rows(plan, base, tell, keep))
    order = {plan.place(row): i for i, row in reversed(list(enumerate(plan.jobs)))}
    return sorted(done, key=lambda row: (order[plan.place(row)], plan.providers.index(row.provider)))


def _rows(
    plan: Plan[R], base: Mapping[str, Any], tell: Callable[[str], None], keep: Callable[[R], None]
) -> Iterator[R]:
    began = time.monotonic()
    gone: set[tuple[str, str]] = set()
    for job in plan.jobs:
        if (job.provider, job.op) in gone:
            continue
        if "compile" in job.provider:
            torch.compiler.reset()
        row = replace(job, **base)
        try:
            over = time.monotonic() - began > plan.max_seconds
            row = replace(row, skipped=_OVER) if over else plan.measure(row)
        except UnavailableError as error:
            gone.add((row.provider, row.op))
            tell(f"left out: {error}")
            continue
        keep(row)
        tell(plan.line(row))
        yield row


def guarded(row: R, device: str, measure: Callable[[], R]) -> R:
    """What `measure` returns, or the row with the error it raised; afterwards no memory is kept."""
    try:
        return measure()
    except Exception as error:
        return replace(row, skipped=first_line(error))
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def timed(row: R, work: Work, timer: Timer) -> R:
    """The row with the times of forward and backward."""
    sets, calls = plan_calls(work.fwd_bytes)
    data = work.data()
    inputs = [next(data)[0] for _ in range(sets)]
    fwd = timer.time(lambda i: work.provider.call(inputs[i]), sets, calls)
    row = replace(row, fwd_ms=fwd.ms, fwd_how=fwd.how, note=f"{row.note} {fwd.note}".strip())
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
    sets, calls = plan_calls(work.bwd_bytes)
    del inputs[sets:]
    data = work.data()
    graphs = [(work.provider.call(t), [t[name] for name in work.leaves], list(next(data)[1].values())) for t in inputs]

    def call(i: int) -> Sequence[torch.Tensor | None]:
        results, leaves, grads = graphs[i]
        # Replays read what the forward saved, so it must stay.
        return torch.autograd.grad(results, leaves, grads, retain_graph=True)

    return timer.time(call, sets, calls)
