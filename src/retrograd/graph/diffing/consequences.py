"""Consequences of causes: what follows from other numbers of steps, from remat, from other shapes or dtypes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from retrograd.graph.diffing.literals import same_in
from retrograd.graph.diffing.sizes import NUMBER, changed_products, changed_sizes, close, differing, explained
from retrograd.graph.schema import COMPILES_AGAIN, Cause, Kind

_TYPED = re.compile(r"\b((?:bf|f|s|u|c|pred)\d*\w*)\[")
STRUCTURE = frozenset(
    {
        "shape_changed", "attribute_changed", "operand_changed", "output_added", "output_removed", "output_moved",
        "parameter_added", "parameter_removed", "parameter_moved", "instruction_inserted", "instruction_removed",
        "instruction_replaced", "duplicate_changed",
    }
)  # fmt: skip
_FLAG = re.compile(r"(?<![\[\w])(?:True|False)(?=[,)])")
_MASK = re.compile(r"\[(?:(?:True|False)(?:, )?)++\]")
# What only carries values into a loop and out of it, and what has the shape that its users want.
PACKS = frozenset({"broadcast", "broadcast-in-dim", "get-tuple-element", "constant", "bitcast", "copy"})
_SHAPED = frozenset({"broadcast", "broadcast-in-dim", "iota", "constant"})
_HANDED = re.compile(r"output \d+ is parameter (\S+) \S+ -> parameter (\S+) ")
_WIDE = frozenset({"f32", "f64", "s32", "u32", "s64", "pred"})  # what a program has beside the dtype it computes in
_BROUGHT = re.compile(r", with (\d+) (?:new )?parameter")
_COPIES = frozenset({"aten.detach.default", "aten.alias.default", "aten.clone.default", "copy", "bitcast"})
_COUNT = re.compile(r"(?:[+-] )?(?:\d+ x )?")
_ONE_FOR_ANOTHER = re.compile(r"operand \d+ is (parameter \S+) \(\S+\) instead of \1 \(")
# A scalar that is spread where the other graph spreads what it computes.
_SPREAD = re.compile(
    r"(?:broadcast|broadcast-in-dim|convert) .* (?:is|instead of) constant |(?:\d+ x )?broadcast.* \w+={}(?: ->|$)"
)
_EACH = re.compile(r"(\w+\[[\d,]*\])(?: x(\d+))?")
_READ = frozenset({"operand_changed", "attribute_changed"})
_KEYS = re.compile(r"(?:\d+ x )?slice u32\[(?:\d+,)+2\] ")  # of a random key, two words each
_SIGNATURE = frozenset({"parameter_added", "parameter_removed", "parameter_moved"})
_CARRIED = _SIGNATURE | {"output_added", "output_removed", "output_moved"}
_MOVED = COMPILES_AGAIN | {"parameter_moved", "output_moved"}
COMES_OR_GOES: frozenset[Kind] = frozenset(
    {"parameter_added", "parameter_removed", "instruction_inserted", "instruction_removed", "instruction_replaced"}
)
Texts = Mapping[Cause, list[tuple[str, str]]]


@dataclass(frozen=True)
class Placed:
    """A cause with the computation that it stands in ("the body of while while.3", "" for the entry).

    `changes` are texts of what changed, before and after, `position` is how far into the program it stands. Of a
    window, `follow` are the shapes of parameters that follow from it; what `fits` is there or not for such a shape.
    """

    cause: Cause
    within: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    position: float = 0.0
    follow: tuple[tuple[str, str], ...] | None = None
    fits: bool = False


def first_causes(causes: list[Placed]) -> tuple[list[Placed], int]:
    """The causes without those that follow from others, and how many places these have."""
    kept, dropped = list(causes), 0
    for rule in (
        _of_calls,
        _of_parameters,
        _of_flags,
        _of_masks,
        _of_others,
        _of_copies,
        _of_packs,
        _of_order,
        _of_strangers,
        _of_remat,
        _of_keys,
        _of_windows,
        _of_lengths,
        _of_sizes,
        _of_arguments,
        _of_dtypes,
        _of_saved,
    ):
        follows = set(map(id, rule(kept)))
        follows = follows if len(follows) < len(kept) else set[int]()  # something differs: there is a first cause
        dropped += sum(placed.cause.count for placed in kept if id(placed) in follows)
        kept = [placed for placed in kept if id(placed) not in follows]
    return kept, dropped


def _of_calls(causes: list[Placed]) -> Iterator[Placed]:
    """What a called computation takes and returns: its caller, or what is computed in it, says why."""
    carried = [p for p in causes if p.within and (p.cause.kind in _CARRIED or _carries(p.cause.what))]
    if any(p.within for p in causes if p not in carried):
        carried += [p for p in causes if not p.within and _only_packs(p.cause)]
        callers = {p.within.rpartition(": ")[2].partition(" of ")[2] for p in causes if p not in carried}
        carried += [p for p in causes if p not in carried and _calls(p, callers)]
    if len(carried) < len(causes):
        yield from carried


def _calls(placed: Placed, callers: set[str]) -> bool:
    """Does a caller only return other shapes, or another number of values, than what it calls makes?"""
    called = any(f"{name} {node}" in callers for name in operations_of(placed.cause.what) for node in placed.cause.a)
    sides = [[text.partition(" ")[0] for text in change] for change in placed.changes]
    return called and bool(sides) and all(before != after for before, after in sides)


def _carries(text: str) -> bool:
    """Is this a parameter of a loop, or one that it hands on, of another shape?"""
    handed = _HANDED.match(text)
    return text.startswith("parameter") or (handed is not None and handed[1] != handed[2])


def _only_packs(cause: Cause) -> bool:
    """Is this what a loop is given to fill, and takes out of it: zeros that are broadcast, elements of its tuple?"""
    sides = [operations_of(text) for text in cause.what.split(" replaced by ")]
    if cause.kind in ("shape_changed", "dtype_changed", "attribute_changed"):
        return sides[0] == {"get-tuple-element"} or (cause.kind == "shape_changed" and sides[0] <= _SHAPED)
    if cause.kind == "operand_changed":
        return cause.what.startswith("while: ") and cause.what.endswith(" operands")
    packs = cause.kind.startswith("instruction") and all(own and own <= PACKS for own in sides)
    return packs and any("get-tuple-element" in own for own in sides)


def only_copies(cause: Cause) -> bool:
    """Are these operations that compute nothing, which come and go with what does?"""
    return cause.kind in ("instruction_inserted", "instruction_removed") and operations_of(cause.what) <= _COPIES


def operations_of(text: str) -> set[str]:
    """The names of operations with which a cause begins: "+ 2 x broadcast, add f32[4] x3" names two."""
    names = set[str]()
    for word in text[_COUNT.match(text).end() :].split(" "):  # type: ignore[union-attr]
        names.add(word.removesuffix(","))
        if not word.endswith(","):
            break
    return names


def _of_parameters(causes: list[Placed]) -> Iterator[Placed]:
    """Outputs that renew parameters which only one side has."""
    for parameters, outputs in (("parameter_added", "output_added"), ("parameter_removed", "output_removed")):
        own = sum(p.cause.count for p in causes if p.cause.kind == parameters and not p.within)
        renewed = [p for p in causes if p.cause.kind == outputs and not p.within]
        own += sum(int(n) for p in renewed for n in _BROUGHT.findall(p.cause.what)) if own else 0
        if own and sum(p.cause.count for p in renewed) <= own:
            yield from renewed


def _of_flags(causes: list[Placed]) -> Iterator[Placed]:
    """Parameters that one side has for an operation at the line and as often as a flag of another one there changed.

    A batch norm that is evaluated counts no batches.
    """
    flags = {(p.cause.where, p.cause.count) for p in causes if _only_flags(p, _FLAG)}
    for placed in causes:
        if placed.cause.kind in _SIGNATURE and placed.cause.where and (placed.cause.where, placed.cause.count) in flags:
            yield placed


def _of_masks(causes: list[Placed]) -> Iterator[Placed]:
    """Which gradients an operation of a backward is asked for, where something is computed in another way."""
    masks = [p for p in causes if _only_flags(p, _MASK)]
    if len(masks) < sum(p.cause.kind not in _MOVED for p in causes):
        yield from masks


def _of_others(causes: list[Placed]) -> Iterator[Placed]:
    """Constants that would be one number of several, or several of one: other ones, of what comes or goes."""
    constants = [(p, pair) for p in causes if p.cause.kind == "constant_changed" for pair in _scalars(p)]
    if any(p.cause.kind.startswith("instruction") or p.cause.kind in _SIGNATURE for p in causes):
        for placed, (x, y) in constants:
            if any(_same(x, before) != _same(y, after) for _, (before, after) in constants):
                yield placed


def _scalars(placed: Placed) -> list[tuple[float, float]]:
    pairs = [differing(before, after) for before, after in placed.changes]
    return [own[0] for own in pairs if len(own) == 1]


def _same(x: float, y: float) -> bool:
    return x == y or close(x, y)


def _of_copies(causes: list[Placed]) -> Iterator[Placed]:
    """Operations that compute nothing, where something is computed in another way."""
    copies = [p for p in causes if only_copies(p.cause)]
    if len(copies) < sum(p.cause.kind not in _MOVED for p in causes):
        yield from copies


def _of_packs(causes: list[Placed]) -> Iterator[Placed]:
    """Values that are only spread, handed in or taken out, where something is computed in another way.

    A number among them is told, unless it is in the same computation that something comes or goes.
    """
    packs = [p for p in causes if _only_spreads(p.cause) or (p.cause.kind == "shape_changed" and _only_packs(p.cause))]
    packs += [p for p in causes if p.cause.kind in _READ and _SPREAD.match(p.cause.what)]
    places = {p.within for p in causes if packs and p.cause.kind in COMES_OR_GOES and p not in packs}
    yield from (p for p in packs if places and (p.within in places or " with " not in p.cause.what))


def _of_order(causes: list[Placed]) -> Iterator[Placed]:
    """Another order of parameters, and which of several of one shape is read, where parameters come or go."""
    signature = [p for p in causes if p.cause.kind in ("parameter_added", "parameter_removed") and not p.within]
    if signature:
        kinds = ("parameter_moved", "output_moved")
        yield from (
            p for p in causes if not p.within and (p.cause.kind in kinds or _ONE_FOR_ANOTHER.search(p.cause.what))
        )


def _of_strangers(causes: list[Placed]) -> Iterator[Placed]:
    """Parameters that come and go in two shapes in which others have changed: without a name, nobody knows which."""
    pairs = {change for p in _reshaped_parameters(causes) for change in p.changes}
    sides = [
        [p for p in causes if p.cause.kind == kind and not p.within]
        for kind in ("parameter_removed", "parameter_added")
    ]
    if pairs and [len(side) for side in sides] == [1, 1]:
        before, after = (Counter(_shapes_of(side[0].cause.what)) for side in sides)
        same = sum(before.values()) == sides[0][0].cause.count and sides[0][0].cause.count == sides[1][0].cause.count
        alike = len(before) == len(after) == 1
        if same and alike and (f"{next(iter(before))} ", f"{next(iter(after))} ") in pairs:
            yield from (side[0] for side in sides)


def _shapes_of(text: str) -> Iterator[str]:
    """The shapes of parameters that come or go, each as often as there are: "+ 3 parameters f32[4] x2, f32[], used"."""
    for shape, often in _EACH.findall(text.partition(", used by")[0]):
        yield from [shape] * int(often or 1)


def _only_spreads(cause: Cause) -> bool:
    """Do only operations come or go that give a value another shape for what reads it?"""
    sides = [operations_of(text) for text in cause.what.split(" replaced by ")]
    return cause.kind.startswith("instruction") and all(own <= PACKS for own in sides)


def _only_flags(placed: Placed, form: re.Pattern[str]) -> bool:
    """Do the arguments of an operation differ in flags of this form alone?"""
    texts = [[form.sub("", text) for text in change] for change in placed.changes]
    attributes = placed.cause.kind in ("attribute_changed", "state_changed")
    return attributes and bool(texts) and all(before == after for before, after in texts)


def _of_saved(causes: list[Placed]) -> Iterator[Placed]:
    """What a forward of AOTAutograd saves and its backward takes, where something is computed in another way."""
    saved = [p for p in causes if not p.within and "saved for backward" in p.cause.what]
    if any(p.cause.kind not in _MOVED for p in causes if p not in saved):
        yield from saved


def _of_remat(causes: list[Placed]) -> Iterator[Placed]:
    """Values that are saved or not, and what is computed again, all around loops."""
    if any(placed.cause.kind == "remat_changed" for placed in causes):
        yield from (
            p
            for p in causes
            if p.cause.kind in (STRUCTURE if p.within else STRUCTURE - _SIGNATURE)
            or (p.cause.kind in _SIGNATURE and any(_part_of(p.cause, r.cause) for r in causes))
            or (p.within and p.cause.kind != "constant_changed")
        )


def _part_of(cause: Cause, remat: Cause) -> bool:
    """Are these the values that one backward takes and the other computes again?"""
    return remat.kind == "remat_changed" and not {*cause.a, *cause.b}.isdisjoint({*remat.a, *remat.b})


def _of_keys(causes: list[Placed]) -> Iterator[Placed]:
    """Which of the keys of a split is drawn from, where something that may have drawn comes or goes."""
    if any(p.cause.kind.startswith("instruction") for p in causes):
        yield from (p for p in causes if p.cause.kind == "attribute_changed" and _KEYS.match(p.cause.what))


def _of_windows(causes: list[Placed]) -> Iterator[Placed]:
    """Parameters in the shapes of those that follow from a window: in a loop, or of an optimiser's state."""
    shapes = {pair for p in causes for pair in p.follow or ()}
    for placed in _reshaped_parameters(causes) if shapes else ():
        if all((before.partition(" ")[0], after.partition(" ")[0]) in shapes for before, after in placed.changes):
            yield placed


