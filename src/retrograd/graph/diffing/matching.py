"""Matching of the nodes of two graphs.

First what is certain: values that are equal and occur once on either side, and everything below them, operand by
operand. Then what equal values cannot say, because one change low in a graph makes every value above it another: a
sweep from the outputs down, in which each node that has found its partner proposes its operands as partners of the
other's operands. A node decides when all its users have (users stand after operands), for the partner with most
proposals among those that are alike. Last, a sweep upwards for what no common output reaches. Each pass takes time
linear in the edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from retrograd.core.alignment import align, chain
from retrograd.graph.diffing.literals import argument_name
from retrograd.graph.form import Form, Label

# An optimiser's next value of a parameter is made of the last a few operations above it.
_NEAR = 4
_MOST_NEAR = 16


class Matching:
    """A one-to-one correspondence of the nodes of two forms: `a[k]` is the partner in B of node k of A, or -1.

    `outputs` are pairs of places in the lists of outputs.
    """

    def __init__(self, form_a: Form, form_b: Form, ids_a: Sequence[bytes], ids_b: Sequence[bytes]) -> None:
        self.form_a, self.form_b = form_a, form_b
        self.ids_a, self.ids_b = ids_a, ids_b
        self.a = [-1] * len(form_a)
        self.b = [-1] * len(form_b)
        self.outputs: list[tuple[int, int]] = []
        self.bold = True
        self.votes: dict[int, Counter[int]] = {}

    def pair(self, a: int, b: int) -> None:
        """Make two nodes partners."""
        self.a[a], self.b[b] = b, a

    def free(self, a: int, b: int) -> bool:
        """Has neither a partner yet?"""
        return self.a[a] < 0 and self.b[b] < 0

    def alike(self, a: int, b: int) -> bool:
        """Are both the same operation with the same attributes and shape, whatever their operands?"""
        return self.form_a.labels[a] == self.form_b.labels[b]

    def descend(self, a: int, b: int) -> None:
        """GraphPair two equal values and everything below them."""
        pending = [(a, b)]
        operands_a, operands_b = self.form_a.operands, self.form_b.operands
        while pending:
            a, b = pending.pop()
            if self.a[a] < 0 and self.b[b] < 0:
                self.pair(a, b)
                pending.extend(zip(operands_a[a], operands_b[b], strict=True))


def match(
    form_a: Form,
    form_b: Form,
    ids_a: Sequence[bytes],
    ids_b: Sequence[bytes],
    *,
    bold: bool = True,
    entry: bool = True,
    named: bool = False,
) -> Matching:
    """The correspondence of two forms, given keys of their values.

    `bold`: take an operation for inserted or removed if what is behind it looks more like its counterpart. Parameters
    of what is no `entry` have the places that the caller gives them: as many on both sides are the same ones. `named`:
    parameters of equal names are the same ones, and so are outputs that renew them.
    """
    matching = Matching(form_a, form_b, ids_a, ids_b)
    matching.bold = bold
    if not entry and len(form_a.parameters) == len(form_b.parameters):
        for a, b in zip(form_a.parameters, form_b.parameters, strict=True):
            matching.pair(a, b)
    if named:
        _by_name(matching)
    _parameters(matching)
    _outputs(matching, named)
    for i, j in matching.outputs:
        a, b = form_a.outputs[i], form_b.outputs[j]
        if ids_a[a] == ids_b[b]:
            matching.descend(a, b)
    _unique(matching)
    _down(matching)
    _up(matching)
    _leftovers(matching)
    _late_outputs(matching)
    return matching


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


def _outputs(matching: Matching, named: bool) -> None:
    """Outputs that correspond: equal values in order, equal values elsewhere, then what is left between those.

    Between two pairs, outputs correspond one by one if their shapes agree; else by label, by operation, by shape.
    """
    outs_a, outs_b = matching.form_a.outputs, matching.form_b.outputs
    labels_a, labels_b = matching.form_a.labels, matching.form_b.labels
    pairs = _Outputs(len(outs_a), len(outs_b))
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
            own = [argument_name(form, n) for n in nodes if form.numbers[n] >= 0 and form.labels[n][1] == shape]
            if own:
                name = own[0]
                break
        names.append(name)
    return names


def is_nothing(label: Label) -> bool:
    """Is this FX's None, as the gradient of an input that needs none? It stands for no value of the other graph."""
    return label[0] == "constant" and label[2] == "None"


