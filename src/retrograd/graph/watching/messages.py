"""A watched run in words: what is said at the first graph too many, and the table of a report. Strings only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrograd.graph.watching.schema import Planned, Step, Watched, WatchReport

_WIDEST = 96  # of a cause in the table: the whole of it stands below


def seconds(value: float | None) -> str:
    """A duration; "?" if unknown."""
    return "?" if value is None else f"{value:.2f}"


def unexpected(graph: Watched, known: Sequence[Watched], expect: int | None, brief: bool = False) -> str:
    """What a graph too many is, why it is there, since when and what it cost; `brief` on one line."""
    limit = f"expected at most {expect}, this makes {graph.number + 1}" if expect is not None else "after the warm-up"
    cost = "" if graph.seconds is None else f"; compiling it took {seconds(graph.seconds)} s"
    head = f"step {graph.step}: a new {graph.role} graph was compiled ({limit}){cost}"
    if brief:
        return f"{head}: {graph.why() or 'no cause found'}"
    lines = [f"{head}: {_size(graph)}"]
    if graph.against is not None:
        before = known[graph.against]
        lines.append(f"  compared with {before.title}, first seen at step {before.step}: {_size(before)}")
    return "\n".join([*lines, *(f"  {line}" for line in details(graph))])


def reordered(one: Planned) -> str:
    """An order beside the graphs that changed: what differs, and what to do."""
    lines = [f"step {one.step}: an order beside the graphs changed"]
    for found in one.causes:
        lines += [found.text(), *([f"    {found.advice}"] if found.advice else [])]
    return "\n  ".join(lines)


def details(graph: Watched, most: int = 6) -> list[str]:
    """The framework's reason, causes with advice, notes; one line each, the first `most` causes."""
    lines = [f"the framework says: {graph.reason}"] if graph.reason else []
    if graph.same_as is not None:
        lines.append(f"it computes the same as graph {graph.same_as}; only the framework's key or guards differ")
    for found in graph.causes[:most]:
        lines.append(found.text())
        if found.advice:
            lines.append(f"    {found.advice}")
    if len(graph.causes) > most:
        lines.append(f"and {len(graph.causes) - most} more, which the report has")
    return lines + list(graph.notes)


def table(report: WatchReport) -> str:
    """Step, graph, key, sizes, seconds and cause of every graph; below it the causes in full."""
    head = ("step", "graph", "part", "key", "instr", "params", "outs", "compile s", "cause")
    rows = [head, *(_row(graph) for graph in report.graphs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [_summary(report), ""]
    for row in rows:
        cells = [c.rjust(w) if i in (0, 4, 5, 6, 7) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]  # noqa: B905
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    for graph in report.unexpected:
        lines += ["", f"{graph.title} is one too many: {_size(graph)}", *(f"  {line}" for line in details(graph))]
    for one in report.orders:
        lines += ["", *_order(one)]
    ran = [row for row in report.rows if row.ran]
    if ran:
        lines += [
            "",
            "steps: " + ", ".join(f"{_span(first, last)} {_ran(first)}" for first, last in _runs(report, ran)),
        ]
    return "\n".join(lines + [f"note: {note}" for note in report.notes])


def _order(one: Planned) -> list[str]:
    held = f"{one.kind} {one.key}: {_many(len(one.rows), one.unit)}" if one.key else f"no {one.kind}"
    if not one.expected:
        return [f"{held}, by surprise", *(f"  {line}" for line in reordered(one).splitlines())]
    return [f"{held}, since step {one.step}", *(f"  {found.text()}" for found in one.causes)]


def _summary(report: WatchReport) -> str:
    count, extra = len(report.graphs), len(report.unexpected)
    text = f"{_many(report.steps, 'step')}, {_many(count, 'graph')}"
    if report.computations != count:
        text += f" ({report.computations} different)"
    if report.expect is not None:
        text += f", expected at most {report.expect}"
    timed = any(graph.seconds is not None for graph in report.graphs)
    if timed:
        text += f"; compiling took {seconds(report.seconds)} s"
    if changed := sum(not one.expected for one in report.orders):
        text += f"; {_many(changed, 'order')} beside them changed"
    if extra:
        text += f"; {extra} too many" + (f", {seconds(report.wasted)} s of it" if timed else "")
    return f"{text} [{', '.join(report.backends)}]"


def _row(graph: Watched) -> tuple[str, ...]:
    why = graph.why() or ("" if graph.against is not None else "first")
    why = " ".join(why.split())
    if len(why) > _WIDEST:
        why = why[: _WIDEST - 3] + "..."
    number = f"{graph.number}{'' if graph.expected else ' !'}"
    key = graph.key[:8] if graph.level == "strict" else f"{graph.level}:{graph.key[:8]}"
    sizes = [str(n) if graph.instructions else "?" for n in (graph.instructions, graph.parameters, graph.outputs)]
    part = f"{graph.role} {graph.name}".strip()
    return (str(graph.step), number, part, key, *sizes, seconds(graph.seconds), why)


def _size(graph: Watched) -> str:
    if not graph.instructions:
        return "size unknown"
    return (
        f"{_many(graph.instructions, 'instruction')}, {_many(graph.parameters, 'parameter')}, "
        f"{_many(graph.outputs, 'output')}"
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _ran(row: Step) -> str:
    return f"graph{'s' if len(row.ran) > 1 else ''} " + "+".join(map(str, row.ran))


def _span(first: Step, last: int) -> str:
    return str(first.step) if last == first.step else f"{first.step}-{last}"


def _runs(report: WatchReport, rows: Sequence[Step]) -> Iterable[tuple[Step, int]]:
    """Rows with the last step that still runs the same graphs: rows stand only where that changes."""
    ends = [row.step - 1 for row in rows[1:]] + [max(report.steps - 1, rows[-1].step)]
    return zip(rows, ends, strict=True)
