"""Regions that only one graph has: connected instructions inserted or removed, and the parameters they bring.

Regions that look the same (the update of each parameter's momentum, say) are one cause with a count.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from retrograd.core.wording import count, shortened, some
from retrograd.graph.diffing.consequences import PACKS, operations_of
from retrograd.graph.diffing.literals import added_part, parameter_name, shown
from retrograd.graph.diffing.matching import is_nothing
from retrograd.graph.diffing.side_by_side import Half, View, shapes
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause

# What a block of `with` calls in Dynamo's graphs, in words.
_MODES = {
    "torch.amp.autocast_mode._enter_autocast": "autocast entered with",
    "torch._C._set_grad_enabled": "grad mode set to",
    "torch._C._functorch._vmap_increment_nesting": "vmap entered with",
    "torch._C._enter_inference_mode": "inference mode entered with",
    "torch.autograd.grad_mode._enter_inference_mode": "inference mode entered with",
}
_MOST_OPERATIONS = 8  # in a sentence
_MOST_OFTEN = 2  # of these, what a region has most of
_FLOAT = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")  # 0.1, 1e-05, no size of a shape
_MOVED = 3  # different operations of a region that stands in another place
_WIDEST = 60  # of arguments and numbers in a sentence
# What torch_xla calls its modules.
_LAZY = ("IrToHlo", "SyncTensorsGraph")


@dataclass(frozen=True, slots=True)
class Region:
    """Connected nodes that the other graph lacks; `fed` are partners that use them, `outputs` places among outputs."""

    nodes: tuple[int, ...]
    parameters: tuple[int, ...]
    fed: tuple[int, ...]
    outputs: tuple[int, ...]


def regions(half: Half) -> list[Region]:
    """The regions of one side, but for nodes that are explained already.

    A leaf that several regions use (one more scalar parameter, say) does not connect them, and belongs to the first.
    """
    absent = {n for n in half.alone if is_nothing(half.form.labels[n]) and not half.users[n]}  # returned, not read
    alone = [n for n in half.alone if n not in half.explained and n not in absent]
    inside = set(alone)
    leader = {n: n for n in alone}

    def find(n: int) -> int:
        while leader[n] != n:
            leader[n] = leader[leader[n]]
            n = leader[n]
        return n

    form, users = half.form, half.users
    for n in alone:
        for o in form.operands[n]:
            if o in inside and (form.operands[o] or sum(u in inside for u in users[o]) == 1):
                leader[find(n)] = find(o)
    members: dict[int, list[int]] = defaultdict(list)
    for n in alone:
        if not form.operands[n] and find(n) == n and sum(u in inside for u in users[n]) > 1:
            members[find(next(u for u in users[n] if u in inside))].append(n)
        else:
            members[find(n)].append(n)
    outputs: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(form.outputs):
        outputs[node].append(place)
    return [_region(half, nodes, inside, outputs) for nodes in members.values()]


def _region(half: Half, nodes: list[int], inside: set[int], outputs: dict[int, list[int]]) -> Region:
    fed = {u for n in nodes for u in half.users[n] if u not in inside}
    places = [p for n in nodes for p in outputs.get(n, ())]
    parameters = tuple(n for n in nodes if half.form.numbers[n] >= 0)
    return Region(tuple(sorted(nodes)), parameters, tuple(sorted(fed)), tuple(places))


def find_causes(view: View) -> list[Cause]:
    """Causes for what one side has and the other lacks; outputs that only one side has come with what makes them."""
    causes: list[Cause] = []
    lines: dict[bool, set[str]] = {}  # where regions with parameters stand on each side
    fed: dict[Cause, set[int]] = {}  # nodes of A that read what a cause adds or takes away
    for half, other in ((view.b, view.a), (view.a, view.b)):
        extra = [
            place
            for place, node in enumerate(half.form.outputs)
            if place not in half.paired and node not in half.explained and not is_nothing(half.form.labels[node])
        ]
        connected = regions(half)
        causes += _outputs(half, connected, extra)
        rest = [r for r in connected if r.fed or not set(r.outputs) <= set(extra) or not r.outputs]
        stateful = [r for r in rest if r.parameters and not half.saved(r.parameters)]
        lines[half.added] = {half.best_line(r.nodes) for r in stateful} - {""}
        grouped = _grouped(half, other, rest)
        for cause, members in grouped:  # a loop reads what has nothing to do with each other
            readers = [n for r in members for n in r.fed if half.form.labels[n][0] != "while"]
            fed[cause] = {half.partner[n] if half.added else n for n in readers}
        causes += [cause for cause, _ in grouped]
    # An operation with a bias is replaced by one without: the parameter says it.
    return [
        cause
        for cause in _replaced(causes, fed)
        if not (cause.kind.startswith("instruction_i") and cause.where in lines[False])
        and not (cause.kind.startswith("instruction_rem") and cause.where in lines[True])
    ]


def _outputs(half: Half, candidates: list[Region], extra: list[int]) -> list[Cause]:
    """An output more or less: a tensor alive at the cut, and the line that made it."""
    makers = {p: r for r in candidates for p in r.outputs if not r.fed}
    by_line: dict[tuple[str, str], list[int]] = defaultdict(list)
    fx = half.graph.format == "fx"  # what a forward saves differs as a whole
    for place in extra:
        node = half.form.outputs[place]
        by_line[("", "") if fx else (half.form.labels[node][0], half.where(node))].append(place)
    causes: list[Cause] = []
    for (opcode, line), places in by_line.items():
        nodes = [half.form.outputs[p] for p in places]
        producers = sorted({n for p in places if p in makers for n in makers[p].nodes} | set(nodes))
        numbers = ", ".join(map(str, places[:4])) + (", ..." if len(places) > 4 else "")
        kinds = shapes(half.form.labels[n][1] for n in nodes)
        parameters = [n for n in producers if half.form.numbers[n] >= 0 and half.partner[n] < 0]
        noun = "new parameter" if half.added else "parameter"
        brings = f", with {count(len(parameters), noun)}" if parameters else ""
        tensors = "a tensor" if len(places) == 1 else count(len(places), "tensor")
        meaning, advice = _meaning_of_output(half.graph)
        made_by = opcode or some(list(dict.fromkeys(half.form.labels[n][0] for n in nodes)), 3)
        text = (
            f"{half.sign} output {numbers} {kinds} made by {made_by}{brings}: {tensors} {meaning} in {half.letter} only"
        )
        kind = "output_added" if half.added else "output_removed"
        line = line or half.best_line(producers)
        causes.append(half.cause(kind, text, line, advice, producers, len(places)))
    return causes


def _meaning_of_output(graph: Graph) -> tuple[str, str]:
    """What an output is, and what to do about one more. A lazy graph returns every tensor that is alive at the cut."""
    if graph.format == "fx" and any(ins.name.startswith("tangents_") for ins in graph.main.instructions):
        return "returned as gradient of a parameter or input", "look at which inputs and parameters need a gradient"
    if graph.format == "fx":
        return (
            "returned or saved for backward",
            "look at what the function returns, and which inputs and parameters need a gradient",
        )
    if graph.name.startswith(_LAZY):
        return (
            "alive at the cut",
            "drop the last reference before the step ends (del, or copy to the host), or keep it at every step",
        )
    return "returned", "look at what the function returns: a value for logging, or auxiliary output?"


def _grouped(half: Half, other: Half, candidates: list[Region]) -> list[tuple[Cause, list[Region]]]:
    """Regions at the same line, with new parameters or without, as one cause."""
    alike: dict[tuple[str, bool, bool], list[Region]] = defaultdict(list)
    counts = Counter(half.exact)
    for region in candidates:
        known = all(counts[half.exact[n]] > 1 for n in region.nodes) and _still_read(half, other, region)
        line = "" if region.parameters else half.best_line(region.nodes)
        alike[line, known, bool(region.parameters)].append(region)
    return [(_region_cause(half, other, rs, known), rs) for (_, known, _), rs in alike.items()]


def _still_read(half: Half, other: Half, region: Region) -> bool:
    """Do the users of a region read the same values on the other side, from a twin?"""
    for user in region.fed:
        read = {half.exact[o] for o in half.form.operands[user] if o in region.nodes}
        if half.partner[user] < 0 or not read <= {other.exact[o] for o in other.form.operands[half.partner[user]]}:
            return False
    return True


def _region_cause(half: Half, other: Half, alike: list[Region], known: bool) -> Cause:
    form = half.form
    nodes = [n for r in alike for n in r.nodes]
    instead = _instead(half, other, set(nodes), alike[0].fed)
    parameters = [n for r in alike for n in r.parameters]
    bodies = [n for n in nodes if form.operands[n] or form.labels[n][0] not in ("parameter", "constant", "iota")]
    ops = list(dict.fromkeys(form.labels[n][0] for n in bodies)) or ["constant"]
    line = half.best_line(bodies or nodes)
    times = f"{len(alike)} x " if len(alike) > 1 else ""
    operations = f"{times}{', '.join(_telling(half, bodies, ops))}{', ...' if len(ops) > _MOST_OPERATIONS else ''}"
    if known and not parameters:
        often = "once more" if half.added else "once less"
        text = f"{half.sign} {operations} a second time: the same value is computed {often}"
        return half.cause("duplicate_changed", text, line, _ADVICE["duplicate_changed"], nodes, len(alike))
    if parameters and not (bodies and (half.form.computation is not half.graph.main or half.saved(parameters))):
        kind = "parameter_added" if half.added else "parameter_removed"
        text = f"{half.sign} {_layer(half, parameters)}"
        text += shapes(form.labels[n][1] for n in parameters) + (f", used by {operations}" if bodies else "")
        text += half.saved(parameters)
        return half.cause(kind, text, line, _ADVICE[kind], nodes, len(parameters))
    kind = "instruction_inserted" if half.added else "instruction_removed"
    if modes := [n for n in nodes if form.labels[n][0] in _MODES]:
        words = dict.fromkeys(f"{_MODES[form.labels[n][0]]} {form.labels[n][2].removeprefix('args=')}" for n in modes)
        text = f"{half.sign} {some(list(words), 3)} in {half.letter} only"
        return half.cause(kind, text, line or _next_line(half, nodes[0]), _ADVICE[kind], nodes, len(alike))
    sizes = shapes(form.labels[n][1] for n in bodies or nodes)
    text = f"{half.sign} {operations} {sizes}{_numbers(half, nodes)} in {half.letter} only{instead}"
    return half.cause(kind, text, line, _ADVICE[kind], nodes, len(alike))


def _instead(half: Half, other: Half, nodes: set[int], fed: tuple[int, ...]) -> str:
    """What the first reader of a region reads on the other side: not what is new there, nor what the region reads."""
    inputs = {half.partner[o] for n in nodes for o in half.form.operands[n] if o not in nodes}
    for user in [n for n in fed[:1] if half.partner[n] >= 0]:
        own, others = half.form.operands[user], other.form.operands[half.partner[user]]
        for x, y in zip(own, others, strict=False):
            if x in nodes and other.partner[y] >= 0 and y not in inputs and y not in other.form.literals:
                return f": {half.describe(user)} reads {other.describe(y)} ({other.name(y)}) in {other.letter}"
    return ""


def _telling(half: Half, nodes: list[int], operations: list[str]) -> list[str]:
    """The operations to name where there are many, in order: what the region has most of and the graph least."""
    counts = Counter(label[0] for label in half.form.labels)
    own = Counter(name for n in nodes if (name := half.form.labels[n][0]) not in PACKS)
    most = [name for name, _ in own.most_common(_MOST_OFTEN)]
    rarest = sorted(set(operations) - set(most), key=lambda name: (counts[name], operations.index(name)))
    named = [*rarest[: _MOST_OPERATIONS - len(most)], *most]
    return [name for name in operations if name in named]


def _numbers(half: Half, nodes: list[int]) -> str:
    """The numbers that the other graph has not: scalar constants, or the arguments of a single operation of FX."""
    labels = [half.form.labels[n] for n in nodes]
    if len(labels) == 1 and half.graph.format == "fx" and labels[0][2]:
        return f" {shortened(labels[0][2], _WIDEST)}"
    scalars = [label[1:] for label in labels if label[0] == "constant" and label[1].endswith("[]")]
    numbers = list(dict.fromkeys(shown(shape, literal, _WIDEST) for shape, literal in scalars))
    if half.graph.format == "fx":
        numbers = list(dict.fromkeys(number for label in labels for number in _FLOAT.findall(label[2])))
    return f" with {some(numbers, 3)}" if numbers else ""


def _next_line(half: Half, node: int) -> str:
    """The line of what comes next: Dynamo keeps no line of a mode that a block sets."""
    return next((line for n in range(node + 1, len(half.form)) if (line := half.where(n))), "")


def _layer(half: Half, parameters: list[int]) -> str:
    """Parameters in words: their number, and the layer that they are or a few of their names."""
    names = _parameter_names(half, parameters)
    layer = added_part(names, _parameter_names(half, set(half.form.parameters) - set(parameters)))
    number = count(len(parameters), "parameter")
    if layer:
        return f"{'' if layer.startswith('layer') else 'layer '}{layer}: {number} "
    named = [name for name in names if name]
    return f"{number} {some(named, 2)} " if named else f"{number} "


def _parameter_names(half: Half, nodes: Iterable[int]) -> list[str]:
    return [parameter_name(half.form, n) for n in sorted(nodes)]


_ADVICE: dict[str, str] = {
    "duplicate_changed": "the same expression is written or traced twice: compute it once and keep it",
    "parameter_added": "state that the other step did not have (an optimizer's first step makes its buffers), or a "
    "tensor made between steps: create it before the first step, outside the traced region",
    "parameter_removed": "state that the other step had: is something used only at some steps?",
    "instruction_inserted": "this line runs in B only: a branch in Python, logging, or a check at some steps?",
    "instruction_removed": "this line runs in A only: a branch in Python, logging, or a check at some steps?",
}


def _same_readers(readers: set[int], others: set[int], same_file: bool) -> bool:
    """Are most of two sets of readers the same ones, or in one file all of the fewer?"""
    common, sizes = len(readers & others), sorted((len(readers), len(others)))
    return 2 * common > sizes[1] or (same_file and 0 < common == sizes[0])


def _replaced(causes: list[Cause], fed: dict[Cause, set[int]]) -> list[Cause]:
    """Something removed and inserted that the same operations read, or at one line as often, or moved: replaced."""
    kinds = {"instruction_inserted", "instruction_removed"}
    kept: list[Cause] = []
    for cause in causes:
        others = [k for k in kept if {k.kind, cause.kind} == kinds and not operations_of(k.what) <= PACKS]
        own = fed.get(cause, set())
        pairs = (
            k
            for k in others
            if (k.where, k.count) == (cause.where, cause.count)
            or _same_readers(fed.get(k, set()), own, k.where.split(":")[0] == cause.where.split(":")[0])
            or (operations_of(k.what) == operations_of(cause.what) and len(operations_of(k.what)) >= _MOVED)
        )
        twin = None if operations_of(cause.what) <= PACKS else next(pairs, None)
        if twin is None:
            kept.append(cause)
            continue
        old, new = (cause, twin) if cause.kind == "instruction_removed" else (twin, cause)
        text = f"{old.what[2:].partition(' in A only')[0]} replaced by {new.what[2:].partition(' in B only')[0]}"
        advice = "another operation is called at this line"
        both = Cause("instruction_replaced", text, cause.where, advice, old.a, new.b, cause.count)
        kept[kept.index(twin)] = both
    return kept
