"""What `retrograd graph` says as one page that needs no network: the picture is drawn from the embedded record."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from retrograd.graph.schema import Diff, Follow, Unique
from retrograd.report import dataflow, graph
from retrograd.report.html import island, template

_SCRIPT = Path(__file__).parent / "templates" / "graph_diff.js"
_MOST_NAMES = 12  # of one cause; the embedded record has all of them


def render(record: Diff | Unique | Follow) -> str:
    """The page as text."""
    return _diff(record) if isinstance(record, Diff) else _list(record)


def _diff(diff: Diff) -> str:
    from markupsafe import Markup

    script = _SCRIPT.read_text(encoding="utf-8")
    return template("graph_diff.html.j2").render(
        diff=diff,
        words=graph,
        most=_MOST_NAMES,
        record=Markup(island(diff)),
        script=Markup(script),
        # The policy of the page runs this script and no other, whatever a name in a dump may look like.
        script_hash=Markup("sha256-" + b64encode(sha256(script.encode()).digest()).decode()),
    )


def _list(record: Unique | Follow) -> str:
    from markupsafe import Markup

    following = isinstance(record, Follow)
    above = [text for text, _ in (dataflow.head_lines(record) if following else graph.unique_lines(record)) if text]
    return template("graph_list.html.j2").render(
        head=above[0],
        above=above[1:],
        tone="undecided" if following and record.dead else "proved",
        rows=[] if following else graph.unique_rows(record),
        trail=list(dataflow.trail(record)) if following else [],
        record=Markup(island(record)),
    )
