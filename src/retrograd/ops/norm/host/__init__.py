"""The eager norms on CUDA without Python in the way: their autograd node and launches in C++, where that was built.

`build()` compiles host.cpp (half a minute, needs g++ and Python's headers) into the user's cache; from then on every
process takes it by itself. RETROGRAD_HOST=build does the same when a norm first sees a GPU, RETROGRAD_HOST=off leaves
it alone. Results are those of the Python path bit for bit; what C++ does not know goes there: first calls, tensors
that are not plain or not aligned, functions under a mode, accumulate_main_grad, deterministic=False.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from retrograd import config
from retrograd.errors import NativeBuildError
from retrograd.ops.norm.host import recipes
from retrograd.ops.tensor_subclasses import PLAIN
from retrograd.runtime.cpp.extension import Extension

__all__ = ["build", "entry", "off", "on", "why_not"]

_SOURCE, _AGAIN = Path(__file__).with_name("host.cpp"), "retrograd.ops.norm.host.build(again=True)"
library = Extension(_SOURCE, "retrograd_norm_host", "norm-host", _AGAIN)
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
            "the C++ path of the norms has not been built for this torch and Python; call "
            "retrograd.ops.norm.host.build(), or set RETROGRAD_HOST=build"
        )
    module = library.load(path)
    if (refused := module.use_cuda()) is not None:
        raise NativeBuildError(f"the C++ path of the norms cannot run here: {refused}; set RETROGRAD_HOST=off")
    recipes.connect(module)
    _take(module.apply, None)


def off() -> None:
    """Leave the C++ path in this process; `on` takes it again. Backwards of calls that took it still run in C++."""
    _take(None, "it was switched off")
    recipes.disconnect()


def why_not() -> str | None:
    """Why this process does not take the C++ path, or None if it does."""
    return _reason


def _first(x: Any, *rest: Any) -> Any:
    """Stands for the entry until a tensor on CUDA decides whether there is one."""
    if type(x) in PLAIN and x is not None and x.is_cuda:
        _decide()
        if entry is not None:
            return entry(x, *rest)
    return NotImplemented


def _decide() -> None:
    wish = config.host()
    if wish == "off" or config.interpreting() or torch.version.hip is not None:
        _take(None, "RETROGRAD_HOST is off" if wish == "off" else "it launches compiled kernels on NVIDIA GPUs only")
        return
    try:
        if wish == "build":
            library.build()
        elif library.find() is None:
            _take(None, "it has not been built; call retrograd.ops.norm.host.build()")
            return
        on()
    except (NativeBuildError, ImportError) as error:
        _take(None, str(error))
        warnings.warn(f"norms go through Python, which is slower: {error}", stacklevel=4)


def _take(function: Callable[..., Any] | None, reason: str | None) -> None:
    """Make `function` what the norms call first; `reason` says why there is none."""
    global entry, _reason
    entry, _reason = function, reason


# What rms_norm and layer_norm call first; None where the ordinary path is the only one.
entry: Callable[..., Any] | None = _first if torch.version.cuda else None
