"""Record of a watched run, as plain data, and its JSON. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from retrograd.core.notebook import Shown
from retrograd.core.schema import Record
from retrograd.graph.schema import Cause

SCHEMA = "retrograd.graph.watch/1"

Level = Literal["strict", "undecided", "text", "live"]


@dataclass(frozen=True)
class Watched:
    """One graph that was compiled.

    `role` says which part of a step it is ("forward", "backward", "inference", "autograd", "step", "module"), `name`
    what the framework calls it. `key` is the same for the same graph (`level` "strict"; "undecided" where the text
    leaves something out, so that equal keys prove nothing, "text" where no reader could read it, "live" where the
    framework gave none); `recorded` is the framework's own key. `step` is the
    first step that has it. `seconds` is what compiling it took, None if unknown. `reason` is what the framework says
    about why it was compiled. `against` is the number of the graph it was compared with, `causes` what differs,
    `same_as` the number of an earlier graph that was proven to be the same. `expected` is false for a graph that makes
    one too many.
    """

    number: int
    role: str
    name: str
    step: int
    key: str
    level: Level = "strict"
    recorded: str = ""
    format: str = ""
    instructions: int = 0
    parameters: int = 0
    outputs: int = 0
    collectives: int = 0
    seconds: float | None = None
    reason: str = ""
    against: int | None = None
    same_as: int | None = None
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    expected: bool = True

    @property
    def title(self) -> str:
        """Number, part of the step, name."""
        return f"graph {self.number} ({self.role}{f' {self.name}' if self.name else ''})"

    def why(self) -> str:
        """The framework's reason, else the first cause, in words."""
        if self.same_as is not None:
            return f"computes the same as graph {self.same_as}" + (f"; {self.reason}" if self.reason else "")
        return self.reason or (self.causes[0].text() if self.causes else "")


@dataclass(frozen=True)
class StepRow:
    """One step: the graphs that were compiled in it, and those that are known to have run."""

    step: int
    compiled: tuple[int, ...] = ()
    ran: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Planned:
    """An order beside the graphs, as a plan of gradient buckets, that held at the end of a step for the first time.

    `place` tells orders that hold at the same time apart; `key` is "" where one was withdrawn, `causes` say what
    differs from the one that held there before, `expected` is false for one that took its place by surprise.
    """

    number: int
    kind: str
    key: str
    step: int
    place: int = 0
    unit: str = "row"
    rows: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    expected: bool = True


@dataclass(frozen=True)
class WatchReport(Record, Shown):
    """The record of a watched run, true if no graph was compiled that is one too many and no order changed.

    `steps` counts all, `rows` holds those that compiled something or ran another graph than the step before. `seconds`
    is what compiling took, `wasted` the part of it that the graphs too many took. `orders` are those that the program
    announced beside its graphs.
    """

    _noun: ClassVar[str] = "report of watched graphs"

    backends: tuple[str, ...]
    steps: int
    expect: int | None
    warmup: int | None
    graphs: tuple[Watched, ...]
    rows: tuple[StepRow, ...]
    seconds: float = 0.0
    wasted: float = 0.0
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    schema: str = SCHEMA
    orders: tuple[Planned, ...] = ()

    def __bool__(self) -> bool:
        return not self.unexpected and all(order.expected for order in self.orders)

    @property
    def unexpected(self) -> tuple[Watched, ...]:
        """The graphs that make one too many."""
        return tuple(g for g in self.graphs if not g.expected)

    @property
    def computations(self) -> int:
        """How many different computations the graphs are; those that were not proven to be the same count apart."""
        return sum(g.same_as is None for g in self.graphs)

    @property
    def exit_code(self) -> int:
        """0 as expected, 1 a graph too many or an order that changed."""
        return 0 if self else 1


@dataclass(frozen=True)
class Changed:
    """What became of one name: "changed" with causes, "added" (not in the lock), "missing" (only in the lock)."""

    name: str
    status: Literal["same", "changed", "added", "missing"]
    causes: tuple[Cause, ...] = ()
    note: str = ""

    def text(self) -> str:
        """The change in lines, causes with advice."""
        if self.status == "same":
            return f"same     {self.name}"
        lines = [f"{self.status:<8} {self.name}" + (f": {self.note}" if self.note else "")]
        for cause in self.causes:
            first, *advice = cause.lines("      ")
            lines += [f"  - {first}", *advice]
        return "\n".join(lines)


@dataclass(frozen=True)
class Check(Record):
    """Graphs against a lock file, true if none changed."""

    _noun: ClassVar[str] = "check of a lock file"

    lock: str
    graphs: tuple[Changed, ...]
    schema: str = "retrograd.graph.lock.check/1"

    def __bool__(self) -> bool:
        return all(g.status == "same" for g in self.graphs)

    @property
    def exit_code(self) -> int:
        """0 as locked, 1 changed."""
        return 0 if self else 1

    def text(self) -> str:
        """One line a graph, with causes."""
        return "\n".join([self.head, *(g.text() for g in self.graphs)])

    @property
    def head(self) -> str:
        """How many are not as locked, in words."""
        changed = sum(g.status != "same" for g in self.graphs)
        return f"{self.lock}: " + (f"{changed} of {len(self.graphs)} graphs are not " if changed else "") + "as locked"
