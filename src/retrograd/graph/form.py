"""The data of a canonical form: nodes, their labels and operands, and what was folded away beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from retrograd.graph.brackets import split
from retrograd.graph.ir import Computation, Instruction

Value: TypeAlias = "int | tuple[Value, ...]"
Label = tuple[str, str, str]  # (opcode, shape, attributes): what a node is, its operands apart


@dataclass(frozen=True, slots=True)
class CollectiveNodes:
    """One collective instruction (the start of an asynchronous one): its opcode and its nodes, one an operand."""

    instruction: Instruction
    opcode: str
    nodes: tuple[int, ...]


@dataclass(slots=True)
class Form:
    """The canonical form of one computation.

    Node k is `labels[k]` applied to the nodes `operands[k]`; it comes from the instruction `origins[k]`. Nodes come
    after their operands. `numbers[k]` is the number of a parameter, -1 of any other node. `outputs` are nodes, `live`
    says which nodes an output or a side effect needs; parameters always are. `after[k]` are nodes that run before node
    k, `homes[k]` the computation that node k comes from if that is not the form's own.
    """

    computation: Computation
    labels: list[Label] = field(default_factory=list[Label])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    origins: list[Instruction] = field(default_factory=list[Instruction])
    numbers: list[int] = field(default_factory=list[int])
    homes: dict[int, Computation] = field(default_factory=dict[int, Computation])
    called: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict[int, tuple[tuple[str, str], ...]])
    after: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    literals: set[int] = field(default_factory=set[int])  # constants, and what is made of one constant alone
    computes_in_order: bool = False  # `after` belongs to what is computed, as in FX, where operations change tensors
    outputs: list[int] = field(default_factory=list[int])
    structure: str = ""
    parameters: list[int] = field(default_factory=list[int])
    collectives: list[CollectiveNodes] = field(default_factory=list[CollectiveNodes])
    chained: bool = False  # a token chain orders the collectives
    tokens: list[int] = field(default_factory=list[int])  # with which the chain begins
    chain: list[int] = field(default_factory=list[int])  # operands of collectives with their tokens
    # The places that a node reads, and those of its computation that come out of a barrier.
    behind: dict[int, tuple[tuple[int, ...], set[int]]] = field(
        default_factory=dict[int, tuple[tuple[int, ...], set[int]]]
    )
    barriers: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    # Instructions that were folded away, and the nodes of their values: their placement has to be compared, too.
    folded: list[tuple[tuple[int, ...], Instruction]] = field(default_factory=list[tuple[tuple[int, ...], Instruction]])
    effects: list[int] = field(default_factory=list[int])  # nodes that do something beside their value, in order
    live: bytearray = field(default_factory=bytearray)
    dead: int = 0  # instructions, as they are printed, that no output or side effect needs

    def __len__(self) -> int:
        return len(self.labels)

    def home(self, node: int) -> Computation:
        """The computation that a node comes from."""
        return self.homes.get(node, self.computation)

    def holds(self, nodes: tuple[int, ...]) -> bool:
        """Is any of these nodes live? -1 - k stands for the start of an asynchronous operation."""
        return not nodes or any(n < 0 or self.live[n] for n in nodes)


def flatten(value: Value) -> list[int]:
    """The nodes of a value, in order."""
    if type(value) is int:
        return [value]
    if set(map(type, value)) == {int}:  # type: ignore[arg-type]
        return list(value)  # type: ignore[arg-type]
    nodes: list[int] = []
    pending: list[Value] = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, tuple):
            pending.extend(reversed(part))
        else:
            nodes.append(part)
    return nodes


def structure(value: Value) -> str:
    if type(value) is int:
        return "."
    if all(type(v) is int for v in value):  # type: ignore[union-attr]
        return f"({len(value)})"  # type: ignore[arg-type]
    return "(" + ",".join(structure(v) for v in value) + ")"  # type: ignore[union-attr]


@lru_cache(512)
def elements(shape: str) -> tuple[str, ...]:
    """The shapes of what a result consists of; of a tuple its elements."""
    return tuple(split(shape[1:-1])) if shape.startswith("(") else (shape,)


def liveness(operands: list[tuple[int, ...]], roots: list[int], after: dict[int, tuple[int, ...]]) -> bytearray:
    """Which nodes the roots need. One sweep backwards: operands stand before their users."""
    live = bytearray(len(operands))
    for root in roots:
        live[root] = 1
    for node in range(len(operands) - 1, -1, -1):
        if live[node]:
            for operand in operands[node]:
                live[operand] = 1
            for earlier in after.get(node, ()) if after else ():
                live[earlier] = 1
    return live


def reached(computation: Computation) -> bytearray:
    """Which instructions the root or an effect needs, as they are printed."""
    instructions = computation.instructions
    live = bytearray(len(instructions))
    live[computation.root] = 1
    for place in range(len(instructions) - 1, -1, -1):
        ins = instructions[place]
        if live[place] or ins.has_effect:
            live[place] = 1
            for before in ins.operands:
                live[before] = 1
            for before in ins.after:
                live[before] = 1
    return live
