"""Loops of two graphs: how many steps they make, and whether one computes again what the other saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from retrograd.core.wording import count
from retrograd.graph.form import Form, elements
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause
from retrograd.graph.value_names import name_of

Forms = dict[str, Form]
# What stacks, unstacks and counts: as many as there are values that a loop saves. It says nothing of recomputation.
_BOOKKEEPING_NAMES = """
    add bitcast broadcast broadcast-in-dim compare concatenate constant convert copy dynamic-slice
    dynamic-update-slice get-tuple-element iota opt-barrier pad parameter reshape select slice transpose
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_NAMES.split())
_STEPS_ADVICE = "the length of a scan is compiled into the graph: keep it the same, or pad to one length"
_REMAT_ADVICE = "jax.checkpoint or nn.remat is on in one of the two: what the backward needs is saved in the other"


def steps(forms: Forms, form: Form, node: int) -> int | None:
    """How many steps a loop makes that counts up by one to a bound; None if that is not in the text."""
    roles = dict(form.called.get(node, ()))
    if form.labels[node][0] != "while" or not {"condition", "body"} <= set(roles):
        return None
    condition, body, operands = forms[roles["condition"]], forms[roles["body"]], form.operands[node]
    test = condition.outputs[0] if len(condition.outputs) == 1 else -1
    if test < 0 or condition.labels[test][0] != "compare" or "LT" not in condition.labels[test][2]:
        return None
    if len(condition.operands[test]) != 2 or len(condition.parameters) > len(operands):
        return None
    counter, bound = condition.operands[test]
    number = condition.numbers[counter]
    last = _integer(condition, bound)
    if last is None and condition.numbers[bound] >= 0:  # captured from outside, as in StableHLO
        last = _integer(form, operands[condition.numbers[bound]])
    if number < 0 or last is None or number >= len(body.outputs):
        return None
    first, after = _integer(form, operands[number]), body.outputs[number]
    by_one = body.labels[after][0] == "add" and {body.numbers[n] for n in body.operands[after]} == {number, -1}
    step = by_one and next(_integer(body, n) for n in body.operands[after] if body.numbers[n] < 0)
    return last - first if first is not None and step == 1 else None


def _integer(form: Form, node: int) -> int | None:
    opcode, shape, attrs = form.labels[node]
    literal = attrs.strip("-")
    return int(attrs) if opcode == "constant" and shape.endswith("[]") and literal.isdecimal() else None


def steps_cause(pairs: dict[tuple[int, int], list[tuple[str, str]]]) -> list[Cause]:
    """One cause for each pair of numbers of steps, with the loops that make them."""
    causes: list[Cause] = []
    for (before, after), names in pairs.items():
        many = f", in {count(len(names), 'loop')}" if len(names) > 1 else ""
        sides = tuple(a for a, _ in names), tuple(b for _, b in names)
        causes.append(
            Cause("loop_changed", f"scan of {before} -> {after} steps{many}", "", _STEPS_ADVICE, *sides, len(names))
        )
    return causes


def remat_cause(a: Graph, b: Graph, forms_a: Forms, forms_b: Forms) -> Cause | None:
    """Recomputation in the loops of one graph: they carry less than the other's, and compute again what these do."""
    loops_a, loops_b = list(_loops(forms_a)), list(_loops(forms_b))
    if not loops_a or len(loops_a) != len(loops_b):
        return None
    carried_a, carried_b = (_carried(loops) for loops in (loops_a, loops_b))
    operations_a, operations_b = _operations(forms_a, loops_a), _operations(forms_b, loops_b)
    more, fewer = operations_b - operations_a, operations_a - operations_b
    if carried_b < carried_a and _again(more, fewer, operations_a):
        only, saved, again = "B", carried_a - carried_b, more
    elif carried_a < carried_b and _again(fewer, more, operations_b):
        only, saved, again = "A", carried_b - carried_a, fewer
    else:
        return None
    text = (
        f"remat in {only} only: its loops save {count(saved, 'value')} fewer for the backward and compute "
        f"{count(again.total(), 'operation')} again ({', '.join(op for op, _ in again.most_common(4))})"
    )
    names_a, names_b = (
        tuple(name_of(graph, form.home(n), form.origins[n]) for form, n in loops)
        for graph, loops in ((a, loops_a), (b, loops_b))
    )
    return Cause("remat_changed", text, "", _REMAT_ADVICE, names_a, names_b)


def _again(more: Counter[str], fewer: Counter[str], others: Counter[str]) -> bool:
    """Are operations computed again that the loops of the other graph have? Fusing turns a few into others."""
    known = sum(n for op, n in more.items() if op in others)
    return not fewer and 2 * known > more.total()


def _loops(forms: Forms) -> Iterator[tuple[Form, int]]:
    for form in forms.values():
        for node in form.called:
            if form.labels[node][0] == "while" and form.live[node]:
                yield form, node


def _carried(loops: list[tuple[Form, int]]) -> int:
    return sum(len(elements(form.origins[node].shape)) for form, node in loops)


def _operations(forms: Forms, loops: list[tuple[Form, int]]) -> Counter[str]:
    """The operations of loops, those apart that only move values."""
    bodies = [forms[name] for form, node in loops for role, name in form.called[node] if role == "body"]
    return Counter(
        label[0]
        for body in bodies
        for node, label in enumerate(body.labels)
        if body.live[node] and label[0] not in _BOOKKEEPING
    )
