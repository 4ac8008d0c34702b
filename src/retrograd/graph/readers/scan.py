"""Splitting text that nests brackets, braces and quotes, in one pass of a compiled expression."""

from __future__ import annotations

import re

# A quoted string is one token: brackets in it do not count. "->" and "<=" are not brackets.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(\[{]|[)\]}]|,')


def balanced(depth: int) -> str:
    """An expression for text whose round brackets nest at most `depth` deep; it never backtracks (possessive)."""
    inner = r"[^()]*+"
    for _ in range(depth):
        inner = rf"[^()]*+(?:\({inner}\)[^()]*+)*+"
    return inner


def split(text: str, separator: str = ",") -> list[str]:
    """The parts of a text between separators that stand outside brackets and quotes, stripped; [] for blank text."""
    parts: list[str] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        found = token[0]
        if found in "([{":
            depth += 1
        elif found in ")]}":
            depth -= 1
        elif found == separator and depth <= 0:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def closing(text: str, start: int) -> int:
    """Where the bracket closes that opens at `start`; -1 if it does not."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.start()
    return -1


def depth(text: str) -> int:
    """How many brackets are open at the end of a text."""
    return sum(1 if t[0] in "([{" else -1 if t[0] in ")]}" else 0 for t in _TOKEN.finditer(text))
