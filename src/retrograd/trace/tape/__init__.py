"""The recorder's path without Python in a step; opt-in, since it is compiled on the user's machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from retrograd.ops._native.extension import Extension

_EXTENSION = Extension(
    Path(__file__).with_name("tape.cpp"),
    "retrograd_trace_tape",
    "trace-tape",
    "retrograd.trace.tape.build(again=True)",
)


def build(*, again: bool = False) -> Path:
    """Compile the tape for this torch and Python, which takes half a minute to two; later recorders use it.

    Args:
        again: Compile also if there is one.

    Returns:
        The library, in the user's cache.

    Raises:
        NativeBuildError: there is no C++ compiler, headers of torch or Python are missing, or the compiler fails.
    """
    return _EXTENSION.build(again=again)


@cache
def load() -> Any:
    """The extension module, built if it was not. Never unloaded: the dispatcher keeps its fallback."""
    return _EXTENSION.load(build())
