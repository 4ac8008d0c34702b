"""The canonical form of a graph: values and who uses them, with everything folded away that computes nothing.

Folded: names, layouts and metadata (readers drop them), tuple / get-tuple-element, optimisation barriers, torch_xla's
token chain, the start/done pairs of asynchronous operations; a collective over many operands becomes one node an
operand. What was folded is kept beside the nodes, so that a difference in packaging alone can be named.

torch_xla orders its collectives by arithmetic: the first operand of the next one gets `+ token`, and the token of the
next is `token * result[0]` of the last, with a token that starts at 0 (pytorch/xla, `xla_model.py`). Without folding,
a single additional collective changes every value behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from retrograd.errors import GraphError
from retrograd.graph.brackets import split
from retrograd.graph.ir import COLLECTIVES, PER_OPERAND, Computation, Graph, Instruction
from retrograd.graph.tokens import tokens

Value: TypeAlias = "int | tuple[Value, ...]"
Label = tuple[str, str, str]  # (opcode, shape, attributes): what a node is, its operands apart


@dataclass(frozen=True, slots=True)
class CollectiveNodes:
    """One collective instruction: its place in the computation and its nodes, one an operand."""

    place: int
    opcode: str
    nodes: tuple[int, ...]


@dataclass(slots=True)
class Form:
    """The canonical form of one computation.

    Node k is `labels[k]` applied to the nodes `operands[k]`; it comes from the instruction `origins[k]`. Nodes come
    after their operands. `numbers[k]` is the number of a parameter, -1 of any other node. `outputs` are nodes, `live`
    says which nodes an output or a side effect needs.
    """

    computation: Computation
    labels: list[Label] = field(default_factory=list[Label])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    origins: list[int] = field(default_factory=list[int])
    numbers: list[int] = field(default_factory=list[int])
    called: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict[int, tuple[tuple[str, str], ...]])
    values: list[Value] = field(default_factory=list[Value])
    outputs: list[int] = field(default_factory=list[int])
    structure: str = ""
    parameters: list[int] = field(default_factory=list[int])
    collectives: list[CollectiveNodes] = field(default_factory=list[CollectiveNodes])
    chained: bool = False  # a token chain orders the collectives
    barriers: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    live: bytearray = field(default_factory=bytearray)
    dead: int = 0  # instructions, as they are printed, that no output or side effect needs

    def __len__(self) -> int:
        return len(self.labels)

    def instruction(self, node: int) -> Instruction:
        """The instruction that a node comes from."""
        return self.computation.instructions[self.origins[node]]


def forms(graph: Graph) -> dict[str, Form]:
    """The canonical form of every computation, by name; GraphError if a tuple has no such element."""
    return {name: _Folder(graph, computation).form() for name, computation in graph.computations.items()}


def flatten(value: Value) -> list[int]:
    """The nodes of a value, in order."""
    if type(value) is int:
        return [value]
    nodes: list[int] = []
    pending: list[Value] = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending.extend(reversed(part))
        else:
            nodes.append(part)
    return nodes


def _structure(value: Value) -> str:
    if type(value) is int:
        return "."
    if all(type(v) is int for v in value):  # type: ignore[union-attr]
        return f"({len(value)})"  # type: ignore[arg-type]
    return "(" + ",".join(_structure(v) for v in value) + ")"  # type: ignore[union-attr]


_FOLDED = frozenset({"tuple", "get-tuple-element", "opt-barrier", "parameter"})


class _Folder:
    def __init__(self, graph: Graph, computation: Computation) -> None:
        self.graph = graph
        self.result = Form(computation)

    def form(self) -> Form:
        self.fold()
        result = self.result
        if result.collectives:
            self.drop_tokens()
        root = result.values[result.computation.root]
        result.outputs, result.structure = flatten(root), _structure(root)
        result.parameters = [flatten(result.values[p])[0] for p in result.computation.parameters]
        effects = [place for place, ins in enumerate(result.computation.instructions) if ins.has_effect]
        result.live = _liveness(
            result.operands, [*result.outputs, *(n for p in effects for n in flatten(result.values[p]))]
        )
        result.collectives = [c for c in result.collectives if any(result.live[n] for n in c.nodes)]
        result.dead = self.count_dead(effects)
        return result

    def fold(self) -> None:
        """Nodes and values of all instructions. Nine in ten are plain; they go through the short way."""
        result, values = self.result, self.result.values
        labels, operands, origins, numbers = result.labels, result.operands, result.origins, result.numbers
        packed: set[int] = set()  # places whose value is a tuple
        plain: dict[str, bool] = {}
        for place, ins in enumerate(result.computation.instructions):
            short = plain.get(ins.opcode)
            if short is None:
                short = plain[ins.opcode] = not _folds(ins.opcode)
            if short and packed.isdisjoint(ins.operands):
                if ins.called:
                    result.called[len(labels)] = ins.called
                values.append(len(labels))
                labels.append((ins.opcode, ins.shape, ins.attrs))
                operands.append(tuple([values[o] for o in ins.operands]))  # type: ignore[misc]
                origins.append(place)
                numbers.append(-1)
                continue
            value = self.value(place, ins)
            values.append(value)
            if type(value) is tuple:
                packed.add(place)

    def value(self, place: int, instruction: Instruction) -> Value:
        """The value of an instruction that is folded, or that takes tuples."""
        opcode, values = instruction.opcode, self.result.values
        if opcode == "tuple":
            return tuple([values[o] for o in instruction.operands])
        if opcode == "get-tuple-element":
            return self.element(place, instruction)
        if opcode == "opt-barrier" and len(instruction.operands) == 1:
            value = values[instruction.operands[0]]
            self.result.barriers.append(tuple(flatten(value)))
            return value
        if opcode in COLLECTIVES:
            return self.collective(place, instruction, opcode, instruction)
        if _asynchronous(opcode):
            return self.asynchronous(place, instruction)
        return self.node(place, instruction)

    def add(self, place: int, label: Label, operands: tuple[int, ...], number: int = -1) -> int:
        result = self.result
        result.labels.append(label)
        result.operands.append(operands)
        result.origins.append(place)
        result.numbers.append(number)
        return len(result.labels) - 1

    def node(self, place: int, instruction: Instruction) -> int:
        values, attrs = self.result.values, instruction.attrs
        if instruction.opcode == "parameter":
            number, _, rest = attrs.partition(", ")
            return self.add(place, ("parameter", instruction.shape, rest), (), int(number))
        operands = tuple([values[o] for o in instruction.operands])
        for operand in operands:
            if type(operand) is tuple:
                attrs = f"{attrs} operands={_structure(operands)}"
                operands = tuple(flatten(operands))
                break
        node = self.add(place, (instruction.opcode, instruction.shape, attrs), operands)  # type: ignore[arg-type]
        if instruction.called:
            self.result.called[node] = instruction.called
        return node

    def element(self, place: int, instruction: Instruction) -> Value:
        value = self.result.values[instruction.operands[0]] if instruction.operands else 0
        if type(value) is tuple:
            try:
                return value[int(instruction.attrs)]
            except (IndexError, ValueError):
                raise GraphError(
                    f"{self.graph.title}, line {instruction.line}: {instruction.name} takes element "
                    f"{instruction.attrs or '(none)'} of a tuple with {len(value)}"
                ) from None
        return self.node(place, instruction)

    def collective(self, place: int, instruction: Instruction, opcode: str, start: Instruction) -> Value:
        """One node an operand where result k depends on operand k alone; else one node."""
        result, count = self.result, len(start.operands)
        if opcode not in PER_OPERAND or count < 2:
            node = self.renamed(place, start, opcode, instruction)
            result.collectives.append(CollectiveNodes(place, opcode, (node,)))
            return node
        shapes = elements(instruction.shape)
        nodes: list[int] = []
        for k, operand in enumerate(start.operands):
            shape = shapes[k] if k < len(shapes) else ""
            nodes.append(self.add(place, (opcode, shape, start.attrs), tuple(flatten(result.values[operand]))))
            if start.called:
                result.called[nodes[-1]] = start.called
        result.collectives.append(CollectiveNodes(place, opcode, tuple(nodes)))
        return tuple(nodes)

    def renamed(self, place: int, start: Instruction, opcode: str, done: Instruction) -> int:
        merged = Instruction(start.name, opcode, done.shape, start.operands, start.attrs, start.called)
        return self.node(place, merged)

    def asynchronous(self, place: int, instruction: Instruction) -> Value:
        """The start hands its place on (as a value that no node has); the done becomes the operation."""
        base, _, part = instruction.opcode.rpartition("-")
        result = self.result
        if base in ("send", "recv", "infeed", "outfeed"):
            return self.node(place, instruction)
        if part == "start":
            return (-1 - place,)
        value = result.values[instruction.operands[0]] if len(instruction.operands) == 1 else 0
        if part == "update":
            return value
        if not (isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], int) and value[0] < 0):
            return self.node(place, instruction)
        start = result.computation.instructions[-1 - value[0]]
        if base in COLLECTIVES:
            return self.collective(place, instruction, base, start)
        return self.renamed(place, start, base, instruction)

    def drop_tokens(self) -> None:
        """The operands of collectives without `+ broadcast(token)`, where a token chain orders them."""
        result = self.result
        chain = {node for place in tokens(result.computation)[1] for node in flatten(result.values[place])}
        if not chain:
            return
        result.chained = True
        for collective in result.collectives:
            for node in collective.nodes:
                result.operands[node] = tuple([self.without_token(o, chain) for o in result.operands[node]])

    def without_token(self, node: int, chain: set[int]) -> int:
        result = self.result
        if result.labels[node][0] != "add" or len(result.operands[node]) != 2:
            return node
        kept, added = result.operands[node]
        token = (
            result.operands[added][0] if result.labels[added][0] == "broadcast" and result.operands[added] else added
        )
        return kept if token in chain else node

    def count_dead(self, effects: list[int]) -> int:
        instructions = self.result.computation.instructions
        reached = _liveness([i.operands for i in instructions], [self.result.computation.root, *effects])
        return sum(1 for i, ins in enumerate(instructions) if not reached[i] and ins.opcode != "parameter")


def _folds(opcode: str) -> bool:
    return opcode in _FOLDED or opcode in COLLECTIVES or _asynchronous(opcode)


def _asynchronous(opcode: str) -> bool:
    return opcode.endswith(("-start", "-done")) or opcode == "async-update"


def elements(shape: str) -> list[str]:
    """The shapes of what a result consists of; of a tuple its elements."""
    return split(shape[1:-1]) if shape.startswith("(") else [shape]


def _liveness(operands: list[tuple[int, ...]], roots: list[int]) -> bytearray:
    """Which nodes the roots need. One sweep backwards: operands stand before their users."""
    live = bytearray(len(operands))
    for root in roots:
        live[root] = 1
    for node in range(len(operands) - 1, -1, -1):
        if live[node]:
            for operand in operands[node]:
                live[operand] = 1
    return live
