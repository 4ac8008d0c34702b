"""Loader of wheels that were linked against PyTorch for CUDA, beside a PyTorch for CPUs.

torchvision and torchaudio come from the registry in one build, whose libraries ask for libc10_cuda.so, libtorch_cuda.so
and libcudart.so. Their CPU operators call none of it. Where PyTorch has no such libraries, empty ones with those names
and the missing symbols are compiled and loaded first; a symbol that is called all the same ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sysconfig
from pathlib import Path

import torch

BUILD = Path(__file__).resolve().parent.parent.parent / "build" / "outside"


PACKAGES = ("torchvision", "torchaudio")


@functools.cache
def prepare() -> None:
    """Make the libraries of `PACKAGES` loadable; a no-op with PyTorch for CUDA.

    Raises:
        subprocess.CalledProcessError: `cc` or `nm` failed.
    """
    torch_libraries = Path(torch.__file__).parent / "lib"
    if (torch_libraries / "libtorch_cuda.so").exists():
        return
    site = Path(sysconfig.get_path("purelib"))
    every = [library for package in PACKAGES for library in sorted((site / package).rglob("*.so"))]
    libraries = [library for library in every if b"libtorch_cuda.so" in library.read_bytes()]
    missing = {symbol for library in libraries for symbol in _symbols(library, "--undefined-only")}
    for library in torch_libraries.glob("lib*.so"):
        missing -= _symbols(library, "--defined-only")
    runtime = {s for s in missing if re.match(r"(__)?cuda[A-Z]", s)}
    rest = {s for s in missing - runtime if "cuda" in s}
    for name in _needed(libraries):
        _load(name, {"cudart": runtime, "c10_cuda": rest}.get(name.split(".")[0].removeprefix("lib"), set()))


def _symbols(library: Path, which: str) -> set[str]:
    listing = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines()}


def _needed(libraries: list[Path]) -> list[str]:
    names = (rb"libcudart\.so\.\d+", rb"libc10_cuda\.so", rb"libtorch_cuda\.so")
    return sorted({m.decode() for p in libraries for n in names for m in re.findall(n, p.read_bytes())}, reverse=True)


def _load(name: str, symbols: set[str]) -> None:
    """Compile a library of this name and load it for all that come after it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    source, versions, library = (BUILD / f"{name}{suffix}" for suffix in (".c", ".map", ""))
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    for symbol in sorted(symbols):
        # nvcc registers its kernels when the library is loaded, which needs no device.
        refusal = "" if symbol.startswith("__cuda") else f'fprintf(stderr, "{symbol}: no CUDA here\\n"); abort(); '
        lines.append(f"void *{symbol}(void) {{ {refusal}return 0; }}")
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    versions.write_text(f"{name} {{ global: *; }};\n", encoding="utf-8")
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"]
    subprocess.run([*command, "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
