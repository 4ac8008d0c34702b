"""Text of a source line as a report shows it: of a statement over several lines, the whole of it."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

_LONGEST = 160  # characters of a statement over several lines; what a line has is shown in full


def statement(file: str, line: int) -> str:
    """The statement at a line without comments, as one line; "" if the file cannot be read.

    Compilers give a call over several lines the line of its last operand, `mask=mask,` say, which tells nothing.
    """
    lines = tuple(linecache.getlines(file))
    if not 0 < line <= len(lines):
        return ""
    first, last = next(((a, b) for a, b in _spans(lines) if a <= line <= b), (line, line))
    parts = [text.partition("#")[0].strip() for text in lines[first - 1 : last]]
    joined = " ".join(part for part in parts if part)
    if first == last:
        return joined
    for opening, closing in ("()", "[]", "{}"):
        joined = joined.replace(f"{opening} ", opening).replace(f", {closing}", closing).replace(f" {closing}", closing)
    return joined if len(joined) <= _LONGEST else f"{joined[:_LONGEST]} ..."


@lru_cache(maxsize=64)
def _spans(lines: tuple[str, ...]) -> list[tuple[int, int]]:
    """First and last lines of the statements over several lines; of those that hold others, of what stands before."""
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    spans: list[tuple[int, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = [child.lineno for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            last = inner[0] - 1 if inner else node.end_lineno or node.lineno
            if last > node.lineno:
                spans.append((node.lineno, last))
    return spans
