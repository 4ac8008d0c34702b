"""Loops and switches of two graphs: how many steps and branches they have."""

from __future__ import annotations

from retrograd.core.wording import count
from retrograd.graph.form import Form
from retrograd.graph.schema import Cause

Forms = dict[str, Form]
_STEPS_ADVICE = "the length of a scan is compiled into the graph: keep it the same, or pad to one length"
_BRANCHES_ADVICE = "every branch is compiled: give the switch the same list of functions at every step"


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


def steps_cause(sizes: dict[str, list[tuple[str, str]]]) -> list[Cause]:
    """One cause for each other number of steps or branches, with the loops or switches that have it."""
    causes: list[Cause] = []
    for text, names in sizes.items():
        noun, advice = ("loop", _STEPS_ADVICE) if text.startswith("scan") else ("switch", _BRANCHES_ADVICE)
        many = f", in {count(len(names), noun)}" if len(names) > 1 else ""
        sides = tuple(a for a, _ in names), tuple(b for _, b in names)
        causes.append(Cause("loop_changed", f"{text}{many}", "", advice, *sides, len(names)))
    return causes
