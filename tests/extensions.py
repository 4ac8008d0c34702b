"""Extension modules that tests compile, where there is a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrograd.errors import NativeBuildError
from retrograd.runtime.cpp import build as native


def built(build: Callable[[], Path]) -> Path:
    """What `build` compiles, or a skip where there is no compiler; a source that does not compile is an error."""
    try:
        native.find_compiler()
        return build()
    except NativeBuildError as error:
        if "does not compile" in str(error):
            raise
        pytest.skip(str(error))
