"""Fragment of HTML for notebooks: verdict, findings and how to see them again, by the templates of the pages.

No charts and no script: a notebook may be read where nothing runs. `retrograd.write(report, "r.html")` has them.
"""

from __future__ import annotations

from retrograd.core.document import Card, Document
from retrograd.report.html import template

_MOST = 5  # cards; the page has all of them


def to_notebook(document: Document) -> str:
    """The fragment; it needs no network and no other style."""
    cards = [part for part in document.brief if isinstance(part, Card)]
    left_out = cards[_MOST:]
    more = ""
    if left_out:
        more = f'{len(left_out)} more {document.more}; all of them are in retrograd.write(record, "record.html")'
    parts = [part for part in document.brief if not any(part is card for card in left_out)]
    fragment: str = template("notebook.html.j2").render(parts=parts, more=more)
    return fragment
