"""Messages about the compilations of a recorded run: a table, and where ranks part."""

from __future__ import annotations

from retrograd.core import document as doc
from retrograd.core.wording import count, shortened
from retrograd.graph.compilations.schema import Compilation, Compilations
from retrograd.graph.messages import annotation

_HEAD = ("rank", "compile", "where", "guards", "graphs", "caches", "s", "why")
_WIDEST = 110


def document(record: Compilations, everything: bool = True) -> doc.Document:
    """The table, under where ranks part."""
    columns = slice(0 if len(record.ranks) > 1 else 1, None)
    rows = [_row(row, None if everything else _WIDEST)[columns] for row in record.rows]
    table = doc.Table(_HEAD[columns], tuple(rows))
    again = sum(bool(row.reason) for row in record.rows)
    broken = sum(len(row.breaks) for row in record.rows)
    facts = [count(len(record.rows), "compilation"), f"{count(len(record.ranks), 'rank')}"]
    facts += [count(again, "recompilation")] if again else []
    facts += [count(broken, "graph break")] if broken else []
    word = f"the ranks part: {count(len(record.causes), 'cause')}" if record.causes else ""
    head = ", ".join(facts)
    text: list[doc.TextLine | doc.Table] = [doc.TextLine(f"{head}; {word}" if word else head, "bold")]
    for number, cause in enumerate(record.causes, 1):
        text += [doc.TextLine(line) for line in ("", *(f"{number}. {cause.what}",))]
        text += doc.labelled([("at", cause.where), ("do", cause.advice)], width=5, indent=3)
    text += [doc.TextLine(), table, *(doc.TextLine(f"note: {note}", "dim") for note in record.notes)]
    header = doc.Header("finding" if record.causes else "proved", head, record.notes, word)
    cards = [doc.Card(c.what, (doc.Fact("at", c.where), doc.Fact("do", c.advice))) for c in record.causes]
    page: list[doc.PagePart] = [header]
    page += [doc.Section("Where ranks part", tuple(cards))] if cards else []
    page.append(doc.Section("Compilations", (table,)))
    remarks = (*map(annotation, record.causes), doc.Annotation("notice", "retrograd graph compilations", word or head))
    return doc.Document("retrograd graph compilations", tuple(text), tuple(page), tuple(page), annotations=remarks)


def _row(row: Compilation, widest: int | None) -> tuple[str, ...]:
    why = [row.reason, *(f"graph break at {text}" for text in row.breaks), row.failure]
    if row.recordings:
        why.append(f"CUDA graphs recorded {count(row.recordings, 'time')}")
    text = "; ".join(filter(None, why))
    caches = ", ".join(dict.fromkeys(row.caches))
    seconds = "?" if row.seconds is None else f"{row.seconds:.2f}"
    where = f"{row.where} {row.function}".strip()
    shown = text if widest is None else shortened(text, widest)
    return (str(row.rank), f"[{row.id}]", where, str(row.guards), ", ".join(row.graphs), caches, seconds, shown)
