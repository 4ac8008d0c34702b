"""Document: a record in words, tables and pictures, as plain data between the rooms that know it and the renderers.

The `messages.py` beside a record's schema makes it; `retrograd.report` has one renderer a format and knows no record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Tone = Literal["proved", "finding", "undecided", "plain"]
STYLES = {"proved": "bold green", "finding": "bold red", "undecided": "bold yellow"}  # of a verdict on a terminal


class TextLine(NamedTuple):
    """A line on a terminal; `style` is rich's ("bold red", "dim"). It is never wrapped: people copy from it."""

    text: str = ""
    style: str = ""


class Fact(NamedTuple):
    """A labelled text; `form` is "" for prose, "mono" for code, "pre" for lines that people copy."""

    label: str
    text: str
    form: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell that is more than a text: its style on a terminal, its class on a page, a bar of so many percent."""

    text: str = ""
    style: str = ""
    tone: str = ""
    bar: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows under a heading, which may be empty."""

    head: tuple[str, ...]  # titles of columns
    rows: tuple[tuple[str | Cell, ...], ...]  # texts or cells; lines of a text stand below each other
    # the columns that are numbers, aligned to the right; negative ones count from the end
    numbers: tuple[int, ...] = ()
    # columns whose text is folded where a terminal is narrow; without any, no text is ever cut
    fold: tuple[int, ...] = ()
    narrow: int = 0  # on terminals of fewer columns than this, the last cell stands below the one in column `below`
    below: int = 0  # see `narrow`
    caption: str = ""  # title of a small table, which stands beside others
    named: int = 0  # the column that names a row, on a page


@dataclass(frozen=True)
class Chart:
    """A picture: what it shows, the same for who cannot see it, and data with marks as Vega-Lite has them."""

    caption: str
    label: str
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Paragraphs:
    """Sentences: in a row, as a list of points ("points"), or indented by their blanks ("lines")."""

    lines: tuple[str | TextLine, ...]
    form: Literal["", "points", "lines"] = ""


@dataclass(frozen=True)
class Embedded:
    """A part of a page that has a template of its own in `report/templates`, and the values it needs."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Header:
    """The verdict of a page: its tone, a word, what was looked at, and facts."""

    tone: Tone
    head: str
    facts: tuple[str, ...] = ()
    word: str = ""


@dataclass(frozen=True)
class Card:
    """One finding, cause or operator: a sentence, labelled facts, pictures and small tables."""

    title: str = ""
    facts: tuple[Fact, ...] = ()
    aside: str = ""
    tone: str = ""
    parts: tuple[Table | Chart, ...] = ()

    @property
    def shown(self) -> tuple[Fact, ...]:
        """The facts that have a text."""
        return tuple(fact for fact in self.facts if fact.text)


@dataclass(frozen=True)
class Section:
    """Parts of a page under a heading; where `folded`, they are to be opened first."""

    title: str
    parts: tuple[PagePart, ...]
    folded: bool = False


PagePart = Header | Section | Card | Table | Chart | Paragraphs | Embedded


@dataclass(frozen=True)
class Annotation:
    """A remark of CI at a line of a file; `place` is "file.py:12" or "".

    `rule` names what it is an instance of ("oracle/wrong-value"), "" of a summary; `accepted` is why it may stand.
    """

    level: Literal["error", "warning", "notice"]
    title: str
    text: str
    place: str = ""
    rule: str = ""
    accepted: str = ""


@dataclass(frozen=True)
class SuiteCase:
    """One case of JUnit; `failures` are type, message and details, and `reason` says why there is no result."""

    name: str
    status: Literal["passed", "failed", "skipped", "undecided"]
    seconds: float
    reason: str = ""
    failures: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """The cases of JUnit, all of one command."""

    name: str
    classname: str
    seconds: float
    started: str
    cases: tuple[SuiteCase, ...]


@dataclass(frozen=True)
class Document:
    """What is shown of a record."""

    title: str  # of the page
    text: tuple[TextLine | Table, ...]  # lines and tables of a terminal
    page: tuple[PagePart, ...]  # parts of a page
    # parts of a fragment for notebooks, which has no charts; of its cards only the first are shown
    brief: tuple[PagePart, ...] = ()
    more: str = "causes"  # what the cards are, in the plural
    annotations: tuple[Annotation, ...] = ()  # remarks in CI
    suite: Suite | None = None  # cases of JUnit; None: the record has none
    file: str = ""  # what the record is about, for remarks without a place


@dataclass(frozen=True)
class Scalar:
    """A number at a step, for curves."""

    step: int
    tag: str
    value: float


@dataclass(frozen=True)
class Histogram:
    """Counts at a step: of values up to each of `limits`, ascending."""

    step: int
    tag: str
    limits: tuple[float, ...]
    counts: tuple[int, ...]
    low: float
    high: float
    total: float = 0.0
    squares: float = 0.0


@dataclass(frozen=True)
class Events:
    """Numbers of a record over steps; `started` is when it began, in ISO form, and a step lasts `seconds`."""

    started: str
    values: Iterable[Scalar | Histogram] = field(default_factory=tuple[Scalar | Histogram, ...])
    seconds: float = 0.0


def labelled(facts: Iterable[Fact | tuple[str, str]], width: int, indent: int = 2, style: str = "") -> list[TextLine]:
    """Facts as lines with aligned labels: a label once, and in front of the first line of its text alone."""
    lines: list[TextLine] = []
    last = ""
    for label, text, *_ in facts:
        for number, part in enumerate(text.splitlines()):
            shown = label if number == 0 and label != last else ""
            lines.append(TextLine(f"{' ' * indent}{shown:<{width}}{part}".rstrip(), style))
        last = label
    return lines


def environment(command: str, facts: Mapping[str, str]) -> Section:
    """The last section of a page: the command, versions and devices."""
    rows = [("command", command)] if command else []
    return Section("Environment", (Table((), (*rows, *facts.items())),))
