"""Differences that compile again and compute the same: donation, layouts, devices, partitions, shardings, fusions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from retrograd.core.wording import shortened
from retrograd.graph import keys
from retrograd.graph.brackets import split
from retrograd.graph.diffing.matching import match
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause
from retrograd.graph.value_names import name_of

_DONATION = ("input_output_alias", "buffer_donor")
_DONOR = re.compile(r"\(([0-9]{1,9}), *\{")
_LAYOUTS = "entry_computation_layout"
# Attributes of a module that count even where something else differs; the others follow from it.
_ALWAYS = ("num_partitions", "replica_count", "num_replicas")
_MESH = "sdy.mesh"
_WIDEST = 100
_ADVICE = {
    "aliasing_changed": "a graph compiles again if other inputs are donated: donate the same ones at every step",
    "module_changed": "keep the mesh, the number of devices and the flags of the compiler the same at every step",
    "placement_changed": "another device, layout, sharding or memory: make the tensor in the same way at every step",
}
_TRAINED_ADVICE = "a parameter has a gradient, and with it the backward another output: is it meant to be trained?"
_HELD = re.compile(r"_(buffers|parameters)_")
_BARRIERS_ADVICE = "no operation moves across a barrier, nor is fused: jax.checkpoint or torch_xla puts them elsewhere"
Digests = Callable[[Form, Form], tuple[list[bytes], list[bytes]]]


def module_causes(a: Graph, b: Graph, same: bool) -> list[Cause]:
    """What differs in the headers; `same`: the two compute the same."""
    causes: list[Cause] = []
    text = _donation(a, b)
    if text:
        causes.append(Cause("aliasing_changed", text, "", _ADVICE["aliasing_changed"]))
    causes += _trained(a, b) if same else []
    for name in sorted({*a.header, *b.header} - {*_DONATION, *keys.HARMLESS_HEADER}):
        before, after = a.header.get(name, ""), b.header.get(name, "")
        if before == after or not (same or name in _ALWAYS or name.startswith(_MESH)):
            continue
        if name == _LAYOUTS:
            changed = _layouts(before, after)
            causes += [Cause("placement_changed", text, "", _ADVICE["placement_changed"]) for text in changed]
        else:
            text = f"{name} of the module: {_shown(before)} -> {_shown(after)}"
            causes.append(Cause("module_changed", text, "", _ADVICE["module_changed"]))
    return causes


def _trained(a: Graph, b: Graph) -> list[Cause]:
    """Inputs that Dynamo took from a parameter of a module in one graph, from a buffer in the other."""
    kinds = [[_HELD.findall(graph.main.instructions[p].name) for p in graph.main.parameters] for graph in (a, b)]
    names = [[graph.main.instructions[p].name for p in graph.main.parameters] for graph in (a, b)]
    if a.format != "fx" or len(names[0]) != len(names[1]):
        return []
    changed = [k for k, (x, y) in enumerate(zip(*kinds, strict=True)) if x and y and x[-1] != y[-1]]
    if not changed:
        return []
    words = [{"buffers": "a buffer", "parameters": "a parameter"}[side[changed[0]][-1]] for side in kinds]
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    text = f"input {changed[0]} {names[1][changed[0]]} is {words[0]} -> {words[1]} of its module{more}"
    own, others = (tuple(side[k] for k in changed) for side in names)
    return [Cause("placement_changed", text, "", _TRAINED_ADVICE, own, others, len(changed))]


def _donation(a: Graph, b: Graph) -> str:
    texts = [[graph.header.get(name, "") for name in _DONATION] for graph in (a, b)]
    if texts[0] == texts[1]:
        return ""
    before, after = ({int(n) for text in side for n in _DONOR.findall(text)} for side in texts)
    if before == after:
        return f"the same arguments are donated to other outputs: {_shown(texts[0][0])} -> {_shown(texts[1][0])}"
    if before and after:
        return f"donation of arguments {ranges(before)} -> {ranges(after)}"
    return f"donation of arguments {ranges(before or after)}, in {'A' if before else 'B'} only"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in words: "0 to 18, 20"."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in parts)


def _layouts(before: str, after: str) -> Iterator[str]:
    sides = [_entry(text) for text in (before, after)]
    if not all(sides) or len(sides[0]) != len(sides[1]):
        yield f"layouts of the entry: {_shown(before)} -> {_shown(after)}"
        return
    outputs = before.count("->") and len(split(before.strip("{}").partition("->")[2].strip("()")))
    parameters = len(sides[0]) - outputs
    for k, (x, y) in enumerate(zip(*sides, strict=True)):
        if x != y:
            what_of = f"parameter {k}" if k < parameters else f"output {k - parameters}"
            yield f"layout of {what_of}: {x.strip()} -> {y.strip()}"


def _entry(text: str) -> list[str]:
    parameters, _, outputs = text[1:-1].partition("->")
    return [part for side in (parameters, outputs) for part in split(side[1:-1] if side.startswith("(") else side)]


def barrier_causes(a: Form, b: Form) -> list[Cause]:
    """At most one cause: barriers over other numbers of values."""
    sizes = [sorted(map(len, form.barriers)) for form in (a, b)]
    if sizes[0] == sizes[1]:
        return []
    counts = [f"{len(size)} over {sum(size)} values" for size in sizes]
    changed = " -> ".join(counts) if counts[0] != counts[1] else f"{counts[0]}, grouped in another way"
    return [Cause("barrier_changed", f"optimisation barriers: {changed}", "", _BARRIERS_ADVICE)]


def _shown(text: str) -> str:
    return shortened(text, _WIDEST) or "(none)"


class Placements:
    """The walk over two graphs that compute the same, for what is compiled in another way."""

    def __init__(
        self, sides: tuple[Graph, Graph], forms: tuple[dict[str, Form], dict[str, Form]], ids: Digests
    ) -> None:
        self.graphs, self.forms, self.ids = sides, forms, ids
        self.seen: set[tuple[str, str]] = set()
        self.changes: dict[tuple[str, str, str], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        self.folded: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def causes(self) -> list[Cause]:
        a, b = self.graphs
        placed = [keys.compiled_key(*side, with_header=False) for side in zip(self.graphs, self.forms, strict=True)]
        if placed[0] == placed[1]:
            return []
        self.walk(a.entry, b.entry)
        causes = barrier_causes(self.forms[0][a.entry], self.forms[1][b.entry])
        for (noun, before, after), (names_a, names_b) in self.changes.items():
            many = f"{len(names_a)} x " if len(names_a) > 1 else ""
            text = f"{many}{noun}: {_shown(before)} -> {_shown(after)}"
            advice = _ADVICE["placement_changed"]
            causes.append(Cause("placement_changed", text, "", advice, tuple(names_a), tuple(names_b), len(names_a)))
        fewer, more = self.folded[0] - self.folded[1], self.folded[1] - self.folded[0]
        words = [
            f"{sign}{n} {shortened(text, _WIDEST)}"
            for sign, counts in (("-", fewer), ("+", more))
            for text, n in counts.items()
        ]
        if words or not causes:
            # Two programs that are not equal differ for a reason; never say "same" for want of words.
            text = "which values they or barriers stand for, or the arithmetic that puts collectives in order"
            text = f"copies, fusions and calls: {shortened(', '.join(words), 2 * _WIDEST) or text}"
            causes.append(Cause("packaging_changed", text, "", "the compiler was given another module or other flags"))
        return causes

    def walk(self, name_a: str, name_b: str) -> None:
        """Compare the computations of these names and those that they call."""
        if (name_a, name_b) in self.seen:
            return
        self.seen.add((name_a, name_b))
        form_a, form_b = self.forms[0][name_a], self.forms[1][name_b]
        partner = match(form_a, form_b, *self.ids(form_a, form_b)).a
        for a, b in enumerate(partner):
            if b < 0 or not form_a.live[a]:
                continue
            self.node(form_a, form_b, a, b, partner)
            for (_, x), (_, y) in zip(form_a.called.get(a, ()), form_b.called.get(b, ()), strict=False):
                self.walk(x, y)
        for counts, form in zip(self.folded, (form_a, form_b), strict=True):
            for nodes, ins in form.folded:
                if form.holds(nodes):
                    counts[f"{ins.opcode} {ins.placement}".strip()] += 1

    def node(self, form_a: Form, form_b: Form, a: int, b: int, partner: list[int]) -> None:
        ins_a, ins_b = form_a.origins[a], form_b.origins[b]
        names = [
            name_of(graph, form.home(n), ins)
            for graph, form, n, ins in zip(self.graphs, (form_a, form_b), (a, b), (ins_a, ins_b), strict=True)
        ]
        number = form_a.numbers[a]
        noun = f"parameter {number}" if number >= 0 else form_a.labels[a][0]
        left, right = split(ins_a.placement), split(ins_b.placement)
        if self.graphs[0].format == "fx":
            noun = "value"
            if not (left and right):  # devices and strides are printed only if asked for: nothing is known of them
                noun = "checkpoint of an operation"
                left, right = ([part for part in side if part.startswith("recompute=")] for side in (left, right))
        if left != right:
            before = ", ".join(part for part in left if part not in right)
            after = ", ".join(part for part in right if part not in left)
            self.add((noun, before, after), names)
        after_a = sorted(partner[n] for n in form_a.after.get(a, ()))
        if after_a != sorted(form_b.after.get(b, ())):
            before, after = (
                ", ".join(form.labels[n][0] for n in form.after.get(k, ())) for form, k in ((form_a, a), (form_b, b))
            )
            self.add((f"control predecessors of {noun}", before, after), names)

    def add(self, key: tuple[str, str, str], names: list[str]) -> None:
        for known, name in zip(self.changes[key], names, strict=True):
            known.append(name)
