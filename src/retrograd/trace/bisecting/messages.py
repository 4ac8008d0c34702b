"""Messages of a bisection: what must be computed in higher precision, in words and as a document."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core import document as doc
from retrograd.trace.bisecting.schema import Bisection, Culprit

_TONES: dict[str, doc.Tone] = {"within": "proved", "found": "finding", "undecided": "undecided"}
_WORDS = {"within": "No mismatch", "found": "Found", "undecided": "Cannot decide"}


def document(record: Bisection, everything: bool = True) -> doc.Document:
    """The record; nothing of it is left out."""
    header = doc.Header(
        _TONES[record.verdict],
        verdict(record),
        (*filter(None, [record.target]), facts(record)),
        _WORDS[record.verdict],
    )
    page: list[doc.PagePart] = [header]
    if record.culprits:
        head = (record.by, "where", "error, it alone raised", "error, all but it raised")
        rows = tuple(
            (c.name, "\n".join(filter(None, (place(c), c.code))), f"{c.alone:.2g}", f"{c.without:.2g}")
            for c in record.culprits
        )
        title = f"What must be computed in {record.precision}, in the order of the step"
        page.append(doc.Section(title, (doc.Table(head, rows, numbers=(2, 3)),)))
    if record.notes:
        page.append(doc.Section("Notes", (doc.Paragraphs(record.notes),)))
    cards = [
        doc.Card(
            facts=(
                doc.Fact(str(k), c.name),
                doc.Fact("at", place(c)),
                doc.Fact("line", c.code),
                doc.Fact("alone", f"error {c.alone:.2g}"),
            )
        )
        for k, c in enumerate(record.culprits, 1)
    ]
    brief = doc.Header(header.tone, header.head, (facts(record), *record.notes))
    return doc.Document(f"retrograd trace bisect: {record.target}", tuple(_text(record)), tuple(page), (brief, *cards))


def verdict(record: Bisection) -> str:
    """What came out, in a sentence."""
    if record.verdict == "within":
        return f"no mismatch: the error {record.before:.2g} is within the tolerance {record.tolerance:.2g}"
    if record.verdict == "undecided":
        return (
            f"not a matter of operators' precision: with all of them in {record.precision} the error is "
            f"{record.everything:.2g}, the tolerance {record.tolerance:.2g}"
        )
    noun = record.by if len(record.culprits) == 1 else f"{record.by}s"
    return f"{len(record.culprits)} {noun} in {record.precision}: error {record.before:.2g} -> {record.after:.2g}"


def facts(record: Bisection) -> str:
    """The errors, and how they were found."""
    return (
        f"error {record.before:.2g} as it is ({record.worst}), {record.everything:.2g} with every operator in "
        f"{record.precision}, tolerance {record.tolerance:.2g}; {record.candidates} operators, {record.runs} runs, "
        f"{record.seconds:.1f} s"
    )


def place(culprit: Culprit) -> str:
    """Line, module and phase, as far as they are known."""
    module = f"module {culprit.module}" if culprit.module and f"module {culprit.module}" != culprit.name else ""
    return ", ".join(filter(None, (culprit.place, module, culprit.phase)))


def _text(record: Bisection) -> Iterator[doc.TextLine]:
    yield doc.TextLine(verdict(record), doc.STYLES[_TONES[record.verdict]])
    yield doc.TextLine(f"{record.target}: {facts(record)}" if record.target else facts(record), "dim")
    for number, culprit in enumerate(record.culprits, 1):
        yield doc.TextLine()
        yield doc.TextLine(
            f"{number}. {culprit.name}{f'  ({culprit.ops} operators)' if culprit.ops > 1 else ''}", "bold"
        )
        error = [f"{record.before:.2g} -> {culprit.alone:.2g} with it alone in {record.precision}"]
        if len(record.culprits) > 1:
            error.append(f"{culprit.without:.2g} with the others so, and it as it is")
        known = [("at", place(culprit)), ("line", culprit.code), ("error", "\n".join(error))]
        yield from doc.labelled(known, width=7, indent=len(f"{number}. "))
    if record.notes:
        yield doc.TextLine()
    yield from (doc.TextLine(f"note: {note}") for note in record.notes)
