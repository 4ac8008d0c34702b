"""Matching of the nodes of two graphs.

First what is certain: values that are equal and occur once on either side, and everything below them, operand by
operand. Then what equal values cannot say, because one change low in a graph makes every value above it another: a
sweep from the outputs down, in which each node that has found its partner proposes its operands as partners of the
other's operands. A node decides when all its users have (users stand after operands), for the partner with most
proposals among those that are alike. Last, a sweep upwards for what no common output reaches. Each pass takes time
linear in the edges.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from retrograd.core.alignment import align, chain
from retrograd.graph.diffing.correspondence import Matching, Places
from retrograd.graph.diffing.literals import parameter_name
from retrograd.graph.diffing.ordered_pairs import OrderedPairs
from retrograd.graph.form import Form, Label

_NAME = re.compile(r'op_name="([^"]*+)"')
_COUNTED = re.compile(r"\.[0-9]+\Z")
# An optimiser's next value of a parameter is made of the last a few operations above it.
_NEAR = 4
_MOST_NEAR = 16


def match(
    form_a: Form,
    form_b: Form,
    ids_a: list[bytes],
    ids_b: list[bytes],
    *,
    bold: bool = True,
    entry: bool = True,
    named: bool = False,
    traced: bool = False,
    ordered: Sequence[tuple[int, int]] = (),
    places: Places = None,
) -> Matching:
    """The correspondence of two forms, given keys of their values.

    `bold`: take an operation for inserted or removed if what is behind it looks more like its counterpart. Parameters
    of what is no `entry` have the places that the caller gives them: as many on both sides are the same ones, else
    those in `places`, pairs of numbers. `named`: parameters of equal names are the same ones, and so are outputs that
    renew them. `traced`: so are operations that stand in the same order, as two traces of nearly the same program do.
    `ordered`: so are parameters of these places, as `in_order` finds them.
    """
    matching = Matching(form_a, form_b, ids_a, ids_b)
    matching.bold = bold
    if not entry and not places and len(form_a.parameters) == len(form_b.parameters):
        for a, b in zip(form_a.parameters, form_b.parameters, strict=True):
            matching.pair(a, b)
    elif not entry:
        _placed(matching, places)
    if named:
        _by_name(matching)
    for i, j in ordered:
        if matching.free(form_a.parameters[i], form_b.parameters[j]):
            matching.pair(form_a.parameters[i], form_b.parameters[j])
    _parameters(matching)
    _outputs(matching, named, places or ())
    if traced:
        _traced(matching)
    for i, j in matching.outputs:
        a, b = form_a.outputs[i], form_b.outputs[j]
        if ids_a[a] == ids_b[b]:
            matching.descend(a, b)
    _unique(matching)
    _down(matching)
    _up(matching)
    _leftovers(matching)
    _late_outputs(matching)
    _part_strangers(matching)
    return matching


def _placed(matching: Matching, places: Places) -> None:
    """Parameters that a caller gives corresponding values, as loops do: what they carry keeps its place."""
    form_a, form_b = matching.form_a, matching.form_b
    for i, j in places or ():
        if i < len(form_a.parameters) and j < len(form_b.parameters):
            matching.pair(form_a.parameters[i], form_b.parameters[j])


def _traced(matching: Matching) -> None:
    """Operations in the order of their trace: first those that are alike, then between them those of one name."""
    form_a, form_b = matching.form_a, matching.form_b
    names_a, names_b = _names(form_a), _names(form_b)
    rest = [[k for k in range(len(form)) if form.operands[k]] for form in (form_a, form_b)]
    whole = [
        [(form.labels[k], names[k]) for k in own]
        for form, names, own in zip((form_a, form_b), (names_a, names_b), rest, strict=True)
    ]
    for i, j in align(*whole):
        a, b = rest[0][i], rest[1][j]
        if matching.free(a, b):
            matching.pair(a, b)


def _names(form: Form) -> list[str]:
    """What the program calls each operation, without numbers that a trace appends."""
    known: dict[str, str] = {}
    for ins in form.origins:
        if ins.metadata not in known:
            match = _NAME.search(ins.metadata)
            known[ins.metadata] = _COUNTED.sub("", match[1]) if match else ""
    return [known[ins.metadata] for ins in form.origins]


def _parameters(matching: Matching) -> None:
    """Parameters that are certain: equal, and like no other."""
    form_a, form_b = matching.form_a, matching.form_b
    count_a = Counter(matching.ids_a[a] for a in form_a.parameters)
    place_b = {matching.ids_b[b]: b for b in form_b.parameters}
    count_b = Counter(matching.ids_b[b] for b in form_b.parameters)
    for a in form_a.parameters:
        own = matching.ids_a[a]
        if count_a[own] == 1 == count_b[own] and matching.free(a, place_b[own]):
            matching.pair(a, place_b[own])


def in_order(form_a: Form, form_b: Form) -> list[tuple[int, int]]:
    """Parameters of shapes of which both graphs have as many, where one has others besides: in order; else none."""
    labels = [[form.labels[n] for n in form.parameters] for form in (form_a, form_b)]
    counts = [Counter(own) for own in labels]
    pairs = align(*labels, patience=False)  # type: ignore[type-var]
    certain = all(counts[0][own] == counts[1][own] for own in counts[0] & counts[1])
    return pairs if certain and len(pairs) == min(map(len, labels)) else []


def places_of(matching: Matching, a: int, b: int) -> list[tuple[int, int]]:
    """Which operand of a node is which of its partner: in place, or partners, and between them those of one shape."""
    operands_a, operands_b = matching.form_a.operands[a], matching.form_b.operands[b]
    labels_a = [matching.form_a.labels[o] for o in operands_a]
    labels_b = [matching.form_b.labels[o] for o in operands_b]
    in_place = [(k, k) for k in range(len(labels_a))] if len(labels_a) == len(labels_b) else []
    agreeing = sum(labels_a[k][1] == labels_b[k][1] for k, _ in in_place)
    if in_place and agreeing == len(in_place):
        return in_place
    where = {o: j for j, o in enumerate(operands_b)}
    known = [(i, where[p]) for i, o in enumerate(operands_a) if (p := matching.a[o]) in where]
    pairs = OrderedPairs(len(labels_a), len(labels_b))
    pairs.add(chain(known))
    pairs.refine([matching.ids_a[o] for o in operands_a], [matching.ids_b[o] for o in operands_b])
    pairs.refine(labels_a, labels_b)
    pairs.refine([label[1] for label in labels_a], [label[1] for label in labels_b])
    # As many as before: other values in another order only if more of them agree so.
    return in_place if in_place and len(pairs.all()) <= agreeing else pairs.all()


def _outputs(matching: Matching, named: bool, places: Sequence[tuple[int, int]]) -> None:
    """Outputs that correspond: those of a loop at corresponding places, equal values in order, equal values elsewhere.

    Between two pairs, outputs correspond one by one if their shapes agree; else by label, by operation, by shape.
    """
    outs_a, outs_b = matching.form_a.outputs, matching.form_b.outputs
    labels_a, labels_b = matching.form_a.labels, matching.form_b.labels
    pairs = OrderedPairs(len(outs_a), len(outs_b))
    pairs.add([(i, j) for i, j in places if i < len(outs_a) and j < len(outs_b)])
    ids = [matching.ids_a[o] for o in outs_a], [matching.ids_b[o] for o in outs_b]
    pairs.refine(*ids)
    pairs.moved(*ids)
    if named:
        pairs.by_name(_renewed(matching.form_a), _renewed(matching.form_b))
    shapes = [labels_a[o][1] for o in outs_a], [labels_b[o][1] for o in outs_b]
    pairs.in_step(*shapes)
    pairs.refine([labels_a[o] for o in outs_a], [labels_b[o] for o in outs_b])
    pairs.refine([labels_a[o][:2] for o in outs_a], [labels_b[o][:2] for o in outs_b])
    pairs.refine(*shapes)
    pairs.in_step([is_nothing(labels_a[o]) for o in outs_a], [is_nothing(labels_b[o]) for o in outs_b])
    matching.outputs = pairs.all()


def _renewed(form: Form) -> list[str]:
    """Of each output the name of the parameter that it renews: one of its shape, a few operations below."""
    names: list[str] = []
    for output in form.outputs:
        shape, nodes, name = form.labels[output][1], [output], ""
        for _ in range(_NEAR):
            nodes = [o for n in nodes for o in form.operands[n]][:_MOST_NEAR]
            own = [parameter_name(form, n) for n in nodes if form.numbers[n] >= 0 and form.labels[n][1] == shape]
            if own:
                name = own[0]
                break
        names.append(name)
    return names


def is_nothing(label: Label) -> bool:
    """Is this FX's None, as the gradient of an input that needs none? It stands for no value of the other graph."""
    return label[0] == "constant" and label[2] == "None"


