"""Messages of `retrograd graph`: comparisons, counts and followed values in words and as documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from retrograd.core import document as doc
from retrograd.core.program_lines import is_library
from retrograd.core.wording import count, duration, some
from retrograd.graph import follow_messages
from retrograd.graph.schema import COMPILES_AGAIN, Cause, Diff, Follow, GraphPair, Pairs, Side, Unique

# What differs where nothing computed does, in words.
_HARMLESS = {
    "packaging_only": "packaging",
    "dead_code_only": "dead code",
    "layout_only": "layouts",
}
_TONES: dict[str, doc.Tone] = {"different": "finding", "cannot tell": "undecided", "same": "proved"}
_LEVELS = {
    "text": "as texts",
    "names": "up to names",
    "dead code": "up to dead code and packaging",
    "parameter order": "up to the order of parameters",
}
# What is printed without `--all`.
_MOST_CAUSES = 20
_MOST_OF_PAIR = 3  # of each of several pairs
_MOST_NAMES = 6
_MOST_NAMES_OF_PAGE = 12  # the embedded record has all of them
_KEY = 12  # characters of a key: enough to tell a handful apart


def document(record: Diff | Pairs | Unique | Follow, everything: bool = True) -> doc.Document:
    """The record; `everything` leaves nothing out of its text."""
    if isinstance(record, Diff):
        return _diff(record, everything)
    if isinstance(record, Pairs):
        return _pairs(record, everything)
    return _unique(record) if isinstance(record, Unique) else _follow(record, everything)


# Diff.


def _diff(diff: Diff, everything: bool) -> doc.Document:
    tone = _TONES[diff.verdict]
    sides = (f"A: {diff.a.title} \u00b7 {facts(diff.a)}", f"B: {diff.b.title} \u00b7 {facts(diff.b)}")
    sizes = (f"A: {facts(diff.a)}", f"B: {facts(diff.b)}")
    head, word = f"{diff.a.title} and {diff.b.title}", verdict(diff).capitalize()
    values: dict[str, Any] = dict(diff=diff, places=places, most=_MOST_NAMES_OF_PAGE)
    return doc.Document(
        title=f"retrograd graph diff: {head}",
        text=tuple(_diff_text(diff, everything)),
        page=(
            doc.Header(tone, head, (*sides, *([] if diff.passes else [counts(diff)])), word),
            doc.Embedded("graph_diff.html.j2", values),
        ),
        brief=(doc.Header(tone, head, sizes, word), *(_card(k, cause) for k, cause in enumerate(diff.causes, 1))),
        annotations=(
            *map(annotation, diff.causes),
            doc.Annotation("notice", f"retrograd graph diff {diff.a.title} {diff.b.title}", verdict(diff)),
        ),
        file=diff.b.title,
    )


def verdict(diff: Diff) -> str:
    """Same, different or not to be told, in a few words."""
    if diff.causes:
        again = all(cause.kind in COMPILES_AGAIN for cause in diff.causes)
        how = "compiles again" if diff.unknown else "computes the same and compiles again"
        return f"different: {f'{how}, ' if again else ''}{count(len(diff.causes), 'cause')}"
    if diff.unknown:
        return (
            f"cannot tell: {'two stages of compilation' if diff.passes else 'a text does not say all that is computed'}"
        )
    kinds = list(dict.fromkeys(_HARMLESS.get(note.kind, note.kind.replace("_", " ")) for note in diff.notes))
    return f"same computation; only {_listed(kinds)} differ" if kinds else "same computation"


def _diff_text(diff: Diff, everything: bool, most_causes: int = _MOST_CAUSES) -> Iterator[doc.TextLine]:
    """The verdict, the causes with first cause first, what is harmless, and what is counted only."""
    style = {"different": "bold red", "cannot tell": "bold yellow", "same": "bold green"}[diff.verdict]
    yield doc.TextLine(verdict(diff), style)
    for letter, side in (("A", diff.a), ("B", diff.b)):
        yield doc.TextLine(f"{letter}  {side.title}: {facts(side)}", "dim")
    most = len(diff.causes) if everything else most_causes
    for number, cause in enumerate(diff.causes[:most], 1):
        yield doc.TextLine()
        yield from _cause_text(f"{number}. ", cause, None if everything else _MOST_NAMES)
    if len(diff.causes) > most:
        yield doc.TextLine()
        yield doc.TextLine(f"{len(diff.causes) - most} more causes; --all prints them", "dim")
    if diff.unknown:
        yield doc.TextLine()
        yield doc.TextLine("unknown:")
        for cause in diff.unknown:
            yield from (doc.TextLine(f"  {line}") for line in cause.lines())
    if diff.notes:
        yield doc.TextLine()
        yield doc.TextLine("harmless:")
        yield from (doc.TextLine(f"  {note.text()}") for note in diff.notes)
    yield doc.TextLine()
    if diff.passes:
        yield from pass_lines(diff)
    else:
        yield doc.TextLine(counts(diff), "dim")


def pass_lines(diff: Diff) -> Iterator[doc.TextLine]:
    """The table of two stages of compilation."""
    width = max(len(row.what) for row in diff.passes) + 2
    last = ""
    for row in diff.passes:
        first, *more = row.how.splitlines() or [""]
        yield doc.TextLine(f"{row.kind if row.kind != last else '':<12}{row.what:<{width}}{first}".rstrip())
        yield from (doc.TextLine(f"{'':<{12 + width}}{line}") for line in more)
        last = row.kind


def _cause_text(number: str, cause: Cause, most: int | None) -> Iterator[doc.TextLine]:
    yield doc.TextLine(f"{number}{cause.what}{places(cause)}", "bold")
    names = [("at", cause.where), ("in A", some(cause.a, most)), ("in B", some(cause.b, most)), ("do", cause.advice)]
    yield from doc.labelled(names, width=5, indent=len(number))


def _card(number: int, cause: Cause) -> doc.Card:
    return doc.Card(
        facts=(
            doc.Fact(str(number), cause.what + places(cause)),
            doc.Fact("at", cause.where),
            doc.Fact("do", cause.advice),
        )
    )


def annotation(cause: Cause) -> doc.Annotation:
    """At the line of a cause where that is the user's."""
    file, _, line = cause.where.rpartition(":")
    place = cause.where if file and line.isdigit() and not is_library(file) else ""
    text = "\n".join(filter(None, [cause.what, "" if place else cause.where, cause.advice]))
    return doc.Annotation("error", cause.kind.replace("_", " "), text, place, f"graph/{cause.kind}")


