"""Messages about mutants: as a document, a table by rarity, and each survivor with its diff."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core import document as doc
from retrograd.core.wording import count, duration, some
from retrograd.mutation.schema import RARITIES, Mutant, MutantResult, MutationReport

_APART = {
    "raises": "raise at every ordinary input", "equivalent": "no input was found at which they differ",
    "kink": "differ only where the gradient jumps", "crashed": "end their process", "timed out": "never end",
    "not applicable": "cannot stand in the place of the function",
}  # fmt: skip
_SHOWN = 10  # survivors in a text


def document(report: MutationReport, everything: bool = True) -> doc.Document:
    """The report."""
    judge = report.judges[0]
    survivors = report.survivors(judge)
    cards = tuple(_card(r) for r in survivors)
    page: list[doc.PagePart] = [
        doc.Header(
            "finding" if survivors else "proved", f"mutants of {report.target}", (_size(report),), _verdict(report)
        ),
        doc.Section("", (_table(report), *_apart(report))),
    ]
    if cards:
        page.append(doc.Section(f"Survivors: what {_named(judge)} would let pass", cards))
    page.append(doc.Section("Every mutant", (_every(report),), folded=True))
    page.append(doc.environment(report.command, {"time": duration(report.seconds), **report.environment}))
    shown = survivors if everything else survivors[:_SHOWN]
    return doc.Document(
        f"retrograd mutate: {report.target}", tuple(_text(report, shown, len(survivors))), tuple(page),
        brief=(page[0], *cards), more="survivors",
        annotations=(*(_annotation(r, report) for r in survivors), _summary(report)),
    )  # fmt: skip


def progress_line(result: MutantResult) -> str:
    """One mutant on a line."""
    seen = [f"{j.judge} {_notices(j.judge)} {'it' if j.killed else 'NOTHING'}" for j in result.judgements]
    fate = f"differs {_place(result.rarity)}" if result.fate == "differs" else result.fate
    shown = seen if result.fate == "differs" else []
    return "; ".join([f"{result.mutant.operator} in {result.mutant.function}: {fate}", *shown])


def _notices(judge: str) -> str:
    return "notice" if judge == "tests" else "notices"


def _named(judge: str) -> str:
    return "verify" if judge == "verify" else "the tests"


def _place(rarity: str) -> str:
    return {"found by verify alone": rarity, "order or races": f"in {rarity}"}.get(rarity, f"at {rarity}")


def _where(mutant: Mutant) -> str:
    """The line; of an operation its number, since it has no source."""
    return f"{mutant.file}:{mutant.line}" if mutant.file else f"operation {mutant.line}"


def _verdict(report: MutationReport) -> str:
    killed = len(report.differing) - len(report.survivors(report.judges[0]))
    return f"{killed} of {len(report.differing)} noticed"


def _less(report: MutationReport) -> str:
    """Why the exit code is not 0."""
    return f", fewer than {100 * report.least:.4g} %" if report.exit_code else ""


def _summary(report: MutationReport) -> doc.Annotation:
    text = f"{_verdict(report)} by {_named(report.judges[0])}{_less(report)}"
    return doc.Annotation("error" if report.exit_code else "notice", f"retrograd mutate {report.target}", text)


def _size(report: MutationReport) -> str:
    return (
        f"{count(len(report.results), 'mutant')} of {report.candidates} possible, in "
        f"{count(len(report.functions), 'function')}; seed {report.seed}, verify at level {report.level}"
    )


def _table(report: MutationReport) -> doc.Table:
    rows: list[tuple[str, ...]] = []
    for rarity in (*RARITIES, ""):
        these = [r for r in report.differing if rarity in ("", r.rarity)]
        if these:
            shares = [f"{sum(r.killed(judge) for r in these)} of {len(these)}" for judge in report.judges]
            rows.append((rarity or "all", *shares))
    return doc.Table(
        ("differ at", *(f"{j} {_notices(j)}" for j in report.judges)),
        tuple(rows),
        numbers=tuple(range(1, 1 + len(report.judges))),
    )


def _apart(report: MutationReport) -> tuple[doc.Paragraphs, ...]:
    lines = [
        f"{count(n, 'mutant')} apart: {text}" for fate, text in _APART.items() if (n := _number(report, fate))
    ]  # fmt: skip
    return (doc.Paragraphs((*lines, *report.notes), "points"),) if lines or report.notes else ()


def _number(report: MutationReport, fate: str) -> int:
    return sum(r.fate == fate for r in report.results)


def _facts(result: MutantResult) -> Iterator[doc.Fact]:
    yield doc.Fact("differs", f"{_place(result.rarity)}: {result.difference}")
    yield doc.Fact("shown by", f"{result.case} in {result.dtype}" if result.case else result.dtype)
    for judgement in result.judgements:
        verb = _notices(judgement.judge)
        verdict = f"{verb}: {judgement.why}" if judgement.killed else f"{verb} nothing"
        more = f" ({judgement.why})" if judgement.why and not judgement.killed else ""
        yield doc.Fact(judgement.judge, verdict + more)
    yield doc.Fact("change", result.mutant.diff, "pre")
    yield doc.Fact("test", result.test, "pre")


def _card(result: MutantResult) -> doc.Card:
    mutant = result.mutant
    title = f"{mutant.operator} in {mutant.function}"
    return doc.Card(title, tuple(_facts(result)), aside=_where(mutant), tone="finding")


def _annotation(result: MutantResult, report: MutationReport) -> doc.Annotation:
    mutant = result.mutant
    diff = mutant.diff.splitlines()
    change = "\n".join(line for line in diff if line.startswith(("+", "-")) and line[1:2] not in "+-")
    title = f"{mutant.operator}: {_named(report.judges[0])} would not notice"
    place = f"{mutant.file}:{mutant.line}" if mutant.file else ""
    return doc.Annotation("warning", title, change, place, f"mutate/{mutant.operator}")


def _every(report: MutationReport) -> doc.Table:
    rows = [
        (r.mutant.id, r.mutant.operator, f"{r.mutant.line}", r.fate, r.rarity,
         some([j.judge for j in r.judgements if j.killed]))
        for r in report.results
    ]  # fmt: skip
    return doc.Table(
        ("mutant", "operator", "line", "fate", "differs at", "noticed by"), tuple(rows), numbers=(2,), fold=(0,)
    )


def _text(
    report: MutationReport, survivors: tuple[MutantResult, ...], number: int
) -> Iterator[doc.TextLine | doc.Table]:
    judge = report.judges[0]
    yield doc.TextLine(f"retrograd mutate {report.target}", "bold")
    yield doc.TextLine(_size(report))
    for result in survivors:
        yield doc.TextLine()
        yield doc.TextLine(f"SURVIVES {result.mutant.operator} in {result.mutant.function}", "bold red")
        yield doc.TextLine(f"  at {_where(result.mutant)}")
        yield from doc.labelled(_facts(result), width=9)
    if number > len(survivors):
        yield doc.TextLine(f"and {count(number - len(survivors), 'survivor')} more; --all shows them")
    yield doc.TextLine()
    yield _table(report)
    for part in _apart(report):
        yield from (doc.TextLine(f"note: {line}") for line in part.lines)
    style = "bold red" if number else "bold green"
    yield doc.TextLine(
        f"{_verdict(report).upper()} by {_named(judge)} in {duration(report.seconds)}{_less(report)}", style
    )
