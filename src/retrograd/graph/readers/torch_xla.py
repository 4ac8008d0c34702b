"""Save-files of torch_xla (XLA_SAVE_TENSORS_FILE): one block for each cut, with Python frames and the graph's hash.

[ScheduleSyncTensorsGraph]
TensorsGraphInfo:
  step (train.py:79)
  <module> (train.py:102)

Root Hashes: (1f, 2e)

## BEGIN_GRAPH
HloModule IrToHlo.2106, ...
Graph Hash: 5e4854
## END_GRAPH
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from retrograd.graph import brackets

_BLOCK = re.compile(r"\[(\w+)\]\s*\Z")
_BEGIN, _END, _HASH = "## BEGIN_GRAPH", "## END_GRAPH", "Graph Hash:"


@dataclass(frozen=True)
class SaveFileBlock:
    """One graph of a save-file: `body` is its text, which begins at line `first`."""

    body: str
    first: int
    key: str
    frames: tuple[tuple[str, int], ...]
    name: str


def blocks(text: str, source: str) -> Iterator[SaveFileBlock]:
    """The blocks in order; GraphError where one is not closed."""
    lines = brackets.lines(text)
    name = ""
    frames: list[tuple[str, int]] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(_BEGIN):
            body, key, end = _body(lines, at + 1, source)
            yield SaveFileBlock(body, at + 2, key, tuple(frames), name)
            name, frames, at = "", [], end
        elif header := _BLOCK.match(line):
            name, frames = header[1], []
        elif frame := _frame(line):
            frames.append(frame)
        at += 1
    if frames:
        raise brackets.error(source or "the text", len(lines), f"the last block has no `{_BEGIN}`; the file is cut off")


def _frame(line: str) -> tuple[str, int] | None:
    """File and line of `  function (file:line)`; from the right, since files and functions may have brackets."""
    head, colon, number = line.rstrip().rpartition(":")
    file = head.rpartition(" (")[2]
    if not colon or not line.startswith(" ") or file == head or not number.endswith(")"):
        return None
    return (file, int(number[:-1])) if number[:-1].isascii() and number[:-1].isdigit() and len(number) < 10 else None


def _body(lines: list[str], start: int, source: str) -> tuple[str, str, int]:
    """The lines between the marks without the hash, the hash, and where the block ends."""
    key, last = "", -1
    for at in range(start, len(lines)):
        line = lines[at]
        if line.startswith(_HASH):
            key, last = line[len(_HASH) :].strip(), at
        elif line.startswith(_END):
            return "\n".join(lines[start : last if last >= 0 else at]), key, at
        elif line.startswith(_BEGIN):
            break
    raise brackets.error(
        source or "the text", start, f"the graph that begins here has no `{_END}`; the file is cut off"
    )