class _Outputs:
    """Pairs of outputs found so far: `chain` ascends on both sides, `crossing` are those that do not fit into it."""

    def __init__(self, count_a: int, count_b: int) -> None:
        self.chain = [(-1, -1), (count_a, count_b)]
        self.crossing: list[tuple[int, int]] = []
        self.taken: tuple[set[int], set[int]] = (set(), set())

    def all(self) -> list[tuple[int, int]]:
        return sorted(self.chain[1:-1] + self.crossing)

    def gaps(self) -> list[tuple[list[int], list[int]]]:
        """The outputs without a partner between neighbours of the chain."""
        taken_a, taken_b = self.taken
        return [
            (
                [i for i in range(i + 1, next_i) if i not in taken_a],
                [j for j in range(j + 1, next_j) if j not in taken_b],
            )
            for (i, j), (next_i, next_j) in zip(self.chain, self.chain[1:], strict=False)
        ]

    def add(self, pairs: list[tuple[int, int]]) -> None:
        self.chain = sorted(self.chain + pairs)

    def refine(self, view_a: Sequence[object], view_b: Sequence[object]) -> None:
        """GraphPair what is equal in this view, in order, within each gap."""
        new: list[tuple[int, int]] = []
        for left, right in self.gaps():
            if left and right:
                inner = align([view_a[i] for i in left], [view_b[j] for j in right], patience=False)  # type: ignore[arg-type]
                new += [(left[x], right[y]) for x, y in inner]
        self.add(new)

    def in_step(self, view_a: Sequence[object], view_b: Sequence[object]) -> None:
        """GraphPair one by one where a gap has as many on either side, equal in this view."""
        new: list[tuple[int, int]] = []
        for left, right in self.gaps():
            if len(left) == len(right) and [view_a[i] for i in left] == [view_b[j] for j in right]:
                new += list(zip(left, right, strict=True))
        self.add(new)

    def by_name(self, names_a: Sequence[str], names_b: Sequence[str]) -> None:
        """GraphPair what has a name that occurs once on either side."""
        count_a, count_b = Counter(names_a), Counter(names_b)
        place_b = {name: j for j, name in enumerate(names_b)}
        places = {i for i, _ in self.chain} | self.taken[0], {j for _, j in self.chain} | self.taken[1]
        pairs = [
            (i, place_b[name])
            for i, name in enumerate(names_a)
            if name and count_a[name] == 1 == count_b[name] and i not in places[0] and place_b[name] not in places[1]
        ]
        kept = set(chain(sorted([*self.chain, *pairs])))
        self.add([pair for pair in pairs if pair in kept])

    def moved(self, view_a: Sequence[bytes], view_b: Sequence[bytes]) -> None:
        """GraphPair equal values that stand in another order."""
        gaps = self.gaps()
        waiting: dict[bytes, list[int]] = {}
        for j in sorted((j for _, right in gaps for j in right), reverse=True):
            waiting.setdefault(view_b[j], []).append(j)
        for i in sorted(i for left, _ in gaps for i in left):
            if waiting.get(view_a[i]):
                self.crossing.append((i, waiting[view_a[i]].pop()))
        self.taken = {i for i, _ in self.crossing}, {j for _, j in self.crossing}


def _unique(matching: Matching) -> None:
    """GraphPair values that occur once on either side, largest first, and what is below them.

    Values that depend on no parameter (constants and what is made of them) say nothing about place: they find their
    partners through their users.
    """
    count_a, count_b = Counter(matching.ids_a), Counter(matching.ids_b)
    place_b = {i: b for b, i in enumerate(matching.ids_b)}
    form_a = matching.form_a
    grounded = bytearray(len(form_a))
    for a, operands in enumerate(form_a.operands):
        grounded[a] = form_a.numbers[a] >= 0 or any(grounded[o] for o in operands)
    for a in range(len(form_a) - 1, -1, -1):
        own = matching.ids_a[a]
        if matching.a[a] < 0 and count_a[own] == 1 == count_b[own] and grounded[a] and form_a.operands[a]:
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
        matching.votes.setdefault(a, Counter())[b] += weight


def _propose_operands(matching: Matching, a: int, b: int) -> None:
    operands_a, operands_b = matching.form_a.operands[a], matching.form_b.operands[b]
    if len(operands_a) == len(operands_b):
        for x, y in zip(operands_a, operands_b, strict=True):
            _propose(matching, x, y, 2)
        return
    pairs = align([matching.ids_a[o] for o in operands_a], [matching.ids_b[o] for o in operands_b], patience=False)
    if not pairs:
        labels_a, labels_b = matching.form_a.labels, matching.form_b.labels
        pairs = align([labels_a[o] for o in operands_a], [labels_b[o] for o in operands_b], patience=False)
    for i, j in pairs:
        _propose(matching, operands_a[i], operands_b[j], 2)


def _decide(matching: Matching, a: int, votes: Counter[int]) -> None:
    """The partner of a node: the candidate with most votes that is alike; else see whether something came between."""
    candidates = [b for b, _ in votes.most_common() if matching.b[b] < 0]
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
    named = {name: b for b in form_b.parameters if matching.b[b] < 0 and (name := argument_name(form_b, b))}
    for a in form_a.parameters:
        b = named.get(argument_name(form_a, a), -1)
        if b >= 0 and matching.free(a, b):
            matching.pair(a, b)


def _leftovers(matching: Matching) -> None:
    """Equal values that nothing else could tell apart, in order; parameters by name, then by number, first."""
    form_a, form_b = matching.form_a, matching.form_b
    _by_name(matching)
    for a, b in zip(form_a.parameters, form_b.parameters, strict=False):
        if matching.free(a, b) and matching.alike(a, b) and form_a.live[a] == form_b.live[b]:
            matching.pair(a, b)
    waiting: dict[bytes, list[int]] = {}
    for b in range(len(form_b) - 1, -1, -1):
        if matching.b[b] < 0:
            waiting.setdefault(matching.ids_b[b], []).append(b)
    for a in range(len(form_a)):
        if matching.a[a] < 0 and waiting.get(matching.ids_a[a]):
            matching.pair(a, waiting[matching.ids_a[a]].pop())


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