def places(cause: Cause) -> str:
    """In how many places, unless the cause says so itself."""
    return f"  ({cause.count} places)" if cause.count > 1 and str(cause.count) not in cause.what else ""


def facts(side: Side) -> str:
    """How large a graph is."""
    sizes = [
        count(side.instructions, "instruction"),
        count(side.parameters, "parameter"),
        count(side.outputs, "output"),
        count(side.collectives, "collective"),
    ]
    return ", ".join([*sizes, *([f"{side.dead} dead"] if side.dead else [])])


def counts(diff: Diff) -> str:
    """What is the same, and what differs because something below it does."""
    text = f"{count(diff.matched, 'value')} match"
    if diff.consequences:
        text += f", {diff.consequences} differ only because something below them does"
    return f"{text}{f'; {duration(diff.seconds)}' if diff.seconds else ''}"


# Several graphs.


def _pairs(pairs: Pairs, everything: bool) -> doc.Document:
    """A count, and each pair that is not the same with its first causes."""
    differ = [pair for pair in pairs.pairs if pair.status != "same"]
    tone = "proved" if pairs else "finding" if pairs.exit_code == 1 else "undecided"
    number = len(pairs.pairs)
    word = (
        f"{len(differ)} of {count(number, 'graph')} differ" if differ else f"all {count(number, 'graph')} are the same"
    )
    table = doc.Table(("graph", "verdict", "first cause"), tuple(map(_pair_row, differ)))
    text: list[doc.TextLine | doc.Table] = [doc.TextLine(word, doc.STYLES[tone])]
    text += [doc.TextLine(f"{letter}  {title}", "dim") for letter, title in (("A", pairs.a), ("B", pairs.b))]
    text += [doc.TextLine(), table] if differ else []
    cards: list[doc.Card] = []
    for pair in differ:
        if pair.diff is None:
            continue
        lines = list(_diff_text(pair.diff, everything, _MOST_OF_PAIR))
        text += [
            doc.TextLine(),
            doc.TextLine(pair.name, "bold"),
            *(doc.TextLine(f"  {x.text}", x.style) for x in lines),
        ]
        cards.append(doc.Card(pair.name, (doc.Fact("why", "\n".join(line.text for line in lines), "pre"),)))
    header = doc.Header(tone, f"{pairs.a} and {pairs.b}", (), word)
    page: list[doc.PagePart] = [header]
    if differ:
        page += [doc.Section("Graphs that differ", (table,)), doc.Section("Why", tuple(cards))]
    remarks = [annotation(cause) for pair in differ if pair.diff is not None for cause in pair.diff.causes[:1]]
    remarks.append(doc.Annotation("notice", f"retrograd graph diff {pairs.a} {pairs.b}", word))
    return doc.Document(
        f"retrograd graph diff: {word}", tuple(text), tuple(page), tuple(page), "graphs", annotations=tuple(remarks)
    )


