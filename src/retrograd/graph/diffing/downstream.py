"""Downstream causes: which of them lies behind another in the flow of values, and which comes first in the program.

A backward pass is made of the forward pass: an operation that changed there changes its gradient, the norms and
updates behind it, and who reads what. All of that stands behind the first change and says nothing new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
_FOR_USERS = frozenset({"broadcast", "broadcast-in-dim"})
_FOLLOW = _STRUCTURE | _OUTPUTS | {"attribute_changed", "shape_changed", "dtype_changed"}
_COLLECTIVES: frozenset[Kind] = frozenset({"collective_inserted", "collective_removed"})
_MOST = 200  # causes that are looked at: a bit of every node for each


def positions(view: View, causes: Sequence[Cause]) -> list[float]:
    """Of each cause, how far into the program its first instruction stands: 0 at the beginning, 1 at the end."""
    sides = [_nodes(half, causes) for half in (view.a, view.b)]
    return [
        min((_position(half, n) for n in nodes[k]), default=1.0)
        for k in range(len(causes))
        for half, nodes in [(view.a, sides[0]) if sides[0][k] else (view.b, sides[1])]
    ]


def following(view: View, causes: Sequence[Cause]) -> tuple[set[int], set[int]]:
    """The places of causes that another one is before, in all that they concern; nodes of A behind other parameters."""
    if not any(c.kind in _LEAD for c in causes):
        return set(), set()
    causes = causes[:_MOST]
    sides = [_nodes(half, causes) for half in (view.a, view.b)]
    own = [_bits(nodes, causes) for nodes in sides]
    before_b = _before(view.b, own[1], None, [])
    before_a = _before(view.a, own[0], view.a.partner, before_b)
    before_b = _before(view.b, own[1], view.b.partner, before_a)
    follows: set[int] = set()
    for k, cause in enumerate(causes):
        if cause.kind in _COLLECTIVES and any(_within(sides, k, i) for i in range(len(causes)) if i != k):
            follows.add(k)
        if cause.kind not in _FOLLOW or cause.what.startswith("parameter"):
            continue
        nodes = [before[n] for before, side in zip((before_a, before_b), sides, strict=True) for n in side[k]]
        common = -1 if nodes else 0
        for mask in nodes:
            common &= mask
        leads = [i for i in range(len(causes)) if i != k and common >> i & 1]
        if cause.kind == "attribute_changed":
            leads = [i for i in leads if causes[i].kind in _SIGNATURE or _operation(causes[i]) == _operation(cause)]
        if leads:
            follows.add(k)
    signature = sum(1 << k for k, cause in enumerate(causes) if cause.kind in _SIGNATURE)
    return follows, {n for n in view.a.form.called if before_a[n] & signature}


def _within(sides: list[list[list[int]]], k: int, i: int) -> bool:
    """Are the nodes of one cause part of what another adds or takes away?"""
    return all(set(side[k]) < set(side[i]) or not side[k] for side in sides)


def _operation(cause: Cause) -> str:
    words = cause.what.split(" ")
    return words[2] if words[1:2] == ["x"] else words[0]


def _nodes(half: Half, causes: Sequence[Cause]) -> list[list[int]]:
    """The nodes of each cause on one side."""
    names = [set(cause.b if half.added else cause.a) for cause in causes]
    owners: dict[str, list[int]] = defaultdict(list)
    for k, own in enumerate(names):
        for name in own:
            owners[name].append(k)
    endings = {name.rpartition("/")[2] for name in owners} | set(owners)
    nodes: list[list[int]] = [[] for _ in causes]
    for n, ins in enumerate(half.form.origins):
        if ins.name in endings and half.form.live[n]:
            for k in owners.get(half.name(n), ()):
                nodes[k].append(n)
    return nodes


def _position(half: Half, node: int) -> float:
    """A literal stands where it is used, behind the operation that does, and so does what is made for one use."""
    literal = node in half.form.literals
    users = list(half.readers(node)) if literal else half.users[node] if half.form.labels[node][0] in _FOR_USERS else ()
    return (min(users) + 0.5 if users else node) / len(half.form)


def _bits(nodes: list[list[int]], causes: Sequence[Cause]) -> dict[int, int]:
    bits: dict[int, int] = defaultdict(int)
    for k, own in enumerate(nodes):
        if causes[k].kind in _LEAD:
            for n in own:
                bits[n] |= 1 << k
    return bits


def _before(half: Half, own: dict[int, int], partner: list[int] | None, other: list[int]) -> list[int]:
    """Of each node a bit for each cause that it depends on; what its partner depends on counts as well."""
    masks: list[int] = []
    for n, operands in enumerate(half.form.operands):
        mask = other[partner[n]] if partner is not None and partner[n] >= 0 else 0
        for o in operands:
            mask |= masks[o] | own.get(o, 0)
        masks.append(mask)
    return masks
