"""Lines of a person's program among the frames of a call. No torch."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"


@cache
def is_program(file: str) -> bool:
    """Whether a file is neither torch's, Python's nor ours."""
    torch = str(Path(getattr(sys.modules.get("torch"), "__file__", None) or os.devnull).parent) + os.sep
    if file.startswith((_OURS, torch, "<frozen", "<eval_with_key")):
        return False
    return not file.startswith(_STANDARD) or (_PACKAGES in file and f"{_PACKAGES}torch{os.sep}" not in file)


@cache
def place(code: CodeType, line: int) -> str:
    """ "train.py:46 (main)"."""
    file = Path(code.co_filename)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else Path(*file.parts[-2:])
    return f"{shown}:{line} ({code.co_name})"


def innermost(frame: FrameType | None) -> str:
    """The innermost line of the program at or above a frame; "" if there is none."""
    while frame is not None:
        if is_program(frame.f_code.co_filename):
            return place(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""
