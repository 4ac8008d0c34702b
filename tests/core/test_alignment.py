"""Which elements of two sequences correspond, against the longest common subsequence by its definition."""

from __future__ import annotations

import itertools
import random

import pytest

from retrograd.core import alignment
from retrograd.core.alignment import align


def _longest(a: list[int], b: list[int]) -> int:
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
    return lengths[-1][-1]


def _pairs_of(seed: int) -> tuple[list[int], list[int]]:
    draw = random.Random(seed)
    return [draw.randrange(4) for _ in range(draw.randrange(14))], [
        draw.randrange(4) for _ in range(draw.randrange(14))
    ]


def test_pairs_are_equal_and_never_cross() -> None:
    for seed in range(500):
        a, b = _pairs_of(seed)
        found = align(a, b)
        assert all(a[i] == b[j] for i, j in found)
        assert all(p < r and q < s for (p, q), (r, s) in itertools.pairwise(found))


def test_without_anchors_the_script_is_the_shortest() -> None:
    for seed in range(500):
        a, b = _pairs_of(seed)
        assert len(alignment._shortest(a, b, (0, len(a), 0, len(b)))) == _longest(a, b)


def test_one_insertion_in_a_long_list_leaves_all_else_paired() -> None:
    a = [k % 97 for k in range(20_000)]
    b = [*a[:7777], 5, *a[7777:]]
    found = align(a, b)
    assert len(found) == len(a)
    assert {j for _, j in found} >= set(range(7770))


def test_lists_with_nothing_in_common() -> None:
    assert align([1, 2, 3], [4, 5]) == []
    assert align([], [1]) == []


def test_far_more_edits_than_are_searched_still_give_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "MOST_EDITS", 3)
    a, b = [1, 1, 2, 2, 2, 3] * 9, [2, 1, 3, 3, 2] * 9
    found = align(a, b)
    assert found
    assert all(a[i] == b[j] for i, j in found)


def test_without_patience_as_many_are_paired_as_can_be() -> None:
    for seed in range(500):
        a, b = _pairs_of(seed)
        assert len(align(a, b, patience=False)) == _longest(a, b)
    # What is once on both sides is an anchor of patience, whatever it costs.
    a, b = [1, 2, 1, 9, 3], [9, 1, 2, 1, 1]
    assert [len(align(a, b, patience=patience)) for patience in (False, True)] == [3, 1]
