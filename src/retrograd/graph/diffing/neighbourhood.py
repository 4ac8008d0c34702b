"""The neighbourhood of the causes as records, for pictures: who uses what, on both sides."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.schema import Cause, Node

# Nodes a side: what a page can hold and a person can walk through. Nearest to the causes first.
_MOST = 1500


def neighbourhoods(view: View, causes: Sequence[Cause]) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The nodes around the causes, of either side."""
    chosen_a, chosen_b = _nodes_near(view, causes)
    return (
        tuple(_node(view, view.a, view.b, n) for n in sorted(chosen_a)),
        tuple(_node(view, view.b, view.a, n) for n in sorted(chosen_b)),
    )


def _nodes_near(view: View, causes: Sequence[Cause]) -> tuple[set[int], set[int]]:
    """Nodes of the causes, then their neighbours, ring by ring, with their partners, until there are enough."""
    chosen: tuple[set[int], set[int]] = (set(), set())
    ring: list[tuple[int, int]] = []
    halves = (view.a, view.b)
    for which, half in enumerate(halves):
        names = {name for cause in causes for name in (cause.a, cause.b)[which][:50]}
        # Names are compared first: a module has 37,000 of them, and the causes a few.
        endings = {name.rpartition("/")[2] for name in names} | names
        ring += [
            (which, n)
            for n, ins in enumerate(half.form.origins)
            if ins.name in endings and half.form.live[n] and half.name(n) in names
        ]
    while ring:
        later: list[tuple[int, int]] = []
        for which, node in ring:
            half, seen = halves[which], chosen[which]
            if node in seen or len(seen) >= _MOST or not half.form.live[node]:
                continue
            seen.add(node)
            later += [(which, n) for n in (*half.form.operands[node], *half.users[node][:20])]
            if half.partner[node] >= 0:
                later.append((1 - which, half.partner[node]))
        ring = later
    return chosen


def _node(view: View, half: Half, other: Half, node: int) -> Node:
    opcode, shape, attrs = half.form.labels[node]
    number = half.form.numbers[node]
    partner = half.partner[node]
    a, b = (partner, node) if half.added else (node, partner)
    same = partner >= 0 and view.matching.alike(a, b) and view.same_operands(a, b)
    alone = "added" if half.added else "removed"
    return Node(
        id=half.name(node),
        opcode=opcode,
        shape=shape,
        attrs=f"{number}{', ' + attrs if attrs else ''}" if number >= 0 else attrs,
        where=half.where(node),
        operands=half.names(half.form.operands[node]),
        users=half.names(half.users[node]),
        status="same" if same else "changed" if partner >= 0 else alone,
        twin=other.name(partner) if partner >= 0 else "",
    )
