"""Downstream causes: which of them lies behind another in the flow of values, and which comes first in the program.

A backward pass is made of the forward pass: an operation that changed there changes its gradient, the norms and
updates behind it, and who reads what. All of that stands behind the first change and says nothing new.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from retrograd.graph.diffing.consequences import only_copies
from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.schema import Cause, Kind

_STRUCTURE: frozenset[Kind] = frozenset(
    {
        "instruction_inserted", "instruction_removed", "instruction_replaced", "operand_changed", "duplicate_changed",
    }
)  # fmt: skip
_SIGNATURE: frozenset[Kind] = frozenset({"parameter_added", "parameter_removed"})
_LEAD = _STRUCTURE | _SIGNATURE | {"attribute_changed", "shape_changed", "dtype_changed", "state_changed"}
_OUTPUTS: frozenset[Kind] = frozenset({"output_added", "output_removed"})
_FOLLOW = _STRUCTURE | _OUTPUTS | {"attribute_changed", "shape_changed", "dtype_changed"}
_COMES_OR_GOES = _SIGNATURE | {"instruction_inserted", "instruction_removed", "instruction_replaced"}
_ALIKE = re.compile(r"operand \d+ is (?!parameter)(\S+ \S+) \(\S+\) instead of \1 \(")
_COLLECTIVES: frozenset[Kind] = frozenset({"collective_inserted", "collective_removed"})
MOST = 200  # causes that are looked at: a bit of every node for each


def following(view: View, causes: Sequence[Cause]) -> tuple[set[int], set[int]]:
    """The places of causes that another one is before, in all that they concern; nodes of A behind other parameters."""
    if not any(c.kind in _LEAD for c in causes):
        return set(), set()
    causes = causes[:MOST]
    sides = [nodes_of(half, causes) for half in (view.a, view.b)]
    own = [bits_of(nodes, causes) for nodes in sides]
    before_b = causes_before(view.b, own[1], None, [])
    before_a = causes_before(view.a, own[0], view.a.partner, before_b)
    before_b = causes_before(view.b, own[1], view.b.partner, before_a)
    follows: set[int] = set()
    leading: dict[int, list[int]] = {}
    # What a loop carries follows from what it computes, not the other way round.
    carried = frozenset[Kind]() if view.a.form.computation is view.a.graph.main else _SIGNATURE
    for k, cause in enumerate(causes):
        changed = [i for i in range(len(causes)) if causes[i].kind in _COMES_OR_GOES]
        if _ALIKE.search(cause.what) and any(_stands_before(sides, i, k) for i in changed):
            follows.add(k)  # which of two alike values is read is told where nothing differs before it
        if cause.kind in _COLLECTIVES and any(_within(sides, k, i) for i in range(len(causes)) if i != k):
            follows.add(k)
        if cause.kind not in _FOLLOW or cause.what.startswith("parameter"):
            continue
        own = [common(before, side[k]) for before, side in zip((before_a, before_b), sides, strict=True) if side[k]]
        shared = own[0] & own[-1] if own else 0
        leads = [i for i in range(len(causes)) if i != k and shared >> i & 1 and causes[i].kind not in carried]
        if cause.kind == "attribute_changed":
            leads = [i for i in leads if causes[i].kind in _SIGNATURE or _operation(causes[i]) == _operation(cause)]
        if leads:
            follows.add(k)
            leading[k] = leads
    follows -= _firsts_of_circles(follows, leading, sides)
    signature = sum(1 << k for k, cause in enumerate(causes) if cause.kind in _SIGNATURE)
    return follows, {n for n in view.a.form.called if before_a[n] & signature}


def _firsts_of_circles(follows: set[int], leading: dict[int, list[int]], sides: list[list[list[int]]]) -> set[int]:
    """Causes that are before each other, as where two operations change places: the first of each circle.

    All that stands behind what is told is told by it; of the rest, the first, until nothing is left.
    """
    firsts, rest = set[int](), set(leading) & follows
    while rest:
        behind = {k for k in rest if any(i not in rest for i in leading[k])}
        if not behind:
            behind = {min(rest, key=lambda k: min(side[k][0] for side in sides if side[k]))}
            firsts |= behind
        rest -= behind
    return firsts


def common(masks: Sequence[int], nodes: Sequence[int]) -> int:
    """The bits that the masks of all these nodes have; none if there are no nodes."""
    shared = -1 if nodes else 0
    for n in nodes:
        shared &= masks[n]
    return shared


def _within(sides: list[list[list[int]]], k: int, i: int) -> bool:
    """Are the nodes of one cause part of what another adds or takes away?"""
    return all(set(side[k]) < set(side[i]) or not side[k] for side in sides)


def _stands_before(sides: list[list[list[int]]], i: int, k: int) -> bool:
    """Does one cause begin before another in a graph that has both?"""
    return any(bool(side[i] and side[k]) and min(side[i]) < min(side[k]) for side in sides)


def _operation(cause: Cause) -> str:
    words = cause.what.split(" ")
    return words[2] if words[1:2] == ["x"] else words[0]


def nodes_of(half: Half, causes: Sequence[Cause]) -> list[list[int]]:
    """The nodes of each cause on one side."""
    names = [set(() if cause in half.changed else cause.b if half.added else cause.a) for cause in causes]
    owners: dict[str, list[int]] = defaultdict(list)
    for k, own in enumerate(names):
        for name in own:
            owners[name].append(k)
    endings = {name.rpartition("/")[2] for name in owners} | set(owners)
    nodes = [list(half.changed.get(cause, ())) for cause in causes]
    for n, ins in enumerate(half.form.origins):
        if ins.name in endings and half.form.live[n]:
            for k in owners.get(half.name(n), ()):
                nodes[k].append(n)
    return nodes


def bits_of(nodes: list[list[int]], causes: Sequence[Cause]) -> dict[int, int]:
    bits: dict[int, int] = defaultdict(int)
    for k, own in enumerate(nodes):
        # What a forward saves is no reason of what its backward computes: both have one.
        if causes[k].kind in _LEAD and "saved for backward" not in causes[k].what and not only_copies(causes[k]):
            for n in own:
                bits[n] |= 1 << k
    return bits


def causes_before(half: Half, own: dict[int, int], partner: list[int] | None, other: list[int]) -> list[int]:
    """Of each node a bit for each cause that it depends on; what its partner depends on counts as well."""
    masks: list[int] = []
    for n, operands in enumerate(half.form.operands):
        mask = other[partner[n]] if partner is not None and partner[n] >= 0 else 0
        for o in operands:
            mask |= masks[o] | own.get(o, 0)
        masks.append(mask)
    return masks
