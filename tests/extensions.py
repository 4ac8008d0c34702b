"""C++ that tests compile, where there is a compiler; a source that does not compile, or not in time, is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd.errors import NativeBuildError
from retrograd.runtime.cpp import build as native
from retrograd.runtime.cpp import extension


def why_no_compiler() -> str | None:
    """Why no C++ can be compiled here, or None; whether ours compiles is for tests to say."""
    try:
        native.find_compiler()
    except NativeBuildError as error:
        return str(error)
    return None


def built(build: Callable[[], Path]) -> Path:
    """What `build` compiles, or a skip where there is no compiler or no header of torch or Python."""
    try:
        native.find_compiler()
        extension.check_headers()
    except NativeBuildError as error:
        pytest.skip(str(error))
    return build()
