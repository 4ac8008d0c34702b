"""Text of a document: lines and tables on a terminal or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from retrograd.core.document import Cell, Document, Table, TextLine

WIDTH = 140  # columns of a table that folds, where no terminal has a width


def show(parts: Iterable[TextLine | Table], console: Console) -> None:
    """Print lines and tables; nothing that a person may want to copy is wrapped or cut."""
    for part in parts:
        if isinstance(part, TextLine):
            _line(console, part)
        elif part.fold:
            console.print(_folded(part, console.width))
        else:
            for line in _aligned(part):
                _line(console, line)


def to_text(document: Document, width: int = WIDTH) -> str:
    """The document as plain text without colour; tables that fold do so at `width` columns."""
    out = StringIO()
    show(document.text, Console(file=out, width=width, color_system=None, force_terminal=False))
    # rich pads table rows with blanks, which a file need not keep.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _line(console: Console, line: TextLine) -> None:
    # A Text object, because names such as `x[bold]` would be read as markup in a plain string.
    console.print(Text(_printable(line.text), style=line.style), soft_wrap=True)


def _printable(text: str) -> str:
    # Names come from files and programs, and an escape character in one would command the terminal.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _folded(table: Table, width: int) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    narrow = width < table.narrow
    rows = [list(map(_cell, row)) for row in table.rows]
    if narrow:
        for row in rows:
            aside = row.pop()
            if aside.plain:
                row[table.below] = Text("\n  ").join((row[table.below], aside))
    for column in range(max(map(len, [table.head, *rows]))):
        numeric = column in table.numbers
        folds = column in table.fold
        grid.add_column(justify="right" if numeric else "left", no_wrap=not folds, overflow="fold")
    if table.head:
        grid.add_row(*(Text(_printable(title), style="bold") for title in table.head))
    for row in rows:
        grid.add_row(*row)
    return grid


def _cell(cell: str | Cell) -> Text:
    return Text(_printable(cell)) if isinstance(cell, str) else Text(_printable(cell.text), style=cell.style)


def _aligned(table: Table) -> Iterable[TextLine]:
    """Rows under a dim heading. rich's tables would cut names, which makes them useless."""
    rows: list[Sequence[str]] = [table.head] if table.head else []
    rows += [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]
    columns = len(rows[0])
    numbers = {number % columns for number in table.numbers}
    widths = [max(len(row[k]) for row in rows) for k in range(columns)]
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(w) if k in numbers else cell.ljust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield TextLine("  ".join(cells), "dim" if table.head and number == 0 else "")
