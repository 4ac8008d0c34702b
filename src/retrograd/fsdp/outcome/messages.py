"""Messages of ranks that were compared: the lines of a terminal, and a page."""

from __future__ import annotations

from retrograd.core import document as doc
from retrograd.core.wording import count
from retrograd.fsdp.outcome.schema import RankComparison, RankDifference, RankSteps

_TONES: dict[str, doc.Tone] = {"same": "proved", "differs": "finding", "failed": "undecided", "undecided": "undecided"}
_WORDS = {"same": "SAME ORDER", "differs": "RANKS DIFFER", "failed": "NOT COMPARED", "undecided": "CANNOT TELL"}


def document(outcome: RankComparison, everything: bool = True) -> doc.Document:
    """The record; nothing of it is left out."""
    cards = (
        *(doc.Card(facts=(doc.Fact("what", text),), tone="finding") for text in outcome.problems),
        *map(_card, outcome.partings),
    )
    sentence = outcome.summary or count(len(cards), "finding")
    header = doc.Header(_TONES[outcome.verdict], sentence, (outcome.target,), _word(outcome))
    page: list[doc.PagePart] = [header, *[doc.Section("Findings", cards)] * bool(cards)]
    notes = (*outcome.notes, *(f"rank {rank.rank}: {note}" for rank in outcome.ranks for note in rank.notes))
    if notes:
        page.append(doc.Section("Notes", (doc.Paragraphs(notes, "points"),)))
    if outcome.ranks:
        rows = tuple((str(r.rank), str(r.steps), _patterns(r), r.hash) for r in outcome.ranks)
        page.append(doc.Section("Ranks", (doc.Table(("rank", "steps", "collectives", "hash"), rows, (1,)),)))
    return doc.Document(
        "retrograd fsdp", tuple(map(doc.TextLine, _lines(outcome))), tuple(page), (header, *cards), "findings"
    )


def _word(outcome: RankComparison) -> str:
    return "FINDING" if outcome.problems and not outcome.partings else _WORDS[outcome.verdict]


def _lines(outcome: RankComparison) -> list[str]:
    lines = [f"problem: {text}" for text in outcome.problems]
    for parting in outcome.partings:
        differ = "ranks differ: " if outcome.ranks else ""
        lines.append(f"{differ}{parting.place}: {parting.text}")
        for side, frames in parting.stacks.items():
            lines += [f"  {side}: {frames[0] if frames else 'no stack'}", *(f"    {frame}" for frame in frames[1:])]
    for rank in outcome.ranks:
        lines.append(f"rank {rank.rank}: {rank.steps} steps ({_patterns(rank)}), hash {rank.hash}")
        lines += [f"  note: {note}" for note in rank.notes]
    return [*lines, *outcome.summary.splitlines(), *(f"note: {note}" for note in outcome.notes)]


def _patterns(rank: RankSteps) -> str:
    return ", ".join(f"{steps} x {collectives} collectives" for steps, collectives in rank.patterns) or "none"


def _card(parting: RankDifference) -> doc.Card:
    stacks = (doc.Fact(side, "\n".join(frames) or "no stack", "mono") for side, frames in parting.stacks.items())
    return doc.Card(parting.place, (doc.Fact("what", parting.text), *stacks), tone="finding")
