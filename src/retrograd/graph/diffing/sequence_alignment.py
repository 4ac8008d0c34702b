"""Which elements of two sequences correspond: common ones in order, found by Myers' algorithm.

E. Myers, "An O(ND) difference algorithm and its variations", Algorithmica 1 (1986). Outputs of two steps differ in a
few places of thousands, where this takes time proportional to the number of differences; difflib is quadratic when
elements repeat, as shapes do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# Differences after which the rest is paired by position: beyond, the two sequences have little in common anyway, and
# the search would take time and memory in the square of it.
_MOST = 400


def common(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Pairs (i, j), both ascending, with a[i] == b[j]: a longest list of them if there are at most 400 differences."""
    start = 0
    while start < len(a) and start < len(b) and a[start] == b[start]:
        start += 1
    end = 0
    while end < len(a) - start and end < len(b) - start and a[-1 - end] == b[-1 - end]:
        end += 1
    inner = _search(a[start : len(a) - end], b[start : len(b) - end])
    head = [(i, i) for i in range(start)]
    tail = [(len(a) - end + k, len(b) - end + k) for k in range(end)]
    return [*head, *[(i + start, j + start) for i, j in inner], *tail]


def _search(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    n, m = len(a), len(b)
    if not n or not m:
        return []
    reach = {1: 0}
    trail: list[dict[int, int]] = []
    for edits in range(min(n + m, _MOST) + 1):
        trail.append(dict(reach))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            y = x - k
            while x < n and y < m and a[x] == b[y]:
                x, y = x + 1, y + 1
            reach[k] = x
            if x >= n and y >= m:
                return _walk_back(trail, n, m)
    return _unique_in_order(a, b)


def _walk_back(trail: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for edits in range(len(trail) - 1, -1, -1):
        reach, k = trail[edits], x - y
        down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
        before = k + 1 if down else k - 1
        old_x = reach[before] if edits else 0
        old_y = old_x - before if edits else 0
        while x > old_x and y > old_y and x > 0 and y > 0:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = (old_x, old_y) if edits else (0, 0)
    return pairs[::-1]


def _unique_in_order(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Elements that occur once in each, the longest ascending run of them: n log n however different the two are."""
    once_a = _once(a)
    once_b = _once(b)
    pairs = sorted((i, once_b[element]) for element, i in once_a.items() if element in once_b)
    return [pairs[k] for k in ascending([j for _, j in pairs])]


def _once(elements: Sequence[Hashable]) -> dict[Hashable, int]:
    places: dict[Hashable, int] = {}
    for place, element in enumerate(elements):
        places[element] = -1 if element in places else place
    return {element: place for element, place in places.items() if place >= 0}


def ascending(numbers: Sequence[int]) -> list[int]:
    """Places of a longest ascending subsequence (patience sorting)."""
    from bisect import bisect_left

    tops: list[int] = []
    top_places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        pile = bisect_left(tops, number)
        before.append(top_places[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(number)
            top_places.append(place)
        else:
            tops[pile], top_places[pile] = number, place
    chain: list[int] = []
    at = top_places[-1] if top_places else -1
    while at >= 0:
        chain.append(at)
        at = before[at]
    return chain[::-1]
