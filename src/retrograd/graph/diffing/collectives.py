"""Collectives that were inserted, removed, coalesced in another way, or stand in another order."""

from __future__ import annotations

from retrograd.core.alignment import chain
from retrograd.graph.canonical import Collective
from retrograd.graph.diffing.side_by_side import Half, View, plural, shapes
from retrograd.graph.schema import Cause

_ORDER = "put collectives in an order that does not depend on when gradients arrive; ranks that disagree will hang"
_BUCKET = "another bucket size, or buckets that fill in another order: make the plan once, from the order of parameters"


def changed(view: View) -> list[Cause]:
    """Causes that concern collectives, as whole instructions with all their operands."""
    of_b = {n: g for g, c in enumerate(view.b.form.collectives) for n in c.nodes}
    of_a = {n: g for g, c in enumerate(view.a.form.collectives) for n in c.nodes}
    links: list[set[int]] = [
        {of_b[view.a.partner[n]] for n in c.nodes if view.a.partner[n] in of_b} for c in view.a.form.collectives
    ]
    reached = set[int]().union(*links)
    alone_a = [g for g, found in enumerate(links) if not found]
    alone_b = [g for g in range(len(view.b.form.collectives)) if g not in reached]
    causes = _alone(view.b, alone_b, "+", "B") + _alone(view.a, alone_a, "-", "A")
    return causes + _rebucketed(view, links, of_a) + _reordered(view, links)


def _alone(half: Half, groups: list[int], sign: str, only: str) -> list[Cause]:
    collectives = half.form.collectives
    causes: list[Cause] = []
    for g in groups:
        c = collectives[g]
        kinds = shapes(half.form.labels[half.form.operands[n][0]][1] for n in c.nodes if half.form.operands[n])
        text = (
            f"{sign} {c.opcode} with {plural(len(c.nodes), 'operand')} {kinds}, "
            f"number {g + 1} of {len(collectives)} collectives, in {only} only"
        )
        names = half.names(c.nodes)
        kind = "collective_inserted" if sign == "+" else "collective_removed"
        sides = ((), names) if sign == "+" else (names, ())
        causes.append(Cause(kind, text, half.best_line(c.nodes), _BUCKET, *sides))
    return causes


def _rebucketed(view: View, links: list[set[int]], of_a: dict[int, int]) -> list[Cause]:
    """Operands that travel in other company: coalesced before and not now, or with other ones."""
    a, b = view.a.form.collectives, view.b.form.collectives
    differing = [g for g, found in enumerate(links) if found and not _same_company(view, a[g], [b[h] for h in found])]
    if not differing:
        return []
    others = sorted(set[int]().union(*(links[g] for g in differing)))
    before, after = ([_size(c) for c in half] for half in ([a[g] for g in differing], [b[h] for h in others]))
    opcode = a[differing[0]].opcode
    text = (
        f"{opcode}: {plural(len(differing), 'instruction')} with {_sizes(before)} operands -> "
        f"{plural(len(others), 'instruction')} with {_sizes(after)}"
    )
    nodes_a = [n for g in differing for n in a[g].nodes]
    nodes_b = [n for h in others for n in b[h].nodes]
    line = view.b.best_line(nodes_b) or view.a.best_line(nodes_a)
    sides = view.a.names(nodes_a), view.b.names(nodes_b)
    return [Cause("collective_rebucketed", text, line, _BUCKET, *sides, len(differing))]


def _same_company(view: View, one: Collective, others: list[Collective]) -> bool:
    return len(others) == 1 and tuple(view.a.partner[n] for n in one.nodes) == others[0].nodes


def _size(collective: Collective) -> int:
    return len(collective.nodes)


def _sizes(sizes: list[int]) -> str:
    shown = "+".join(map(str, sizes[:6]))
    return shown + ("+..." if len(sizes) > 6 else "")


def _reordered(view: View, links: list[set[int]]) -> list[Cause]:
    """Collectives whose order a token chain or a schedule fixes, in another order."""
    if not (_ordered(view.a) and _ordered(view.b)):
        return []
    places = [(g, min(found)) for g, found in enumerate(links) if len(found) == 1]
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
    sides = view.a.names(nodes_a), view.b.names(nodes_b)
    line = view.b.best_line(nodes_b) or view.a.best_line(nodes_a)
    return [Cause("collective_reordered", text, line, _ORDER, *sides, len(moved))]


def _ordered(half: Half) -> bool:
    return half.form.chained or half.graph.header.get("is_scheduled") == "true"
