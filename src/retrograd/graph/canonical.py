"""The canonical form of a graph: values and who uses them, with everything folded away that computes nothing.

Folded: names and metadata (readers drop them), tuple / get-tuple-element, optimisation barriers, copies, torch_xla's
token chain, the start/done pairs of asynchronous operations; a collective over many operands becomes one node an
operand. Calls and fusions are replaced by what they call, so that one change in it is one change of every graph; what a
loop carries are nodes of their own; a constant that several operations use is one for each. What was folded is
kept beside the nodes, so that a difference in packaging alone can be named.

torch_xla orders its collectives by arithmetic: the first operand of the next one gets `+ token`, and the token of the
next is `token * result[0]` of the last, with a token that starts at 0 (pytorch/xla, `xla_model.py`). Without folding,
a single additional collective changes every value behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from retrograd.errors import GraphError
from retrograd.graph.form import CollectiveNodes, Form, Label, Value, elements, flatten, liveness, reached, structure
from retrograd.graph.ir import COLLECTIVES, PER_OPERAND, Computation, Graph, Instruction
from retrograd.graph.tokens import tokens


def forms(graph: Graph) -> dict[str, Form]:
    """The canonical form of every computation, by name; GraphError if a tuple has no such element."""
    inlined, kinds = _inlined(graph), dict[str, int]()
    return {name: _Folder(graph, of, inlined, kinds).form() for name, of in graph.computations.items()}


# Calls of calls may grow exponentially; beyond this many times the module's size they stay as they are.
_GROWTH = 4
_DEEPEST = 60  # calls in calls


def _inlined(graph: Graph) -> bool:
    """Are calls and fusions of a module replaced by what they call? Callees come before their callers."""
    if graph.format == "fx":
        return False
    sizes: dict[str, tuple[int, int]] = {}
    for name, computation in graph.computations.items():
        size, depth = len(computation), 0
        for ins in computation.instructions:
            if ins.called and ins.opcode in _INLINED:
                inner, below = sizes[ins.called[0][1]]
                size, depth = size + inner, max(depth, below + 1)
        sizes[name] = size, depth
    return sum(n for n, _ in sizes.values()) <= 2 * _GROWTH * len(graph) + 10_000 and all(
        depth <= _DEEPEST for _, depth in sizes.values()
    )


_FOLDED = frozenset({"tuple", "get-tuple-element", "opt-barrier", "parameter", "copy", "while", "conditional"})
_INLINED = frozenset({"call", "fusion"})
_CONTEXTS = {"s32[]", "u32[]"}  # of asynchronous operations
# Of constants alone these are constants, too.
_LITERALS = frozenset({"constant", "iota", "broadcast", "broadcast-in-dim", "convert", "reshape"})


class _Folder:
    def __init__(self, graph: Graph, computation: Computation, inlined: bool, kinds: dict[str, int]) -> None:
        self.graph = graph
        self.result = Form(computation, computes_in_order=graph.format == "fx")
        self.inlined = inlined
        self.kinds = kinds  # of operations
        self.reached: dict[str, bytearray] = {}  # what is needed, of each computation
        self.literals = self.result.literals
        self.used: set[int] = set()  # literals that an operation has already
        self.effects = self.result.effects
        self.place_values: list[Value] = []  # of the computation at hand
        self.computation = computation

    def form(self) -> Form:
        result, computation = self.result, self.result.computation
        values = self.fold(computation, None)
        if result.collectives:
            self.drop_tokens(values)
        root, returned = values[computation.root], computation.instructions[computation.root]
        result.outputs, result.structure = flatten(root), structure(root)
        if returned.opcode == "tuple":
            result.structure += returned.attrs  # of FX: what is returned beside values
        result.parameters = [n for p in computation.parameters for n in flatten(values[p])]
        result.numbers = [-1] * len(result.labels)
        for number, node in enumerate(result.parameters):
            result.numbers[node] = number
        result.live = liveness(result.operands, [*result.outputs, *self.effects, *result.parameters], result.after)
        result.collectives = [c for c in result.collectives if any(result.live[n] for n in c.nodes)]
        result.dead = self.count_dead()
        return result

    def fold(self, computation: Computation, arguments: list[Value] | None) -> list[Value]:
        """Nodes and values of all instructions. Nine in ten are plain or elements; they go through the short way."""
        result, literals, kinds = self.result, self.literals, self.kinds
        labels, operands, origins = result.labels, result.operands, result.origins
        outer, start = (self.computation, self.place_values), len(labels)
        self.computation, self.place_values = computation, []
        values = self.place_values
        packed: set[int] = set()  # places whose value is a tuple
        behind: set[int] = set()  # places whose value comes out of a barrier
        for place, ins in enumerate(computation.instructions):
            opcode, read = ins.opcode, ins.operands
            kind = kinds.get(opcode)
            if kind is None:
                kind = kinds[opcode] = _kind(opcode, self.inlined)
            value = node = len(labels)
            if kind <= _LITERAL and packed.isdisjoint(read):
                own: tuple[int, ...] = tuple([values[o] for o in read])  # type: ignore[misc]
                if own and not literals.isdisjoint(own):
                    own = self.unshared(own)
                    value = node = len(labels)
                if ins.called:
                    result.called[node] = ins.called
                if kind == _LITERAL and ins.shape and (not own or (len(own) == 1 and own[0] in literals)):
                    literals.add(node)
                labels.append((opcode, ins.shape, ins.attrs))
                operands.append(own)
                origins.append(ins)
            else:
                value = self.taken(ins) if kind == _ELEMENT else self.value(ins, kind, arguments)
                if type(value) is tuple:
                    packed.add(place)
            values.append(value)
            if ins.has_effect:
                self.effects += [n for n in flatten(value) if n >= 0]
            if opcode == "opt-barrier" or (behind and not behind.isdisjoint(read)):
                if len(labels) == node:  # folded away: what reads it is behind the barrier, too
                    behind.add(place)
                else:
                    result.behind[node] = read, behind
            if ins.after:
                self.ordered(ins, value, node)
        if arguments is not None:
            for node in range(start, len(labels)):
                result.homes.setdefault(node, computation)
        self.computation, self.place_values = outer
        return values

    def taken(self, ins: Instruction) -> Value:
        """The value of an element of a tuple: by a short way where it is a node and nothing is to be noted of it."""
        index, values = ins.attrs, self.place_values
        whole = values[ins.operands[0]] if ins.operands and not ins.placement else 0
        if type(whole) is tuple and index.isdecimal() and int(index) < len(whole):
            node = whole[int(index)]
            if type(node) is int and node >= 0 and self.result.labels[node][1] == ins.shape:
                return node
        return self.value(ins, _ELEMENT, None)

    def unshared(self, operands: tuple[int, ...]) -> tuple[int, ...]:
        """Operands, each constant one of its own: whether two places share a constant says nothing."""
        own: list[int] = []
        for node in operands:
            if node in self.literals:
                if node in self.used:
                    node = self.copy_of(node)
                else:
                    self.used.add(node)
            own.append(node)
        return tuple(own)

    def copy_of(self, node: int) -> int:
        result = self.result
        operands = tuple([self.copy_of(o) for o in result.operands[node]])
        if node in result.homes:
            result.homes[len(result.labels)] = result.homes[node]
        copied = self.add(result.origins[node], result.labels[node], operands)
        self.literals.add(copied)
        self.used.add(copied)
        return copied

    def ordered(self, ins: Instruction, value: Value, first: int) -> None:
        """Note what runs before an instruction; beside it where it is folded into values from before node `first`."""
        before = tuple([n for place in ins.after for n in flatten(self.place_values[place]) if n >= 0])
        nodes = [n for n in flatten(value) if n >= first]
        self.result.after.update((n, before) for n in nodes)
        if before and not nodes:
            self.result.folded.append(((*flatten(value), *before), ins))

    def value(self, instruction: Instruction, kind: int, arguments: list[Value] | None) -> Value:
        """The value of an instruction that is folded, or that takes tuples."""
        opcode = instruction.opcode
        if kind == _COLLECTIVE:
            return self.collective(instruction, opcode, instruction)
        if kind == _ASYNCHRONOUS:
            return self.asynchronous(instruction)
        if opcode == "parameter" and arguments is None:
            rest = instruction.attrs.partition(", ")[2]
            return self.spread(instruction, instruction.shape, lambda shape: ("parameter", shape, rest))
        if opcode in ("while", "conditional") and instruction.shape.startswith("("):
            node = self.node(instruction, "")
            self.effects += [node] if instruction.has_effect else []
            numbers = iter(range(instruction.shape.count("[") + 1))
            return self.spread(
                instruction, instruction.shape, lambda part: ("get-tuple-element", part, str(next(numbers))), (node,)
            )
        value = self.folded(instruction, arguments)
        # What says more than its operand, as a copy to another dtype does in a damaged text, is not folded.
        if value is None or not self.agrees(value, instruction.shape):
            return self.node(instruction, instruction.shape)
        if opcode == "opt-barrier" and self.needs(self.computation)[len(self.place_values)]:
            self.result.barriers.append(tuple(flatten(value)))
        constant = type(value) is int and value in self.literals  # each user has one of its own
        if instruction.placement or (opcode in ("copy", "fusion") and not constant):
            self.result.folded.append((() if constant else tuple(flatten(value)), instruction))
        return value

    def folded(self, instruction: Instruction, arguments: list[Value] | None) -> Value | None:
        """The value of an instruction that only passes values on; None if it does more."""
        opcode, values = instruction.opcode, self.place_values
        if opcode == "get-tuple-element":
            return self.element(instruction)
        if opcode == "parameter" and arguments is not None:
            number, _, rest = instruction.attrs.partition(", ")
            return None if rest else arguments[int(number)]
        if opcode == "tuple" and (not instruction.attrs or self.graph.format == "fx"):
            return tuple([values[o] for o in instruction.operands])
        if instruction.attrs:
            return None
        if opcode in ("opt-barrier", "copy") and len(instruction.operands) == 1:
            return values[instruction.operands[0]]
        if opcode == "opt-barrier":
            return tuple([values[o] for o in instruction.operands])
        if opcode in _INLINED and self.inlined and self.fits(instruction):
            body = self.graph.computations[instruction.called[0][1]]
            return self.fold(body, [values[o] for o in instruction.operands])[body.root]
        return None

    def agrees(self, value: Value, shape: str) -> bool:
        """Has a value this shape? FX prints no shapes of tuples."""
        if self.graph.format == "fx":
            return True
        labels = self.result.labels
        if type(value) is int:
            return value < 0 or labels[value][1] == shape
        parts = elements(shape) if shape.startswith("(") else ()
        if set(map(type, value)) == {int} and min(value) >= 0:  # type: ignore[arg-type,operator]
            return tuple([labels[v][1] for v in value]) == parts  # type: ignore[union-attr,index]
        if shape == "()" or (len(value) == 1 and value[0] in range(-(1 << 40), 0)):  # type: ignore[index]
            return shape != "()" or not value
        return len(parts) == len(value) and all(map(self.agrees, value, parts))  # type: ignore[arg-type]

    def fits(self, call: Instruction) -> bool:
        return len(call.called) == 1 and len(self.graph.computations[call.called[0][1]].parameters) == len(
            call.operands
        )

    def spread(
        self, ins: Instruction, shape: str, label: Callable[[str], Label], operands: tuple[int, ...] = ()
    ) -> Value:
        """A value of a shape, a node for each element where it is a tuple."""
        if shape.startswith("("):
            return tuple([self.spread(ins, part, label, operands) for part in elements(shape)])
        return self.add(ins, label(shape), operands)

    def add(self, origin: Instruction, label: Label, operands: tuple[int, ...]) -> int:
        result = self.result
        result.labels.append(label)
        result.operands.append(operands)
        result.origins.append(origin)
        return len(result.labels) - 1

    def node(self, instruction: Instruction, shape: str) -> int:
        values, attrs = self.place_values, instruction.attrs
        operands = tuple([values[o] for o in instruction.operands])
        for operand in operands:
            if type(operand) is tuple:
                if shape:  # of a loop or a branch the number of operands says it
                    attrs = f"{attrs} operands={structure(operands)}"
                operands = tuple(flatten(operands))
                break
        node = self.add(instruction, (instruction.opcode, shape, attrs), self.unshared(operands))  # type: ignore[arg-type]
        if instruction.called:
            self.result.called[node] = instruction.called
        return node

    def element(self, instruction: Instruction) -> Value:
        value = self.place_values[instruction.operands[0]] if instruction.operands else 0
        if type(value) is tuple:
            index = instruction.attrs
            if not index.isdecimal() or int(index) >= len(value):
                raise GraphError(
                    f"{self.graph.title}, line {instruction.line}: {instruction.name} takes element "
                    f"{instruction.attrs or '(none)'} of a tuple with {len(value)}"
                )
            return value[int(index)]
        return self.node(instruction, instruction.shape)

    def collective(self, instruction: Instruction, opcode: str, start: Instruction) -> Value:
        """One node an operand where result k depends on operand k alone; else one node."""
        result, count = self.result, len(start.operands)
        merged = self.merged(start, opcode, instruction)
        if opcode not in PER_OPERAND or count < 2:
            node = self.renamed(start, merged)
            result.collectives.append(CollectiveNodes(start, opcode, (node,)))
            return node
        shapes = elements(instruction.shape)
        nodes: list[int] = []
        for k, operand in enumerate(start.operands):
            shape = shapes[k] if k < len(shapes) else ""
            own = self.unshared(tuple(flatten(self.place_values[operand])))
            nodes.append(self.add(merged, (opcode, shape, start.attrs), own))
            if start.called:
                result.called[nodes[-1]] = start.called
        result.collectives.append(CollectiveNodes(start, opcode, tuple(nodes)))
        self.effects += nodes if start.has_effect else []
        return tuple(nodes)

    def merged(self, start: Instruction, opcode: str, done: Instruction) -> Instruction:
        """The start and the done of an asynchronous operation as one instruction."""
        if start is done:
            return start
        own = start.attrs if opcode == "copy" else ""  # a copy is folded away, and what it says with it
        placed = ", ".join(filter(None, [own, start.placement, done.placement, done.attrs]))
        return replace(start, opcode=opcode, shape=done.shape, placement=placed)

    def renamed(self, start: Instruction, merged: Instruction) -> int:
        node = self.node(merged, merged.shape)
        self.effects += [node] if start.has_effect else []
        return node

    def asynchronous(self, instruction: Instruction) -> Value:
        """The start hands its place on (as a value that no node has); the done becomes the operation."""
        base, _, part = instruction.opcode.rpartition("-")
        values = self.place_values
        if base in ("send", "recv", "infeed", "outfeed"):
            return self.node(instruction, instruction.shape)
        if part == "start":
            return (-1 - len(values),) if self.starts(instruction) else self.node(instruction, instruction.shape)
        value = values[instruction.operands[0]] if len(instruction.operands) == 1 else 0
        if part == "update":
            return value
        if not (isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], int) and value[0] < 0):
            return self.node(instruction, instruction.shape)
        start = self.computation.instructions[-1 - value[0]]
        if base in COLLECTIVES:
            return self.collective(instruction, base, start)
        merged = self.merged(start, base, instruction)
        if base == "copy" and len(start.operands) == 1:
            self.result.folded.append((tuple(flatten(values[start.operands[0]])), merged))
            return values[start.operands[0]]
        return self.renamed(start, merged)

    def starts(self, start: Instruction) -> bool:
        """Is the start of an asynchronous operation of the shape of its operands and its result, and a context?"""
        operands = {self.result.labels[n][1] for o in start.operands for n in flatten(self.place_values[o]) if n >= 0}
        parts = [_leaves(part) for part in elements(start.shape)]
        results = parts[1] if len(parts) > 1 else parts[0] if parts else []
        return set(_leaves(start.shape)) <= operands | set(results) | _CONTEXTS

    def drop_tokens(self, values: list[Value]) -> None:
        """The operands of collectives without `+ broadcast(token)`, where a token chain orders them."""
        result = self.result
        chain = {node for place in tokens(result.computation)[1] for node in flatten(values[place])}
        result.tokens = sorted(node for node in chain if result.labels[node][0] != "multiply")
        if not chain or any(result.labels[n][0] == "constant" and result.labels[n][2] != "0" for n in result.tokens):
            return
        result.chained = True
        for collective in result.collectives:
            for node in collective.nodes:
                own = result.operands[node]
                result.operands[node] = tuple([self.without_token(o, chain) for o in own])
                result.chain += [o for o in own if o not in result.operands[node]]

    def without_token(self, node: int, chain: set[int]) -> int:
        result = self.result
        if result.labels[node][0] != "add" or len(result.operands[node]) != 2:
            return node
        kept, added = result.operands[node]
        spread = result.operands[added] if result.labels[added][0] == "broadcast" else ()
        token = spread[0] if spread else added
        return kept if token in chain and result.labels[kept][1] == result.labels[node][1] else node

    def count_dead(self) -> int:
        computation = self.result.computation
        both = zip(computation.instructions, self.needs(computation), strict=True)
        return sum(not is_live and ins.opcode != "parameter" for ins, is_live in both)

    def needs(self, computation: Computation) -> bytearray:
        """Which instructions of a computation it needs. Values that come out of a barrier may be needed without it."""
        if computation.name not in self.reached:
            self.reached[computation.name] = reached(computation)
        return self.reached[computation.name]


_PLAIN, _LITERAL, _ELEMENT, _OTHER, _COLLECTIVE, _ASYNCHRONOUS = range(6)


def _kind(opcode: str, inlined: bool) -> int:
    """How an operation is folded: the first two become a node, if they read no tuple."""
    if opcode in COLLECTIVES:
        return _COLLECTIVE
    if opcode.endswith(("-start", "-done")) or opcode == "async-update":
        return _ASYNCHRONOUS
    if opcode in _FOLDED or (inlined and opcode in _INLINED):
        return _ELEMENT if opcode == "get-tuple-element" else _OTHER
    return _LITERAL if opcode in _LITERALS else _PLAIN


def _leaves(shape: str) -> list[str]:
    return [leaf for part in elements(shape) for leaf in _leaves(part)] if shape.startswith("(") else [shape]
