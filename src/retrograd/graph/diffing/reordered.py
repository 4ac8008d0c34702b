"""Order: the same parameters, outputs and operands in another order, or differently connected."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from retrograd.core.alignment import chain
from retrograd.core.wording import count
from retrograd.graph.diffing.literals import shown
from retrograd.graph.diffing.side_by_side import Half, View
from retrograd.graph.schema import Cause

_WIDEST = 60  # of a constant in a sentence
_LIVE = "parameters are numbered as the trace meets them: keep the order in which tensors are made and used"


def parameters(view: View) -> tuple[list[Cause], str]:
    """A cause if parameters stand in another order; if numbers only moved up or down to make room, a remark."""
    a, b = view.a.form, view.b.form
    pairs = [(a.numbers[n], b.numbers[view.a.partner[n]]) for n in a.parameters if view.a.partner[n] >= 0]
    shifted = [(i, j) for i, j in pairs if i != j]
    if not shifted:
        return [], ""
    kept = set(chain(pairs))
    out_of_order = [pair for pair in pairs if pair not in kept]
    counts = Counter(j - i for i, j in shifted)
    histogram = ", ".join(f"{shift:+d} x{n}" if n > 1 else f"{shift:+d}" for shift, n in counts.most_common(4))
    if not out_of_order:
        return (
            [],
            f"the other parameters keep their order; {len(shifted)} of {len(pairs)} have another number ({histogram})",
        )
    moved = {i for i, _ in shifted}
    names_a = view.a.names(n for n in a.parameters if a.numbers[n] in moved and view.a.partner[n] >= 0)
    names_b = view.b.names(view.a.partner[n] for n in a.parameters if a.numbers[n] in moved and view.a.partner[n] >= 0)
    text = f"{len(shifted)} of {len(pairs)} parameters moved: the same ones in another order (shifts {histogram})"
    text += view.a.saved(n for n in a.parameters if a.numbers[n] in {i for i, _ in out_of_order})
    return [Cause("parameter_moved", text, "", _LIVE, names_a, names_b, len(shifted))], ""


def outputs(view: View) -> list[Cause]:
    """A cause if outputs that both have stand in another order."""
    pairs = sorted(view.outputs)
    kept = set(chain(pairs))
    moved = [pair for pair in pairs if pair not in kept]
    if not moved:
        return []
    a = [view.a.form.outputs[i] for i, _ in moved]
    b = [view.b.form.outputs[j] for _, j in moved]
    i, j = moved[0]
    many = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    text = f"output {i} {view.a.describe(a[0])}{many} in another order: now output {j}{_saves(view)}"
    advice = "outputs are live tensors in the order of their creation: make them in the same order at every step"
    sides = view.a.names(a), view.b.names(b)
    return [Cause("output_moved", text, view.b.best_line(b), advice, *sides, len(moved))]


def operands(view: View) -> list[Cause]:
    """Causes for operations and outputs that are the same but read other values, which both graphs have."""
    causes: list[Cause] = []
    form_a, form_b = view.a.form, view.b.form
    entry = form_a.computation is view.a.graph.main
    carries = not entry and len(form_a.parameters) != len(form_b.parameters)
    for a in sorted(view.rewired):
        b = view.a.partner[a]
        if not form_a.live[a]:
            continue
        places = _rewired(view, form_a.operands[a], form_b.operands[b])
        # Which of the values of one shape is which, that a loop carries more or fewer of, nobody knows.
        places = [
            k for k in places if not (carries and _both_carried(view, form_a.operands[a][k], form_b.operands[b][k]))
        ]
        if places and not _carries_otherwise(view, a, b):
            causes.append(_operand_cause(view, a, b, places))
        elif len(form_a.operands[a]) != len(form_b.operands[b]) and not _explained(view, a, b):
            counts = f"{len(form_a.operands[a])} -> {count(len(form_b.operands[b]), 'operand')}"
            causes.append(_rewire(view, a, b, f"{view.a.describe(a)}: {counts}"))
    for i, j in view.outputs:
        x, y = form_a.outputs[i], form_b.outputs[j]
        if _rewired(view, (x,), (y,)):
            text = f"output {i} is {view.a.describe(x)} ({view.a.name(x)}) -> {view.b.describe(y)} ({view.b.name(y)})"
            text += _saves(view) if view.a.describe(x) == view.b.describe(y) else ""
            causes.append(_rewire(view, x, y, text))
    return _together(causes)


def _saves(view: View) -> str:
    """Of a forward of AOTAutograd: most of what it returns is what its backward reads."""
    names = [view.a.form.origins[n].name for n in view.a.form.parameters]
    forward = view.a.graph.format == "fx" and any(name.startswith("primals_") for name in names)
    return ", saved for backward" if forward and not any(name.startswith("tangents_") for name in names) else ""


def _together(causes: list[Cause]) -> list[Cause]:
    """Causes about the same operation at the same line as one, worded as the first."""
    groups: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        groups.setdefault((cause.what.split(":")[0], cause.where), []).append(cause)
    return [
        replace(
            alike[0],
            what=alike[0].what + (f", and {len(alike) - 1} more like it" if len(alike) > 1 else ""),
            a=tuple(n for c in alike for n in c.a),
            b=tuple(n for c in alike for n in c.b),
            count=len(alike),
        )
        for alike in groups.values()
    ]


def _rewired(view: View, operands_a: tuple[int, ...], operands_b: tuple[int, ...]) -> list[int]:
    """Places where both read a value that the other has as well, and not the same one."""
    if len(operands_a) != len(operands_b):
        return []
    return [
        k
        for k, (x, y) in enumerate(zip(operands_a, operands_b, strict=True))
        if view.a.partner[x] != y
        and view.a.shared(x)
        and view.b.shared(y)
        # Which of several equal constants is the partner says nothing.
        and not (x in view.a.form.literals and view.a.exact[x] == view.b.exact[y])
    ]


def _carries_otherwise(view: View, a: int, b: int) -> bool:
    """Do two loops carry values of other shapes, in another order? What their bodies compute says why."""
    sides = (view.a.form, a), (view.b.form, b)
    shapes = [[form.labels[o][1] for o in form.operands[node]] for form, node in sides]
    return view.a.form.labels[a][0] == "while" and shapes[0] != shapes[1]


def _both_carried(view: View, a: int, b: int) -> bool:
    """Are both parameters, of one shape?"""
    sides = (view.a.form, a), (view.b.form, b)
    return all(form.numbers[n] >= 0 for form, n in sides) and view.matching.alike(a, b)


def _explained(view: View, a: int, b: int) -> bool:
    """Is an operand of either one that only its side has? Then the insertion or removal says it."""
    sides = (view.a, a), (view.b, b)
    return any(not half.shared(o) for half, node in sides for o in half.form.operands[node])


def _operand_cause(view: View, a: int, b: int, places: list[int]) -> Cause:
    operands_a, operands_b = view.a.form.operands[a], view.b.form.operands[b]
    if len(places) == 2:
        i, j = places
        if view.a.partner[operands_a[i]] == operands_b[j] and view.a.partner[operands_a[j]] == operands_b[i]:
            return _rewire(view, a, b, f"{view.a.describe(a)}: operands {i} and {j} exchanged")
    k = places[0]
    x, y = operands_a[k], operands_b[k]
    more = f" (and {count(len(places) - 1, 'more operand')})" if len(places) > 1 else ""
    text = (
        f"{view.a.describe(a)}: operand {k} is {view.b.describe(y)} ({_told(view.b, y)}) instead of "
        f"{view.a.describe(x)} ({_told(view.a, x)}){more}"
    )
    return _rewire(view, a, b, text)


def _told(half: Half, node: int) -> str:
    """A constant by its number, anything else by its name."""
    opcode, shape, literal = half.form.labels[node]
    return shown(shape, literal, _WIDEST) if opcode == "constant" and literal else half.name(node)


def _rewire(view: View, a: int, b: int, text: str) -> Cause:
    line = view.b.where(b) or view.a.where(a)
    advice = "the operation at this line is given another value: a variable that was assigned in another order?"
    return Cause("operand_changed", text, line, advice, (view.a.name(a),), (view.b.name(b),))