def _of_lengths(causes: list[Placed]) -> Iterator[Placed]:
    """Numbers of steps that differ in several ways, by as much as the sizes of what the program is given."""
    loops = [p for p in causes if p.cause.kind == "loop_changed"]
    sizes = {pair for p in _reshaped_parameters(causes) for change in p.changes for pair in changed_sizes(*change)}
    pairs = [pair for p in loops for pair in differing(*_sides(p.cause.what))]
    if len(loops) > 1 and sizes and all(explained(pair, sizes) for pair in pairs):
        yield from loops


def _of_sizes(causes: list[Placed]) -> Iterator[Placed]:
    """Shapes, sizes and constants that are to each other as the numbers of steps, or the sizes of parameters."""
    steps = {pair for p in causes if p.cause.kind == "loop_changed" for pair in differing(*_sides(p.cause.what))}
    arguments = _arguments(causes)
    shaped = _reshaped_parameters(causes)
    shaped = shaped or sorted((p for p in causes if reshapes(p)), key=lambda p: (bool(p.within), p.position))[:1]
    sizes = steps or {pair for p in shaped for before, after in p.changes for pair in changed_sizes(before, after)}
    within = shaped[0].within if shaped and not steps else ""  # what a loop begins with says nothing of the rest
    for placed in causes:
        follows = placed.cause.kind in ("shape_changed", "constant_changed", "attribute_changed") and placed.changes
        follows = follows and placed.within.startswith(within)
        follows = follows and placed.follow is None  # no size explains a window
        if follows and sizes and placed not in arguments and (steps or placed not in shaped):
            pairs = [pair for before, after in placed.changes for pair in differing(before, after)]
            if pairs and all(explained(pair, sizes) for pair in pairs):
                yield placed


