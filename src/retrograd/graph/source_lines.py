"""Source lines of instructions: metadata of HLO, stack-frame tables of newer XLA, comments of FX."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Each character once, and at most nine digits: damaged metadata is read in linear time and never overflows `int`.
_FIELD = re.compile(r'(?<!\w)(\w++)=(?:"((?:[^"\\]++|\\.)*+)"|(-?[0-9]{1,9})(?![0-9]))')
_ESCAPE = re.compile(r"\\(.)")

# Frames of frameworks: true, but not the line that a user can change.
_LIBRARIES = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|(?:^|/)(?:torch|torch_xla|jax|jaxlib|flax|numpy)/|^<frozen"
)


Frames = tuple[tuple[str, int, str], ...]  # (file, line, function), innermost first


@dataclass(frozen=True)
class Place:
    """Where an instruction comes from: `op` is the framework's name of the operation, `file` "" if unknown."""

    op: str = ""
    file: str = ""
    line: int = 0
    kind: str = ""
    frames: Frames = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else ""


def place_of(metadata: str, stack: dict[int, Frames]) -> Place:
    """The place in the metadata of an instruction; `stack` holds frames by stack_frame_id."""
    fields = {
        name: _ESCAPE.sub(r"\1", text) if number == "" else number for name, text, number in _FIELD.findall(metadata)
    }
    frames = stack.get(int(fields.get("stack_frame_id", 0)), ())
    file, line = fields.get("source_file", ""), int(fields.get("source_line", 0))
    if not file and frames:
        file, line = next(((f, n) for f, n, _ in frames if not is_library(f)), frames[0][:2])
    return Place(fields.get("op_name", ""), file, line, fields.get("op_type", ""), frames)


def is_library(file: str) -> bool:
    """Is this file part of a framework rather than of the user's program?"""
    return bool(_LIBRARIES.search(file))
