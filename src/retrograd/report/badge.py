"""Badge of documents: the worst verdict among them as a small SVG, which needs no service."""

from __future__ import annotations

from collections.abc import Sequence

from retrograd.core.document import Document, Header

_LABEL = "retrograd"
# From worst to best; white text on each has a contrast of at least 4.5.
_WORDS = {"finding": ("finding", "#b3202c"), "undecided": ("cannot decide", "#94630a"), "proved": ("proved", "#1a7f4b")}
_TEXT = '<text x="{x}" y="14" textLength="{length}" lengthAdjust="spacingAndGlyphs">{text}</text>'
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {word}">
<rect width="{width}" height="20" rx="3" fill="{colour}"/><rect width="{left}" height="20" rx="3" fill="#3d444d"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>
"""


def to_badge(documents: Sequence[Document]) -> str:
    """The SVG; documents without a verdict count as proved."""
    tones = {part.tone for document in documents for part in document.page[:1] if isinstance(part, Header)}
    word, colour = next((_WORDS[tone] for tone in _WORDS if tone in tones), _WORDS["proved"])
    left, right = (7 * len(text) for text in (_LABEL, word))
    texts = _TEXT.format(x=6, length=left, text=_LABEL) + _TEXT.format(x=left + 18, length=right, text=word)
    width = left + right + 24
    return _SVG.format(width=width, left=left + 12, label=_LABEL, word=word, colour=colour, texts=texts)
