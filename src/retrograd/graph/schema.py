"""Records of comparisons, counts and dataflow of graphs, and their JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import ComparisonOutcome, Record
from retrograd.core.wording import at_line

DIFF_SCHEMA = "retrograd.graph.diff/1"
PAIRS_SCHEMA = "retrograd.graph.pairs/1"
UNIQUE_SCHEMA = "retrograd.graph.unique/1"
FOLLOW_SCHEMA = "retrograd.graph.follow/1"

# In the order in which causes are listed: what explains the rest comes first. A gradient that was carried over brings
# its parameters, its collective and its outputs; a state or a loop, all that is within; a parameter of another shape,
# all shapes behind it; then constants and operators, before what is only in another order or place.
Kind = Literal[
    "gradient_carried_over",
    "state_changed",
    "loop_changed",
    "remat_changed",
    "aliasing_changed",
    "module_changed",
    "shape_changed",
    "dtype_changed",
    "parameter_added",
    "parameter_removed",
    "constant_changed",
    "attribute_changed",
    "instruction_replaced",
    "instruction_inserted",
    "instruction_removed",
    "output_added",
    "output_removed",
    "operand_changed",
    "duplicate_changed",
    "collective_inserted",
    "collective_removed",
    "collective_rebucketed",
    "collective_reordered",
    "output_moved",
    "parameter_moved",
    "placement_changed",
    "packaging_changed",
    "barrier_changed",
    "key_changed",
    "order_changed",
    "packaging_only",
    "dead_code_only",
    "layout_only",
    "not_told",
]

# These change nothing that is computed: a graph that differs in no other way is the same.
HARMLESS: frozenset[str] = frozenset({"packaging_only", "dead_code_only", "layout_only"})
# These change nothing that is computed, but the graph is compiled again.
COMPILES_AGAIN: frozenset[str] = frozenset(
    {"aliasing_changed", "module_changed", "placement_changed", "packaging_changed", "barrier_changed", "key_changed"}
)
Verdict = Literal["same", "different", "cannot tell"]


@dataclass(frozen=True)
class Cause:
    """One reason why two graphs differ.

    `what` says it in words, `where` the source line ("train.py:79", "" if unknown), `advice` what to do about it.
    `a` and `b` name the instructions concerned in either graph, as `computation/instruction` outside the entry.
    `count` is how many places have this cause (as many constants, say), `kind` one of `Kind`.
    """

    kind: Kind
    what: str
    where: str = ""
    advice: str = ""
    a: tuple[str, ...] = ()
    b: tuple[str, ...] = ()
    count: int = 1

    def text(self) -> str:
        """The cause on one line, with its source line."""
        return f"{self.what}{at_line(self.where)}"

    def lines(self, indent: str = "    ") -> list[str]:
        """The cause, and its advice on a line below."""
        return [self.text(), *([f"{indent}{self.advice}"] if self.advice else [])]


@dataclass(frozen=True)
class Side:
    """One of the two graphs: what it is called, how large it is, and its keys (see `retrograd.graph.keys`)."""

    title: str
    name: str
    format: str
    instructions: int
    parameters: int
    outputs: int
    collectives: int
    dead: int
    key: str = ""


@dataclass(frozen=True)
class Node:
    """An instruction in the picture of a difference; `twin` is the one on the other side, "" if there is none."""

    id: str
    opcode: str
    shape: str
    attrs: str
    where: str
    operands: tuple[str, ...]
    users: tuple[str, ...]
    status: Literal["same", "changed", "added", "removed"]
    twin: str = ""


@dataclass(frozen=True)
class PassRow:
    """A row of the table of two stages of one program: `kind` is "fused", "removed", "added", "kept", "rewritten" or
    "collective", `what` how many or which, `how` what became of it, in lines."""

    kind: str
    what: str
    how: str


@dataclass(frozen=True)
class Diff(Record, ComparisonOutcome, Shown):
    """The comparison of two graphs, true if they are the same computation.

    `causes` come first cause first; those of `COMPILES_AGAIN` change nothing that is computed. `unknown` says what the
    texts do not: if it is all there is, whether the two are the same cannot be told (exit code 3). `notes` say what
    differs without changing the computation (names, dead code,
    packaging). `consequences` counts instructions of B that differ only because something below them does, `matched`
    those that are the same in both. `passes` is the table of two stages of compilation of one program, which are told
    by it and not by causes. `nodes_a` and `nodes_b` are the neighbourhood of the causes, for pictures.
    """

    _noun: ClassVar[str] = "graph comparison"

    a: Side
    b: Side
    causes: tuple[Cause, ...]
    notes: tuple[Cause, ...] = ()
    matched: int = 0
    consequences: int = 0
    seconds: float = 0.0
    nodes_a: tuple[Node, ...] = ()
    nodes_b: tuple[Node, ...] = ()
    unknown: tuple[Cause, ...] = ()
    passes: tuple[PassRow, ...] = ()
    schema: str = DIFF_SCHEMA

    @property
    def verdict(self) -> Verdict:
        """Same, different (in what is computed or in how it is compiled), or not to be told."""
        return "different" if self.causes else "cannot tell" if self.unknown else "same"

    @property
    def same(self) -> bool:
        """Whether the two were proven to be the same."""
        return self.verdict == "same"

    @property
    def computes_the_same(self) -> bool:
        """Whether the two were proven to compute the same, compiled alike or not."""
        return not self.unknown and all(cause.kind in COMPILES_AGAIN for cause in self.causes)

    @property
    def exit_code(self) -> int:
        """0 same, 1 different, 3 cannot tell."""
        return {"same": 0, "different": 1, "cannot tell": 3}[self.verdict]


@dataclass(frozen=True)
class GraphPair:
    """A graph of A and the one of B under the same name; `status` is the verdict, or where alone it is."""

    name: str
    status: Literal["same", "different", "cannot tell", "only in A", "only in B"]
    verdict: str
    diff: Diff | None = None


@dataclass(frozen=True)
class Pairs(Record, Shown):
    """Two folders, logs or files with several graphs each, compared graph by graph; true if all are the same."""

    _noun: ClassVar[str] = "comparison of several graphs"

    a: str
    b: str
    pairs: tuple[GraphPair, ...]
    schema: str = PAIRS_SCHEMA

    def __bool__(self) -> bool:
        return all(pair.status == "same" for pair in self.pairs)

    @property
    def exit_code(self) -> int:
        """0 all the same, 1 one differs or is missing, 3 one cannot be told."""
        return 0 if self else 1 if any(p.status not in ("same", "cannot tell") for p in self.pairs) else 3


@dataclass(frozen=True)
class Level:
    """How many graphs there are when some differences do not count, and which file has which (numbers from 0)."""

    name: Literal["text", "names", "dead code", "parameter order"]
    unique: int
    members: tuple[int, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Unique(Record, Shown):
    """How many graphs a set of files really holds, at each level; `titles` in the order given."""

    _noun: ClassVar[str] = "count of graphs"

    titles: tuple[str, ...]
    sides: tuple[Side, ...]
    levels: tuple[Level, ...]
    recorded: tuple[str, ...] = ()  # the keys that the framework wrote beside the graphs, "" where it did not
    schema: str = UNIQUE_SCHEMA

    def level(self, name: str) -> Level:
        """One level; KeyError names those there are."""
        for level in self.levels:
            if level.name == name:
                return level
        raise KeyError(f"no level {name!r}; there are {[level.name for level in self.levels]}")


@dataclass(frozen=True)
class FlowStep:
    """One instruction that a followed value comes to, from the step numbered `parent` (-1: it is where one begins).

    It comes in as the operands numbered `operands`; `part` is the element of the result that carries it on ("3", "1.0";
    "" for all of it). `how`: "packaging" hands the value on, "moved" gives the same numbers another shape or place,
    "used" computes with it, "order" only puts collectives in order. `exact`: these are still the numbers of the value.
    `outputs` are the numbers of the graph's outputs that this is; `ends`: nobody uses it. `collective` counts from 1.
    """

    id: str
    opcode: str
    shape: str
    where: str = ""
    operands: tuple[int, ...] = ()
    part: str = ""
    parent: int = -1
    how: Literal["start", "packaging", "moved", "used", "order"] = "start"
    exact: bool = True
    outputs: tuple[int, ...] = ()
    ends: bool = False
    collective: int = 0


@dataclass(frozen=True)
class Crossing:
    """A collective that a followed value goes through: as operand `operand` of `of`, to result `result` (-1: to all).

    It is the `ordinal`-th of all `collectives` of the graph in the order of the text, and the `nth` of the `alike` ones
    with its opcode. These count from 1 and leave out collectives that no output needs, which have the number 0.
    `exact`: what goes in is the value itself, not something computed from it.
    """

    id: str
    opcode: str
    ordinal: int
    collectives: int
    nth: int
    alike: int
    operand: int
    of: int
    result: int
    where: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Reached:
    """An output that depends on a followed value; `exact` if the value itself is returned there."""

    index: int
    shape: str
    id: str
    where: str = ""
    exact: bool = False


@dataclass(frozen=True)
class Follow(Record, Shown):
    """Where one value of a graph goes: every step (or the first of `total`), the collectives and outputs it reaches.

    `ends` names the instructions where a way ends that nobody uses, `effects` those that do something, such as a send.
    """

    _noun: ClassVar[str] = "trail of a value"

    title: str
    asked: str
    id: str
    opcode: str
    shape: str
    where: str
    steps: tuple[FlowStep, ...]
    total: int
    outputs: tuple[Reached, ...] = ()
    outputs_of: int = 0
    collectives: tuple[Crossing, ...] = ()
    ends: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schema: str = FOLLOW_SCHEMA

    @property
    def dead(self) -> bool:
        """Does nothing that leaves the graph depend on it?"""
        return not self.outputs and not self.effects
