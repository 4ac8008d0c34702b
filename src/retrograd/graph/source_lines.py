"""Source lines of instructions: metadata of HLO, stack-frame tables of newer XLA, comments of FX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from retrograd.core.program_lines import is_library

# Each character once, and at most nine digits: damaged metadata is read in linear time and never overflows `int`.
_FIELD = re.compile(r'(?<!\w)(\w++)=(?:"((?:[^"\\]++|\\.)*+)"|(-?[0-9]{1,9})(?![0-9]))')
_ESCAPE = re.compile(r"\\(.)")

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
    if not file:
        file, line = user_frame([frame[:2] for frame in frames])
    return Place(fields.get("op_name", ""), file, line, fields.get("op_type", ""), frames)


def user_frame(frames: Sequence[tuple[str, int]], library: bool = True) -> tuple[str, int]:
    """File and line of the innermost frame of the user's program, else (with `library`) of the innermost of all."""
    own = next((frame for frame in frames if not is_library(frame[0])), None)
    return own or (frames[0] if frames and library else ("", 0))


def short(frame: tuple[str, int]) -> str:
    """A frame without its folders: "train.py:24"."""
    return f"{frame[0].rpartition('/')[2]}:{frame[1]}" if frame[0] else ""
