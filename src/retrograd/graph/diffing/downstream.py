"""Downstream causes: which of them lies behind another in the flow of values, and which comes first in the program.

A backward pass is made of the forward pass: an operation that changed there changes its gradient, the norms and
updates behind it, and who reads what. All of that stands behind the first change and says nothing new.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from retrograd.graph.diffing.consequences import COMES_OR_GOES, PACKS, only_copies, operations_of
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
_TURNS = PACKS | {"concatenate", "dynamic-slice", "gather", "pad", "reshape", "reverse", "slice", "transpose"}
_TAKES = frozenset({"dynamic-slice", "gather"})
_CHOOSES = frozenset({"add", "compare", "select"})  # an index that may be negative
BEHIND_CALLS = _OUTPUTS | _STRUCTURE | {"shape_changed"}
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
        changed = [i for i in range(len(causes)) if causes[i].kind in COMES_OR_GOES]
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


def across_calls(view: View, causes: Sequence[Cause], callers: dict[int, list[Cause]]) -> tuple[set[int], set[int]]:
    """The places of causes, and callers, that stand behind a caller in which, or behind where, something else is done.

    The loop of a backward computes in another way what the loop of the forward does, and so does all that is between.
    `callers` are nodes of A, with the causes in what they call.
    """
    few = list(causes[:MOST])
    sides = [nodes_of(half, few) for half in (view.a, view.b)]
    working = {a for a, inner in callers.items() if any(map(_computes, inner))}
    handed = {k for k, cause in enumerate(few) if _hands_in(view, cause, [side[k] for side in sides], working)}
    # Nodes on either side of what comes first.
    leads = [(sides[0][k], sides[1][k]) for k, cause in enumerate(few) if _computes(cause) and k not in handed]
    leads += [([a], [view.a.partner[a]]) for a in working]
    own_a, own_b = defaultdict[int, int](int), defaultdict[int, int](int)
    for k, (nodes_a, nodes_b) in enumerate(leads[:MOST]):
        for own, nodes in ((own_a, nodes_a), (own_b, nodes_b)):
            for n in nodes:
                own[n] |= 1 << k
    before_b = causes_before(view.b, own_b, None, [])
    before_a = causes_before(view.a, own_a, view.a.partner, before_b)
    behind = {a for a in callers if before_a[a] & ~own_a[a]}
    calls = sum(own_a[a] for a in callers)
    follows = set(handed)
    for k, cause in enumerate(few):
        if cause.kind not in BEHIND_CALLS:
            continue
        masks = [
            common(before, [n for n in side[k] if n not in half.form.literals])
            for before, side, half in zip((before_a, before_b), sides, (view.a, view.b), strict=True)
            if side[k]
        ]
        if masks and masks[0] & masks[-1] & calls:
            follows.add(k)
    return follows, behind


def _hands_in(view: View, cause: Cause, nodes: list[list[int]], working: set[int]) -> bool:
    """Does a region only choose and turn around values for calls in which something else is computed?"""
    half, own = (view.b, nodes[1]) if cause.kind == "instruction_inserted" else (view.a, nodes[0])
    names = operations_of(cause.what)
    if cause.kind not in ("instruction_inserted", "instruction_removed") or not names <= _CHOOSES | _TURNS:
        return False
    if names & _CHOOSES and not names & _TAKES:
        return False
    own = [n for n in own if half.form.numbers[n] < 0 and n not in half.form.literals]
    read = {user for n in own for user in half.users[n]}.difference(own)
    calls = {view.a.partner[a] for a in working} if half.added else working
    return bool(read) and read <= calls


def _computes(cause: Cause) -> bool:
    """Is something else computed, not only handed on?"""
    sides = [operations_of(text) for text in cause.what.split(" replaced by ")]
    return cause.kind.startswith("instruction") and any(not own <= PACKS for own in sides)


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
    # All that a loop carries has one name in HLO: of a region only what the other side lacks.
    lacking = [cause.kind in COMES_OR_GOES for cause in causes]
    for n, ins in enumerate(half.form.origins):
        if ins.name in endings and half.form.live[n]:
            for k in owners.get(half.name(n), ()):
                if not lacking[k] or half.partner[n] < 0:
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
