"""Edits: one place in a function's source replaced by another text, and what that looks like as a diff."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """One replacement.

    Attributes:
        operator: the kind of mistake, as `factor dropped`.
        start, end: offsets into the function's source, in characters.
        text: what stands there instead.
        line: of the replaced text within the function, from 0.
    """

    operator: str
    start: int
    end: int
    text: str
    line: int

    def applied(self, source: str) -> str:
        """The source with this edit."""
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str, path: str = "", first_line: int = 1) -> str:
        """A unified diff of the lines that change, with two lines around them.

        Args:
            source: of the function.
            path: named in the head; no head without one.
            first_line: of the function in that file.
        """
        old, new = source.splitlines(), self.applied(source).splitlines()
        lines = list(difflib.unified_diff(old, new, path, path, lineterm="", n=2))
        begin = self._hunk(lines[2], first_line) if len(lines) > 2 else ""
        return "\n".join([*(lines[:2] if path else []), begin, *lines[3:]])

    @staticmethod
    def _hunk(head: str, first_line: int) -> str:
        """The head of a hunk, counted in the file instead of in the function."""

        def moved(place: str) -> str:
            begin, comma, count = place.partition(",")
            return f"{begin[0]}{int(begin[1:]) + first_line - 1}{comma}{count}"

        _, old, new, _ = head.split(" ")
        return f"@@ {moved(old)} {moved(new)} @@"


class Source:
    """A function's source with its tree; places of nodes as offsets in characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends."""
        end_line, end_col = getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0)
        return self._offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0)), self._offset(end_line, end_col)

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def edit(self, operator: str, node: ast.AST, text: str) -> Edit:
        """An edit that replaces a node."""
        start, end = self.span(node)
        return Edit(operator, start, end, text, getattr(node, "lineno", 1) - 1)

    def _offset(self, line: int, column: int) -> int:
        # ast counts bytes of UTF-8.
        return self._begins[line - 1] + len(self._lines[line - 1].encode()[:column].decode())
