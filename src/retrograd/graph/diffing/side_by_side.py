"""Both sides of one computation: nodes, partners, names and source lines, shared by the finders of differences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from retrograd.core.program_lines import is_library
from retrograd.graph.diffing.correspondence import Matching
from retrograd.graph.form import Form
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Cause, Kind
from retrograd.graph.value_names import name_of

Names = tuple[str, ...]
_IS_ARGUMENT = re.compile(r"(?:primals|tangents)_").match


@dataclass(slots=True)
class Half:
    """One side: the graph, the form of the computation, keys of its values, and who has no partner.

    `ids` are the keys that the matching went by, `exact` those that tell parameters apart. `partner[k]` is the node
    of the other side, -1 if none; `added` is true of B, the later graph. `paired` are places of outputs that the other
    side has too, `explained` nodes that a cause has explained already, `twins` constants without a partner of which the
    other side has equal ones: not they changed, but who reads them. `changed` are nodes of causes: each reader of a
    constant has one of its own, of the same name.
    """

    graph: Graph
    form: Form
    ids: list[bytes]
    exact: list[bytes]
    partner: list[int]
    added: bool
    paired: set[int]
    alone: list[int] = field(default_factory=list[int])
    explained: set[int] = field(default_factory=set[int])
    twins: set[int] = field(default_factory=set[int])
    changed: dict[Cause, list[int]] = field(default_factory=dict[Cause, list[int]])
    _users: list[list[int]] | None = None
    _lines: dict[str, str] = field(default_factory=dict[str, str])  # by metadata

    def __post_init__(self) -> None:
        live = self.form.live
        self.alone = [k for k, partner in enumerate(self.partner) if partner < 0 and live[k]]

    def meet(self, other: Half) -> None:
        """Tell apart the constants that the other side has as well."""
        known = {other.exact[n] for n in other.form.literals if other.form.live[n]}
        self.twins = {k for k in self.alone if k in self.form.literals and self.exact[k] in known}
        self.alone = [k for k in self.alone if k not in self.twins]

    def shared(self, node: int) -> bool:
        """Does the other side have this value, too?"""
        return self.partner[node] >= 0 or node in self.twins

    def replaced(self, node: int, other: Half) -> bool:
        """Has the other side nothing for this operation, or another one?"""
        partner, labels = self.partner[node], self.form.labels
        stranger = partner >= 0 and labels[node][0] != other.form.labels[partner][0]
        return node not in self.form.literals and (partner < 0 or stranger)

    @property
    def users(self) -> list[list[int]]:
        """Live users of each node, in order; a node that uses another twice stands once."""
        if self._users is None:
            users: list[list[int]] = [[] for _ in range(len(self.form))]
            live = self.form.live
            for k, operands in enumerate(self.form.operands):
                if live[k]:
                    for o in operands if len(operands) < 2 else set(operands):
                        users[o].append(k)
            self._users = users
        return self._users

    def saved(self, parameters: Iterable[int]) -> str:
        """Of a backward of AOTAutograd: ", saved for backward" if these parameters are values of the forward alone."""
        if self.graph.format != "fx" or self.form.computation is not self.graph.main:
            return ""
        names = [self.form.origins[n].name for n in self.form.parameters]
        own = [self.form.origins[n].name for n in parameters]
        backward = any(name.startswith("tangents_") for name in names)
        return ", saved for backward" if backward and not any(map(_IS_ARGUMENT, own)) else ""

    def readers(self, literal: int) -> Iterator[int]:
        """Who reads a literal, through what is made of it alone."""
        pending = [literal]
        while pending:
            for user in self.users[pending.pop()]:
                if user in self.form.literals:
                    pending.append(user)
                else:
                    yield user

    @property
    def letter(self) -> str:
        """Which of the two graphs this is."""
        return "B" if self.added else "A"

    @property
    def sign(self) -> str:
        """The sign before what only this side has."""
        return "+" if self.added else "-"

    def cause(
        self, kind: Kind, text: str, line: str, advice: str, nodes: Iterable[int], count: int = 1, other: Names = ()
    ) -> Cause:
        """A cause that names instructions of this side, and those of the other where it concerns any."""
        own = self.names(nodes)
        return Cause(kind, text, line, advice, *((other, own) if self.added else (own, other)), count)

    def name(self, node: int) -> str:
        """The name of the instruction, with its computation outside the entry."""
        return name_of(self.graph, self.form.home(node), self.form.origins[node])

    def names(self, nodes: Iterable[int]) -> Names:
        """The instructions of nodes, each once, in order."""
        return tuple(dict.fromkeys(self.name(n) for n in nodes))

    def where(self, node: int) -> str:
        """The source line of a node."""
        origin = self.form.origins[node]
        line = self._lines.get(origin.metadata)
        if line is None:
            line = self._lines[origin.metadata] = str(self.graph.where(origin))
        return line

    def best_line(self, nodes: Iterable[int]) -> str:
        """The source line that most of the nodes have, of the user's program if any of them is."""
        counts = Counter(line for line in map(self.where, nodes) if line)
        own = {line: n for line, n in counts.items() if not is_library(line)}
        return max(own or counts, key=(own or counts).__getitem__, default="")

    def describe(self, node: int) -> str:
        """Operation and shape in words."""
        opcode, shape, _ = self.form.labels[node]
        return f"{opcode} {shape}".strip()


@dataclass(slots=True)
class View:
    """Both sides of one computation, and how they correspond.

    `changes` are texts of what changed, before and after, `follow` shapes of parameters that follow from a window,
    `shaped` nodes of A that have another shape because of one.
    """

    a: Half
    b: Half
    matching: Matching
    changes: dict[Cause, tuple[tuple[str, str], ...]] = field(default_factory=dict[Cause, tuple[tuple[str, str], ...]])
    follow: dict[Cause, tuple[tuple[str, str], ...]] = field(default_factory=dict[Cause, tuple[tuple[str, str], ...]])
    shaped: set[int] = field(default_factory=set[int])
    rewired: set[int] = field(init=False)  # nodes of A that read other values than their partners

    def __post_init__(self) -> None:
        partner = self.a.partner
        pairs = zip(partner, self.a.form.operands, strict=True)
        others = self.b.form.operands
        self.rewired = {
            a for a, (b, own) in enumerate(pairs) if b >= 0 and tuple([partner[o] for o in own]) != others[b]
        }

    @property
    def outputs(self) -> list[tuple[int, int]]:
        """Pairs of places in the lists of outputs that correspond."""
        return self.matching.outputs

    def cause(
        self, kind: Kind, text: str, advice: str, nodes_a: Sequence[int], nodes_b: Sequence[int], count: int
    ) -> Cause:
        """A cause that concerns nodes of both sides."""
        line = self.b.best_line(nodes_b) or self.a.best_line(nodes_a)
        return Cause(kind, text, line, advice, self.a.names(nodes_a), self.b.names(nodes_b), count)

    def same_operands(self, a: int, b: int) -> bool:
        """Are the operands of two partners partners, one by one?"""
        return a not in self.rewired


def shapes(names: Iterable[str], most: int = 4) -> str:
    """Shapes with their counts: "f32[256] x8, f32[64,256] x2"."""
    counts = Counter(names)
    words = [f"{shape} x{n}" if n > 1 else shape for shape, n in counts.most_common(most)]
    left = len(counts) - most
    return ", ".join(words) + (f" and {left} other shape{'s' * (left > 1)}" if left > 0 else "")
