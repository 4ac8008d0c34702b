"""Facts that a launch plan may know about the device. No torch, no triton."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Backend(Enum):
    """What runs the kernels."""

    CUDA = "cuda"
    HIP = "hip"
    INTERPRETER = "interpreter"


@dataclass(frozen=True)
class Gpu:
    """A device to plan for: who runs the kernels, on how many multiprocessors, NVIDIA's compute capability x 10.

    `pdl`: a kernel may be launched while the one ahead of it ends (programmatic dependent launch).
    """

    backend: Backend
    num_sms: int
    arch: int = 90
    pdl: bool = False
