"""The compilers that kernels and C++ would be built with, and their versions."""

from __future__ import annotations

import re
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from retrograd import config
from retrograd.env.asking import answer, find

_RELEASE = re.compile(r"release (\d+\.\d+)|\b(\d+\.\d+(?:\.\d+)+)")
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")

Tool = dict[str, str | None]


def compilers() -> list[Tool]:
    """Name, path and version of each compiler; a path of None: it is not there."""
    chosen = config.variables(["CXX"]).get("CXX")
    cxx = shlex.split(chosen)[0] if chosen and chosen.strip() else None
    first = next((name for name in (cxx, "c++", "g++", "clang++") if name and find(name)), cxx or "c++")
    tools = [_tool("c++", find(first)), _tool("nvcc", find("nvcc")), _tool("hipcc", find("hipcc"))]
    tools.append(_tool("ptxas (Triton's)", _tritons_ptxas()))
    tools.append(_tool("ptxas", find("ptxas")))
    return [*tools, _nvrtc()]


def _tool(name: str, path: str | None) -> Tool:
    return {"name": name, "path": path, "version": _version(path) if path else None}


def _version(path: str) -> str | None:
    said = _RELEASE.search(answer([path, "--version"]) or "")
    return (said[1] or said[2]) if said else None


def _tritons_ptxas() -> str | None:
    """The one that Triton calls: TRITON_PTXAS_PATH, else that of its wheel."""
    chosen = config.variables(["TRITON_PTXAS_PATH"]).get("TRITON_PTXAS_PATH")
    if chosen:
        return find(chosen)
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return str(path) if path.is_file() else None


def _nvrtc() -> Tool:
    """CUDA's run-time compiler, as a wheel brings it."""
    for name in _NVRTC:
        try:
            return {"name": "nvrtc", "path": name, "version": metadata.version(name)}
        except metadata.PackageNotFoundError:
            continue
    return {"name": "nvrtc", "path": None, "version": None}
