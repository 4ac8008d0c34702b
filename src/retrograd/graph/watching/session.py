"""Session of a watched run: its steps and graphs, which are new, which one too many, and why. Pure."""

# What people pass is checked, whatever the hints say.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from retrograd.core.order_registry import Order
from retrograd.errors import GraphChangedError, UsageError
from retrograd.graph.canonical import forms
from retrograd.graph.diffing.compare import compare, side
from retrograd.graph.ir import Graph
from retrograd.graph.schema import Diff
from retrograd.graph.watching import graph_text, messages, order_changes
from retrograd.graph.watching.events import Compiled, Event, Executed
from retrograd.graph.watching.schema import Planned, StepRow, Watched, WatchReport

ON_EXTRA = ("explain", "raise", "warn")
_WARMUP = 2  # steps: the first has no optimizer state yet, the second has
_MAX_CAUSES = 12  # kept of one comparison; what follows them is their consequence as a rule


class GraphChangedWarning(UserWarning):
    """A training step compiled a graph too many, or an order beside the graphs changed."""


@dataclass
class GraphEntry:
    """A graph with what is needed to compare it."""

    watched: Watched
    text: str
    graph: Graph | None
    family: str


@dataclass
class WatchSession:
    """Judges graphs as they come.

    `expect` is how many graphs there may be, `warmup` the number of steps in which new ones are no surprise; either may
    be None. `say` prints.
    """

    expect: int | None = None
    warmup: int | None = None
    on_extra: str = "explain"
    say: Callable[[str], None] = print
    backends: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    entries: list[GraphEntry] = field(default_factory=list[GraphEntry])
    rows: list[StepRow] = field(default_factory=list[StepRow])
    plans: list[Planned] = field(default_factory=list[Planned])
    notes: list[str] = field(default_factory=list[str])
    now: int = 0

    def __post_init__(self) -> None:
        if self.expect is None and self.warmup is None:
            self.warmup = _WARMUP
        for name, value in (("expect", self.expect), ("warmup", self.warmup)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise UsageError(f"`{name}` is {value!r}, expected a number of {_NOUNS[name]}, 0 or more, or None")
        if self.on_extra not in ON_EXTRA:
            raise UsageError(f"`on_extra` is {self.on_extra!r}, expected one of {', '.join(map(repr, ON_EXTRA))}")

    def step(self, events: Sequence[Event], held: Mapping[int, Order] | None = None) -> StepRow:
        """Close a step with what happened in it and the orders beside the graphs that hold at its end.

        Raises:
            GraphChangedError: a graph is one too many or an order changed, and `on_extra` is "raise". The step is
                recorded all the same.
        """
        first = len(self.entries)
        ran: list[int] = []
        for event in events:
            number = self._add(event) if isinstance(event, Compiled) else self._find(event)
            if isinstance(event, Executed) and number is not None and number not in ran:
                ran.append(number)
        new = [entry.watched for entry in self.entries[first:]]
        row = StepRow(self.now, tuple(g.number for g in new), tuple(ran), sum(g.seconds or 0.0 for g in new))
        last = next((r for r in reversed(self.rows) if r.ran), None)
        if row.compiled or (row.ran and (last is None or last.ran != row.ran)):
            self.rows.append(row)
        warm = self.warmup is not None and self.now < self.warmup
        plans = order_changes.changes(self.plans, held or {}, self.now, warm)
        self.plans += plans
        self.now += 1
        self._report_unexpected([g for g in new if not g.expected], [p for p in plans if not p.expected])
        return row

    def restart(self) -> None:
        """What was taken for steps so far is the first one: the program marks its steps itself."""
        self.now = 0
        for entry in self.entries:
            entry.watched = replace(entry.watched, step=0)
        if self.rows:
            numbers = [number for row in self.rows for number in row.compiled]
            self.rows = [StepRow(0, tuple(numbers), self.rows[-1].ran, sum(row.seconds for row in self.rows))]

    def _find(self, event: Executed) -> int | None:
        return next((e.watched.number for e in self.entries if e.watched.recorded == event.recorded), None)

    def _add(self, event: Compiled) -> int:
        number = len(self.entries)
        family = event.family or event.role
        source = f"{event.role} graph {number}"
        reading = graph_text.known(event.text, event.format, source)
        key = reading.key or event.digest
        before = next((e.watched.number for e in reversed(self.entries) if e.family == family), None)
        # Equal keys prove nothing where the text leaves something out, cannot be read, or is not known.
        proven = [e.watched.number for e in self.entries if e.watched.level == reading.level == "strict"]
        same = next((n for n in proven if self.entries[n].watched.key == key), None)
        left_out = [f"whether it is the same as another cannot be told: {cause.what}" for cause in reading.unknown]
        notes = (*((reading.problem,) if reading.problem else ()), *left_out, *event.notes)
        watched = Watched(
            number, event.role, event.name, self.now, key, reading.level, event.recorded, event.format,  # type: ignore[arg-type]
            seconds=event.seconds, reason=event.reason, against=before, same_as=same, notes=notes,
            expected=self._expected(number),
        )  # fmt: skip
        if reading.graph is not None:
            watched = replace(watched, **sizes(reading.graph))
        entry = GraphEntry(watched, event.text, reading.graph, family)
        self.entries.append(entry)
        if before is not None and same is None:
            self._compare(entry, self.entries[before])
        return number

    def _expected(self, number: int) -> bool:
        if self.expect is not None and number >= self.expect:
            return False
        return self.warmup is None or self.now < self.warmup

    def _compare(self, entry: GraphEntry, before: GraphEntry) -> None:
        if entry.graph is None or before.graph is None:
            return
        try:
            diff = compare(before.graph, entry.graph, pictured=False)
        except Exception as error:  # a run of days must not end because its watcher does not understand a graph
            failed = f"the comparison with graph {before.watched.number} failed: {type(error).__name__} {error}"
            entry.watched = replace(entry.watched, notes=(*entry.watched.notes, failed))
            return
        entry.watched = replace(entry.watched, causes=diff.causes[:_MAX_CAUSES])

    def _report_unexpected(self, extra: Sequence[Watched], changed: Sequence[Planned]) -> None:
        if not extra and not changed:
            return
        known = [entry.watched for entry in self.entries]
        # In full at the first one; those that follow are told in a line, and stand in the report.
        brief = self.on_extra == "explain" and any(not g.expected for g in known[: extra[0].number if extra else 0])
        # An order that changed may be why graphs did.
        lines = [messages.reordered(plan) for plan in changed]
        text = "\n".join([*lines, *(messages.unexpected(g, known, self.expect, brief) for g in extra)])
        if self.on_extra == "raise":
            raise GraphChangedError(text)
        if self.on_extra == "warn":
            warnings.warn(text, GraphChangedWarning, stacklevel=4)
        else:
            self.say(f"retrograd.graph: {text}")

    def explain(self, i: int, j: int) -> Diff:
        """Compare two of the graphs by their numbers; UsageError if there is no such graph or no text of it."""
        graphs: list[Graph] = []
        for name, number in (("i", i), ("j", j)):
            if not isinstance(number, int) or not 0 <= number < len(self.entries):
                raise UsageError(
                    f"`{name}` is {number!r}, expected the number of a graph, 0 to {len(self.entries) - 1}"
                )
            graph = self.entries[number].graph
            if graph is None:
                title = self.entries[number].watched.title
                reason = next(iter(self.entries[number].watched.notes), "its text is unknown")
                raise UsageError(f"`{name}` is {number}: {title} cannot be compared; {reason}")
            graphs.append(graph)
        return compare(graphs[0], graphs[1])

    def report(self) -> WatchReport:
        """What was seen so far."""
        graphs = tuple(entry.watched for entry in self.entries)
        wasted = sum(g.seconds or 0.0 for g in graphs if not g.expected)
        return WatchReport(
            self.backends, self.now, self.expect, self.warmup, graphs, tuple(self.rows),
            sum(g.seconds or 0.0 for g in graphs), wasted, tuple(self.notes), self.versions, orders=tuple(self.plans),
        )  # fmt: skip


_NOUNS = {"expect": "graphs", "warmup": "steps"}


def sizes(graph: Graph) -> dict[str, int]:
    """Instructions, parameters, outputs and collectives of a graph."""
    counts = side(graph, forms(graph))
    return {name: getattr(counts, name) for name in ("instructions", "parameters", "outputs", "collectives")}
