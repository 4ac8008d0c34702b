"""Difference of two sequences of collectives, in words: two ranks, two steps, two logs. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from retrograd.fsdp.schema import JOINED, Collective, Log

ADVICE = "issue collectives in the same order on every rank (module order, sets, data-dependent branches)"
ORDER = "; both issue the same collectives, in another order"


@dataclass(frozen=True)
class Difference:
    """The first place where two sequences part."""

    index: int  # place in the sequence, from 0
    first: Collective | None  # None where the sequence has ended
    second: Collective | None
    kind: str  # "order" (the same collectives in another order), "missing" (the second lacks some), "extra" or "other"

    def text(self, name: str, other: str) -> str:
        """The sentence, with the names of both sides."""
        if self.first is None or self.second is None:
            does, who, rest = (self.first, name, other) if self.first is not None else (self.second, other, name)
            assert does is not None
            return f"{who} {does.does} ({does.details}) where {rest} does nothing more"
        words = f"{other} {self.second.does} where {name} {self.first.does}"
        if self.first.does == self.second.does:
            roots = (
                ", " + side.rooted if self.first.rooted != self.second.rooted else ""
                for side in (self.second, self.first)
            )
            words += f", but {other}: {self.second.details}{next(roots)}; {name}: {self.first.details}{next(roots)}"
        else:
            words += f" ({self.second.details})"
        return words + ORDER * (self.kind == "order")


def first_difference(first: Sequence[Collective], second: Sequence[Collective]) -> Difference | None:
    """Where two sequences part; None if they are equal."""
    for at, (own, other) in enumerate(zip_longest(first, second)):
        if own is None or other is None or own.identity != other.identity:
            here, there = (Counter(c.identity for c in s[at:]) for s in (first, second))
            lacking, more = here - there, there - here
            kind = "other" if lacking and more else "missing" if lacking else "extra" if more else "order"
            return Difference(at, own, other, kind)
    return None


def rank_difference(
    first: Sequence[Collective], second: Sequence[Collective], rank: int, other: int
) -> tuple[int, Difference] | None:
    """Where what two ranks must have in common parts, and its place in the sequence that has more.

    Common are the collectives of process groups with both; between groups, and of messages, the order is free.
    """
    parted: list[tuple[int, Difference]] = []
    for lane in dict.fromkeys(c.lane for c in (*first, *second) if {rank, other}.issubset(c.ranks)):
        sides = [[(at, c) for at, c in enumerate(s) if c.lane == lane and not c.unordered] for s in (first, second)]
        difference = first_difference(*([c for _, c in side] for side in sides))
        if difference is not None:
            longer = sides[0] if difference.first is not None else sides[1]
            parted.append((longer[difference.index][0], difference))
    return min(parted, key=lambda pair: pair[0], default=None)


@dataclass(frozen=True)
class LogDiff:
    names: tuple[str, str]  # what the logs are called
    steps: int  # how many were compared
    place: str = ""  # the step in which they part, "" if they are equal
    text: str = ""  # what differs, in words
    difference: Difference | None = None  # None if equal or not kept

    @property
    def same(self) -> bool:
        """Whether every compared step is the same."""
        return not self.place

    def words(self) -> str:
        if self.same:
            return f"same order: {self.names[0]} and {self.names[1]}, {self.steps} steps"
        return f"{self.place}: {self.text}"


def diff(one: Log, other: Log, names: tuple[str, str] | None = None) -> LogDiff:
    """Compare two logs step by step: of two ranks their shared groups, of one rank in two runs everything.

    Args:
        one: a log.
        other: another; of the same rank, or of another rank of the same run.
        names: what to call them in sentences; "rank 0" and "rank 1" by default.
    """
    called = names or (f"rank {one.rank}", f"rank {other.rank}")
    across = one.rank != other.rank
    compared, joined = 0, across and any(c.by == JOINED for log in (one, other) for c in log.table)
    first, second = dict(one.parts()), dict(other.parts())
    # Steps that only one log still keeps are left out: both forget the oldest first.
    for place in first if set(first) >= set(second) else second:
        mine, theirs = first.get(place), second.get(place)
        if mine is None or theirs is None:
            continue
        if joined and any(c.by == JOINED for c in (*mine, *theirs)):
            break  # a rank without input has fewer steps from here on
        if across:
            parted = rank_difference(mine, theirs, one.rank, other.rank)
        else:
            difference = first_difference(mine, theirs)
            parted = None if difference is None else (difference.index, difference)
        if parted is not None:
            at, difference = parted
            return LogDiff(called, compared, f"{place}, collective {at}", difference.text(*called), difference)
        compared += place.startswith("step") and "not ended" not in place
    if one.total != other.total and not joined:
        text = f"{called[0]} made {one.total} steps, {called[1]} {other.total}"
        return LogDiff(called, compared, f"step {min(one.total, other.total)}", text)
    return LogDiff(called, compared)
