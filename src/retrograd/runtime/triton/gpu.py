"""Facts that a launch plan may know about the device, and its arithmetic. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Backend(Enum):
    """Whose GPU runs the kernels."""

    CUDA = "cuda"
    HIP = "hip"


@dataclass(frozen=True)
class Gpu:
    """A device to plan for: who runs the kernels, on how many multiprocessors, NVIDIA's compute capability x 10.

    `pdl`: a kernel may be launched while the one ahead of it ends (programmatic dependent launch). `lanes`: threads of
    a warp.
    """

    backend: Backend
    num_sms: int
    arch: int = 90
    pdl: bool = False
    lanes: int = 32


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
