"""Detectors of races beside an oracle that compares every pair of accesses of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from retrograd.ttir.races import Cells, Conflict, OrderedRaces, UnorderedRaces

MEMORY = object()
ORDERS = ("relaxed", "acquire", "release", "acq_rel")


@dataclass
class Event:
    """An access of a run: kind "read", "write", "atomic" (with an order) or "fence"."""

    program: int
    kind: str
    cell: int = 0
    order: str = ""
    writes: bool = True  # of an atomic: no load, nor a swap that fails
    looks: bool = True  # whether its result is used


def drawn(
    draws: random.Random,
    programs: int,
    cells: int,
    length: int,
    with_atomics: bool,
    mixed: float = 0.1,
    reading: float = 0.0,
) -> list[Event]:
    """Events; `mixed`: how many of the atomics are at cells of plain accesses; `reading`: do not write, or do not look."""
    events = []
    for _ in range(length):
        kind = draws.choice(["read", "write", "atomic", "atomic", "fence"] if with_atomics else ["read", "write"])
        # The last cells are for atomics, so that most of a run is free of races.
        cell = draws.randrange(cells) if kind != "atomic" or draws.random() < mixed else cells + draws.randrange(2)
        order = draws.choice(ORDERS) if kind == "atomic" else ""
        writes, looks = draws.random() >= reading, draws.random() >= reading
        events.append(Event(draws.randrange(programs), kind, cell, order, writes, looks))
    return events


def oracle(events: list[Event], programs: int) -> set[int]:
    """Cells at which two accesses are in conflict: every pair by the sets of events that each program knows of."""
    knows: list[set[int]] = [set() for _ in range(programs)]
    pending: list[set[int]] = [set() for _ in range(programs)]
    observed: list[set[int]] = [
        set() for _ in range(programs)
    ]  # atomics whose result an atomic of the program has read
    at_fence: list[set[int] | None] = [None] * programs
    released: dict[int, set[int]] = {}
    racy: set[int] = set()
    for number, event in enumerate(events):
        p = event.program
        if event.kind == "fence":
            knows[p] |= pending[p]
            at_fence[p] = set(knows[p])
            continue
        if event.kind == "write":
            released.pop(event.cell, None)
        if event.kind == "atomic":
            told = released.get(event.cell, set()) if event.looks else pending[p]
            if event.order in ("acquire", "acq_rel"):
                knows[p] |= told
            pending[p] |= told
        for earlier, other in enumerate(events[:number]):
            both = {event.kind, other.kind}
            meet = other.program != p and other.kind != "fence" and other.cell == event.cell
            ordered = earlier in knows[p] or (other.kind == "atomic" and earlier in observed[p])
            if meet and both - {"read"} and both != {"atomic"} and not ordered:
                racy.add(event.cell)
            if meet and both == {"atomic"} and event.looks:
                observed[p].add(earlier)
        knows[p].add(number)
        if event.kind == "atomic":
            tells = knows[p] if event.order in ("release", "acq_rel") else at_fence[p]
            if tells is not None and event.writes:
                released[event.cell] = released.get(event.cell, set()) | tells
    return racy


def detected(events: list[Event], programs: int, ordered: bool, cells: int) -> set[int]:
    racy: set[int] = set()

    def note(at: Cells, conflict: Conflict) -> None:
        assert conflict.first[0] != conflict.second[0]
        racy.update(conflict.cells.tolist())

    detector = OrderedRaces(note, programs) if ordered else UnorderedRaces(note, len(events), programs)
    for number, event in enumerate(events):
        cell, who = np.array([event.cell]), np.array([event.program], np.int32)
        if isinstance(detector, OrderedRaces):
            if event.kind == "fence":
                detector.fence(event.program)
                continue
            if event.kind == "write":
                detector.overwrite(MEMORY, cell)
            if event.kind == "atomic":
                detector.synchronise(event.program, MEMORY, cell, event.order, event.writes, event.looks)
        if event.kind != "fence":
            detector.touch(event.kind, Cells(MEMORY, cell, who, number), cells)
    return racy


@pytest.mark.parametrize("seed", range(150))
def test_ordered_races_are_those_of_the_oracle(seed):
    draws = random.Random(seed)
    programs, cells = draws.randrange(2, 5), draws.randrange(1, 4)
    events = drawn(draws, programs, cells, draws.randrange(4, 24), with_atomics=True)
    assert detected(events, programs, True, cells + 2) == oracle(events, programs)


@pytest.mark.parametrize("seed", range(300))
def test_ordered_races_beside_plain_accesses_of_the_same_cells(seed):
    draws = random.Random(1000 + seed)
    programs = draws.randrange(2, 4)
    events = drawn(draws, programs, 1, draws.randrange(3, 9), with_atomics=True, mixed=0.6, reading=0.3)
    assert detected(events, programs, True, 3) == oracle(events, programs)


@pytest.mark.parametrize("seed", range(50))
def test_unordered_races_are_those_of_the_oracle(seed):
    draws = random.Random(seed)
    programs, cells = draws.randrange(2, 5), draws.randrange(2, 8)
    events = drawn(draws, programs, cells, draws.randrange(4, 12), with_atomics=False)
    events += [Event(draws.randrange(programs), "atomic", draws.randrange(cells), "relaxed") for _ in range(3)]
    assert detected(events, programs, False, cells) == oracle(events, programs)


def test_runs_are_of_both_sorts():
    counts = {True: 0, False: 0}
    for seed in range(150):
        draws = random.Random(seed)
        programs, cells = draws.randrange(2, 5), draws.randrange(1, 4)
        counts[bool(oracle(drawn(draws, programs, cells, draws.randrange(4, 24), True), programs))] += 1
    assert min(counts.values()) >= 15, counts


def of_order(*events: Event) -> set[int]:
    """Racy cells by the detector, which are the oracle's."""
    seen = detected(list(events), 3, True, 2)
    assert seen == oracle(list(events), 3)
    return seen


