"""Keys of graphs: equal for equal computations, in every process and on every machine (blake2b, never Python's hash).

Four levels, each blind to what the next does not count:

* text: the bytes.
* names: every instruction, dead ones and packaging included; blind to names, order of lines, layouts, metadata.
* strict: the computation: live values, their operands, the numbers of parameters, which collectives are coalesced and
  in which order a token chain (or a schedule) puts them.
* free: the same with parameters numbered in the order in which the outputs meet them, so that the same graph with its
  parameters in another order has the same key. Exact, not a heuristic: operands and outputs are ordered.

A fifth, `compiled_key`, counts all that a compiler depends on beside: layouts, devices, shardings, donation, fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from retrograd.graph.canonical import forms
from retrograd.graph.form import Form, Label
from retrograd.graph.ir import Computation, Graph

# Attributes of a module that say nothing about what is compiled, each with the reason.
HARMLESS_HEADER = {
    "is_scheduled": "the order of collectives counts where it is set",
    "fingerprint_before_lhs": "a hash of the text",
}

_SIZE = 16  # bytes: at 10^6 graphs the odds of one collision are 10^-27

_PIECE = 1 << 18  # characters


def text_key(text: str) -> str:
    """The key of a text as it stands."""
    whole = blake2b(digest_size=_SIZE)
    for start in range(0, len(text), _PIECE):  # fifteen megabytes in one piece cost as much again for their memory
        whole.update(text[start : start + _PIECE].encode("utf-8", "surrogatepass"))
    return whole.hexdigest()


def strict_key(graph: Graph, of: dict[str, Form] | None = None) -> str:
    """The same for graphs that compute the same from the same parameters. 32 hexadecimal digits."""
    return _graph_key(graph, of or forms(graph), renumbered=False)


def free_key(graph: Graph, of: dict[str, Form] | None = None) -> str:
    """The same for graphs that are `strict_key`-equal once their parameters are put in another order."""
    return _graph_key(graph, of or forms(graph), renumbered=True)


def names_key(graph: Graph) -> str:
    """The same for graphs that differ in names, order of lines, layouts and metadata alone."""
    called: dict[str, bytes] = {}
    for computation in graph:
        called[computation.name] = _raw_key(computation, called)
    return called[graph.entry].hex()


def compiled_key(graph: Graph, of: dict[str, Form] | None = None, with_header: bool = True) -> str:
    """The same for graphs that are `strict_key`-equal and are compiled to the same program."""
    of = of or forms(graph)
    main = of[graph.entry]
    own = digests(main, Bodies(of, placed=True), main.numbers, placed=True)
    header = [f"{name}={value}" for name, value in sorted(graph.header.items()) if name not in HARMLESS_HEADER]
    counted = map(str.encode, header if with_header else ())
    return _hash(form_key(main, own, ordered(graph, main), placed=True), *counted).hex()


def _hash(*parts: bytes) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=_SIZE).digest()


def _raw_key(computation: Computation, called: dict[str, bytes]) -> bytes:
    digests: list[bytes] = []
    for ins in computation.instructions:
        label = f"{ins.opcode}\1{ins.shape}\1{ins.attrs}".encode("utf-8", "surrogatepass")
        bodies = [called[name] for _, name in ins.called]
        digests.append(_hash(label, *bodies, *[digests[o] for o in (*ins.operands, *ins.after)]))
    return _hash(digests[computation.root], *sorted(digests))


def _graph_key(graph: Graph, of: dict[str, Form], renumbered: bool) -> str:
    main = of[graph.entry]
    numbers = numbers_by_first_use(main) if renumbered else main.numbers
    return form_key(main, digests(main, Bodies(of), numbers), ordered(graph, main)).hex()


class Bodies(dict[str, bytes]):
    """The key of each called computation, equal for those that compute the same (and, `placed`, in the same way).

    Made when it is asked for: most of what is called has been put in place of its call.
    """

    def __init__(self, of: dict[str, Form], placed: bool = False) -> None:
        super().__init__()
        self.of, self.placed = of, placed
        self.places = {name: place for place, name in enumerate(of)}  # called ones before their callers

    def __missing__(self, name: str) -> bytes:
        needed: set[str] = set()
        pending = [name]
        while pending:
            if (body := pending.pop()) not in needed and body not in self:
                needed.add(body)
                pending += [inner for called in self.of[body].called.values() for _, inner in called]
        for inner in sorted(needed, key=self.places.__getitem__):
            form = self.of[inner]
            own = digests(form, self, form.numbers, self.placed)
            self[inner] = form_key(form, own, ordered=False, placed=self.placed)
        return self[name]


def ordered(graph: Graph, form: Form) -> bool:
    """Does a token chain or a schedule put the collectives in order?"""
    return form.chained or graph.header.get("is_scheduled") == "true"


def form_key(form: Form, digests: list[bytes], ordered: bool, placed: bool = False) -> bytes:
    """The key of one computation: outputs, live values with multiplicity, how collectives are coalesced."""
    groups = [b"".join(digests[n] for n in c.nodes) for c in form.collectives]
    if not ordered:
        groups.sort()
    groups += [digests[n] for n in form.tokens]
    everything = sorted(digests[k] for k in range(len(form)) if form.live[k])
    outputs = [digests[o] for o in form.outputs]
    if placed:
        packages = [
            f"{ins.opcode} {ins.placement} ".encode() + b"".join(digests[n] for n in nodes if n >= 0)
            for nodes, ins in form.folded
            if form.holds(nodes)
        ]
        # Without it an order that happens to be the sorted one would be no order.
        groups += [b"ordered"] * (ordered and len(form.collectives) > 1)
        barriers = (b"".join(digests[n] for n in group if form.live[n]) for group in form.barriers)
        groups += [b"folded", *sorted(packages), b"chain", *sorted(digests[n] for n in form.chain)]
        groups += [b"barriers", *sorted(filter(None, barriers))]
    return _hash(form.structure.encode(), b"".join(outputs), b"".join(everything), *groups)


def digests(form: Form, called: dict[str, bytes], numbers: Sequence[int], placed: bool = False) -> list[bytes]:
    """Of each node a key of its value: the same label on the same operands. -1 in place of a number: any parameter.

    `placed`: with what the compiled program depends on alone.
    """
    after = form.after if placed or form.computes_in_order else {}
    labels: dict[Label, blake2b] = {}  # a copy of what has taken the label in costs a third of a new hash
    digests: list[bytes] = []
    bodies, more = form.called, bool(after) or placed
    for node, (label, operands) in enumerate(zip(form.labels, form.operands, strict=True)):
        known = labels.get(label)
        if known is None:
            text = "\1".join(label).encode("utf-8", "surrogatepass") + b"\0"
            known = labels[label] = blake2b(text, digest_size=_SIZE)
        own = known.copy()
        if node in bodies:
            own.update(b"".join([called[name] for _, name in bodies[node]]) + b"\2")
        elif numbers[node] >= 0:
            own.update(b"%d" % numbers[node])
        for operand in operands:
            own.update(digests[operand])
        if more:
            if node in after:
                own.update(b"\3" + b"".join(sorted([digests[n] for n in after[node]])))
            if placed and (placement := form.origins[node].placement):
                own.update(b"\4" + placement.encode("utf-8", "surrogatepass"))
            if placed and node in form.behind:
                places, behind = form.behind[node]
                own.update(b"\5" + bytes([place in behind for place in places]))
        digests.append(own.digest())
    return digests


def numbers_by_first_use(form: Form) -> list[int]:
    """Numbers for parameters in the order in which a walk from the outputs, depth first, meets them; -1 for others.

    A parameter that no output needs comes after those, in the order of its own number.
    """
    numbers = [-1] * len(form)
    seen = bytearray(len(form))
    count = 0
    pending = list(reversed(form.outputs))
    while pending:
        node = pending.pop()
        if seen[node]:
            continue
        seen[node] = 1
        if form.numbers[node] >= 0:
            numbers[node] = count
            count += 1
        else:
            pending.extend(reversed(form.operands[node]))
    for node in form.parameters:
        if not seen[node]:
            numbers[node] = count
            count += 1
    return numbers
