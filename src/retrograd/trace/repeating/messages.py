"""Messages of repeated steps: which operator gave other bits, on which rank, in words and as a document."""

from __future__ import annotations

from collections.abc import Iterator

from retrograd.core import document as doc
from retrograd.core.wording import count, some
from retrograd.trace.repeating.schema import OperatorDifference, RepeatedSteps, ReplicaDifference

_TONES: dict[int, doc.Tone] = {0: "proved", 1: "finding", 3: "undecided"}
_WORDS = {0: "Same", 1: "Different", 3: "Cannot decide"}
_ADVICE = {
    "once": "a fault of the hardware, or an operator whose bits depend on what runs beside it: repeat the step, and "
    "test the device if it comes again",
    "varies": "nothing is known by which its bits may vary: a faulty device, a race, or a library that adds in "
    "another order each time",
    "nondeterministic": "it adds in whatever order threads come; torch.use_deterministic_algorithms(True) takes an "
    "ordered kernel where there is one",
}


def document(record: RepeatedSteps, everything: bool = True) -> doc.Document:
    """The record; nothing of it is left out."""
    tone, head = _TONES[record.exit_code], verdict(record)
    page: list[doc.PagePart] = [doc.Header(tone, head, (facts(record),), _WORDS[record.exit_code])]
    ordered = sorted(record.differences, key=lambda d: d.kind == "nondeterministic")
    for title, chosen in (
        ("Operators that gave other bits", [d for d in ordered if d in record.wrong]),
        ("Operators whose bits may vary", [d for d in ordered if d not in record.wrong]),
    ):
        if chosen:
            cards = (doc.Card(_title(d), tuple(doc.Fact(*pair) for pair in _known(d)), tone="numbered") for d in chosen)
            page.append(doc.Section(title, tuple(cards)))
    if record.replicas:
        page.append(doc.Section("Copies", (doc.Paragraphs(tuple(map(replica, record.replicas)), "points"),)))
    notes = (*record.notes, *left_out(record))
    if notes:
        page.append(doc.Section("Notes", (doc.Paragraphs(notes, "points"),)))
    brief = [doc.Header(tone, head, (facts(record), *map(replica, record.replicas), *notes))]
    cards = [doc.Card(_title(d), tuple(doc.Fact(*pair) for pair in _known(d))) for d in ordered]
    return doc.Document(f"retrograd trace repeat: {head}", tuple(_text(record, ordered)), tuple(page), (*brief, *cards))


def verdict(record: RepeatedSteps) -> str:
    """What came out, in a sentence."""
    if record.wrong:
        first = record.wrong[0]
        of = f" on rank {first.rank}" if len(record.ranks) > 1 else ""
        where = (
            f"{f' in {first.op.module}' if first.op.module else ''}{f' at {first.op.place}' if first.op.place else ''}"
        )
        more = f", and {len(record.wrong) - 1} more" if len(record.wrong) > 1 else ""
        return f"{first.op.name}{where} gave other bits when it was executed again, in step {first.op.step}{of}{more}"
    if record.replicas:
        return replica(record.replicas[0])
    if not record.operators:
        return "cannot decide: no operator was repeated"
    return f"the same bits: {count(record.operators, 'operator')} executed twice in {count(record.sampled, 'step')}"


def facts(record: RepeatedSteps) -> str:
    """How much was repeated."""
    sampled = f"{count(record.sampled, 'step')}, {f'one in {record.every}' if record.every > 1 else 'all of them'}"
    ranks = f", ranks {some([str(rank) for rank in record.ranks])}" if len(record.ranks) > 1 else ""
    return f"{count(record.operators, 'operator')} repeated in {sampled}; {count(record.steps, 'update')} made{ranks}"


def left_out(record: RepeatedSteps) -> list[str]:
    """What was executed once, in a line."""
    parts = [f"{number} {why}" for why, number in record.left_out]
    return [f"executed once: {', '.join(parts)}"] * bool(parts)


def replica(difference: ReplicaDifference) -> str:
    """ "parameters that ranks hold copies of are not equal on rank 1 before the update of step 3: 0.weight"."""
    ranks = f"rank{'s' * (len(difference.ranks) > 1)} {some([str(rank) for rank in difference.ranks])}"
    when = f"before the update of step {difference.step}"
    names = some(list(difference.names), 3)
    return f"{difference.quantity} that ranks hold copies of are not equal on {ranks} {when}: {names}"


def _title(difference: OperatorDifference) -> str:
    return f"{difference.op.name} {'may vary' if difference.kind == 'nondeterministic' else 'gave other bits'}"


def _known(difference: OperatorDifference) -> list[tuple[str, str]]:
    op, which = difference.op, difference.executions
    alike = sorted((which.count(k) for k in set(which)), reverse=True)
    alone = next((k + 1 for k, number in enumerate(which) if which.count(number) == 1), 0)
    executions = f"{len(which)} executions gave {len(alike)} results, {' and '.join(map(str, alike))} times"
    if difference.kind == "once":
        gone_on = ", with which the program would go on" if alone == 1 else ""
        executions = f"execution {alone} of {len(which)} alone gave another result{gone_on}"
    return [
        ("at", f"{op.where}, rank {difference.rank}"),
        ("line", op.code),
        ("bits", f"{executions}; {difference.elements} of {difference.total} elements, {difference.example}"),
        ("why", _ADVICE[difference.kind]),
    ]


def _text(record: RepeatedSteps, ordered: list[OperatorDifference]) -> Iterator[doc.TextLine]:
    yield doc.TextLine(verdict(record), doc.STYLES[_TONES[record.exit_code]])
    yield doc.TextLine(facts(record), "dim")
    for number, difference in enumerate(ordered, 1):
        yield doc.TextLine()
        yield doc.TextLine(f"{number}. {_title(difference)}", "bold")
        yield from doc.labelled(_known(difference), width=6, indent=3)
    for apart in record.replicas:
        yield doc.TextLine()
        yield doc.TextLine(replica(apart), "bold")
    if notes := [*record.notes, *left_out(record)]:
        yield doc.TextLine()
        yield from (doc.TextLine(f"note: {note}", "dim") for note in notes)