def _of_arguments(causes: list[Placed]) -> Iterator[Placed]:
    """What a forward saves in another shape, where an argument of an operation of the backward says why: a stride."""
    if any(_arguments(causes)):
        yield from _reshaped_parameters(causes)


def _arguments(causes: list[Placed]) -> list[Placed]:
    """Other arguments of operations of a backward to which no more than what is saved has another shape.

    An argument that is a size of these tensors, or how many numbers they have in some dimensions, follows from that.
    """
    shaped = _reshaped_parameters(causes)
    if not shaped or not all("saved for backward" in p.cause.what for p in shaped):
        return []
    sizes = {pair for p in shaped for before, after in p.changes for pair in changed_products(before, after)}
    return [
        p
        for p in causes
        if p.cause.kind == "attribute_changed"
        and any("_backward" in name for name in operations_of(p.cause.what))
        and any(pair not in sizes for before, after in p.changes for pair in differing(before, after))
    ]


def _reshaped_parameters(causes: list[Placed]) -> list[Placed]:
    return [p for p in causes if p.cause.kind == "shape_changed" and not p.within and "parameter" in p.cause.what]


def reshapes(placed: Placed) -> bool:
    """Has an operation another shape?"""
    shapes = [[text.partition(" ")[0] for text in change] for change in placed.changes]
    return placed.cause.kind in ("shape_changed", "attribute_changed") and any(a != b for a, b in shapes)


