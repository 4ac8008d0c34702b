"""Records as a fragment of HTML for notebooks: verdict, findings, how to see them again, by the reports' templates.

No charts and no script: a notebook may be read where nothing runs. `retrograd.write(report, "r.html")` has them.
"""

from __future__ import annotations

from typing import Any

from retrograd.check.schema import Report
from retrograd.flake.schema import Flake, FlakeReport
from retrograd.graph.schema import Diff, Follow, Unique
from retrograd.report import dataflow, flake, graph, trace, wording
from retrograd.report.html import template
from retrograd.trace.bisecting import messages as bisecting
from retrograd.trace.bisecting.schema import Bisection
from retrograd.trace.diffing import messages as diffing
from retrograd.trace.diffing.schema import TraceDiff
from retrograd.trace.nan_provenance import Provenance

Record = Report | FlakeReport | Flake | Diff | Unique | Follow | Provenance | TraceDiff | Bisection

_MOST = 5  # findings or causes; the page has all of them
_TONES = {"steady": "proved", "undecided": "undecided"}
_EXITS = {0: "proved", 1: "finding"}


def render(record: Record) -> str:
    """The fragment; it needs no network and no other style."""
    if isinstance(record, Report):
        return _verification(record)
    if isinstance(record, FlakeReport):
        return "".join(_flake(found) for found in record.flakes)
    if isinstance(record, Flake):
        return _flake(record)
    if isinstance(record, Provenance):
        rows = [trace.rows(record)] if record.op else []
        return _fragment(_tone(record.exit_code), "", trace.verdict(record), above=list(record.notes), lists=rows)
    if isinstance(record, TraceDiff | Bisection):
        return _compared(record)
    return _diff(record) if isinstance(record, Diff) else _listing(record)


def _fragment(tone: str, word: str, head: str, **parts: Any) -> str:
    empty: dict[str, Any] = dict(above=[], findings=[], lists=[], report=None, more="")
    text: str = template("notebook.html.j2").render(
        tone=tone, word=word, head=head, words=wording, **{**empty, **parts}
    )
    return text


def _verification(report: Report) -> str:
    facts = [report.device, ", ".join(report.dtypes), f"level {report.level}", f"seed {report.seed}"]
    return _fragment(
        report.verdict,
        wording.verdict(report.verdict),
        report.target,
        above=[" \u00b7 ".join([*facts, wording.duration(report.seconds)])],
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


def _compared(record: TraceDiff | Bisection) -> str:
    """Two runs, or a step and its reference: causes, or what must be computed in higher precision."""
    if isinstance(record, TraceDiff):
        head, above = diffing.verdict(record), [f"A: {diffing.facts(record.a)}", f"B: {diffing.facts(record.b)}"]
        above.append(diffing.counts(record))
        found = [
            [(str(k), c.what), ("at", c.where), ("line", c.code), ("in", c.inside), ("why", c.why), ("do", c.advice)]
            for k, c in enumerate(record.causes, 1)
        ]
    else:
        head, above = bisecting.verdict(record), [bisecting.facts(record)]
        found = [
            [(str(k), c.name), ("at", bisecting.place(c)), ("line", c.code), ("alone", f"error {c.alone:.2g}")]
            for k, c in enumerate(record.culprits, 1)
        ]
    lists = [[(label, text) for label, text in rows if text] for rows in found[:_MOST]]
    more = _left_out(len(found), "causes")
    return _fragment(_tone(record.exit_code), "", head, above=[*above, *record.notes], lists=lists, more=more)


def _tone(exit_code: int) -> str:
    return _EXITS.get(exit_code, "undecided")


def _listing(record: Unique | Follow) -> str:
    following = isinstance(record, Follow)
    lines = [text for text, _ in (dataflow.head_lines(record) if following else graph.unique_lines(record)) if text]
    tone = "undecided" if following and record.dead else "proved"
    return _fragment(tone, "", lines[0], above=lines[1:])


def _left_out(count: int, what: str) -> str:
    return f'{count - _MOST} more {what}; all of them are in retrograd.write(record, "record.html")' * (count > _MOST)
