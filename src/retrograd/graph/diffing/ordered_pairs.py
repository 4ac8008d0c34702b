"""Pairs of places in two lists that keep their order as far as can be: outputs of two graphs, what two loops carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from retrograd.core.alignment import align, chain


class OrderedPairs:
    """Pairs so far: `chain` ascends on both sides, `crossing` are those that do not fit into it."""

    def __init__(self, count_a: int, count_b: int) -> None:
        self.chain = [(-1, -1), (count_a, count_b)]
        self.crossing: list[tuple[int, int]] = []
        self.taken: tuple[set[int], set[int]] = (set(), set())

    def all(self) -> list[tuple[int, int]]:
        return sorted(self.chain[1:-1] + self.crossing)

    def gaps(self) -> list[tuple[list[int], list[int]]]:
        """What has no partner between neighbours of the chain."""
        taken_a, taken_b = self.taken
        return [
            (
                [i for i in range(i + 1, next_i) if i not in taken_a],
                [j for j in range(j + 1, next_j) if j not in taken_b],
            )
            for (i, j), (next_i, next_j) in zip(self.chain, self.chain[1:], strict=False)
        ]

    def add(self, pairs: list[tuple[int, int]]) -> None:
        self.chain = sorted(self.chain + pairs)

    def refine(self, view_a: Sequence[object], view_b: Sequence[object]) -> None:
        """GraphPair what is equal in this view, in order, within each gap."""
        new: list[tuple[int, int]] = []
        for left, right in self.gaps():
            if left and right:
                inner = align([view_a[i] for i in left], [view_b[j] for j in right], patience=False)  # type: ignore[arg-type]
                new += [(left[x], right[y]) for x, y in inner]
        self.add(new)

    def in_step(self, view_a: Sequence[object], view_b: Sequence[object]) -> None:
        """GraphPair one by one where a gap has as many on either side, equal in this view."""
        new: list[tuple[int, int]] = []
        for left, right in self.gaps():
            if len(left) == len(right) and [view_a[i] for i in left] == [view_b[j] for j in right]:
                new += list(zip(left, right, strict=True))
        self.add(new)

    def by_name(self, names_a: Sequence[str], names_b: Sequence[str]) -> None:
        """GraphPair what has a name that occurs once on either side."""
        count_a, count_b = Counter(names_a), Counter(names_b)
        place_b = {name: j for j, name in enumerate(names_b)}
        places = {i for i, _ in self.chain} | self.taken[0], {j for _, j in self.chain} | self.taken[1]
        pairs = [
            (i, place_b[name])
            for i, name in enumerate(names_a)
            if name and count_a[name] == 1 == count_b[name] and i not in places[0] and place_b[name] not in places[1]
        ]
        kept = set(chain(sorted([*self.chain, *pairs])))
        self.add([pair for pair in pairs if pair in kept])

    def moved(self, view_a: Sequence[bytes], view_b: Sequence[bytes]) -> None:
        """GraphPair equal values that stand in another order."""
        gaps = self.gaps()
        waiting: dict[bytes, list[int]] = {}
        for j in sorted((j for _, right in gaps for j in right), reverse=True):
            waiting.setdefault(view_b[j], []).append(j)
        for i in sorted(i for left, _ in gaps for i in left):
            if waiting.get(view_a[i]):
                self.crossing.append((i, waiting[view_a[i]].pop()))
        self.taken = {i for i, _ in self.crossing}, {j for _, j in self.crossing}