@pytest.mark.parametrize("order", ["acq_rel", "relaxed"])
def test_a_counter_may_be_set_back_plainly_by_who_has_counted_last(order):
    counts = [Event(program, "atomic", 0, order) for program in (0, 1)]
    assert of_order(*counts, Event(1, "write", 0)) == set()
    assert of_order(*counts, Event(0, "write", 0)) == {0}  # the other one counted after it
    assert of_order(*counts, Event(2, "write", 0)) == {0}  # who has not counted knows of nobody


def test_a_swap_that_fails_releases_nothing():
    stored, looked = Event(0, "write", 0), Event(1, "atomic", 1, "acquire")
    for fence in ([], [Event(0, "fence")]):
        order = "relaxed" if fence else "acq_rel"
        assert of_order(stored, *fence, Event(0, "atomic", 1, order, writes=True), looked, Event(1, "read", 0)) == set()
        assert of_order(stored, *fence, Event(0, "atomic", 1, order, writes=False), looked, Event(1, "read", 0)) == {0}


def test_a_count_that_was_released_is_known_to_who_hears_of_it_elsewhere():
    counts = [Event(0, "atomic", 0, "release"), Event(1, "atomic", 0, "acquire"), Event(1, "atomic", 1, "release")]
    assert of_order(*counts, Event(2, "atomic", 1, "acquire"), Event(2, "write", 0)) == set()
    assert of_order(*counts, Event(2, "atomic", 1, "relaxed"), Event(2, "write", 0)) == {0}
    counts[1].order = "relaxed"
    assert of_order(*counts, Event(2, "atomic", 1, "acquire"), Event(2, "write", 0)) == {0}


def test_lanes_of_one_access_are_compared_with_each_other():
    conflicts: list[Conflict] = []
    detector = UnorderedRaces(lambda at, conflict: conflicts.append(conflict), 3, 4)
    detector.touch("write", Cells(MEMORY, np.array([0, 1, 1, 2]), np.array([0, 0, 1, 1], np.int32), 2), 4)
    (conflict,) = conflicts
    assert conflict.cells.tolist() == [1]
    assert {conflict.first, conflict.second} == {(0, 2), (1, 2)}


def test_a_second_reader_is_remembered():
    conflicts: list[Conflict] = []
    detector = UnorderedRaces(lambda at, conflict: conflicts.append(conflict), 3, 4)
    cells, who = np.array([0, 0]), np.array([3, 1], np.int32)
    detector.touch("read", Cells(MEMORY, cells, who, 0), 1)
    detector.touch("write", Cells(MEMORY, cells[:1], who[1:], 1), 1)  # by the one that read last
    assert [conflict.first for conflict in conflicts] == [(3, 0)]
