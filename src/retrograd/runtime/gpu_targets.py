"""The GPUs that code is made for, or kernels are executed as on, without having one. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass

from retrograd.compat.triton_compile import GpuDescription
from retrograd.errors import UsageError

KIB = 1024


@dataclass(frozen=True)
class Target(GpuDescription):
    """One GPU architecture."""

    max_warps: int  # warps resident on a multiprocessor
    reserved_bytes: int = 0  # shared memory that the system takes of each program's

    @property
    def nvidia(self) -> bool:
        return self.backend == "cuda"


# Limits: CUDA programming guide, table of compute capabilities; AMD CDNA3 and CDNA4 instruction set references
# (4 SIMDs of 512 registers x 64 lanes, 8 waves each).
_ALL = (
    Target("sm_80", "cuda", 80, 32, 108, 163 * KIB, 65536, 64, KIB),
    Target("sm_90", "cuda", 90, 32, 132, 227 * KIB, 65536, 64, KIB),
    Target("sm_100", "cuda", 100, 32, 148, 227 * KIB, 65536, 64, KIB),
    Target("gfx942", "hip", "gfx942", 64, 304, 64 * KIB, 131072, 32),
    Target("gfx950", "hip", "gfx950", 64, 256, 160 * KIB, 131072, 32),
)


def targets() -> dict[str, Target]:
    """Every target by name, NVIDIA first."""
    return {target.name: target for target in _ALL}


def target_named(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: There is no such target.
    """
    known = targets()
    if name not in known:
        raise UsageError(f"unknown target {name!r}, expected one of: {', '.join(known)}")
    return known[name]
