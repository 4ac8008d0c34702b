"""Messages of the checker: a report in words, as a document and as numbers over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import cast

from retrograd.check import charts
from retrograd.check.acceptance import ENDED
from retrograd.check.schema import NO_REFERENCE, Case, Finding, Profile, Report, StageResult, reasons_once
from retrograd.core import document as doc
from retrograd.core.wording import count, duration

VERDICTS = {"proved": "PROVED", "finding": "FINDING", "undecided": "CANNOT DECIDE"}
_MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip", "undecided": "??"}
_STATUS_STYLE = {"passed": "green", "failed": "bold red", "skipped": "dim", "undecided": "yellow"}
_STATUS_TONE = {"undecided": "status-undecided"}
# From this width on, the power of a stage has a column of its own.
_WIDE = 110
# Enough to see the pattern; the embedded record has all of them.
_MOST_PROFILES = 12


def document(report: Report, everything: bool = True) -> doc.Document:
    """The report; nothing of it is left out."""
    verdict = _verdict(report)
    facts = [report.device, ", ".join(report.dtypes), f"level {report.level}", f"seed {report.seed}"]
    head = (" \u00b7 ".join([*facts, duration(report.seconds)]), *_covers(report))
    cards = tuple(map(_card, report.findings))
    header = doc.Header(report.verdict, report.target, head, verdict)
    notes = [*report.notes, *(f"{s.id}: {note}" for s in report.stages for note in s.notes)]
    stages = _stages_of_page(report)
    page: list[doc.PagePart] = [
        doc.Header(report.verdict, report.target, (*head, *filter(None, [report.started])), verdict)
    ]
    page += [doc.Section("Findings", cards)] * bool(cards)
    if standing := tuple(map(_card, report.accepted)):
        page.append(doc.Section("Accepted findings", standing))
    page.append(doc.Section("Stages", (stages,)))
    page += _profiles(report)
    page += [doc.Section("Notes", (doc.Paragraphs(tuple(notes), "points"),))] * bool(notes)
    return doc.Document(
        title=f"{verdict}: {report.target}",
        text=tuple(_text(report, notes)),
        page=(*page, doc.environment(report.command, report.environment)),
        brief=(header, *cards, doc.Section(f"{len(report.stages)} stages", (stages,), folded=True)),
        more="findings",
        annotations=tuple(_annotations(report)),
        suite=_suite(report),
        file=report.target.rpartition(":")[0] if ".py:" in report.target else "",
    )


def _text(report: Report, notes: list[str]) -> Iterator[doc.TextLine | doc.Table]:
    yield doc.TextLine(f"retrograd verify {report.target}", "bold")
    dtypes = ", ".join(report.dtypes)
    yield doc.TextLine(f"device {report.device} | dtypes {dtypes} | level {report.level} | seed {report.seed}")
    yield doc.TextLine()
    if report.stages:
        rows = tuple(map(_row, reasons_once(report.stages)))
        yield doc.Table((), rows, numbers=(3, 4, 5), fold=(2, 6), narrow=_WIDE, below=2)
        yield doc.TextLine()
    for number, finding in enumerate(report.findings, 1):
        yield doc.TextLine(f"Finding {number} of {len(report.findings)} [{finding.stage}, {finding.kind}]", "bold red")
        above = doc.Fact("what", "\n".join(filter(None, (finding.what, evidence(finding)))))
        facts = (fact._replace(label=fact.label.removeprefix("looks ")) for fact in _facts(finding))
        yield from doc.labelled([above, *facts], width=7)
        yield doc.TextLine()
    for finding in report.accepted:
        yield from doc.labelled([doc.Fact("accepted", _accepted(finding))], width=9)
    yield from (doc.TextLine(f"note: {note}") for note in notes)
    if notes or report.accepted:
        yield doc.TextLine()
    yield from (doc.TextLine(line, "dim") for line in _covers(report))
    parts = [count(len(report.findings), "finding")] * bool(report.findings)
    parts += [f"{len(report.accepted)} accepted"] * bool(report.accepted) + [_progress(report)]
    text = f"{_verdict(report)}{',' * bool(report.left_out)} in {duration(report.seconds)} ({', '.join(parts)})"
    yield doc.TextLine(text, doc.STYLES[report.verdict])


def _accepted(finding: Finding) -> str:
    """An accepted finding in a line: its class, the reason, what it is."""
    name = "/".join(filter(None, (finding.stage, finding.kind, finding.tensor)))
    return f"{name}: {finding.accepted} | {finding.what.splitlines()[0]}"


def _verdict(report: Report) -> str:
    """The verdict; that nothing was compared with a truth, or much left out, is not to be missed beside PROVED."""
    alone = report.verdict == "proved" and NO_REFERENCE in report.notes
    cut = f" with a budget of {report.budget or 0:g} s, which left out {report.left_out}" * bool(report.left_out)
    return VERDICTS[report.verdict] + " without a reference" * alone + cut


def _covers(report: Report) -> list[str]:
    return [f"covers {report.covers}"] if report.covers else []


def _progress(report: Report) -> str:
    ended = [stage for stage in report.stages if any(f.kind in ENDED for f in stage.findings)]
    done = sum(stage.status in ("passed", "failed") and stage not in ended for stage in report.stages)
    return f"{done} of {len(report.stages)} stages ran to their end"


def _row(stage: StageResult) -> tuple[str | doc.Cell, ...]:
    style = _STATUS_STYLE[stage.status]
    # The blank after the singular keeps the column aligned.
    pairs = ((stage.cases, "case"), (stage.runs, "run"))
    counts = [f"{number} {noun}{' ' if number == 1 else 's'}" for number, noun in pairs]
    cost = [*counts, duration(stage.seconds)] if stage.status != "skipped" else ["", "", ""]
    standing = f"{len(stage.accepted)} accepted" if stage.accepted else ""
    aside = "; ".join(filter(None, (standing, stage.reason, power(stage))))
    return doc.Cell(_MARKS[stage.status], style), doc.Cell(stage.id, style), stage.title, *cost, aside


def _stages_of_page(report: Report) -> doc.Table:
    head = ("Result", "Stage", "What it checks", "Cases", "Runs", "Time", "Power")
    rows = tuple(
        (
            doc.Cell(s.status, tone=_STATUS_TONE.get(s.status, s.status)),
            s.id,
            "\n".join(filter(None, (s.title, s.reason))),
            *(str(s.cases), str(s.runs), duration(s.seconds)),
            doc.Cell(power(s), tone="soft"),
        )
        for s in reasons_once(report.stages)
    )
    return doc.Table(head, rows, numbers=(3, 4, 5), named=1)


def _facts(finding: Finding) -> tuple[doc.Fact, ...]:
    """What is known beside what is wrong and how far."""
    return (
        doc.Fact("accepted", finding.accepted),
        doc.Fact("looks like", finding.looks_like),
        doc.Fact("which", finding.elements),
        doc.Fact("where", finding.where),
        doc.Fact("case", case_text(finding.case), "mono"),
        doc.Fact("repro", finding.repro, "pre"),
    )


def _card(finding: Finding) -> doc.Card:
    worst = doc.Fact("worst", evidence(finding))
    facts = (doc.Fact("stage", f"{finding.stage} ({finding.kind})"), worst, *_facts(finding))
    parts: list[doc.Table | doc.Chart] = []
    if terms := shares(finding):
        rows = tuple((name, size, doc.Cell(bar=share)) for name, size, share in terms)
        parts.append(doc.Table((), rows, numbers=(1,), caption="What the attainable error there is made of"))
    if changes := before_after(finding):
        caption = "Shrunk to the smallest case that still fails"
        parts.append(doc.Table(("", "first seen", "smallest"), tuple(changes), caption=caption))
    if finding.between is not None and finding.got is not None and math.isfinite(finding.got):
        low, high = finding.between
        label = f"Right is {low:.6g} to {high:.6g}, got {finding.got:.6g}"
        parts.append(doc.Chart("The one-sided derivatives", label, charts.kink(low, high, finding.got)))
    return doc.Card(finding.what, facts, parts=tuple(parts))


def _profiles(report: Report) -> list[doc.Section]:
    chosen = profiles(report)
    cards: list[doc.PagePart] = []
    for stage, profile in chosen[:_MOST_PROFILES]:
        tensor = profile.tensor
        drawn: list[doc.Chart] = []
        if any(profile.ratio):
            label = f"Error over attainable error across {tensor}"
            drawn.append(doc.Chart("Error over attainable error", label, charts.heat_map(profile)))
        if any(profile.ulp_counts):
            label = f"Histogram of the distance to the correctly rounded {tensor}"
            drawn.append(doc.Chart("Distance to the correctly rounded result", label, charts.ulp_histogram(profile)))
        aside = f"{stage.id} \u00b7 {case_text(profile.case)} \u00b7 worst {times(profile.worst)}"
        cards.append(doc.Card(tensor, aside=aside, parts=tuple(drawn)))
    if len(chosen) > _MOST_PROFILES:
        cards.append(doc.Paragraphs((f"{len(chosen) - _MOST_PROFILES} more profiles are in the embedded record.",)))
    return [doc.Section("Error profiles", tuple(cards))] if cards else []


def profiles(report: Report) -> list[tuple[StageResult, Profile]]:
    """What is drawn: the profiles of failed stages, then those of the stage that compares with the oracle."""
    failed = [s for s in report.stages if s.status == "failed"]
    oracle = [s for s in report.stages if s.id == "oracle" and s.status != "failed"]
    return [(stage, profile) for stage in (*failed, *oracle) for profile in stage.profiles]


def _annotations(report: Report) -> Iterator[doc.Annotation]:
    for finding in report.findings:
        parts = [finding.what, finding.looks_like and f"looks like: {finding.looks_like}", finding.where, finding.repro]
        title, text = f"{report.target}: {finding.stage}", "\n".join(filter(None, parts))
        yield doc.Annotation("error", title, text, report.place, _rule(finding))
    for finding in report.accepted:
        title, reason = f"{report.target}: accepted", finding.accepted
        yield doc.Annotation("notice", title, _accepted(finding), report.place, _rule(finding), reason)
    for stage, told in zip(report.stages, reasons_once(report.stages), strict=True):
        if stage.status == "undecided" and stage is told:
            rule = f"{stage.id}/undecided"
            yield doc.Annotation("warning", f"{report.target}: {stage.id}", stage.reason, report.place, rule)
    yield doc.Annotation(
        "notice",
        f"retrograd verify {report.target}",
        "; ".join([f"{_verdict(report)}: {_progress(report)}", *_covers(report)]),
    )


def _rule(finding: Finding) -> str:
    return f"{finding.stage}/{finding.kind}"


def _suite(report: Report) -> doc.Suite:
    cases: list[doc.SuiteCase] = []
    for s in report.stages:
        notes = (*(f"accepted {_accepted(f)}" for f in s.accepted), *s.notes)
        cases.append(doc.SuiteCase(s.id, s.status, s.seconds, s.reason, tuple(map(_failure, s.findings)), notes))
    name = f"retrograd verify {report.target}"
    return doc.Suite(name, f"retrograd.{report.target}", report.seconds, report.started, tuple(cases))


def _failure(finding: Finding) -> tuple[str, str, str]:
    lines = [*filter(None, [evidence(finding)]), *(f"{f.label}: {f.text}" for f in _facts(finding) if f.text)]
    return finding.kind, finding.what, "\n".join(lines)


def events(report: Report, step: int = 0) -> doc.Events:
    """One step of numbers.

    Scalars `<target>/<stage>/seconds`, `/findings` and `/power` (relative error) of every stage that ran, and
    `<target>/<stage>/<tensor>/worst`, error over attainable error; histograms `.../ulp` of distances to the correctly
    rounded result.
    """
    ran = [stage for stage in report.stages if stage.status != "skipped"]
    values = [value for stage in ran for value in _values(f"{report.target}/{stage.id}", stage, step)]
    return doc.Events(report.started, values)


def _values(tag: str, stage: StageResult, step: int) -> Iterator[doc.Scalar | doc.Histogram]:
    yield doc.Scalar(step, f"{tag}/seconds", stage.seconds)
    yield doc.Scalar(step, f"{tag}/findings", float(len(stage.findings)))
    if stage.power is not None:
        yield doc.Scalar(step, f"{tag}/power", stage.power)
    for profile in stage.profiles:
        yield doc.Scalar(step, f"{tag}/{profile.tensor}/worst", profile.worst)
        yield _histogram(f"{tag}/{profile.tensor}/ulp", profile, step)


def _histogram(tag: str, profile: Profile, step: int) -> doc.Histogram:
    """Counts over ULP distances; a bin stands at its lower edge, the last one is open."""
    edges, counts = profile.ulp_edges, profile.ulp_counts
    limits = [*(upper for _, upper in itertools.pairwise(edges)), math.inf][: len(counts)]
    filled = [edge for edge, number in zip(edges, counts, strict=False) if number] or [0.0]
    total = sum(edge * number for edge, number in zip(edges, counts, strict=False))
    squares = sum(edge * edge * number for edge, number in zip(edges, counts, strict=False))
    return doc.Histogram(step, tag, tuple(limits), counts, filled[0], filled[-1], total, squares)


def times(excess: float) -> str:
    """ "940x attainable": how many times the attainable error was exceeded."""
    if not math.isfinite(excess):
        return "infinitely beyond attainable"
    return f"{excess:.0f}x attainable" if 10 <= excess < 1e6 else f"{excess:.2g}x attainable"


def case_text(case: Case) -> str:
    """The case with its dtype, on one line."""
    return " ".join(part for part in (case.dtype, case.text()) if part)


def evidence(finding: Finding) -> str:
    """Tensor, index, got, want, excess and the count of wrong elements; what is unknown is left out."""
    place = finding.tensor
    if finding.index is not None:
        place += f"[{', '.join(map(str, finding.index))}]"
    # Nine digits tell any two float32 apart.
    facts = [] if finding.got is None else [f"got {finding.got:.9g}"]
    facts += [] if finding.want is None else [f"want {finding.want:.9g}"]
    facts += [] if finding.excess is None else [times(finding.excess)]
    if finding.wrong is not None:
        of = "" if finding.total is None else f" of {finding.total}"
        facts.append(f"{finding.wrong}{of} elements wrong")
    return ": ".join(part for part in (place, ", ".join(facts)) if part)


def power(stage: StageResult) -> str:
    """What the stage would have caught."""
    if stage.power_text or stage.power is None:
        return stage.power_text
    return f"catches relative errors from {stage.power:.1e}" if stage.power else "exact"


def shares(finding: Finding) -> list[tuple[str, str, float]]:
    """The terms of the attainable error: name, size, share of the whole in percent; empty if they are not known."""
    total = sum(size for _, size in finding.terms)
    if not math.isfinite(total) or total <= 0:
        return []
    return [(name, f"{size:.2g}", 100 * size / total) for name, size in finding.terms]


def before_after(finding: Finding) -> list[tuple[str, str, str]]:
    """What shrinking changed: name, at the first failing case, at the smallest one; what is equal is left out."""
    if finding.first is None:
        return []
    rows: list[tuple[str, str, str]] = []
    old, new = finding.first.case, finding.case
    for part in ("sizes", "params", "layouts", "values"):
        before: dict[str, object] = dict(getattr(old, part))
        after: dict[str, object] = dict(getattr(new, part))
        rows += [(k, _setting(before.get(k)), _setting(after.get(k))) for k in {**before, **after}]
    rows.append(("draw", str(old.draw), str(new.draw)))
    first = finding.first
    rows.append(("elements wrong", _of(first.wrong, first.total), _of(finding.wrong, finding.total)))
    excesses = [e for e in (first.excess, finding.excess) if e is not None]
    if len(excesses) == 2:
        rows.append(("error", times(excesses[0]), times(excesses[1])))
    return [row for row in rows if row[1] != row[2]]


def _setting(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, cast(tuple[object, ...], value))) or "()"
    return "plain" if value is None else str(value)


def _of(wrong: int | None, total: int | None) -> str:
    return "" if wrong is None else f"{wrong} of {total}" if total is not None else str(wrong)
