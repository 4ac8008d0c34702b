"""The eager norms on CUDA without Python in the way: their autograd node and launches in C++.

When a norm first sees a GPU, host.cpp is compiled in the background (half a minute, needs g++ and Python's headers)
into the user's cache; Python serves until it is there, and from then on every process takes it by itself.
RETROGRAD_HOST=build waits for it, as `build()` does; RETROGRAD_HOST=off leaves it alone. Results are those of the
Python path bit for bit; what C++ does not know goes there: first calls, tensors that are not plain or not aligned,
functions under a mode, accumulate_main_grad, deterministic=False.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.errors import NativeBuildError
from retrograd.ops.norm.host import recipes
from retrograd.ops.tensor_subclasses import PLAIN
from retrograd.runtime.cpp.background import BackgroundBuild
from retrograd.runtime.cpp.extension import Extension

__all__ = ["build", "entry", "off", "on", "why_not"]

_SOURCE, _AGAIN = Path(__file__).with_name("host.cpp"), "retrograd.ops.norm.host.build(again=True)"
library = Extension(_SOURCE, "retrograd_norm_host", "norm-host", _AGAIN)
_TITLE, _SWITCH = "the C++ path of the norms", "RETROGRAD_HOST=off"
_deciding = threading.Lock()
_background: BackgroundBuild | None = None
_reason: str | None = "no norm has seen a CUDA tensor yet" if torch.version.cuda else "this torch has no CUDA"


def build(*, again: bool = False) -> Path:
    """Compile the library into the cache, unless it is there; with a GPU, take it in this process from now on.

    Args:
        again: Compile it even if it is there.

    Raises:
        NativeBuildError: There is no C++ compiler, headers of torch or Python are missing, or the compiler fails.
    """
    built = library.build(again=again)
    if torch.cuda.is_available():
        on()
    return built


def on() -> None:
    """Take the C++ path in this process.

    Raises:
        NativeBuildError: It is not built, or cannot run here.
    """
    path = library.find()
    if path is None:
        raise NativeBuildError(
            f"{_TITLE} has not been built for this torch and Python; call "
            "retrograd.ops.norm.host.build(), or set RETROGRAD_HOST=build"
        )
    module = library.load(path)
    if (refused := module.use_cuda()) is not None:
        raise NativeBuildError(f"{_TITLE} cannot run here: {refused}; set {_SWITCH}")
    recipes.connect(module)
    _take(module.apply, None)


def off() -> None:
    """Leave the C++ path in this process; `on` takes it again. Backwards of calls that took it still run in C++."""
    _take(None, "it was switched off")
    recipes.disconnect()


def why_not() -> str | None:
    """Why this process does not take the C++ path, or None if it does."""
    return _background.reason or None if entry is _first and _background is not None else _reason


def _first(x: Any, *rest: Any) -> Any:
    """Stands for the entry until a tensor on CUDA decides whether there is one, and while that is compiled."""
    if _background is not None and _background.running():
        return NotImplemented
    # Loading a library into a capture could break it; calls that a graph replays are no slower by Python.
    if type(x) in PLAIN and x is not None and x.is_cuda and not torch.cuda.is_current_stream_capturing():
        _decide()
        if entry is not None and entry is not _first:
            return entry(x, *rest)
    return NotImplemented


def _decide() -> None:
    """Take the C++ path, or none, or have it compiled and be asked again; one thread at a time."""
    with _deciding:
        if entry is not _first or (_background is not None and _background.running()):
            return  # another thread was first
        wish = config.host()
        if wish == "off" or config.interpreting() or torch.version.hip is not None:
            _take(
                None, "RETROGRAD_HOST is off" if wish == "off" else "it launches compiled kernels on NVIDIA GPUs only"
            )
            return
        try:
            if wish == "build":
                library.build()
            if library.find() is not None:
                on()
            elif _background is None:
                _begin()
            else:
                _take(None, _background.reason)
                if _background.tried:
                    _warn(_background.reason)
        except (NativeBuildError, ImportError) as error:
            _take(None, str(error))
            _warn(str(error))


def _begin() -> None:
    global _background
    _background = BackgroundBuild(library, _TITLE, _SWITCH)


def _warn(reason: str) -> None:
    warnings.warn(f"norms go through Python, which is slower: {reason}", stacklevel=5)


def _take(function: Callable[..., Any] | None, reason: str | None) -> None:
    """Make `function` what the norms call first; `reason` says why there is none."""
    global entry, _reason
    entry, _reason = function, reason


# What rms_norm and layer_norm call first; None where the ordinary path is the only one.
entry: Callable[..., Any] | None = _first if torch.version.cuda else None