def _pair_row(pair: GraphPair) -> tuple[str, ...]:
    first = None if pair.diff is None else next(iter(pair.diff.causes), None)
    return pair.name, pair.verdict, first.text() if first else ""


# Unique.


def _unique(unique: Unique) -> doc.Document:
    lines = list(_unique_text(unique))
    table = _unique_table(unique)
    header = doc.Header("proved", lines[0].text, tuple(line.text for line in lines[1:]))
    hint = doc.Paragraphs(("In a column, the same letter is the same graph.",))
    return doc.Document(
        title=f"retrograd graph: {header.head}",
        text=(*lines, doc.TextLine(), table),
        page=(header, doc.Section("Which graph is which", (hint, table))),
        brief=(header,),
        annotations=(doc.Annotation("notice", "retrograd graph", header.head),),
    )


def _unique_text(unique: Unique) -> Iterator[doc.TextLine]:
    """How many graphs there are at each level."""
    total = len(unique.titles)
    real = next((level.unique for level in unique.levels if level.name == "dead code"), 0)
    yield doc.TextLine(f"{count(real, 'different computation')} in {count(total, 'graph')}", "bold")
    for level in unique.levels:
        yield doc.TextLine(f"  {level.unique:>4}  {_LEVELS.get(level.name, level.name)}")
    known = [key for key in unique.recorded if key]
    if known:
        of = "them" if len(known) == total else f"{len(known)} of them"
        yield doc.TextLine(f"  {len(set(known)):>4}  by the keys recorded with {of}")


def letter(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def _unique_table(unique: Unique) -> doc.Table:
    """A row for each graph: its letter at each level, recorded key, size."""
    keyed = any(unique.recorded)
    recorded = ["recorded key"] if keyed else []
    head = ("graph", *(level.name for level in unique.levels), *recorded, "instructions", "parameters", "outputs")
    rows: list[tuple[str, ...]] = []
    for k, title in enumerate(unique.titles):
        letters = [letter(level.members[k]) for level in unique.levels]
        key = [unique.recorded[k][:_KEY]] if keyed else []
        side = unique.sides[k]
        rows.append((title, *letters, *key, str(side.instructions), str(side.parameters), str(side.outputs)))
    return doc.Table(head, tuple(rows), numbers=(-3, -2, -1))


def listing(sides: Sequence[Side], recorded: Sequence[str]) -> doc.Table:
    """What graphs files hold, one a row."""
    sizes = ("instructions", "dead", "parameters", "outputs", "collectives")
    rows = tuple(
        (s.title, s.name, s.format, s.key[:_KEY], key[:_KEY], *(str(getattr(s, size)) for size in sizes))
        for s, key in zip(sides, recorded, strict=True)
    )
    return doc.Table(("graph", "name", "format", "key", "recorded", *sizes), rows, numbers=(-5, -4, -3, -2, -1))


# Follow.


def _follow(follow: Follow, everything: bool) -> doc.Document:
    above = list(follow_messages.head_lines(follow))
    header = doc.Header("undecided" if follow.dead else "proved", above[0].text, tuple(line.text for line in above[1:]))
    page: list[doc.PagePart] = [header]
    if trail := tuple(follow_messages.trail(follow)):
        page.append(doc.Section("The way, step by step", (doc.Paragraphs(trail, "lines"),)))
    most = None if everything else follow_messages.MOST_STEPS
    text = [*follow_messages.head_lines(follow, everything), doc.TextLine()]
    return doc.Document(
        title=f"retrograd graph: {header.head}",
        text=(*text, *follow_messages.trail(follow, everything, most)),
        page=tuple(page),
        brief=(header,),
        annotations=(doc.Annotation("notice", "retrograd graph", header.head),),
    )


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
