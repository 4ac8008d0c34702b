"""Eager deformable attention on CUDA without Python in the way (`runtime.cpp.host_path`): autograd node and launches.

First calls go through Python, as do tensors that are not plain, not contiguous or not aligned, functions under a mode,
second derivatives, the sort of Triton's deterministic gradient.
"""

from __future__ import annotations

from pathlib import Path

from retrograd.ops.msda.host import recipes
from retrograd.runtime.cpp.host_path import HostPath

__all__ = ["build", "off", "on", "path", "why_not"]

path = HostPath(Path(__file__).with_name("host.cpp"), "deformable attention", __name__, recipes.connect)
build, on, off, why_not = path.build, path.on, path.off, path.why_not
