"""Paired timing of variants of one training step, fine enough for 1 % on a host that does other work as well.

    base  A  base  C  base  B  base ...

Every step of a variant stands between two steps of the base and is divided by their mean, so what slows the machine for
longer than a step slows all three. Variants come in another order in each round, the same on every rank; the slowest
rank counts. One ratio a round and variant: their median, with a 95 % interval by bootstrap over rounds. Give the base a
second time as a variant: its ratio is 1 but for what the method cannot resolve.

Two ways to run: `free`, as training does, where the host issues the next step while the device works; and `apart`,
where each step starts on an idle device, so that the time in which the host issues it is measured too. Device time is
that between two events on the stream that computes. The collector of garbage runs between rounds only.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], None]
Switch = Callable[[str], None]


def pin(local_rank: int, local_ranks: int) -> list[int]:
    """Give this process its own share of the cores, in all its threads; the share."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // local_ranks)
    mine = cores[local_rank * share : (local_rank + 1) * share] or cores
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread.name), mine)
    return mine


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside; what is alive now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@dataclass
class Rounds:
    """Steps of one way to run.

    Attributes:
        step_ms: by variant, the base included, of each round: from a step's begin to its end.
        ratio: by variant, of each round: to the mean of the base's steps before and after.
        host_ms: as `step_ms`, of what the host needs to issue a step.
        host_more_ms: by variant, of each round: `host_ms` less that of the base's steps before and after.
    """

    step_ms: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, list[float]] = field(default_factory=dict)
    host_ms: dict[str, list[float]] = field(default_factory=dict)
    host_more_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, names: list[str], steps: list[float], hosts: list[float]) -> None:
        """One round: the base at even places, variants between."""
        for i in range(1, len(names) - 1, 2):
            self.ratio.setdefault(names[i], []).append(2 * steps[i] / (steps[i - 1] + steps[i + 1]))
            self.host_more_ms.setdefault(names[i], []).append(hosts[i] - (hosts[i - 1] + hosts[i + 1]) / 2)
            self.step_ms.setdefault(names[i], []).append(steps[i])
            self.host_ms.setdefault(names[i], []).append(hosts[i])

    @property
    def count(self) -> int:
        return max(map(len, self.ratio.values()), default=0)


class Interleaver:
    """Runs rounds until their time is over.

    Args:
        step: one training step.
        switch: makes the variant of this name the one that `step` runs; not timed.
        base: what others are compared with.
        variants: names; `base` among them under a name of its own shows what is resolved.
        device: "cuda" or "cpu".
    """

    def __init__(self, step: Step, switch: Switch, base: str, variants: list[str], device: str) -> None:
        self.step, self.switch, self.base, self.variants, self.device = step, switch, base, variants, device
        self.cuda = device == "cuda"
        self._order = random.Random(0)

    def run(self, seconds: float, apart: bool, at_least: int = 3) -> Rounds:
        """Rounds for this long, by the slowest rank's clock."""
        found, start = Rounds(), time.perf_counter()
        with uncollected():
            while True:
                names = [self.base]
                for name in self._order.sample(self.variants, len(self.variants)):
                    names += [name, self.base]
                steps, hosts = self._round(names, apart)
                passed = time.perf_counter() - start
                told = torch.tensor([*steps, *hosts, passed], dtype=torch.float64, device=self.device)
                dist.all_reduce(told, op=dist.ReduceOp.MAX)
                told = told.tolist()
                found.add(names, told[: len(names)], told[len(names) : -1])
                gc.collect()
                if found.count >= at_least and told[-1] * (1 + 1 / found.count) > seconds:
                    return found

    def _round(self, names: list[str], apart: bool) -> tuple[list[float], list[float]]:
        """Milliseconds of each step and of issuing it, after one that is not counted."""
        self.switch(self.base)
        self.step()
        events, steps, hosts = [], [], []
        for name in names:
            self.switch(name)
            if apart:
                self._wait()
            if self.cuda and not apart:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                events.append((begin, end))
                begin.record()
            start = time.perf_counter()
            self.step()
            hosts.append(1e3 * (time.perf_counter() - start))
            if self.cuda and not apart:
                end.record()
            elif apart:
                self._wait()
            steps.append(1e3 * (time.perf_counter() - start))
        self._wait()
        if events:
            steps = [begin.elapsed_time(end) for begin, end in events]
        return steps, hosts

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def interval(values: list[float], resamples: int = 2000) -> tuple[float, float, float]:
    """Median and the ends of its 95 % interval, by bootstrap."""
    given = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = given[torch.randint(len(values), (resamples, len(values)), generator=generator)]
    medians = drawn.quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return given.quantile(0.5).item(), low, high


def busy_ms(step: Step, steps: int) -> tuple[float, float] | None:
    """Milliseconds a step in which this rank's device runs something, and something else than NCCL's kernels.

    NCCL's kernels wait for other ranks on the device, so the first number counts waiting. None where the profiler
    records no kernels.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    try:
        profiler.start()
    except (AssertionError, RuntimeError) as error:  # a host that lets nobody profile shall not end the run
        print(f"the device's busy time is not known: {error}", file=sys.stderr)
        return None
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    profiler.stop()
    spans = [
        (event.time_range.start, event.time_range.end, "nccl" in event.name.lower())
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    if not spans:
        return None
    both = _covered([span[:2] for span in spans]), _covered([span[:2] for span in spans if not span[2]])
    return both[0] / 1e3 / steps, both[1] / 1e3 / steps


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@contextmanager
def timed_calls(places: list[tuple[Any, str]]) -> Iterator[list[float]]:
    """Seconds spent in these attributes of classes or instances, calls inside calls once; about 0.3 us a call."""
    spent, depth, before = [0.0], [0], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.perf_counter() - start

        call.__wrapped__ = function  # so that who unwraps it finds the original
        return call

    for thing, name in places:
        before.append((thing, name, thing.__dict__.get(name)))
        setattr(thing, name, timed(getattr(thing, name)))
    try:
        yield spent
    finally:
        for thing, name, old in reversed(before):
            if old is None:
                delattr(thing, name)
            else:
                setattr(thing, name, old)
