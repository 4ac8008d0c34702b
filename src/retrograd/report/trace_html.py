"""What `retrograd trace` says as one page that needs no network."""

from __future__ import annotations

from retrograd.report import trace, trace_bars
from retrograd.report.html import island, template
from retrograd.trace.filters import Listing
from retrograd.trace.nan_provenance import Provenance
from retrograd.trace.nan_reasons import magnitudes

_MOST_ROWS = 3000  # of a table; a browser takes seconds for more. The embedded record has what was listed.


def render(record: Provenance | Listing) -> str:
    """The page as text."""
    from markupsafe import Markup

    nan = record if isinstance(record, Provenance) else None
    ops = (record.ops if isinstance(record, Listing) else record.way)[:_MOST_ROWS]
    made = [trace.shown(op) for op in ops]
    axis = trace_bars.axis(made)
    pictures = [] if axis is None else [Markup(trace_bars.picture(s, axis, magnitudes(s) if s else "")) for s in made]
    return template("trace.html.j2").render(
        title=trace.headline(record),
        tone=_tone(record),
        nan=nan,
        words=trace,
        rows=trace.table(ops),
        pictures=pictures,
        axis=axis,
        left_out=(len(record.ops) if isinstance(record, Listing) else len(record.way)) - len(ops),
        meta=record.meta if isinstance(record, Listing) else {},
        record=Markup(island(record)),
    )


def _tone(record: Provenance | Listing) -> str:
    if isinstance(record, Listing):
        return "plain"  # no verdict: the infinities of a mask are meant
    return {0: "proved", 1: "finding"}.get(record.exit_code, "undecided")
