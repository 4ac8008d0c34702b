"""Precedence of the causes within one computation: how far into the program each stands, and which explains which.

A number that becomes 1, or a power of two, takes operations away that the compiler does without: the number is first.
Where another computation begins with another number, that computation is first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from math import isclose, nan

from retrograd.graph.diffing.downstream import MOST, bits_of, causes_before, common, nodes_of
from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.schema import Cause

_FOR_USERS = frozenset({"broadcast", "broadcast-in-dim"})
_REGIONS = frozenset({"instruction_inserted", "instruction_removed", "instruction_replaced"})
_TURNS = frozenset({"bitcast", "copy", "reverse", "transpose"})
_NEXT = 1e-9  # behind another cause, before what stands behind that one
_FEWEST = 3  # different operations of a region that no number explains
_FARTHEST = 64  # operations between a number and a region that it leads into
_FACTORS = (1.0, -1.0, 2.0, -2.0, 0.5, -0.5)  # that a gradient, or who reads a number, puts before it
_ROUNDING = 2.0**-22  # of a quotient of two float32
_Sides = tuple[list[list[int]], list[list[int]]]


def positions(view: View, causes: Sequence[Cause]) -> list[float]:
    """Of each cause, how far into the program its first instruction stands: 0 at the beginning, 1 at the end.

    What another cause explains, or what lies behind it in one of the graphs and not in the other, stands behind it.
    """
    halves = view.a, view.b
    sides = nodes_of(view.a, causes), nodes_of(view.b, causes)
    places: list[float] = []
    for k, cause in enumerate(causes):
        own = [(half, nodes[k]) for half, nodes in zip(halves, sides, strict=True) if nodes[k]]
        own = own[:1] if cause in view.a.changed else own  # of partners, where the one in A stands
        places.append(min((_position(half, n) for half, nodes in own for n in _computed(half, nodes)), default=1.0))
    few = range(min(len(causes), MOST))
    behind = [0] * len(few)
    for half, nodes in zip(halves, sides, strict=True) if len(few) > 1 else ():
        before = causes_before(half, bits_of(nodes[: len(few)], causes), None, [])
        for k in few:
            own = [n for n in nodes[k] if n not in half.form.literals]
            behind[k] |= common(before, own) & ~(1 << k)
    for k in sorted(few, key=places.__getitem__):
        leads = [i for i in few if behind[k] >> i & 1 and not behind[i] >> k & 1]
        places[k] = max([places[k], *(places[i] + _NEXT for i in leads)])
    for first, second in _explained(view, causes, sides):
        places[second] = max(places[second], places[first] + _NEXT)
    return places


def borrowed(view: View, causes: Sequence[Cause]) -> set[int]:
    """The places of constants of which one graph has either number anyway, where much is computed in another way.

    No number changed then: the operations that are left read another one of those that there are.
    """
    sides = nodes_of(view.a, causes), nodes_of(view.b, causes)
    much = any(
        len({half.form.labels[n][0] for n in _operations(half, own[k])}) >= _FEWEST
        for k, cause in enumerate(causes[:MOST])
        if cause.kind in _REGIONS
        for half, own in zip((view.a, view.b), sides, strict=True)
    )
    numbers = [k for k, cause in enumerate(causes) if much and cause.kind == "constant_changed"]
    known = [_scalars(half) for half in (view.a, view.b)] if numbers else []
    return {
        k
        for k in numbers
        if all(before in known[1] and after in known[0] for before, after in view.changes.get(causes[k], (("", ""),)))
    }


def _scalars(half: Half) -> set[str]:
    """The scalar constants of one side, shape before literal, and those that operations have as arguments."""
    form = half.form
    return {" ".join(form.labels[n][1:]) for n in form.literals if form.live[n] and form.labels[n][0] == "constant"}


def _computed(half: Half, nodes: list[int]) -> list[int]:
    """The nodes that compute, if any does: what a loop is given stands at its beginning, wherever it is used."""
    return [n for n in nodes if not half.form.literals.issuperset(half.form.operands[n])] or nodes


def _position(half: Half, node: int) -> float:
    """A literal, and what is made for one use, stands behind the operation that uses it, a parameter before it.

    So does a weight that is turned around: XLA does it at any time before.
    """
    form = half.form
    if node in form.literals:
        users, behind = list(half.readers(node)), 0.5
    else:
        parameter = _is_parameter(half, node)
        users = half.users[node] if parameter or form.labels[node][0] in _FOR_USERS else []
        behind = -0.5 if parameter else 0.5
    return (min(users) + behind if users else node) / len(form)


def _is_parameter(half: Half, node: int) -> bool:
    """Is this a parameter, turned around or not?"""
    form = half.form
    while form.labels[node][0] in _TURNS and form.operands[node]:
        node = form.operands[node][0]
    return form.numbers[node] >= 0


def _explained(view: View, causes: Sequence[Cause], sides: _Sides) -> Iterator[tuple[int, int]]:
    """Pairs of a cause and another that it explains: of numbers and regions."""
    halves = list(zip((view.a, view.b), sides, strict=True))
    numbers = [c for c, cause in enumerate(causes[:MOST]) if cause.kind == "constant_changed"]
    known = [_scalars(half) for half in (view.a, view.b)] if numbers else []
    for k in [k for k, cause in enumerate(causes[:MOST]) if numbers and cause.kind in _REGIONS]:
        work = [(half, _operations(half, nodes[k]), set(nodes[k])) for half, nodes in halves]
        names = [{half.form.labels[n][0] for n in own} for half, own, _ in work]
        alone = [(half, own) for (half, own, _), kinds in zip(work, names, strict=True) if len(kinds) == 1]
        for c in numbers:
            told = list(_numbers(view.changes.get(causes[c], ())))
            # Where much is replaced, a number that both graphs have anyway tells nothing.
            both = known[0] & known[1] if all(names) and len(names[0] | names[1]) >= _FEWEST else frozenset[str]()
            if min(map(len, names)) <= 1 and any(_reads(half, own, told, both) for half, own in alone):
                yield c, k
            elif len(names[0] | names[1]) >= _FEWEST and (
                any(
                    region and _leads_into(half, nodes[c], region)
                    for (half, _, region), (_, nodes) in zip(work, halves, strict=True)
                )
                or _is_there(known, view.changes.get(causes[c], ()))
            ):
                yield k, c


def _is_there(known: list[set[str]], changes: Sequence[tuple[str, str]]) -> bool:
    """Has the other graph one of the two numbers anyway, for each of the changes?"""
    return bool(changes) and all(before in known[1] or after in known[0] for before, after in changes)


def _numbers(changes: Sequence[tuple[str, str]]) -> Iterator[float]:
    """Numbers that changed, and those that become 1, or were, in proportion."""
    for before, after in changes:
        x, y = _scalar(before), _scalar(after)
        yield from (x, y)
        if x and y:
            yield from (x / y, y / x)


def _scalar(text: str) -> float:
    """The number of a scalar or of an array of one, shape before literal; NaN if it is none."""
    shape, _, literal = text.partition(" ")
    try:
        return float(literal.strip("{ }")) if shape.endswith(("[]", "[1]")) else nan
    except ValueError:
        return nan


def _operations(half: Half, nodes: list[int]) -> list[int]:
    """The operations among nodes, without literals and what only broadcasts."""
    form = half.form
    return [n for n in nodes if n not in form.literals and form.labels[n][0] not in _FOR_USERS and form.operands[n]]


def _reads(half: Half, nodes: list[int], numbers: list[float], but: Set[str]) -> bool:
    """Do operations read one of these numbers, or it with a factor? A constant of `but` does not count."""
    form = half.form
    pending = [o for n in nodes for o in form.operands[n]]
    while pending:
        node = pending.pop()
        if node in form.literals or form.labels[node][0] in _FOR_USERS:
            text = " ".join(form.labels[node][1:])
            own = _scalar(text) if text not in but else nan
            if any(isclose(own, number * factor, rel_tol=_ROUNDING) for number in numbers for factor in _FACTORS):
                return True
            pending += form.operands[node]
    return False


def _leads_into(half: Half, numbers: list[int], region: set[int]) -> bool:
    """Is all that reads these numbers, sooner or later, read by the region alone?"""
    pending = [user for n in numbers for user in half.readers(n)]
    outputs, seen = set(half.form.outputs), set[int]()
    while pending:
        node = pending.pop()
        if node in region or node in seen:
            continue
        seen.add(node)
        if node in outputs or len(seen) > _FARTHEST or not half.users[node]:
            return False
        pending += half.users[node]
    return bool(seen or numbers)
