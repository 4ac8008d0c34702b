"""Records as a fragment of HTML for notebooks: verdict, findings, how to see them again, by the reports' templates.

No charts and no script: a notebook may be read where nothing runs. `retrograd.write(report, "r.html")` has them.
"""

from __future__ import annotations

from typing import Any

from retrograd.flake.record import Flake, FlakeReport
from retrograd.graph.record import Diff, Follow, Unique
from retrograd.record import Report
from retrograd.report import flake, graph, trail, words
from retrograd.report.html import template

Record = Report | FlakeReport | Flake | Diff | Unique | Follow

_MOST = 5  # findings or causes; the page has all of them
_TONES = {"steady": "proved", "undecided": "undecided"}


def render(record: Record) -> str:
    """The fragment; it needs no network and no other style."""
    if isinstance(record, Report):
        return _verification(record)
    if isinstance(record, FlakeReport):
        return "".join(_flake(found) for found in record.flakes)
    if isinstance(record, Flake):
        return _flake(record)
    return _diff(record) if isinstance(record, Diff) else _listing(record)


def _fragment(tone: str, word: str, head: str, **parts: Any) -> str:
    empty: dict[str, Any] = dict(above=[], findings=[], lists=[], report=None, more="")
    text: str = template("notebook.html.j2").render(tone=tone, word=word, head=head, words=words, **{**empty, **parts})
    return text


def _verification(report: Report) -> str:
    facts = [report.device, ", ".join(report.dtypes), f"level {report.level}", f"seed {report.seed}"]
    return _fragment(
        report.verdict,
        words.verdict(report.verdict),
        report.target,
        above=[" \u00b7 ".join([*facts, words.duration(report.seconds)])],
        findings=report.findings[:_MOST],
        report=report,
        more=_left_out(len(report.findings), "findings"),
    )


def _flake(found: Flake) -> str:
    tone = _TONES.get(found.verdict, "finding")
    word = flake.VERDICTS[found.verdict]
    return _fragment(tone, word, found.target, above=[f"{len(found.runs)} runs"], lists=[flake.rows(found)])


def _diff(diff: Diff) -> str:
    causes = [
        [(str(number), cause.what + graph.places(cause))]
        + [(label, text) for label, text in (("at", cause.where), ("do", cause.advice)) if text]
        for number, cause in enumerate(diff.causes[:_MOST], 1)
    ]
    return _fragment(
        "finding" if diff.causes else "proved",
        graph.verdict(diff).capitalize(),
        f"{diff.a.title} and {diff.b.title}",
        above=[f"A: {graph.facts(diff.a)}", f"B: {graph.facts(diff.b)}"],
        lists=causes,
        more=_left_out(len(diff.causes), "causes"),
    )


def _listing(record: Unique | Follow) -> str:
    following = isinstance(record, Follow)
    lines = [text for text, _ in (trail.head_lines(record) if following else graph.unique_lines(record)) if text]
    tone = "undecided" if following and record.dead else "proved"
    return _fragment(tone, "", lines[0], above=lines[1:])


def _left_out(count: int, what: str) -> str:
    return f'{count - _MOST} more {what}; all of them are in retrograd.write(record, "record.html")' * (count > _MOST)
