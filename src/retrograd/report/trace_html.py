"""What `retrograd trace` says as one page that needs no network."""

from __future__ import annotations

from retrograd.report import trace
from retrograd.report.html import island, template
from retrograd.trace.listing import Listing
from retrograd.trace.provenance import Provenance

_MOST_ROWS = 3000  # of a table; a browser takes seconds for more. The embedded record has what was listed.


def render(record: Provenance | Listing) -> str:
    """The page as text."""
    from markupsafe import Markup

    nan = record if isinstance(record, Provenance) else None
    ops = record.ops if isinstance(record, Listing) else record.way
    return template("trace.html.j2").render(
        title=trace.headline(record),
        tone=_tone(record),
        nan=nan,
        words=trace,
        rows=trace.table(ops[:_MOST_ROWS]),
        left_out=max(len(ops) - _MOST_ROWS, 0),
        meta=record.meta if isinstance(record, Listing) else {},
        record=Markup(island(record)),
    )


def _tone(record: Provenance | Listing) -> str:
    if isinstance(record, Listing):
        return "finding" if any(s.bad for op in record.ops for s in op.outputs) else "proved"
    return {0: "proved", 1: "finding"}.get(record.exit_code, "undecided")
