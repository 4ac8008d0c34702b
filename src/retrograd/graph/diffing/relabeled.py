"""Changed labels of partners: constants, shapes, dtypes, attributes, the operation itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from retrograd.core.wording import shortened
from retrograd.graph.brackets import split
from retrograd.graph.diffing.literals import array_change, changed, parameter_name, reduction, rounded, shown
from retrograd.graph.diffing.side_by_side import View, shapes
from retrograd.graph.diffing.windows import CUTS, WINDOWED, Shaped
from retrograd.graph.schema import Cause, Kind
from retrograd.graph.undecided import elided

_SHAPED_BY_USERS = frozenset({"broadcast", "broadcast-in-dim", "iota", "constant"})
_SYMBOL = re.compile(r"(?<=[\[,])\s*(?:[su]\d|<=)")
_MOST_CUTS = 4  # that may explain parameters: each is followed through the program
_WIDEST = 80  # of attributes and constants in a sentence
_INNER = re.compile(r"([\w.]*+=)\{(.*)\}", re.DOTALL)
_DTYPE = re.compile(r"\b([a-z]+\d*\w*)\[")


def find_causes(view: View) -> tuple[list[Cause], int]:
    """One cause for each different change, with a count, and how many nodes differ in shape only as a consequence."""
    form_a, form_b = view.a.form, view.b.form
    moved, shaped = _reshaped(view)
    groups: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    parameters: dict[Kind, list[tuple[int, int]]] = defaultdict(list)
    consequences = 0
    for a, b in enumerate(view.a.partner):
        if b < 0 or form_a.labels[a] == form_b.labels[b] or not (form_a.live[a] or form_b.live[b]):
            continue
        kind = _kind(view, a, b)
        if kind == "constant_changed" and any(elided(form.labels[n][2]) for form, n in ((form_a, a), (form_b, b))):
            continue
        if kind == "constant_changed" and not _read_alike(view, a, b):
            consequences += 1
            continue
        if (a in moved and not moved[a]) or _renumbered(view, a, b) or shaped.forced(a):
            consequences += 1
            continue
        if form_a.numbers[a] >= 0 and kind in ("shape_changed", "dtype_changed"):
            parameters[kind].append((a, b))
            continue
        groups[kind, *_change_text(view, a, b, kind)].append((a, b))
    causes = [_parameters(view, kind, pairs) for kind, pairs in parameters.items()]
    causes += [_cause(view, key, pairs) for key, pairs in groups.items()]
    own = [cause for cause in causes if not shaped.windows.isdisjoint(view.a.changed[cause])]
    view.follow.update(dict.fromkeys(own, shaped.parameters()))
    view.shaped = shaped.nodes
    return causes, consequences


def _read_alike(view: View, a: int, b: int) -> bool:
    """Are two constants read by one operation? Those of what is replaced are others, and those beside it.

    But for a number that is read in what is replaced as well: 7 in a remainder, of which a compiler makes bits for 4.
    """
    sides = [set(half.readers(n)) for half, n in ((view.a, a), (view.b, b))]
    both = [n for n in sides[0] if view.a.partner[n] in sides[1]]
    labels = view.a.form.labels
    return not all(sides) or (
        not all(_reads_replaced(view, n) for n in both)
        or (bool(both) and any(labels[n] == labels[a] for n in view.a.alone if n in view.a.form.literals))
    )


def _reads_replaced(view: View, a: int) -> bool:
    """Does an operation read, on either side, what the other has not or has another operation for?"""
    sides = (view.a, view.b, a), (view.b, view.a, view.a.partner[a])
    return all(any(half.replaced(o, other) for o in half.form.operands[n]) for half, other, n in sides)


def _renumbered(view: View, a: int, b: int) -> bool:
    """Is it the same element of a loop that carries more or fewer, or an element of what another operation makes?"""
    form_a, form_b = view.a.form, view.b.form
    operands = form_a.operands[a], form_b.operands[b]
    if form_a.labels[a][0] != "get-tuple-element" or form_a.labels[a][1] != form_b.labels[b][1]:
        return False
    if [len(own) for own in operands] != [1, 1]:
        return False
    (x,), (y,) = operands
    other = len(form_a.operands[x]) != len(form_b.operands[y]) or form_a.labels[x] != form_b.labels[y]
    return view.a.partner[x] == y and other


def _parameters(view: View, kind: Kind, pairs: list[tuple[int, int]]) -> Cause:
    """Parameters of another shape, as one cause: everything behind them follows."""
    labels_a, labels_b = view.a.form.labels, view.b.form.labels
    entry = view.a.form.computation is view.a.graph.main
    changes = [
        f"{_called(view, a, b) if entry else view.a.form.numbers[a]} {labels_a[a][1]} -> {labels_b[b][1]}"
        for a, b in sorted(pairs, key=lambda pair: -labels_a[pair[0]][1].count(","))
    ]
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    dynamic = any(_symbols(labels_b[b][1]) > _symbols(labels_a[a][1]) for a, b in pairs)
    text = (
        f"parameter{'s' if len(changes) > 1 else ''} {'; '.join(changes[:3])}{more}"
        + ": a size became dynamic" * dynamic
        + view.a.saved(a for a, _ in pairs)
    )
    return _pairs_cause(view, kind, text, pairs)


def _called(view: View, a: int, b: int) -> str:
    """The number of a parameter, and its name where both sides have one."""
    name = parameter_name(view.b.form, b)
    return f"{view.a.form.numbers[a]}{f' {name}' if name else ''}"


def _symbols(shape: str) -> int:
    """How many sizes of a shape are symbols, as torch.compile names them (s77), or bounds (<=8)."""
    return len(_SYMBOL.findall(shape))


def _reshaped(view: View) -> tuple[dict[int, bool], Shaped]:
    """Partners whose shape or dtype differs: is it here that it began? And what windows gave another shape.

    It began where no operand has it. If a parameter of the entry has it, all others follow from that: a batch of
    another size reaches broadcasts of constants, too, which have no operand that says so. These have the shape that
    users want. No parameter explains a window, and what this explains began here.
    """
    form_a, form_b = view.a.form, view.b.form
    origins: dict[int, bool] = {}
    for a, b in enumerate(view.a.partner):
        if b >= 0 and form_a.labels[a][1] != form_b.labels[b][1]:
            origins[a] = not any(o in origins for o in form_a.operands[a])
    shaped = Shaped(view, origins, _windows(view) if origins else ())
    if not shaped.windows and any(form_a.numbers[a] >= 0 for a in origins):
        shaped = next((own for own in _cuts(view, origins) if own.parameters()), shaped)
    began = {a for a, first in origins.items() if first and form_a.numbers[a] < 0}
    began = {a for a in began if form_a.labels[a][0] not in _SHAPED_BY_USERS}
    # What a loop carries has the shape that the loop makes, unless nothing in it begins with another.
    entry = form_a.computation is view.a.graph.main
    if any(form_a.numbers[a] >= 0 for a in origins) and (entry or not began):
        own = {a for a in origins if form_a.numbers[a] >= 0} - shaped.nodes | shaped.windows
        return {a: a in own for a in origins}, shaped
    if began:
        return {a: a in began for a in origins}, shaped
    return origins, shaped


def _windows(view: View) -> set[int]:
    """Windows of which attributes changed, and no operand's shape."""
    labels, partner, live = view.a.form.labels, view.a.partner, view.a.form.live
    kinds = {op for op in {label[0] for label in labels} if WINDOWED.search(op)}
    own = [a for a, label in enumerate(labels) if label[0] in kinds and partner[a] >= 0] if kinds else []
    return {a for a in own if live[a] and _own_attributes(view, a, partner[a])}