def _unique(matching: Matching) -> None:
    """GraphPair values that occur once on either side, largest first, and what is below them.

    Values that depend on no parameter (constants and what is made of them) say nothing about place: they find their
    partners through their users.
    """
    count_a, count_b = Counter(matching.ids_a), Counter(matching.ids_b)
    place_b = {i: b for b, i in enumerate(matching.ids_b)}
    form_a = matching.form_a
    floating: set[int] = set()
    for a, operands in enumerate(form_a.operands):
        if form_a.numbers[a] < 0 and floating.issuperset(operands):
            floating.add(a)
    for a in range(len(form_a) - 1, -1, -1):
        own = matching.ids_a[a]
        if matching.a[a] < 0 and count_a[own] == 1 == count_b[own] and a not in floating and form_a.operands[a]:
            matching.descend(a, place_b[own])


def _down(matching: Matching) -> None:
    """From the outputs down: pairs propose the pairs of their operands."""
    form_a, form_b, votes = matching.form_a, matching.form_b, matching.votes
    for i, j in matching.outputs:
        _propose(matching, form_a.outputs[i], form_b.outputs[j], 2)
    # What is changed in place is an output, too.
    operations = [[form.labels[n][:2] for n in form.effects] for form in (form_a, form_b)]
    for i, j in align(*operations, patience=False):  # type: ignore[type-var]
        _propose(matching, form_a.effects[i], form_b.effects[j], 2)
    for a in range(len(form_a) - 1, -1, -1):
        if matching.a[a] < 0 and a in votes:
            _decide(matching, a, votes[a])
        b = matching.a[a]
        if b >= 0:
            _propose_operands(matching, a, b)


