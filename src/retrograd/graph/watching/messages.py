"""Messages about a watched run: at the first graph too many, and of the report as a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from retrograd.core import document as doc
from retrograd.core.wording import count, shortened
from retrograd.graph.messages import annotation
from retrograd.graph.watching.schema import Check, Planned, Watched, WatchReport

_WIDEST = 96  # of a cause in the table: the whole of it stands below
_HEAD = ("step", "graph", "part", "key", "instr", "params", "outs", "compile s", "cause")


def seconds(value: float | None) -> str:
    """A duration; "?" if unknown."""
    return "?" if value is None else f"{value:.2f}"


def unexpected(graph: Watched, known: Sequence[Watched], expect: int | None, brief: bool = False) -> str:
    """What a graph too many is, why it is there, since when and what it cost; `brief` on one line."""
    extra = expect is not None and graph.number >= expect
    limit = f"expected at most {expect}, this makes {graph.number + 1}" if extra else "after the warm-up"
    cost = "" if graph.seconds is None else f"; compiling it took {seconds(graph.seconds)} s"
    head = f"step {graph.step}: a new {graph.role} graph was compiled ({limit}){cost}"
    if brief:
        return f"{head}: {graph.why() or 'no cause found'}"
    lines = [f"{head}: {_size(graph)}"]
    if graph.against is not None:
        before = known[graph.against]
        lines.append(f"  compared with {before.title}, first seen at step {before.step}: {_size(before)}")
    return "\n".join([*lines, *(f"  {line}" for line in details(graph))])


def reordered(order: Planned) -> str:
    """An order beside the graphs that changed: what differs, and what to do."""
    lines = [line for cause in order.causes for line in cause.lines()]
    return "\n  ".join([f"step {order.step}: an order beside the graphs changed", *lines])


def details(graph: Watched, most: int = 6) -> list[str]:
    """The framework's reason, causes with advice, notes; one line each, the first `most` causes."""
    lines = [f"the framework says: {graph.reason}"] if graph.reason else []
    if graph.same_as is not None:
        lines.append(f"it computes the same as graph {graph.same_as}; only the framework's key or guards differ")
    for cause in graph.causes[:most]:
        lines += cause.lines()
    if len(graph.causes) > most:
        lines.append(f"and {len(graph.causes) - most} more, which the report has")
    return lines + list(graph.notes)


def document(report: WatchReport | Check, everything: bool = True) -> doc.Document:
    """The run, or the graphs beside their lock file; nothing is left out."""
    if not isinstance(report, WatchReport):
        return _locked(report)
    table = doc.Table(_HEAD, tuple(map(_row, report.graphs)), numbers=(0, 4, 5, 6, 7), named=2)
    extra = [(f"{graph.title} is one too many: {_size(graph)}", details(graph)) for graph in report.unexpected]
    text: list[doc.TextLine | doc.Table] = [doc.TextLine(_summary(report)), doc.TextLine(), table]
    for title, lines in extra:
        text += [doc.TextLine(), doc.TextLine(title), *(doc.TextLine(f"  {line}") for line in lines)]
    orders = [line for order in report.orders for line in ["", *_order(order)]]
    spans = ", ".join(_spans(report))
    below = [*orders, *(["", f"steps: {spans}"] if spans else []), *(f"note: {note}" for note in report.notes)]
    header = doc.Header("proved" if report else "finding", _summary(report))
    page: list[doc.PagePart] = [header, doc.Section("Graphs", (table,))]
    if extra:
        cards = tuple(doc.Card(title, (doc.Fact("why", "\n".join(lines), "pre"),)) for title, lines in extra)
        page.append(doc.Section("Too many", cards))
    if below:
        page.append(doc.Section("Orders and steps", (doc.Paragraphs(tuple(filter(None, below)), "lines"),)))
    return doc.Document("retrograd graph watch", (*text, *map(doc.TextLine, below)), tuple(page), brief=tuple(page))


def _locked(check: Check) -> doc.Document:
    """The check: a card a graph that is not as locked, each cause a remark at its line."""
    changed = [graph for graph in check.graphs if graph.status != "same"]
    header = doc.Header("proved" if check else "finding", check.head)
    cards = tuple(doc.Card(f"{g.name}: {g.status}", (doc.Fact("why", g.text(), "pre"),)) for g in changed)
    remarks: list[doc.Annotation] = []
    for graph in changed:
        rule = f"graph/{graph.status}"
        remarks += [annotation(cause) for cause in graph.causes]
        if not graph.causes:
            remarks.append(doc.Annotation("error", f"{graph.name}: {graph.status}", graph.text(), rule=rule))
    text = tuple(map(doc.TextLine, check.text().splitlines()))
    page = (header, *[doc.Section("What is not as locked", cards)] * bool(cards))
    summary = doc.Annotation("notice", "retrograd graph check", check.head)
    return doc.Document(check.head, text, page, page, "graphs", (*remarks, summary), file=check.lock)


def _order(order: Planned) -> list[str]:
    plan = f"{order.kind} {order.key}: {count(len(order.rows), order.unit)}" if order.key else f"no {order.kind}"
    if not order.expected:
        return [f"{plan}, by surprise", *(f"  {line}" for line in reordered(order).splitlines())]
    return [f"{plan}, since step {order.step}", *(f"  {cause.text()}" for cause in order.causes)]


def _summary(report: WatchReport) -> str:
    graphs, extra = len(report.graphs), len(report.unexpected)
    text = f"{count(report.steps, 'step')}, {count(graphs, 'graph')}"
    if report.computations != graphs:
        text += f" ({report.computations} different)"
    if report.expect is not None:
        text += f", expected at most {report.expect}"
    timed = any(graph.seconds is not None for graph in report.graphs)
    if timed:
        text += f"; compiling took {seconds(report.seconds)} s"
    if changed := sum(not order.expected for order in report.orders):
        text += f"; {count(changed, 'order')} beside them changed"
    if extra:
        text += f"; {extra} too many" + (f", {seconds(report.wasted)} s of it" if timed else "")
    return f"{text} [{', '.join(report.backends)}]"


def _row(graph: Watched) -> tuple[str, ...]:
    why = " ".join((graph.why() or ("" if graph.against is not None else "first")).split())
    number = f"{graph.number}{'' if graph.expected else ' !'}"
    key = graph.key[:8] if graph.level == "strict" else f"{graph.level}:{graph.key[:8]}"
    sizes = [str(n) if graph.instructions else "?" for n in (graph.instructions, graph.parameters, graph.outputs)]
    part = f"{graph.role} {graph.name}".strip()
    return (str(graph.step), number, part, key, *sizes, seconds(graph.seconds), shortened(why, _WIDEST))


def _size(graph: Watched) -> str:
    if not graph.instructions:
        return "size unknown"
    return (
        f"{count(graph.instructions, 'instruction')}, {count(graph.parameters, 'parameter')}, "
        f"{count(graph.outputs, 'output')}"
    )


def _spans(report: WatchReport) -> Iterable[str]:
    """Which graphs ran in which steps: "0 graph 0", "1-7 graphs 1+2". Rows stand only where that changes."""
    rows = [row for row in report.rows if row.ran]
    ends = [*(row.step - 1 for row in rows[1:]), *(max(report.steps - 1, row.step) for row in rows[-1:])]
    for row, last in zip(rows, ends, strict=True):
        steps = str(last) if last == row.step else f"{row.step}-{last}"
        yield f"{steps} graph{'s' if len(row.ran) > 1 else ''} {'+'.join(map(str, row.ran))}"