def _cuts(view: View, origins: dict[int, bool]) -> Iterator[Shaped]:
    """What the first few slices and paddings would explain of which attributes changed, and no operand's shape."""
    labels, partner = view.a.form.labels, view.a.partner
    begin = [a for a, first in origins.items() if first and view.a.form.live[a] and CUTS.search(labels[a][0])]
    for a in [a for a in begin if _own_attributes(view, a, partner[a])][:_MOST_CUTS]:
        yield Shaped(view, origins, {a}, cut=a)


def _kind(view: View, a: int, b: int) -> Kind:
    (op_a, shape_a, _), (op_b, shape_b, _) = view.a.form.labels[a], view.b.form.labels[b]
    if op_a != op_b:
        return "instruction_replaced"
    if shape_a != shape_b and not _own_attributes(view, a, b):
        return "dtype_changed" if _DTYPE.findall(shape_a) != _DTYPE.findall(shape_b) else "shape_changed"
    if view.a.form.origins[a].has_effect:
        return "state_changed"
    return "constant_changed" if op_a == "constant" else "attribute_changed"


def _own_attributes(view: View, a: int, b: int) -> bool:
    """Do attributes of an operation differ that no shape of its operands explains: windows, axes?"""
    form_a, form_b = view.a.form, view.b.form
    same = all(
        form_a.labels[x][1] == form_b.labels[y][1] for x, y in zip(form_a.operands[a], form_b.operands[b], strict=False)
    )
    return bool(form_a.operands[a]) and same and form_a.labels[a][2] != form_b.labels[b][2]


