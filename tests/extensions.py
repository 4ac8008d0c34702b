"""C++ that tests compile, where there is a compiler; a source that does not compile, or not in time, is an error."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from retrograd import config
from retrograd.errors import NativeBuildError
from retrograd.runtime import disk_cache
from retrograd.runtime.cpp import build as native
from retrograd.runtime.cpp import extension

SOURCES = Path(config.__file__).parent
# Of the user, and not of the tests' own caches, which are set later.
KEPT = config.cache_home() / "retrograd-tests"
_MOST = 12  # of some megabytes: those of two versions of torch and the last sources of a few branches


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


def built_once(build: Callable[[], Path], cache: Path) -> Path:
    """The same in a cache of the tests' own, `cache`, from what an earlier run compiled of the same: a minute of a core.

    What is the same is said here and not by the library's own name, which is under test: all C++ of ours, all that
    compiles it, torch and the compiler.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        try:
            kept = KEPT / _key()
            kept.mkdir(parents=True, exist_ok=True)
            os.utime(kept)
            for old in sorted(KEPT.iterdir(), key=os.path.getmtime)[:-_MOST]:
                shutil.rmtree(old, ignore_errors=True)
        except (NativeBuildError, OSError):  # no compiler, which `built` says, or a cache that cannot be written
            return built(build)
        for library in kept.glob("*.so"):
            shutil.copy(library, disk_cache.folder("native"))
        library = built(build)
        if not (kept / library.name).exists():
            partial = kept / f"{library.name}.{os.getpid()}"
            shutil.copy(library, partial)
            partial.replace(kept / library.name)
        return library


def _key() -> str:
    compiler = native.find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    files = sorted([*SOURCES.rglob("*.[ch]pp"), *SOURCES.rglob("*.h"), *(SOURCES / "runtime").rglob("*.py")])
    facts = [*compiler, version, torch.__version__, torch.__file__, *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]
