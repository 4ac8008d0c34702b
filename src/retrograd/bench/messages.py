"""Messages of results: the chart of bandwidth above the tables, as a document. No torch."""

from __future__ import annotations

from retrograd.bench.plot import chart
from retrograd.bench.rows import BenchResults
from retrograd.bench.table import markdown
from retrograd.core import document as doc


def document(results: BenchResults, everything: bool = True) -> doc.Document:
    """The results; UsageError if there is nothing to draw."""
    label = "GB/s by provider, forward and backward, beside a device copy"
    drawn = doc.Chart("Useful bandwidth", label, chart(results.rows))
    title = f"Useful bandwidth of {', '.join(dict.fromkeys(row.op for row in results.rows))}"
    page: list[doc.PagePart] = [doc.Header("plain", title), doc.Section("", (drawn,))]
    tables = markdown(results.rows)
    for block in tables.replace("**", "").strip().split("\n\n"):
        if block.startswith("|"):
            head, _, *body = (tuple(cell.strip() for cell in line[1:-1].split("|")) for line in block.splitlines())
            page.append(doc.Table(head, tuple(body)))
        else:
            page.append(doc.Paragraphs(tuple(block.splitlines())))
    return doc.Document(title, tuple(map(doc.TextLine, tables.splitlines())), tuple(page), tuple(page))
