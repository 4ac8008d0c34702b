"""Alignment of two sequences: patience, then Myers' shortest edit script. Pure.

Elements are equal or not, nothing else is known of them. What both sequences have equally often is paired in order,
and of these pairs the longest chain that crosses nowhere is kept (patience; O(n log n)); between them the same again;
where nothing is equally often, the shortest script of insertions and deletions (Myers 1986, O((n + m) d)), up to
`MOST_EDITS` of them, beyond which all that is common is paired in order and the longest chain kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise

MOST_EDITS = 600  # of one stretch without anchors: 180 000 numbers kept, half a second


def align(a: Sequence[Hashable], b: Sequence[Hashable], *, patience: bool = True) -> list[tuple[int, int]]:
    """Pairs (position in a, position in b) of equal elements, ascending on both sides.

    Args:
        a: a sequence.
        b: another.
        patience: Without it the pairs are as many as there can be, within `MOST_EDITS`; with it what is equally often
            on both sides stays together, which people read more easily, and long sequences take less time.
    """
    pairs: list[tuple[int, int]] = []
    stretches = [(0, len(a), 0, len(b))]
    while stretches:
        a0, a1, b0, b1 = stretches.pop()
        while a0 < a1 and b0 < b1 and a[a0] == b[b0]:
            pairs.append((a0, b0))
            a0, b0 = a0 + 1, b0 + 1
        while a0 < a1 and b0 < b1 and a[a1 - 1] == b[b1 - 1]:
            a1, b1 = a1 - 1, b1 - 1
            pairs.append((a1, b1))
        if a0 == a1 or b0 == b1:
            continue
        anchors = _anchors(a, b, (a0, a1, b0, b1)) if patience else []
        if not anchors:
            pairs += _shortest(a, b, (a0, a1, b0, b1))
            continue
        pairs += anchors
        ends = [(a0 - 1, b0 - 1), *anchors, (a1, b1)]
        for (i, j), (k, m) in pairwise(ends):
            if k - i > 1 and m - j > 1:
                stretches.append((i + 1, k, j + 1, m))
    return sorted(pairs)


Stretch = tuple[int, int, int, int]


def _places(x: Sequence[Hashable], start: int, end: int) -> dict[Hashable, list[int]]:
    places: dict[Hashable, list[int]] = defaultdict(list)
    for k in range(start, end):
        places[x[k]].append(k)
    return places


def _anchors(
    a: Sequence[Hashable], b: Sequence[Hashable], stretch: Stretch, equally: bool = True
) -> list[tuple[int, int]]:
    """What both have (equally often), paired in order; of these pairs the longest chain that crosses nowhere."""
    in_a, in_b = _places(a, *stretch[:2]), _places(b, *stretch[2:])
    pairs = [
        pair
        for key, at in in_a.items()
        if key in in_b and (not equally or len(at) == len(in_b[key]))
        for pair in zip(at, in_b[key], strict=False)
    ]
    return chain(sorted(pairs))


def chain(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence, of pairs with ascending first numbers, whose second numbers ascend too."""
    tails: list[int] = []  # smallest last number of a chain of each length
    holders: list[int] = []
    before = [-1] * len(pairs)
    for k, (_, j) in enumerate(pairs):
        length = bisect_left(tails, j)
        if length == len(tails):
            tails.append(j)
            holders.append(k)
        else:
            tails[length], holders[length] = j, k
        before[k] = holders[length - 1] if length else -1
    kept: list[tuple[int, int]] = []
    k = holders[-1] if holders else -1
    while k >= 0:
        kept.append(pairs[k])
        k = before[k]
    return kept[::-1]


def _shortest(a: Sequence[Hashable], b: Sequence[Hashable], stretch: Stretch) -> list[tuple[int, int]]:
    """Myers: `reach[k]` is how far in a the best script of d edits comes on the diagonal k = x - y."""
    a0, a1, b0, b1 = stretch
    n, m = a1 - a0, b1 - b0
    reach = {1: 0}
    history: list[dict[int, int]] = []
    for d in range(min(n + m, MOST_EDITS) + 1):
        history.append(dict(reach))
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and reach.get(k - 1, -1) < reach.get(k + 1, -1))
            x = reach.get(k + 1, 0) if down else reach.get(k - 1, 0) + 1
            y = x - k
            while x < n and y < m and a[a0 + x] == b[b0 + y]:
                x, y = x + 1, y + 1
            reach[k] = x
            if x >= n and y >= m:
                return [(a0 + i, b0 + j) for i, j in _walk_back(history, n, m)]
    return _anchors(a, b, stretch, equally=False)


def _walk_back(history: Sequence[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for d in range(len(history) - 1, -1, -1):
        reach, k = history[d], x - y
        down = k == -d or (k != d and reach.get(k - 1, -1) < reach.get(k + 1, -1))
        last = k + 1 if down else k - 1
        from_x = reach[last]
        from_y = from_x - last
        while x > from_x and y > from_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = from_x, from_y
    return pairs[::-1]
