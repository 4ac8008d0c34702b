"""Compile a shipped C++ source at first use and load it with ctypes.

The library lies in the user's cache under a hash of all it depends on: source, flags, compiler and CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from retrograd import config
from retrograd.errors import NativeBuildError
from retrograd.runtime import disk_cache

if TYPE_CHECKING:
    import torch

# None of these lets the compiler reorder additions or flush subnormals; -ffast-math would do both, the second for the
# whole process that loads the library. -O2: the vectors are written out, -O3 only builds for longer.
FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-fPIC", "-shared", "-Wno-psabi"),
)
_CANDIDATES = ("c++", "g++", "clang++")
_TIMEOUT_S = 300
_ERROR_LINES = 12


@cache
def load(source: Path, flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The library built from `source`, from the cache if it is there.

    Args:
        source: a C++ file that needs no other file of ours.
        flags: for the compiler.

    Raises:
        NativeBuildError: there is no compiler, it fails, or its result cannot be loaded.
    """
    compiler = find_compiler()
    name = f"{source.stem}-{_key(source, flags, compiler)}.so"
    library = disk_cache.folder("native") / name
    if not library.exists():
        compile_library(compiler, source, flags, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(
            f"{library} does not load: {error}; remove it, and a new one is built at the next use"
        ) from error


@cache
def why_not(source: Path) -> str | None:
    """Why `load` fails, or None if it does not; compiles what this machine has not yet, about 5 s a source."""
    try:
        load(source)
    except NativeBuildError as error:
        return str(error)
    return None


def address(tensor: torch.Tensor) -> int:
    """Of the first element, for compiled code.

    Raises:
        TypeError: the tensor has elements but no memory of its own.
    """
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise TypeError(
            f"impl='native' got a {type(tensor).__name__} without memory of its own, expected a torch.Tensor with "
            "storage; use impl='torch'"
        )
    return pointer


def find_compiler() -> list[str]:
    """The command of the C++ compiler: $CXX if that is set, else the first of c++, g++, clang++.

    Raises:
        NativeBuildError: none is on PATH.
    """
    chosen = config.cxx()
    if chosen is None:
        for name in _CANDIDATES:
            if shutil.which(name):
                return [name]
        raise NativeBuildError(
            f"no C++ compiler found on PATH (looked for {', '.join(_CANDIDATES)}); install one, for example g++, or "
            "set CXX to its path"
        )
    command = shlex.split(chosen)
    if not command or not shutil.which(command[0]):
        raise NativeBuildError(f"CXX is {chosen!r}, which is not a program on PATH; correct CXX or unset it")
    return command


def _key(source: Path, flags: tuple[str, ...], compiler: list[str]) -> str:
    version = _run([*compiler, "--version"]).stdout
    facts = [source.read_text(), *flags, *compiler, version, platform.machine(), _cpu_flags()]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:20]


def _cpu_flags() -> str:
    """What -march=native depends on: a home folder may be shared by machines with different CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))


def compile_library(compiler: list[str], source: Path, flags: tuple[str, ...], library: Path) -> None:
    """Compile `source` into `library`.

    Raises:
        NativeBuildError: the compiler fails.
    """
    with disk_cache.replacing(library) as path:
        command = [*compiler, *flags, str(source), "-o", str(path)]
        done = _run(command)
        if done.returncode or not path.exists():
            output = "\n".join((done.stderr or done.stdout).strip().splitlines()[:_ERROR_LINES])
            raise NativeBuildError(
                f"{source.name} does not compile (exit code {done.returncode}); set CXX to another compiler.\n"
                f"command: {shlex.join(command)}\n{output}"
            )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the compiler does not run: {error}; set CXX to another one") from error
