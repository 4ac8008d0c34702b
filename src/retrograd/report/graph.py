"""What `retrograd graph` says, for a terminal and as annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from retrograd.graph.schema import Cause, Diff, Follow, Side, Unique
from retrograd.report import wording
from retrograd.report.dataflow import follow_lines
from retrograd.report.github import command

GraphRecord: TypeAlias = Diff | Unique | Follow

# What differs where nothing computed does, in words.
_HARMLESS = {
    "barrier_changed": "barriers",
    "packaging_only": "packaging",
    "dead_code_only": "dead code",
    "layout_only": "layouts",
}
LEVELS = {
    "text": "as texts",
    "names": "up to names",
    "dead code": "up to dead code and packaging",
    "parameter order": "up to the order of parameters",
}
# What is printed without `--all`.
_MOST_CAUSES = 20
_MOST_NAMES = 6


def render(record: GraphRecord, console: Console, everything: bool = False) -> None:
    """Print a record; `everything` leaves nothing out."""
    for text, style in lines(record, everything):
        print_line(console, text, style)
    if isinstance(record, Unique):
        print_rows(console, unique_rows(record), numbers=3)


def to_text(record: GraphRecord, width: int = 120, everything: bool = True) -> str:
    """The record as plain text without colour."""
    out = StringIO()
    render(record, Console(file=out, width=width, color_system=None, force_terminal=False), everything)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def lines(record: GraphRecord, everything: bool) -> Iterable[tuple[str, str]]:
    """Lines with their style; of `Unique` those above its table."""
    if isinstance(record, Diff):
        return diff_lines(record, everything)
    return unique_lines(record) if isinstance(record, Unique) else follow_lines(record, everything)


# Diff.


def verdict(diff: Diff) -> str:
    """Same or different, in a few words."""
    if diff.causes:
        return f"different: {wording.count(len(diff.causes), 'cause')}"
    kinds = list(dict.fromkeys(_HARMLESS.get(note.kind, note.kind.replace("_", " ")) for note in diff.notes))
    return f"same computation; only {_listed(kinds)} differ" if kinds else "same computation"


def diff_lines(diff: Diff, everything: bool = True) -> Iterable[tuple[str, str]]:
    """The verdict, the causes with first cause first, what is harmless, and what is counted only."""
    yield verdict(diff), "bold red" if diff.causes else "bold green"
    for letter, side in (("A", diff.a), ("B", diff.b)):
        yield f"{letter}  {side.title}: {facts(side)}", "dim"
    most = len(diff.causes) if everything else _MOST_CAUSES
    for number, cause in enumerate(diff.causes[:most], 1):
        yield "", ""
        yield from _cause_lines(f"{number}. ", cause, everything)
    if len(diff.causes) > most:
        yield "", ""
        yield f"{len(diff.causes) - most} more causes; --all prints them", "dim"
    if diff.notes:
        yield "", ""
        yield "harmless:", ""
        for note in diff.notes:
            yield f"  {note.text()}", ""
    yield "", ""
    yield counts(diff), "dim"


def _cause_lines(number: str, cause: Cause, everything: bool) -> Iterable[tuple[str, str]]:
    indent = " " * len(number)
    yield f"{number}{cause.what}{places(cause)}", "bold"
    for label, text in (
        ("at", cause.where),
        ("in A", wording.some(cause.a, None if everything else _MOST_NAMES)),
        ("in B", wording.some(cause.b, None if everything else _MOST_NAMES)),
        ("do", cause.advice),
    ):
        if text:
            yield f"{indent}{label:<5}{text}", ""


def places(cause: Cause) -> str:
    """In how many places, unless the cause says so itself."""
    return f"  ({cause.count} places)" if cause.count > 1 and str(cause.count) not in cause.what else ""


def facts(side: Side) -> str:
    """How large a graph is."""
    said = [
        wording.count(side.instructions, "instruction"),
        wording.count(side.parameters, "parameter"),
        wording.count(side.outputs, "output"),
        wording.count(side.collectives, "collective"),
    ]
    return ", ".join([*said, *([f"{side.dead} dead"] if side.dead else [])])


def counts(diff: Diff) -> str:
    """What is the same, and what differs because something below it does."""
    said = f"{wording.count(diff.matched, 'value')} match"
    if diff.consequences:
        said += f", {diff.consequences} differ only because something below them does"
    return f"{said}{f'; {wording.duration(diff.seconds)}' if diff.seconds else ''}"


# Unique.


def unique_lines(unique: Unique) -> Iterable[tuple[str, str]]:
    """How many graphs there are at each level."""
    total = len(unique.titles)
    real = unique.levels[-2 if len(unique.levels) > 1 else -1].unique if unique.levels else 0
    for level in unique.levels:
        if level.name == "dead code":
            real = level.unique
    yield f"{wording.count(real, 'different computation')} in {wording.count(total, 'graph')}", "bold"
    for level in unique.levels:
        yield f"  {level.unique:>4}  {LEVELS.get(level.name, level.name)}", ""
    known = [key for key in unique.recorded if key]
    if known:
        yield f"  {len(set(known)):>4}  by the keys recorded with {_all_or(len(known), total)}", ""
    yield "", ""


def letter(number: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def unique_rows(unique: Unique) -> list[tuple[str, ...]]:
    """A heading and a row for each graph: its letter at each level, recorded key, size."""
    keyed = any(unique.recorded)
    head = ("graph", *(level.name for level in unique.levels), *(["recorded key"] if keyed else []), "instructions")
    found: list[tuple[str, ...]] = [(*head, "parameters", "outputs")]
    for k, title in enumerate(unique.titles):
        letters = [letter(level.members[k]) for level in unique.levels]
        recorded = [short(unique.recorded[k])] if keyed else []
        side = unique.sides[k]
        found.append((title, *letters, *recorded, *map(str, (side.instructions, side.parameters, side.outputs))))
    return found


def short(key: str) -> str:
    """The beginning of a key, enough to tell a handful apart."""
    return key[:12]


def listing(sides: Sequence[Side], console: Console, recorded: Sequence[str]) -> None:
    """Print what graphs files hold, one a line."""
    head = (
        "graph",
        "name",
        "format",
        "key",
        "recorded",
        "instructions",
        "dead",
        "parameters",
        "outputs",
        "collectives",
    )
    rows: list[tuple[str, ...]] = [head]
    for side, key in zip(sides, recorded, strict=True):
        sizes = (side.instructions, side.dead, side.parameters, side.outputs, side.collectives)
        rows.append((side.title, side.name, side.format, short(side.key), short(key), *map(str, sizes)))
    print_rows(console, rows, numbers=5)


def print_rows(console: Console, rows: Sequence[Sequence[str]], numbers: int) -> None:
    """Rows under a heading, the last columns being numbers. rich's tables would cut names, which makes them useless."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    first = len(widths) - numbers
    for at, row in enumerate(rows):
        cells = [
            cell.rjust(w) if k >= first else cell.ljust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print_line(console, "  ".join(cells), "" if at else "dim")


# GitHub.


def to_github(record: GraphRecord) -> str:
    """One annotation a cause, at its line where that is the user's, then a notice with the verdict."""
    from retrograd.graph.source_lines import is_library

    found: list[str] = []
    title = "retrograd graph"
    if isinstance(record, Diff):
        title = f"retrograd graph diff {record.a.title} {record.b.title}"
        for cause in record.causes:
            file, _, line = cause.where.rpartition(":")
            users = file and line.isdigit() and not is_library(file)
            text = "\n".join(filter(None, [cause.what, "" if users else cause.where, cause.advice]))
            place = {"file": file, "line": line} if users else {}
            found.append(command("error", cause.kind.replace("_", " "), text, **place))
    (first, _), *_ = lines(record, False)
    found.append(command("notice", title, first))
    return "\n".join(found) + "\n"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _all_or(number: int, total: int) -> str:
    return "them" if number == total else f"{number} of them"


def print_line(console: Console, text: str, style: str) -> None:
    """A line of text that may hold anything."""
    # Names come from files, and an escape character in one would command the terminal.
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    console.print(Text(text, style=style), soft_wrap=True)
