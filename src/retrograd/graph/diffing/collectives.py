"""Collectives that were inserted, removed, coalesced in another way, or stand in another order."""

from __future__ import annotations

from retrograd.core.alignment import chain
from retrograd.core.wording import count
from retrograd.graph import keys
from retrograd.graph.diffing.side_by_side import Half, View, shapes
from retrograd.graph.form import CollectiveNodes
from retrograd.graph.schema import Cause

_ORDER = "put collectives in an order that does not depend on when gradients arrive; ranks that disagree will hang"
_BUCKET = "another bucket size, or buckets that fill in another order: make the plan once, from the order of parameters"


def find_causes(view: View) -> list[Cause]:
    """Causes that concern collectives, as whole instructions with all their operands."""
    of_b = {n: g for g, c in enumerate(view.b.form.collectives) for n in c.nodes}
    of_a = {n: g for g, c in enumerate(view.a.form.collectives) for n in c.nodes}
    links: list[set[int]] = [
        {of_b[view.a.partner[n]] for n in c.nodes if view.a.partner[n] in of_b} for c in view.a.form.collectives
    ]
    reached = set[int]().union(*links)
    alone_a = [g for g, linked in enumerate(links) if not linked]
    alone_b = [g for g in range(len(view.b.form.collectives)) if g not in reached]
    causes = _one_sided(view.b, alone_b) + _one_sided(view.a, alone_a)
    return causes + _rebucketed(view, links, of_a) + _reordered(view, links)


def _one_sided(half: Half, groups: list[int]) -> list[Cause]:
    collectives = half.form.collectives
    causes: list[Cause] = []
    for g in groups:
        c = collectives[g]
        kinds = shapes(half.form.labels[half.form.operands[n][0]][1] for n in c.nodes if half.form.operands[n])
        text = (
            f"{half.sign} {c.opcode} with {count(len(c.nodes), 'operand')} {kinds}, "
            f"number {g + 1} of {len(collectives)} collectives, in {half.letter} only"
        )
        kind = "collective_inserted" if half.added else "collective_removed"
        causes.append(half.cause(kind, text, half.best_line(c.nodes), _BUCKET, c.nodes))
    return causes


def _rebucketed(view: View, links: list[set[int]], of_a: dict[int, int]) -> list[Cause]:
    """Operands that are coalesced with others than before, or not any more."""
    a, b = view.a.form.collectives, view.b.form.collectives
    differing = [g for g, linked in enumerate(links) if linked and not _same_group(view, a[g], [b[h] for h in linked])]
    if not differing:
        return []
    others = sorted(set[int]().union(*(links[g] for g in differing)))
    before, after = ([len(c.nodes) for c in half] for half in ([a[g] for g in differing], [b[h] for h in others]))
    opcode = a[differing[0]].opcode
    text = (
        f"{opcode}: {count(len(differing), 'instruction')} with {_sizes(before)} operands -> "
        f"{count(len(others), 'instruction')} with {_sizes(after)}"
    )
    nodes_a = [n for g in differing for n in a[g].nodes]
    nodes_b = [n for h in others for n in b[h].nodes]
    return [view.cause("collective_rebucketed", text, _BUCKET, nodes_a, nodes_b, len(differing))]


def _same_group(view: View, collective: CollectiveNodes, others: list[CollectiveNodes]) -> bool:
    return len(others) == 1 and tuple(view.a.partner[n] for n in collective.nodes) == others[0].nodes


def _sizes(sizes: list[int]) -> str:
    shown = "+".join(map(str, sizes[:6]))
    return shown + ("+..." if len(sizes) > 6 else "")


def _reordered(view: View, links: list[set[int]]) -> list[Cause]:
    """Collectives whose order a token chain or a schedule fixes, in another order."""
    if not all(keys.ordered(half.graph, half.form) for half in (view.a, view.b)):
        return []
    places = [(g, min(linked)) for g, linked in enumerate(links) if len(linked) == 1]
    kept = {g for g, _ in chain(places)}
    moved = [(g, h) for g, h in places if g not in kept]
    # Of several that became one, all stand at the same place: not moved.
    moved = [(g, h) for g, h in moved if sum(h == other for _, other in places) == 1]
    if not moved:
        return []
    a, b = view.a.form.collectives, view.b.form.collectives
    first_a, first_b = moved[0]
    c = a[first_a]
    many = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    text = f"{c.opcode} ({view.a.name(c.nodes[0])}){many} in another order: number {first_a + 1} -> {first_b + 1}"
    nodes_a = [n for g, _ in moved for n in a[g].nodes]
    nodes_b = [n for _, h in moved for n in b[h].nodes]
    return [view.cause("collective_reordered", text, _ORDER, nodes_a, nodes_b, len(moved))]
