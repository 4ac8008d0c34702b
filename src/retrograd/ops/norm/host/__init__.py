"""The eager norms on CUDA without Python in the way: their autograd node and launches in C++ (`runtime.cpp.host_path`).

First calls go through Python, as do tensors that are not plain or not aligned, functions under a mode,
accumulate_main_grad, deterministic=False.
"""

from __future__ import annotations

from pathlib import Path

from retrograd.ops.norm.host import recipes
from retrograd.runtime.cpp.host_path import HostPath

__all__ = ["build", "off", "on", "path", "why_not"]

path = HostPath(Path(__file__).with_name("host.cpp"), "the norms", __name__, recipes.connect, recipes.disconnect)
build, on, off, why_not = path.build, path.on, path.off, path.why_not
