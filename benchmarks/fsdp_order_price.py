"""What a fixed order of reductions costs: gradients that wait, and time in which the link idles.

    python benchmarks/fsdp_order_price.py

A simulation, with the launcher that training uses. Groups of equal size become ready one a millisecond, in an order
that is disturbed anew in each of 200 steps. Threshold flushing, as DeepSpeed and torch_xla do, reduces whatever has
arrived when it is as large as a bucket; a plan reduces in its own order. Reductions run one after another on a link.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from retrograd.fsdp.bucket_plan import BucketPlan, Group, Launcher

GROUPS, CAP, STEPS = 34, 4, 200
COMPUTE, LATENCY, TRANSFER = 1.0, 0.3, 0.6  # ms: a group's backward; a reduction's start; a group on the link


@dataclass
class Price:
    """Over the steps: the worst of what waits, the mean of times.

    Attributes:
        sequences: different sequences of reductions.
        pending: most groups that waited at once.
        idle: ms in which the link had nothing to do though gradients waited.
        tail: ms between the end of backward and that of the last reduction.
    """

    sequences: int
    pending: int
    idle: float
    tail: float


def plain(draw: random.Random, n: int) -> list[int]:
    return list(range(n))


def swaps(draw: random.Random, n: int) -> list[int]:
    """One in ten neighbours changes places."""
    order = list(range(n))
    for i in range(n - 1):
        if draw.random() < 0.1:
            order[i], order[i + 1] = order[i + 1], order[i]
    return order


def late(draw: random.Random, n: int) -> list[int]:
    """One group, another each step, comes last."""
    order = list(range(n))
    order.append(order.pop(draw.randrange(n)))
    return order


def branches(draw: random.Random, n: int) -> list[int]:
    """Three branches of a model, whose backwards alternate at random."""
    rest = [list(range(i * n // 3, (i + 1) * n // 3)) for i in range(3)]
    order = []
    while any(rest):
        order.append(draw.choice([branch for branch in rest if branch]).pop(0))
    return order


def anything(draw: random.Random, n: int) -> list[int]:
    return draw.sample(range(n), n)


DISTURBANCES: dict[str, Callable[[random.Random, int], list[int]]] = {
    "none": plain,
    "10 % of neighbours swapped": swaps,
    "one late group": late,
    "three branches interleaved": branches,
    "any order": anything,
}


def threshold(order: list[int]) -> tuple[list[tuple[float, list[int]]], int]:
    """(when, what) is reduced, and the most groups that waited."""
    launches, held, peak = [], [], 0
    for turn, group in enumerate(order, 1):
        held.append(group)
        peak = max(peak, len(held) - (len(held) >= CAP) * CAP)
        if len(held) >= CAP:
            launches.append((turn * COMPUTE, held))
            held = []
    return [*launches, *([(len(order) * COMPUTE, held)] if held else [])], peak


def planned(order: list[int]) -> tuple[list[tuple[float, list[int]]], int]:
    """The same, in the order of a plan."""
    plan = BucketPlan.of([Group(str(i), 1, "k") for i in range(len(order))], CAP)
    launcher = Launcher(plan, [g.name for g in plan.groups])
    launches = []
    for turn, group in enumerate(order, 1):
        for index in launcher.arrive(str(group), 1):
            launches.append((turn * COMPUTE, [int(name) for name in plan.buckets[index].groups]))
    return launches, launcher.peak_groups


def link(launches: list[tuple[float, list[int]]], order: list[int]) -> tuple[float, float]:
    """(ms idle while something waited, ms after backward)."""
    ready = {group: turn * COMPUTE for turn, group in enumerate(order, 1)}
    free, idle, sent = 0.0, 0.0, set()
    for when, groups in launches:
        waiting = [ready[group] for group in ready if group not in sent]
        # Idle counts from when a bucket's worth of gradients was there: filling one is not the order's fault.
        filled = sorted(waiting)[: len(groups)][-1]
        idle += max(0.0, when - max(free, filled))
        free = max(free, when) + LATENCY + TRANSFER * len(groups)
        sent |= set(groups)
    return idle, free - len(order) * COMPUTE


def price(policy: Callable[[list[int]], tuple[list[tuple[float, list[int]]], int]], disturb: Callable) -> Price:
    """Run a policy over all steps."""
    draw, seen, pending, idle, tail = random.Random(0), set(), 0, 0.0, 0.0
    for _ in range(STEPS):
        order = disturb(draw, GROUPS)
        launches, peak = policy(order)
        one, other = link(launches, order)
        seen.add(tuple(tuple(groups) for _, groups in launches))
        pending, idle, tail = max(pending, peak), idle + one, tail + other
    return Price(len(seen), pending, idle / STEPS, tail / STEPS)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"{GROUPS} groups, buckets of {CAP}, {STEPS} steps; {COMPUTE} ms a group, {LATENCY} + {TRANSFER} ms a group")
    print()
    print("| order of arrival | policy | different sequences | most groups waiting | link idle, ms | tail, ms |")
    print("|---|---|---|---|---|---|")
    for name, disturb in DISTURBANCES.items():
        for policy in (threshold, planned):
            cost = price(policy, disturb)
            what = f"| {name} | {policy.__name__} | {cost.sequences} | {cost.pending} |"
            print(f"{what} {cost.idle:.1f} | {cost.tail:.1f} |")


if __name__ == "__main__":
    main()