def _sides(text: str) -> tuple[str, str]:
    before, _, after = text.partition(" -> ")
    return NUMBER.findall(before)[-1], NUMBER.findall(after)[0]


def _of_dtypes(causes: list[Placed]) -> Iterator[Placed]:
    """Conversions, and the same operations in the other dtype, where parameters have one."""
    first = [p for p in causes if p.cause.kind == "dtype_changed" and not p.within and "parameter" in p.cause.what]
    dtypes = {d for p in first for change in p.changes for text in change for d in _TYPED.findall(text)}
    if not first:
        first = _first_conversion(causes)
        dtypes = {d for p in first for d in _TYPED.findall(p.cause.what)} - _WIDE
    # What a forward saves in another dtype, it computes in another way.
    arguments = not all("saved for backward" in p.cause.what for p in first)
    for placed in causes if first else ():
        kind, text = placed.cause.kind, placed.cause.what
        if placed in first or kind in COMPILES_AGAIN:
            continue
        other = set(_TYPED.findall(text)) & dtypes
        converts = (arguments and kind.startswith("instruction")) or kind in (
            "dtype_changed",
            "attribute_changed",
            "operand_changed",
        )
        if (converts and other) or (kind == "constant_changed" and all(_rounds(c, dtypes) for c in placed.changes)):
            yield placed


def _first_conversion(causes: list[Placed]) -> list[Placed]:
    """Where something is computed in another dtype, the first cause, if it converts and does nothing else."""
    operations = [p for p in causes if p.cause.kind.startswith("instruction")]
    first = min(operations, key=lambda p: p.position, default=None)
    return [first] if first and "convert" in operations_of(first.cause.what) <= PACKS | {"convert"} else []


def _rounds(change: tuple[str, str], dtypes: set[str]) -> bool:
    """Is one number the other in a dtype that a parameter has, whatever its sign?"""
    numbers = [NUMBER.findall(text.partition(" ")[2]) for text in change]
    if not numbers[0] or [len(side) for side in numbers] != [1, 1]:
        return False
    x, y = (abs(float(side[0])) for side in numbers)
    return any(same_in(dtype, x, y) for dtype in dtypes)
