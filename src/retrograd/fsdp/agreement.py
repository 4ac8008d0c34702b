"""Ranks ask each other whether they are about to do the same, past the collectives that would hang if they are not."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from retrograd.compat.c10d_collectives import rank_store, unrecorded
from retrograd.core.rank_store import RankStore
from retrograd.errors import RanksDifferError
from retrograd.fsdp.bucket_plan import digest

# Groups are made once and kept: a second one of the same ranks, made after the first was destroyed, finds the first
# one's entries in the store and hangs (gloo, PyTorch 2.13).
_groups: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def _group(ranks: list[int], seconds: float) -> Any:
    world = dist.group.WORLD
    key = (id(world), seconds, *ranks)
    if key not in _groups:
        for old in [old for old, (of, _) in _groups.items() if of is not world]:
            del _groups[old]
        group = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=seconds),
            backend="gloo",
            use_local_synchronization=True,
            group_desc="retrograd_buckets",
        )
        _groups[key] = (world, group)
    return _groups[key][1]


class Agreement:
    """A group of its own, on the CPU: 8 bytes a rank and question (gloo: 0.5 ms for 2 ranks, 4 ms for 4).

    Made by all of `ranks` at once, as any process group; they wait for each other for so many seconds.
    """

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        self.ranks, self.seconds = list(ranks), seconds
        self._group: Any = _group(self.ranks, seconds) if len(self.ranks) > 1 else None
        # Through the store, which answers after a rank has died: how far each has come, one entry a rank.
        self._progress: RankStore | None = rank_store(f"buckets of {self.ranks}")
        self._asked = 0

    def require(
        self, due: str, content: Any, describe: Callable[[], str], explain: Callable[[str, str], str] | None = None
    ) -> None:
        """Go on only if all ranks come here, where `due` is about to happen, with content of an equal hash.

        Else every rank that came raises RanksDifferError, with what `describe` says of the contents, or `explain` makes
        of the descriptions of two ranks.
        """
        if self._group is None:
            return
        ours = torch.tensor([int(digest([due, content]), 16) >> 1], dtype=torch.int64, device="cpu")
        theirs = [torch.empty_like(ours) for _ in self.ranks]
        with self._coming(due):
            dist.all_gather(theirs, ours, group=self._group)
        numbers = [int(number) for number in theirs]
        first = next((i for i, number in enumerate(numbers) if number != numbers[0]), None)
        if first is None:
            return
        answers: list[Any] = [None] * len(numbers)
        with self._coming(due):
            dist.all_gather_object(answers, (due, describe()), group=self._group)
        (reference_due, reference), (other_due, other) = answers[0], answers[first]
        if explain is not None and reference_due == other_due == due:
            difference = explain(reference, other)
        else:
            difference = f"rank {self.ranks[0]} has {reference_due}: {reference}; rank {self.ranks[first]} has "
            difference += f"{other_due}: {other}"
        raise RanksDifferError(
            f"ranks {self.ranks[0]} and {self.ranks[first]} differ before a collective that would mix up their "
            f"gradients or hang: {difference}"
        )

    @contextmanager
    def _coming(self, due: str) -> Generator[None]:
        """Around a collective of ours: the others can see that this rank came to it, and where it fails who did not."""
        self._asked += 1
        try:
            if self._progress is not None:
                self._progress.post("at", json.dumps([self._asked, due]))
            with unrecorded():
                yield
        except RuntimeError as error:
            raise RanksDifferError(
                f"rank {dist.get_rank()} is at {due} and waited for the other ranks, {self.seconds:g} s at most: "
                f"{self._absent()} ({str(error).splitlines()[0]})"
            ) from error

    def _absent(self) -> str:
        """Who did not come to the question that failed, and what each was asked before it."""
        words = []
        try:
            for rank in self.ranks:
                posted = self._progress.look("at", rank) if self._progress is not None else None
                asked, due = json.loads(posted) if posted is not None else (0, "")
                if asked < self._asked:
                    last = f"the last that it came to was {due}" if due else "it came to nothing yet"
                    words.append(f"rank {rank} did not come, {last}: it died, hangs, or does something else")
        except RuntimeError:  # the store ended with the rank that held it
            return "the store of the job does not answer: the process that held it has ended"
        return "; ".join(words) or "all came, and a connection broke"
