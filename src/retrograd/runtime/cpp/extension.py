"""Extension modules of Python that are compiled against the installed torch, found again and loaded.

The name of a library holds all that its machine code depends on, so that finding it runs no compiler. Which compiler
built it is not part of that: the ABI is, by torch's own flag.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from retrograd.errors import NativeBuildError
from retrograd.runtime import disk_cache
from retrograd.runtime.cpp import build as native

_LIBRARIES = ("torch_python", "torch_cpu", "torch", "c10")


@dataclass(frozen=True)
class Extension:
    """A C++ source that defines a module of Python."""

    source: Path  # the file, which may include headers beside it
    module: str  # the name in its PyInit_
    label: str  # the beginning of the library's name
    again: str  # how a person has it built again, for messages
    headers: tuple[Path, ...] = ()  # that it includes from elsewhere

    def build(self, *, again: bool = False) -> Path:
        """The library, compiled if it is not in the cache; where another process compiles it, that is waited for.

        Raises:
            NativeBuildError: There is no C++ compiler, headers of torch or Python are missing, or the compiler fails.
        """
        kept = self.find()
        if kept is not None and not again:
            return kept
        check_headers()
        compiler = native.find_compiler()
        library = disk_cache.folder("native") / self.file_name()
        with disk_cache.locked(library):
            if again or not library.exists():
                native.compile_library(compiler, self.source, self.flags(), library)
        return library

    def find(self) -> Path | None:
        """The library for this torch and Python, if it has been built."""
        for folder in (disk_cache.user_folder("native"), disk_cache.folder("native")):
            if (path := folder / self.file_name()).exists():
                return path
        return None

    def load(self, path: Path) -> Any:
        """The extension module.

        Raises:
            NativeBuildError: It does not load.
        """
        loader = ExtensionFileLoader(self.module, str(path))
        spec = importlib.util.spec_from_file_location(self.module, path, loader=loader)
        try:
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            sys.modules[self.module] = module  # so that others can ask whether it is in this process
        except ImportError as error:
            raise NativeBuildError(f"{path} does not load: {error}; build it again with {self.again}") from error
        return module

    def flags(self) -> tuple[str, ...]:
        """For the compiler: those of all extensions, and where our headers are."""
        return (*flags(), *dict.fromkeys(f"-I{path.parent}" for path in self.headers))

    def file_name(self) -> str:
        """Names source, flags, torch, Python and machine."""
        files = [self.source, *sorted(self.source.parent.glob("*.hpp")), *self.headers]
        facts = [*(file.read_text() for file in files), *flags(), torch.__version__, str(torch.version.git_version)]
        facts += [str(sysconfig.get_config_var("SOABI")), platform.machine()]
        return f"{self.label}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:20]}.so"


def flags() -> tuple[str, ...]:
    """For the compiler: torch's headers and libraries, which the process has loaded already when this one is."""
    root = _torch_root()
    includes = (root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_path("include")))
    return (
        *("-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in includes),
        *(f"-L{root / 'lib'}", "-Wl,--no-as-needed"),
        *(f"-l{name}" for name in _LIBRARIES),
    )


def _torch_root() -> Path:
    return Path(torch.__file__).resolve().parent


def check_headers() -> None:
    """NativeBuildError where headers of torch or Python are missing."""
    header = _torch_root() / "include/torch/csrc/autograd/function.h"
    if not header.exists():
        raise NativeBuildError(
            f"torch's C++ headers are missing ({header}); install torch from its wheel, which brings them"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = sysconfig.get_python_version()
        raise NativeBuildError(
            f"Python's C headers are missing ({header}); install them, for example apt-get install python{version}-dev"
        )