def _propose(matching: Matching, a: int, b: int, weight: int) -> None:
    if matching.free(a, b):
        votes = matching.votes.setdefault(a, {})
        votes[b] = votes.get(b, 0) + weight


def _propose_operands(matching: Matching, a: int, b: int) -> None:
    operands_a, operands_b = matching.form_a.operands[a], matching.form_b.operands[b]
    if len(operands_a) == len(operands_b):
        for x, y in zip(operands_a, operands_b, strict=True):
            if matching.a[x] < 0 and matching.b[y] < 0:
                votes = matching.votes.setdefault(x, {})
                votes[y] = votes.get(y, 0) + 2
        return
    pairs = align([matching.ids_a[o] for o in operands_a], [matching.ids_b[o] for o in operands_b], patience=False)
    if not pairs:
        labels_a, labels_b = matching.form_a.labels, matching.form_b.labels
        pairs = align([labels_a[o] for o in operands_a], [labels_b[o] for o in operands_b], patience=False)
    for i, j in pairs:
        _propose(matching, operands_a[i], operands_b[j], 2)


def _decide(matching: Matching, a: int, votes: dict[int, int]) -> None:
    """The partner of a node: the candidate with most votes that is alike; else see whether something came between."""
    candidates = [b for b in sorted(votes, key=votes.__getitem__, reverse=True) if matching.b[b] < 0]
    equal = [b for b in candidates if matching.ids_a[a] == matching.ids_b[b]]
    if equal:
        matching.descend(a, equal[0])
        return
    for b in candidates:
        between = _between(matching, a, b)
        if between is not None:
            x, y = between
            if x == a:
                matching.pair(a, y)
            else:
                _propose(matching, x, y, 3)
            return
    for b in candidates:
        if matching.alike(a, b) or _changed(matching, a, b):
            matching.pair(a, b)
            return
    for b in candidates:  # nothing in common: what is below may still correspond
        _propose_operands(matching, a, b)


def _between(matching: Matching, a: int, b: int) -> tuple[int, int] | None:
    """If one side has an operation more between user and operand: the pair that corresponds around it."""
    if matching.alike(a, b) and _shared(matching, a, b):
        return None
    ids_a, ids_b = matching.ids_a, matching.ids_b
    for o in matching.form_b.operands[b]:
        if matching.b[o] < 0 and (
            ids_b[o] == ids_a[a] or (matching.bold and matching.alike(a, o) and _closer(matching, a, o, a, b))
        ):
            return a, o
    for o in matching.form_a.operands[a]:
        if matching.a[o] < 0 and (
            ids_a[o] == ids_b[b] or (matching.bold and matching.alike(o, b) and _closer(matching, o, b, a, b))
        ):
            return o, b
    return None


def _shared(matching: Matching, a: int, b: int) -> int:
    """How many operands of two nodes are equal or partners already, at the same place."""
    pairs = zip(matching.form_a.operands[a], matching.form_b.operands[b], strict=False)
    return sum(
        1 for x, y in pairs if matching.a[x] == y or (matching.ids_a[x] == matching.ids_b[y] and matching.free(x, y))
    )


