"""Gradients carried over the cut: left in a bucket at the end of a step, reduced in the next one (pytorch/xla#4160).

Two signs. A parameter that only one graph has goes straight into a reduction: it is the gradient of an earlier step.
Or values that one graph reduces are outputs of the other, which does not reduce them: they wait for the next step.
"Straight" means through operations that move numbers and do not make new ones.
"""

from __future__ import annotations

from retrograd.core.wording import count
from retrograd.graph.diffing.side_by_side import Half, View, shapes
from retrograd.graph.form import CollectiveNodes
from retrograd.graph.schema import Cause

_MOVES = frozenset(
    {"reshape", "pad", "convert", "bitcast", "copy", "transpose", "concatenate", "slice", "divide", "broadcast"}
)
_REDUCTIONS = frozenset({"reduce-scatter", "all-reduce"})
_ADVICE = (
    "flush every gradient bucket before the step ends (a module that is used twice or left unused keeps the flush "
    "counter from reaching zero); until then these gradients are applied a step late"
)


def find_causes(view: View) -> list[Cause]:
    """Causes of this kind; the nodes that they explain are marked, with what follows from them on their side."""
    causes = _reduced_parameters(view.b) + _reduced_parameters(view.a)
    return causes + _unreduced_outputs(view.b, view.a) + _unreduced_outputs(view.a, view.b)


def _reduced_parameters(half: Half) -> list[Cause]:
    """Parameters of this side that go straight into a reduction."""
    form = half.form
    alone = set(half.alone)
    causes: list[Cause] = []
    for collective in form.collectives:
        sources = {s for n in collective.nodes for s in _moved_from(half, n) if not form.operands[s]}
        parameters = sorted(s for s in sources if form.numbers[s] >= 0 and s in alone)
        if collective.opcode not in _REDUCTIONS or not parameters:
            continue
        text = (
            f"{half.sign} {count(len(parameters), 'parameter')} "
            f"{shapes(form.labels[n][1] for n in parameters)} that {'goes' if len(parameters) == 1 else 'go'} straight "
            f"into {_position(half, collective)} in {half.letter} only: gradients of an earlier step, carried over the "
            "cut without having been reduced"
        )
        nodes, line = [*parameters, *collective.nodes], half.best_line(collective.nodes)
        causes.append(half.cause("gradient_carried_over", text, line, _ADVICE, nodes, len(parameters)))
        _mark_explained(half, [*parameters, *(n for n in collective.nodes if half.partner[n] < 0)])
    return causes


def _unreduced_outputs(half: Half, other: Half) -> list[Cause]:
    """Outputs of this side alone that the other side puts into a reduction, which this side does not have."""
    reduced: dict[int, CollectiveNodes] = {}
    for collective in other.form.collectives:
        if collective.opcode in _REDUCTIONS and all(other.partner[n] < 0 for n in collective.nodes):
            for n in collective.nodes:
                for via in _moved_from(other, n):
                    if other.partner[via] >= 0:
                        reduced.setdefault(other.partner[via], collective)
    extra = [p for p, n in enumerate(half.form.outputs) if p not in half.paired and n in reduced]
    if not extra:
        return []
    nodes = [half.form.outputs[p] for p in extra]
    collective = reduced[nodes[0]]
    text = (
        f"{half.sign} {count(len(extra), 'output')} "
        f"{shapes(half.form.labels[n][1] for n in nodes)} that {_position(other, collective)} of {other.letter} "
        f"reduces and {half.letter} does not: gradients left in a bucket at the cut, to be carried over into the "
        "next step"
    )
    half.explained.update(nodes)
    line, others = other.best_line(collective.nodes), other.names(collective.nodes)
    return [half.cause("gradient_carried_over", text, line, _ADVICE, nodes, len(extra), others)]


def _position(half: Half, collective: CollectiveNodes) -> str:
    size = count(len(collective.nodes), "operand")
    number = half.form.collectives.index(collective) + 1
    return f"{collective.opcode} number {number} of {len(half.form.collectives)} ({size})"


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


def _mark_explained(half: Half, nodes: list[int]) -> None:
    """These nodes and all that only this side has above them, and the parameters that only those use."""
    alone, explained = set(half.alone), half.explained
    pending = list(nodes)
    while pending:
        n = pending.pop()
        if n not in explained:
            explained.add(n)
            pending += [u for u in half.users[n] if u in alone]
    new = explained
    while new:
        below = {o for n in explained for o in half.form.operands[n] if o in alone and o not in explained}
        new = {o for o in below if all(u in explained for u in half.users[o])}
        explained |= new
