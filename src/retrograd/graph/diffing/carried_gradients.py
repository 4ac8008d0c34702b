"""Gradients carried over the cut: left in a bucket at the end of a step, reduced in the next one (pytorch/xla#4160).

Two signs. A parameter that only one graph has goes straight into a reduction: it is the gradient of an earlier step.
Or values that one graph reduces are outputs of the other, which does not reduce them: they wait for the next step.
"Straight" means through operations that move numbers and do not make new ones.
"""

from __future__ import annotations

from retrograd.core.wording import count
from retrograd.graph.canonical import CollectiveNodes
from retrograd.graph.diffing.side_by_side import ExplainedNodes, Half, View, shapes
from retrograd.graph.schema import Cause

_MOVES = frozenset(
    {"reshape", "pad", "convert", "bitcast", "copy", "transpose", "concatenate", "slice", "divide", "broadcast"}
)
_REDUCTIONS = frozenset({"reduce-scatter", "all-reduce"})
_ADVICE = (
    "flush every gradient bucket before the step ends (a module that is used twice or left unused keeps the flush "
    "counter from reaching zero); until then these gradients are applied a step late"
)


def find_causes(view: View, claimed: ExplainedNodes) -> list[Cause]:
    """Causes of this kind; the nodes that they explain are claimed, with what follows from them on their side."""
    causes: list[Cause] = []
    for half, explained in ((view.b, claimed.b), (view.a, claimed.a)):
        causes += _reduced_parameters(half, explained)
    for half, other, explained in ((view.b, view.a, claimed.b), (view.a, view.b, claimed.a)):
        causes += _unreduced_outputs(half, other, {j if half.added else i for i, j in view.outputs}, explained)
    return causes


def _reduced_parameters(half: Half, explained: set[int]) -> list[Cause]:
    """Parameters of this side that go straight into a reduction."""
    form = half.form
    arriving: dict[int, list[int]] = {}
    alone = set(half.alone)
    for number, collective in enumerate(form.collectives):
        if collective.opcode in _REDUCTIONS:
            sources = {s for n in collective.nodes for s in _sources(half, n)}
            new = sorted(s for s in sources if form.numbers[s] >= 0 and s in alone)
            if new:
                arriving[number] = new
    causes: list[Cause] = []
    for number, parameters in arriving.items():
        collective = form.collectives[number]
        text = (
            f"{half.sign} {count(len(parameters), 'parameter')} "
            f"{shapes(form.labels[n][1] for n in parameters)} that {'goes' if len(parameters) == 1 else 'go'} straight "
            f"into {_position(half, collective)} in {half.letter} only: gradients of an earlier step, carried over the "
            "cut without having been reduced"
        )
        names = half.names([*parameters, *collective.nodes])
        line = half.best_line(collective.nodes)
        causes.append(half.cause("gradient_carried_over", text, line, _ADVICE, names, len(parameters)))
        _mark_explained(half, explained, [*parameters, *(n for n in collective.nodes if half.partner[n] < 0)])
    return causes


def _unreduced_outputs(half: Half, other: Half, paired: set[int], explained: set[int]) -> list[Cause]:
    """Outputs of this side alone that the other side puts into a reduction, which this side does not have."""
    reduced: dict[int, int] = {}
    for number, collective in enumerate(other.form.collectives):
        if collective.opcode in _REDUCTIONS and all(other.partner[n] < 0 for n in collective.nodes):
            for n in collective.nodes:
                for via in _moved_from(other, n):
                    if other.partner[via] >= 0:
                        reduced.setdefault(other.partner[via], number)
    extra = [p for p, n in enumerate(half.form.outputs) if p not in paired and n in reduced]
    if not extra:
        return []
    nodes = [half.form.outputs[p] for p in extra]
    collective = other.form.collectives[reduced[nodes[0]]]
    text = (
        f"{half.sign} {count(len(extra), 'output')} "
        f"{shapes(half.form.labels[n][1] for n in nodes)} that {_position(other, collective)} of {other.letter} "
        f"reduces and {half.letter} does not: gradients left in a bucket at the cut, to be carried over into the "
        "next step"
    )
    explained.update(nodes)
    names, others = half.names(nodes), other.names(collective.nodes)
    sides = (others, names) if half.added else (names, others)
    line = other.best_line(collective.nodes)
    return [Cause("gradient_carried_over", text, line, _ADVICE, *sides, len(extra))]


def _position(half: Half, collective: CollectiveNodes) -> str:
    size = count(len(collective.nodes), "operand")
    number = half.form.collectives.index(collective) + 1
    return f"{collective.opcode} number {number} of {len(half.form.collectives)} ({size})"


def _sources(half: Half, node: int) -> set[int]:
    """Where the operands of a collective come from, through operations that only move numbers."""
    return {n for n in _moved_from(half, node) if not half.form.operands[n]}


def _moved_from(half: Half, node: int) -> list[int]:
    """The nodes between a collective and what makes the numbers it reduces, those included; the first operand each."""
    form = half.form
    path: list[int] = []
    pending = list(form.operands[node])
    while pending and len(path) < 64:
        n = pending.pop()
        path.append(n)
        opcode = form.labels[n][0]
        if opcode in _MOVES and form.operands[n]:
            pending += form.operands[n] if opcode == "concatenate" else form.operands[n][:1]
    return path


def _mark_explained(half: Half, explained: set[int], nodes: list[int]) -> None:
    """These nodes and all that only this side has above them, and the parameters that only those use."""
    alone = set(half.alone)
    pending = list(nodes)
    while pending:
        n = pending.pop()
        if n not in explained:
            explained.add(n)
            pending += [u for u in half.users[n] if u in alone]
    find_causes = True
    while find_causes:
        below = {o for n in explained for o in half.form.operands[n] if o in alone and o not in explained}
        new = {o for o in below if all(u in explained for u in half.users[o])}
        explained |= new
        find_causes = bool(new)
