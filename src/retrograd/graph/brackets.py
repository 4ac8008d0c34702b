"""Bracketed text: splitting text that nests brackets, braces and quotes, in one pass of a compiled expression.

Every expression takes each character once (possessive): ten megabytes of open quotes or brackets take as long as ten
megabytes of anything else.
"""

from __future__ import annotations

import re

from retrograd.core import wording
from retrograd.errors import GraphError

# A quoted string is one token: brackets in it do not count; one that is not closed goes to the end. "->" and "<=" are
# not brackets.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[(\[{]|[)\]}]|,', re.DOTALL)
# A message is read in a terminal; a damaged name may have megabytes.
_LONGEST = 160


def lines(text: str) -> list[str]:
    """The lines as editors count them: at "\\n" and "\\r\\n" only, although Python knows eight more separators."""
    return (text.replace("\r\n", "\n") if "\r" in text else text).split("\n")


def shortened(text: str) -> str:
    """A text as a message can show it."""
    return wording.shortened(text[: 4 * _LONGEST].strip(), _LONGEST)


def error(source: str, line: int, message: str, shown: str = "") -> GraphError:
    """What is wrong in which line of which file, with the line as it stands there."""
    message, shown = shortened(message), shortened(shown)
    return GraphError(f"{source}, line {line}: {message}{': ' + shown if shown else ''}")


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
        bracket = token[0]
        if bracket in "([{":
            depth += 1
        elif bracket in ")]}":
            depth -= 1
        elif bracket == separator and depth <= 0:
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
    """How many brackets are open at the end of a text; a quote that is not closed counts as one."""
    opened = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in "([{":
            opened += 1
        elif bracket in ")]}":
            opened -= 1
        elif bracket != "," and (len(bracket) < 2 or not bracket.endswith('"')):
            opened += 1
    return opened
