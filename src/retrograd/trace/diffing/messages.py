"""Messages of a comparison of traces: the first operator that differs and why, in words and as a document."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core import document as doc
from retrograd.core.wording import count
from retrograd.trace.diffing.schema import DivergenceCause, OpSummary, RunSide, TraceDiff

_MOST_CAUSES = 10
_MODES = {
    "bitwise": "bit for bit",
    "attainable": "within the attainable error",
    "names": "in their operators",
    "logged": "in all that was logged",
}
# What a row of the neighbourhood says of its two operators.
_STATUS = {
    "same": "same",
    "within": "within rounding",
    "made": "made here",
    "carried": "carried from there",
    "outside": "came in from outside",
    "inserted": "only in B",
    "missing": "only in A",
}


def document(diff: TraceDiff, everything: bool = True) -> doc.Document:
    """The comparison; `everything` prints all causes."""
    tone = "proved" if diff.same else "finding"
    head = verdict(diff)
    titled = (f"A: {diff.a.title} \u00b7 {facts(diff.a)}", f"B: {diff.b.title} \u00b7 {facts(diff.b)}", counts(diff))
    first = diff.causes[0].what if diff.causes else head
    above = (head, *titled) if diff.causes else titled
    page: list[doc.PagePart] = [doc.Header(tone, first, above, "Same" if diff.same else "Different")]
    if diff.causes:
        page.append(doc.Section("Causes, in the order of the run", tuple(map(_card, diff.causes))))
    if diff.rows:
        page.append(doc.Embedded("trace_diff.html.j2", dict(diff=diff, status=_STATUS)))
    if diff.notes:
        page.append(doc.Section("Notes", (doc.Paragraphs(diff.notes),)))
    sizes = (f"A: {facts(diff.a)}", f"B: {facts(diff.b)}", counts(diff), *diff.notes)
    known = [[(str(k), cause.what), *_known(cause)] for k, cause in enumerate(diff.causes, 1)]
    cards = [doc.Card(facts=tuple(doc.Fact(*pair) for pair in pairs)) for pairs in known]
    return doc.Document(
        title=f"retrograd trace diff: {diff.a.title} and {diff.b.title}",
        text=tuple(_text(diff, everything)),
        page=tuple(page),
        brief=(doc.Header(tone, head, sizes), *cards),
    )


def verdict(diff: TraceDiff) -> str:
    """Same or different, in a few words."""
    if not diff.causes:
        return f"the same {_MODES[diff.mode]}"
    first, *rest = diff.causes
    seen = first.first
    more = count(len(rest), "more cause")
    at = f" at operator {seen.index} ({', '.join(reversed(seen.when))})" if seen and seen.step >= 0 else ""
    at = f" at {', '.join(reversed(seen.when))}" if seen and not at else at
    return f"different: first{at}{f', and {more}' if rest else ''}"


def facts(side: RunSide) -> str:
    """How large a run is, and where it ran."""
    if not side.level:
        return f"log of DebugMode, {count(side.ops, 'call')}"
    parts = [count(side.ops, "operator"), count(side.steps, "step"), *side.devices, f"level {side.level}"]
    return ", ".join([*parts, *([f"rank {side.rank}"] if side.rank else [])])


def counts(diff: TraceDiff) -> str:
    """What is the same, and what differs because of what it was given."""
    parts = [f"{count(diff.matched, 'operator')} the same"]
    parts += [f"{diff.within} within rounding"] if diff.within else []
    parts += [f"{diff.carried} differ only because of what they were given"] if diff.carried else []
    return ", ".join(parts) + (f"; {diff.seconds:.2f} s" if diff.seconds else "")


def _text(diff: TraceDiff, everything: bool) -> Iterator[doc.TextLine]:
    """The verdict, the causes in the order of the run, notes, counts."""
    yield doc.TextLine(verdict(diff), "bold green" if diff.same else "bold red")
    for letter, side in (("A", diff.a), ("B", diff.b)):
        yield doc.TextLine(f"{letter}  {side.title}: {facts(side)}", "dim")
    most = len(diff.causes) if everything else _MOST_CAUSES
    for number, cause in enumerate(diff.causes[:most], 1):
        yield doc.TextLine()
        yield from _cause_text(f"{number}. ", cause)
    if len(diff.causes) > most:
        yield doc.TextLine()
        yield doc.TextLine(f"{len(diff.causes) - most} more causes; --all prints them", "dim")
    yield doc.TextLine()
    yield from (doc.TextLine(f"note: {note}") for note in diff.notes)
    yield doc.TextLine(counts(diff), "dim")


def _cause_text(number: str, cause: DivergenceCause) -> Iterator[doc.TextLine]:
    yield doc.TextLine(f"{number}{cause.what}{_places(cause)}", "bold")
    yield from doc.labelled(_known(cause), width=6, indent=len(number))
    tensors = [(letter, f"{name}: {text}") for letter, name, text in values(cause)]
    others = list(cause.others[:3])
    if len(cause.others) > 3:
        others.append(f"and {len(cause.others) - 3} more")
    yield from doc.labelled([*tensors, ("also", "\n".join(others))], width=6, indent=len(number), style="dim")


def _card(cause: DivergenceCause) -> doc.Card:
    labels = {"at": "At", "line": "Line", "in": "Inside", "why": "Why", "do": "Do"}
    known = [doc.Fact(labels[label], text, "mono" * (label in ("line", "in"))) for label, text in _known(cause)]
    known += [doc.Fact(letter, f"{name}: {text}", "mono") for letter, name, text in values(cause)]
    return doc.Card(
        f"{cause.what}{_places(cause)}", (*known, doc.Fact("Also", "; ".join(cause.others))), tone="numbered"
    )


def _known(cause: DivergenceCause) -> list[tuple[str, str]]:
    code, inside = (cause.first.code, cause.first.inside) if cause.first else ("", "")
    return [("at", cause.where), ("line", code), ("in", inside), ("why", cause.why), ("do", cause.advice)]


def _places(cause: DivergenceCause) -> str:
    return f"  ({cause.count} places)" if cause.count > 1 else ""


def values(cause: DivergenceCause) -> Iterator[tuple[str, str, str]]:
    """The tensors that differ, in A and in B, with their names; of an operator without a counterpart its outputs."""
    for letter, seen in (("A", cause.a), ("B", cause.b)):
        if seen is not None:
            yield from ((letter, name, text) for name, text in shown(seen))


def shown(seen: OpSummary) -> Iterator[tuple[str, str]]:
    """The tensors of an operator that differ, or its outputs if none does."""
    every = [(f"input {t.index}", t) for t in seen.inputs]
    every += [(f"output {t.index}" if len(seen.outputs) > 1 else "output", t) for t in seen.outputs]
    differ = [(name, t.text) for name, t in every if t.differs][:4]
    yield from differ or [(name, t.text) for name, t in every if name.startswith("output")][:2]
