"""Tape: the recorder's engine without Python in a step; compiled on the user's machine, in half a minute to two."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.compat.registry import status, works
from retrograd.compat.torch_dispatch import TAPE
from retrograd.errors import NativeBuildError
from retrograd.runtime.cpp.background import BackgroundBuild
from retrograd.runtime.cpp.extension import Extension

_TITLE, _SWITCH = "the trace tape", "RETROGRAD_TAPE=off"
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


@cache
def _background() -> BackgroundBuild:
    """The one attempt of this process; its reason is why there is no tape yet."""
    return BackgroundBuild(_EXTENSION, _TITLE, _SWITCH)


def available() -> tuple[Any, str]:
    """The module for engine "auto", or None and why Python records.

    The tape is taken where it has been built. Where it has not, it is compiled in the background for later recorders;
    where there is a GPU, on which Python would cost ten times the step, or RETROGRAD_TAPE is "build", that is waited
    for.
    """
    setting = config.tape()
    if setting == "off":
        return None, "RETROGRAD_TAPE is off"
    if not works(TAPE):
        return None, status(TAPE).difference
    if _EXTENSION.find() is None:
        if setting != "build" and not torch.cuda.is_available():
            return None, _background().reason
        sys.stderr.write(f"retrograd: compiling {_TITLE}, once, in a minute or two ({_SWITCH}: Python records)\n")
    try:
        module = load()
    except NativeBuildError as error:
        return None, str(error).splitlines()[0]
    # The module alone means nothing: torch.compile imports it.
    distributed = "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()
    if module.above_python and distributed:
        return None, "before torch 2.13 the tape does not see what DTensors do inside"
    return (None, "another recorder has the tape") if module.at_work() else (module, "")