def _closer(matching: Matching, a: int, b: int, other_a: int, other_b: int) -> bool:
    """Has the first pair more operands in common than the second, or as many and the second is not alike?"""
    first, second = _shared(matching, a, b), _shared(matching, other_a, other_b)
    return first > second or (first == second and not matching.alike(other_a, other_b))


def _changed(matching: Matching, a: int, b: int) -> bool:
    """Can one be the other after a change: of attributes, shape or the operation itself?"""
    label_a, label_b = matching.form_a.labels[a], matching.form_b.labels[b]
    if label_a[0] == label_b[0]:
        return True
    arity_a, arity_b = len(matching.form_a.operands[a]), len(matching.form_b.operands[b])
    return arity_a == arity_b and arity_a > 0 and 2 * _shared(matching, a, b) >= arity_a


def _up(matching: Matching) -> None:
    """From the parameters up: a node whose operands all have partners is looked for among the users of these."""
    form_a, form_b = matching.form_a, matching.form_b
    users: dict[tuple[object, ...], list[int]] = {}
    for b in range(len(form_b) - 1, -1, -1):
        if matching.b[b] < 0 and form_b.operands[b]:
            users.setdefault((form_b.labels[b], form_b.operands[b]), []).append(b)
    for a in range(len(form_a)):
        if matching.a[a] >= 0 or not form_a.operands[a]:
            continue
        waiting = users.get((form_a.labels[a], tuple([matching.a[o] for o in form_a.operands[a]])))
        while waiting:
            b = waiting.pop()
            if matching.b[b] < 0:
                matching.pair(a, b)
                break


def _by_name(matching: Matching) -> None:
    """Parameters that the program calls by the same name."""
    form_a, form_b = matching.form_a, matching.form_b
    named = {name: b for b in form_b.parameters if matching.b[b] < 0 and (name := parameter_name(form_b, b))}
    for a in form_a.parameters:
        b = named.get(parameter_name(form_a, a), -1)
        if b >= 0 and matching.free(a, b):
            matching.pair(a, b)


def _leftovers(matching: Matching) -> None:
    """Equal values that nothing else could tell apart, in order; parameters by name, then by number, first."""
    form_a, form_b = matching.form_a, matching.form_b
    _by_name(matching)
    for a, b in zip(form_a.parameters, form_b.parameters, strict=False):
        if matching.free(a, b) and matching.alike(a, b) and form_a.live[a] == form_b.live[b]:
            matching.pair(a, b)
    rest_a = [a for a in form_a.parameters if matching.a[a] < 0]
    rest_b = [b for b in form_b.parameters if matching.b[b] < 0]
    sizes_a, sizes_b = (
        [f.labels[n][1].partition("[")[2] for n in own] for f, own in ((form_a, rest_a), (form_b, rest_b))
    )
    for a, b in zip(rest_a, rest_b, strict=True) if sizes_a == sizes_b else ():  # of another dtype
        matching.pair(a, b)
    waiting: dict[bytes, list[int]] = {}
    for b in range(len(form_b) - 1, -1, -1):
        if matching.b[b] < 0:
            waiting.setdefault(matching.ids_b[b], []).append(b)
    for a in range(len(form_a)):
        if matching.a[a] < 0 and waiting.get(matching.ids_a[a]):
            matching.pair(a, waiting[matching.ids_a[a]].pop())


def _part_strangers(matching: Matching) -> None:
    """Part one operation from another where no reader of either has a partner: they belong to what is replaced."""
    strangers = [
        (a, b)
        for a, b in enumerate(matching.a)
        if b >= 0 and matching.form_a.labels[a][0] != matching.form_b.labels[b][0] and matching.form_a.operands[a]
    ]
    if not strangers:
        return
    sides = (matching.form_a, matching.a), (matching.form_b, matching.b)
    read = [
        {o for n, operands in enumerate(form.operands) if form.live[n] and partner[n] >= 0 for o in operands}
        | {*form.outputs, *form.effects}
        for form, partner in sides
    ]
    for a, b in reversed(strangers):
        if a not in read[0] and b not in read[1]:
            matching.a[a] = matching.b[b] = -1


def _late_outputs(matching: Matching) -> None:
    """Outputs whose nodes turned out to be partners, wherever they stand."""
    taken_a, taken_b = ({pair[k] for pair in matching.outputs} for k in (0, 1))
    waiting: dict[int, list[int]] = {}
    for j, b in reversed(list(enumerate(matching.form_b.outputs))):
        if j not in taken_b:
            waiting.setdefault(b, []).append(j)
    for i, a in enumerate(matching.form_a.outputs):
        if i not in taken_a and waiting.get(matching.a[a]):
            matching.outputs.append((i, waiting[matching.a[a]].pop()))
