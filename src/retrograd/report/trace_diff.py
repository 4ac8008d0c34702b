"""What comparing traces and bisecting precision say: for a terminal, and a comparison as one page without network."""

from __future__ import annotations

from io import StringIO

from rich.console import Console
from rich.text import Text

from retrograd.report.html import island, template
from retrograd.trace.bisecting import messages as bisecting
from retrograd.trace.bisecting.schema import Bisection
from retrograd.trace.diffing import messages as diffing
from retrograd.trace.diffing.schema import TraceDiff

Compared = TraceDiff | Bisection

# What a row of the neighbourhood says of its two operators.
STATUS = {
    "same": "same",
    "within": "within rounding",
    "made": "made here",
    "carried": "carried from there",
    "outside": "came in from outside",
    "inserted": "only in B",
    "missing": "only in A",
}


def render(record: Compared, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` leaves nothing out."""
    found = diffing.lines(record, everything) if isinstance(record, TraceDiff) else bisecting.lines(record)
    for text, style in found:
        # Names come from programs: no escape character may command the terminal, no bracket be taken for markup.
        clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
        console.print(Text(clean, style=style), soft_wrap=True)


def to_text(record: Compared, width: int = 120) -> str:
    """The record as plain text without colour."""
    out = StringIO()
    render(record, Console(file=out, width=width, color_system=None, force_terminal=False), everything=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def to_html(record: Compared) -> str:
    """The record as a page: causes, and operators around the first of them on both sides."""
    from markupsafe import Markup

    name = "trace_diff.html.j2" if isinstance(record, TraceDiff) else "trace_bisect.html.j2"
    return template(name).render(
        found=record,
        words=diffing if isinstance(record, TraceDiff) else bisecting,
        status=STATUS,
        record=Markup(island(record)),
    )