def _change_text(view: View, a: int, b: int, kind: str) -> tuple[str, str, str]:
    """Operation, before and after, short: the attributes that differ, not all, and of several shapes one change."""
    (op_a, shape_a, attrs_a), (op_b, shape_b, attrs_b) = view.a.form.labels[a], view.b.form.labels[b]
    if kind == "instruction_replaced":
        return "", f"{op_a} {shape_a}", f"{op_b} {shape_b}"
    if kind in ("shape_changed", "dtype_changed"):
        return "", f"{op_a} {shape_a}", shape_b
    if kind == "constant_changed" and not shape_a.endswith("[]") and (where := array_change(shape_a, attrs_a, attrs_b)):
        left, _, right = where.partition(" -> ")
        return "", f"constant {shape_a}, {left}", right
    if kind == "constant_changed":
        if shape_a == shape_b:
            left, right = changed(shape_a, attrs_a, attrs_b, _WIDEST)
            return "", f"constant {shape_a} {left}", right
        return "", f"constant {shape_a} {shown(shape_a, attrs_a, _WIDEST)}", shown(shape_b, attrs_b, _WIDEST)
    only_a, only_b = split(attrs_a), split(attrs_b)
    left = rounded(", ".join(part for part in only_a if part not in only_b))
    right = rounded(", ".join(part for part in only_b if part not in only_a))
    if left == right:
        left, right = attrs_a, attrs_b
    if max(len(left), len(right)) > _WIDEST:
        left, right = _inner(left, right)
    right = f"{shortened(right, _WIDEST) or '(none)'}{reduction(op_a, attrs_a, attrs_b)}"
    return op_a, shortened(left, _WIDEST) or "(none)", right


def _inner(left: str, right: str) -> tuple[str, str]:
    """What differs within two long attributes: backend_config={... trans_x = 78 : ui8 ...}, not its beginning."""
    sides = [_INNER.fullmatch(text) for text in (left, right)]
    if not all(sides) or sides[0][1] != sides[1][1]:  # type: ignore[index]
        return left, right
    parts = [split(side[2]) for side in sides if side]
    before, after = (", ".join(p for p in own if p not in other) for own, other in (parts, parts[::-1]))
    name = sides[0][1]  # type: ignore[index]
    return f"{name}{{... {before}}}", f"{name}{{... {after}}}"


_ADVICE: dict[str, str] = {
    "constant_changed": "a Python number went into the graph as a constant: pass it as a tensor, or keep it the same "
    "at every step",
    "shape_changed": "pad to one size, drop the last incomplete batch, or mark the dimension dynamic",
    "dtype_changed": "look for a cast, autocast or a default dtype that differs between the two",
    "attribute_changed": "an argument of the operation differs: a slice bound or an axis that depends on rank or step?",
    "state_changed": "a state is set or a tensor is changed in another way: an argument that depends on the step?",
    "instruction_replaced": "another operation is called at this line: a branch in Python, or another version?",
}


def _cause(view: View, key: tuple[str, ...], pairs: list[tuple[int, int]]) -> Cause:
    kind, operation, before, after = key
    if operation:
        sizes = shapes({view.a.form.labels[a][1]: 1 for a, _ in pairs}, 2)
        before = f"{operation} {sizes} {before}"
    many = f"{len(pairs)} x " if len(pairs) > 1 else ""
    verb = "replaced by" if kind == "instruction_replaced" else "->"
    text = f"{many}{before} {verb} {after}"
    return _pairs_cause(view, kind, text, pairs)  # type: ignore[arg-type]


def _pairs_cause(view: View, kind: Kind, text: str, pairs: list[tuple[int, int]]) -> Cause:
    cause = view.cause(kind, text, _ADVICE[kind], [a for a, _ in pairs], [b for _, b in pairs], len(pairs))
    view.a.changed[cause], view.b.changed[cause] = [a for a, _ in pairs], [b for _, b in pairs]
    labels_a, labels_b = view.a.form.labels, view.b.form.labels
    view.changes[cause] = tuple({(" ".join(labels_a[a][1:]), " ".join(labels_b[b][1:])): None for a, b in pairs})
    return cause
